"""One way of our own link, measured while any transfer goes over it: what `uplink` and `downlink` have in common.

The rate is that of the best stretch of a second and a half, by a counter of the bytes that have passed (`sample`); the bytes of whole transfers over
their time are the floor. That alone would count slow starts and last acknowledgements, and a node paced by it loses a quarter of its link
(measured: 20 Mbit/s, 100 ms, 1 % loss).
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from farflung.protocol.settings import FAST_BYTES_PER_S, MEASURABLE_BYTES

REMEMBERED = 12
"""Measurements of which the best counts."""

STRETCH_S = 1.5
"""Long enough that acknowledgements which come in lumps do not look like a faster link."""


class OneWay(ABC):
    """Measures transfers in one direction."""

    def __init__(self, passed_bytes: Callable[[], int], fast_bytes_per_s: float) -> None:
        self._passed_bytes = passed_bytes
        """Counts what has passed, transfers and all else; 0 for ever where nobody can tell."""
        self._fast_bytes_per_s = fast_bytes_per_s
        self._measurable_bytes = MEASURABLE_BYTES * fast_bytes_per_s / FAST_BYTES_PER_S
        self.bytes_per_s = 0.0
        """What others are told, at most what counts as fast; 0 before the first measurement."""
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._under_way = 0
        self._since = 0.0
        self._passed_before = 0
        """When this stretch of transfers began."""
        self._whole_bytes = 0
        """Of its transfers that came to their end."""
        self._samples: deque[tuple[float, int]] = deque()
        self._best_stretch = 0.0

    @contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        """Around one transfer. Transfers share the link, so what counts is the bytes of all of them over the time in which any
        was under way."""
        loop = asyncio.get_running_loop()
        if self._under_way == 0:
            self._since, self._whole_bytes, self._best_stretch = loop.time(), 0, 0.0
            self._passed_before = self._passed_bytes()
            self._samples.clear()
        self._under_way += 1
        try:
            yield
            self._whole_bytes += num_bytes
        finally:
            self._under_way -= 1
            seconds = loop.time() - self._since
            if self._under_way == 0 and (counted := self._counted_bytes()) >= self._measurable_bytes and seconds > 0.0:
                self.observe(max(self._best_stretch, counted / seconds), seconds)

    def sample(self, now: float) -> None:
        """Look at the counter of bytes that have passed; called a few times a second."""
        if self._under_way == 0:
            return
        passed = self._passed_bytes()
        self._samples.append((now, passed))
        while len(self._samples) > 1 and self._samples[1][0] <= now - STRETCH_S:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then >= STRETCH_S:
            self._best_stretch = max(self._best_stretch, (passed - before) / (now - then))

    @abstractmethod
    def _counted_bytes(self) -> int:
        """Of this stretch of transfers."""

    @abstractmethod
    def observe(self, bytes_per_s: float, seconds: float) -> None:
        """One measurement, which took so long."""
