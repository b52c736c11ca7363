"""Arithmetic on sample numbers as logs have them: intervals [start, stop), in any order and repeated where a number occurs more than once."""

from collections.abc import Iterable, Iterator

from farflung.sims.facts import Interval


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same numbers as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif start < stop:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Numbers in the intervals, counted as often as they occur."""
    return sum(stop - start for start, stop in intervals)


def repeats(intervals: list[Interval]) -> int:
    """How often a number occurs beyond its first time."""
    return length(intervals) - length(merge(intervals))


def clip(intervals: Iterable[Interval], below: int) -> Iterator[Interval]:
    """What of them lies below a number."""
    return ((start, min(stop, below)) for start, stop in intervals if start < below)


def numbers(intervals: Iterable[Interval]) -> list[int]:
    """All of them, one by one."""
    return [number for start, stop in intervals for number in range(start, stop)]
