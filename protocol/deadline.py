"""Adaptive deadlines: median + k·MAD of what peers recently needed (hivemind #676), bounded.

The median ignores the odd straggler, the MAD follows how much peers really differ, and neither needs a guess in seconds.
"""

from collections.abc import Sequence
from statistics import median

SPREAD = 5.0
"""k: about 3.4 standard deviations of normal noise, so that an ordinary slow round is waited for."""

SLACK = 0.5
"""Relative floor of the spread: identical machines have a MAD near zero, and a neighbour half as slow again is worth waiting for."""


def adaptive(seconds: Sequence[float], *, low: float, high: float) -> float:
    """Seconds to wait, within [low, high]; `high` while nothing was measured."""
    if not seconds:
        return high
    middle = median(seconds)
    mad = median(abs(s - middle) for s in seconds)
    return min(high, max(low, middle + max(SPREAD * mad, SLACK * middle)))
