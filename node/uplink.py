"""What this node's uplink gives, and how fast bulk may go so that control is not queued behind it.

A queue builds at the bottleneck when bulk is sent as fast as TCP takes it: control messages then wait for hundreds of milliseconds, and packets
drop (transport digest, section 2). So bulk is paced a little below the best rate seen lately. Now and then it goes unpaced for once, or a link
that became faster would never be noticed. Fast links need no brake.

The rate is that of the best stretch of a second and a half, by what the system says has arrived (`sample`); the bytes of whole transfers over their
time are the floor. That alone would count slow starts and last acknowledgements, and a node paced by it loses a quarter of its link (measured:
20 Mbit/s, 100 ms, 1 % loss).
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from farflung.protocol.settings import FAST_BYTES_PER_S

MEASURABLE_BYTES = 1 << 16
"""Smaller transfers say more about latency than about the link's rate."""

BELOW = 0.95
"""Pace, as a part of the best rate seen."""

REMEMBERED = 12
"""Measurements of which the best counts; one in so many goes unpaced."""

PACEABLE_S = 6.0
"""Shorter stretches of sending neither set a pace nor need one: a good part of them is latency, and what they queue is soon gone. A round of
two waves is one stretch: paced, one of 4 s takes a tenth longer (16 MB behind 20 Mbit/s)."""

STRETCH_S = 1.5
"""Long enough that acknowledgements which come in lumps do not look like a faster link."""


class Uplink:
    """Measures transfers and says at which rate to send."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """Smoothed rate, at most FAST_BYTES_PER_S; 0 before the first measurement."""
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._count = 0
        self._short = False
        self._sending = 0
        self._since = 0.0
        self._bytes = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._best_stretch = 0.0

    @property
    def pace_bytes_per_s(self) -> float | None:
        """The rate for bulk now; None: as fast as it goes."""
        if self._short or self._count % REMEMBERED == 0 or max(self._seen) >= FAST_BYTES_PER_S:
            return None
        return BELOW * max(self._seen)

    @contextmanager
    def sending(self, num_bytes: int) -> Iterator[None]:
        """Around one transfer; it counts unless it raises. Transfers share the link, so what counts is the bytes of all of them
        over the time in which any was under way."""
        loop = asyncio.get_running_loop()
        if self._sending == 0:
            self._since, self._bytes, self._best_stretch = loop.time(), 0, 0.0
            self._samples.clear()
        self._sending += 1
        try:
            yield
            self._bytes += num_bytes
        finally:
            self._sending -= 1
            seconds = loop.time() - self._since
            if self._sending == 0 and self._bytes >= MEASURABLE_BYTES and seconds > 0.0:
                self.observe(max(self._best_stretch, self._bytes / seconds), seconds)

    def sample(self, now: float, delivered_bytes: int) -> None:
        """Look at the counter of bytes that have arrived at peers; called a few times a second."""
        if self._sending == 0:
            return
        self._samples.append((now, delivered_bytes))
        while len(self._samples) > 1 and self._samples[1][0] <= now - STRETCH_S:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then >= STRETCH_S:
            self._best_stretch = max(self._best_stretch, (delivered_bytes - before) / (now - then))

    def observe(self, bytes_per_s: float, seconds: float) -> None:
        """One measurement, which took so long."""
        self._short = seconds < PACEABLE_S
        if not self._short:
            self._seen.append(bytes_per_s)
            self._count += 1
        smoothed = 0.7 * self.bytes_per_s + 0.3 * bytes_per_s if self.bytes_per_s else bytes_per_s
        self.bytes_per_s = min(smoothed, FAST_BYTES_PER_S)
