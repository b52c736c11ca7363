"""Processors that all nodes of one machine share: what waits for them is done first come, first served."""

from heapq import heapreplace


class Processors:
    """So many, all alike, and when each is next free, by the clock of whoever asks."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count

    def reserve(self, seconds: float, now: float) -> float:
        """Queue work of so many seconds; returns when it is done."""
        done = max(now, self._free_at[0]) + seconds
        heapreplace(self._free_at, done)
        return done
