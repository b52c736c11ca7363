"""What this node's uplink gives, and how fast bulk may go so that control is not queued behind it.

A queue builds at the bottleneck when bulk is sent as fast as TCP takes it: control messages then wait for hundreds of milliseconds, and packets
drop (transport digest, section 2). So bulk is paced a little below the best rate seen lately, by what the system says has arrived. Now and then
it goes unpaced for once, or a link that became faster would never be noticed. Fast links need no brake.
"""

from collections.abc import Callable

from farflung.node.one_way import REMEMBERED, OneWay
from farflung.protocol.settings import FAST_BYTES_PER_S

BELOW = 0.95
"""Pace, as a part of the best rate seen. One in `REMEMBERED` stretches of sending goes unpaced."""

PACEABLE_S = 6.0
"""Shorter stretches of sending neither set a pace nor need one: a good part of them is latency, and what they queue is soon gone. A round of
two waves is one stretch: paced, one of 4 s takes a tenth longer (16 MB behind 20 Mbit/s)."""


class Uplink(OneWay):
    """Measures what is sent and says at which rate to send. What others are told is smoothed."""

    def __init__(self, delivered_bytes: Callable[[], int]) -> None:
        super().__init__(delivered_bytes)
        self._count = 0
        self._short = False

    @property
    def pace_bytes_per_s(self) -> float | None:
        """The rate for bulk now; None: as fast as it goes."""
        if self._short or self._count % REMEMBERED == 0 or max(self._seen) >= FAST_BYTES_PER_S:
            return None
        return BELOW * max(self._seen)

    def _counted_bytes(self) -> int:
        return self._whole_bytes  # a transfer that broke says more about whom it was for

    def observe(self, bytes_per_s: float, seconds: float) -> None:
        self._short = seconds < PACEABLE_S
        if not self._short:
            self._seen.append(bytes_per_s)
            self._count += 1
        smoothed = 0.7 * self.bytes_per_s + 0.3 * bytes_per_s if self.bytes_per_s else bytes_per_s
        self.bytes_per_s = min(smoothed, FAST_BYTES_PER_S)
