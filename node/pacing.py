"""Caps on bulk bandwidth: a token bucket, and a pacer that waits for it.

One pacer per direction is shared by all carriers of a node. It enforces the user's caps and keeps bulk a little below
the uplink, so that queues build here and not at the bottleneck, where control messages would wait behind them (0.1 s
against 2 s measured on a 2 Mbit/s link). A reservation may go into debt and waits until the debt is paid: what leaves by
time t is at most burst + rate * t, and waiters are served in order.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

MAX_CHUNK_BYTES = 256 << 10
MIN_CHUNK_BYTES = 16 << 10
"""Below this the overhead per chunk counts more than smoothness."""
CHUNK_S = 0.05
"""A chunk takes about this long at the capped rate, so that peers who share the cap take turns often."""


class TokenBucket:
    """The arithmetic alone: bytes per second, or of whatever there is so much a second, burst in the same, time in seconds from any clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if not rate > 0 or not burst > 0:
            raise ValueError("rate and burst must be positive")
        self.rate = rate
        self.burst = burst
        self._balance = burst
        self._then = now

    def reserve(self, size: float, now: float) -> float:
        """Take `size`, be it into debt, and return the seconds to wait before it is there."""
        self._refill(now)
        self._balance -= size
        return max(0.0, -self._balance / self.rate)

    def takes(self, size: float, now: float) -> bool:
        """Whether so much is there now; then it is taken."""
        if self.reserve(size, now) == 0.0:
            return True
        self.refund(size, now)
        return False

    def refund(self, size: float, now: float) -> None:
        """Give back a reservation that was not used."""
        self._refill(now)
        self._balance = min(self.burst, self._balance + size)

    def is_full(self, now: float) -> bool:
        """Whether it is as a new one."""
        self._refill(now)
        return self._balance == self.burst

    def _refill(self, now: float) -> None:
        # A clock that steps back grants nothing; it never takes.
        self._balance = min(self.burst, self._balance + self.rate * max(0.0, now - self._then))
        self._then = max(now, self._then)


class Pacer:
    """Waits so that bulk stays under a rate; without a rate it never waits."""

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._bucket: TokenBucket | None = None
        self.set_rate(rate)

    def set_rate(self, rate: float | None) -> None:
        """New cap in bytes/s, or None for no cap. Reservations already made keep their time."""
        self._bucket = None if rate is None else TokenBucket(rate, max(rate * CHUNK_S, MIN_CHUNK_BYTES), self._clock())

    @property
    def rate(self) -> float | None:
        return None if self._bucket is None else self._bucket.rate

    @property
    def chunk_bytes(self) -> int:
        """How much to ask for at a time."""
        if self._bucket is None:
            return MAX_CHUNK_BYTES
        return int(min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, self._bucket.rate * CHUNK_S)))

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass. A cancelled wait gives them back."""
        bucket = self._bucket
        if bucket is None:
            return
        wait = bucket.reserve(size, self._clock())
        if wait <= 0:
            return
        try:
            await self._sleep(wait)
        except asyncio.CancelledError:
            bucket.refund(size, self._clock())
            raise
