"""Parts of a round: how much of the vector each owner reduces, so that all links finish together, and in how many waves.

In a butterfly all-reduce of a vector of S bytes among n contributors and m receivers, an owner of p bytes uploads
(S - p) of its own contribution and p to each of the m - 1 other receivers, and downloads (n - 1)·p and (S - p).
The slowest link decides, so parts are chosen by the smallest time T at which they all fit.

Where that takes long, every owner has two parts, and the contributions to all first ones are sent before those to the second. So links are never
idle between contributions and means: while the last lost packets of the second wave of contributions are sent again, the means of the first
are on their way. Short rounds have one wave: a transfer costs a millisecond of Python at both ends.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

NEARLY_EQUAL = 1.5
"""Rates within this factor of the typical one count as equal."""

OFFERED = 2.0
"""A downlink is narrow when others offer so many times what it takes. Rates are off by tens of per cent, and few downlinks are
narrower than uplinks: to miss one costs what it always did, to see one that is none would take parts from a good link."""

BISECTION_STEPS = 60
"""Halvings of T: beyond double precision's 52 bits nothing changes."""


def fractions(uplinks: Sequence[float], num_receivers: int, downlinks: Sequence[float] | None = None) -> list[float]:
    """Share of the vector for each owner; sums to 1.

    `uplinks`: bytes/s of each contributor, 0 or less meaning unknown (then taken as the median of the known).
    `num_receivers`: peers that get the mean, owners included.
    `downlinks`: bytes/s of each contributor, 0 or less meaning that it is no bound (`narrow`).
    """
    if len(uplinks) == 1:
        return [1.0]
    downs = [down if down > 0.0 else math.inf for down in downlinks or [0.0] * len(uplinks)]
    return list(_fractions(tuple(_known(uplinks)), tuple(downs), max(num_receivers - 1, 1)))


@lru_cache(maxsize=1024)  # asked after every step, and links change once in a round
def _fractions(ups: tuple[float, ...], downs: tuple[float, ...], copies: int) -> tuple[float, ...]:
    """`copies`: of its part, that each owner sends."""
    num = len(ups)

    def largest(time: float, up: float, down: float) -> float:
        # upload: (1 - p) + copies*p <= time*up; download: (num-1)*p + (1 - p) <= time*down
        share = 1.0
        for budget, factor in ((time * up - 1.0, copies - 1.0), (time * down - 1.0, num - 2.0)):
            if budget < 0.0:
                return 0.0
            if factor > 0.0:
                share = min(share, budget / factor)
        return share

    low, high = 0.0, (copies + num) / min(min(ups), min(downs))
    for _ in range(BISECTION_STEPS):
        time = (low + high) / 2.0
        if sum(largest(time, u, d) for u, d in zip(ups, downs, strict=True)) >= 1.0:
            high = time
        else:
            low = time
    shares = [largest(high, u, d) for u, d in zip(ups, downs, strict=True)]
    total = sum(shares)
    return tuple(s / total for s in shares)


def narrow(downlinks: Sequence[float], uplinks: Sequence[float], num_receivers: int) -> list[float]:
    """The downlinks (bytes/s) that bound what their owner can receive, and 0 for all others.

    What a peer has been seen to receive at is a lower bound of its link: mostly its senders are slower. It says how fast the link is only where they
    offer clearly more than it takes. All others send to it at a time, each by turns to all of `num_receivers`: so they offer the sum of their
    uplinks over the number of peers that each of them sends to, whatever the size of the parts. So no peer that is wrongly taken for a narrow
    one stays so for having had a small part. A link that takes no more than equal parts bring is not told from a better one.
    """
    total = sum(uplinks)
    offered = [(total - up) / max(num_receivers - 1, 1) for up in uplinks]
    return [down if OFFERED * down < rate else 0.0 for down, rate in zip(downlinks, offered, strict=True)]


def cut(first: int, last: int, shares: Sequence[float], align: int) -> list[tuple[int, int]]:
    """Consecutive ranges [start, stop) that cover [first, last), in the proportion of `shares`, cut at multiples of `align`."""
    ranges: list[tuple[int, int]] = []
    start = first
    total = 0.0
    for i, share in enumerate(shares):
        total += share
        end = last if i == len(shares) - 1 else min(last, round((first + total * (last - first)) / align) * align)
        stop = max(start, end)
        ranges.append((start, stop))
        start = stop
    return ranges


def in_waves(
    first: int, last: int, shares: Sequence[float], align: int, waves: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """(owner's index, its range) of all parts that have elements: those of the first wave, in the order of owners, then those of the next."""
    for start, stop in cut(first, last, [1.0 / waves] * waves, align):
        for owner, (begin, end) in enumerate(cut(start, stop, shares, align)):
            if end > begin:
                yield owner, (begin, end)


def levelled(rates: Sequence[float]) -> list[float]:
    """Measured rates with the unknown ones taken as typical, and those near the typical one as equal to it; all 0 when none is known.

    A measured rate is off by tens of per cent. Shares that follow such noise cost more than they gain, since the parts must fit the
    slowest link; what is worth following is a link of another kind.
    """
    known = sorted(r for r in rates if r > 0.0)
    if not known:
        return [0.0] * len(rates)
    typical = known[len(known) // 2]
    return [typical if r <= 0.0 or typical / NEARLY_EQUAL <= r <= typical * NEARLY_EQUAL else r for r in rates]


def slow(rates: Sequence[float]) -> list[bool]:
    """Which of these measured rates are clearly lower than the typical one; one that is not known (0) is not."""
    level = levelled(rates)
    typical = sorted(level)[len(level) // 2] if level else 0.0
    return [rate < typical for rate in level]


def _known(rates: Sequence[float]) -> list[float]:
    known = sorted(r for r in rates if r > 0.0)
    typical = known[len(known) // 2] if known else 1.0
    return [r if r > 0.0 else typical for r in rates]
