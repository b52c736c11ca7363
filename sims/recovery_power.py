"""What a few seeds can tell: whether a mean is below a bound, or not, or neither can be said.

Differences are taken seed by seed, and their mean has Student's distribution if they are normal, which a handful of them cannot show. A bound counts
as kept, or as broken, when the one-sided 95 % limit of the mean is on that side of it.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Quantiles at 95 % of Student's distribution with 1, 2, ... degrees of freedom; with more the last one, which is too careful."""


def limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Below and above which the mean is with 95 % each; None for a single value, which tells nothing of the next one."""
    if len(values) < 2:
        return None
    t = T_95[min(len(values) - 1, len(T_95)) - 1]
    half, mean = t * stdev(values) / sqrt(len(values)), fmean(values)
    return mean - half, mean + half


def is_below(values: Sequence[float], bound: float) -> bool | None:
    """Whether the mean is at most `bound`; None: not decidable with so many values that differ so much."""
    between = limits(values)
    if between is None or between[0] <= bound < between[1]:
        return None
    return between[1] <= bound


def all_of(told: Sequence[bool | None]) -> bool | None:
    """Whether all hold: not if one does not, and else undecided if one is."""
    return False if False in told else None if None in told or not told else True
