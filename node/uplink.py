"""What this node's uplink gives, and how fast bulk may go so that control is not queued behind it.

A queue builds at the bottleneck when bulk is sent as fast as TCP takes it: control messages then wait for hundreds of milliseconds, and packets
drop (transport digest, section 2). So bulk is paced a little below the best rate seen lately, by what the system says has arrived. Now and then
it goes unpaced for once, or a link that became faster would never be noticed. Fast links need no brake.

Where no transfer comes to its end in time, what had arrived of a round that was given up is the measurement; and what is measured is forgotten when nothing
has been sent for many rounds, as by a peer that rounds go without since it is slow (`protocol.sharing`).
"""

import asyncio
from collections.abc import Callable

from farflung.node.one_way import REMEMBERED, OneWay

BELOW = 0.95
"""Pace, as a part of the best rate seen. One in `REMEMBERED` stretches of sending goes unpaced."""

PACEABLE_S = 6.0
"""Shorter stretches of sending neither set a pace nor need one: a good part of them is latency, and what they queue is soon gone. A round of
two waves is one stretch: paced, one of 4 s takes a tenth longer (16 MB behind 20 Mbit/s)."""

GIVEN_UP_S = 3.0
"""Shorter than this a plan was dropped rather than missed, and what has arrived says more about latency."""

IDLE_ROUNDS = 20
"""Without sending, after which a rate is forgotten: twice as many each time."""


class Uplink(OneWay):
    """Measures what is sent and says at which rate to send. What others are told is smoothed."""

    def __init__(self, delivered_bytes: Callable[[], int], fast_bytes_per_s: float) -> None:
        super().__init__(delivered_bytes, fast_bytes_per_s)
        self._count = 0
        self._short = False
        self._given_up = False
        self._idle_rounds = 0
        self._forgets_after = IDLE_ROUNDS
        self._forgotten = 0.0
        """Bytes/s."""

    @property
    def pace_bytes_per_s(self) -> float | None:
        """The rate for bulk now; None: as fast as it goes."""
        if self._short or self._count % REMEMBERED == 0 or max(self._seen) >= self._fast_bytes_per_s:
            return None
        return BELOW * max(self._seen)

    def give_up(self) -> None:
        """The round is over before several owners had all of our contribution, so it is we who are slow: what has arrived counts, for where no transfer
        comes to its end in time nobody would ever know. (A transfer that broke, or was for one who took nothing, says more about whom it was for.)
        """
        self._given_up = self._under_way > 0 and asyncio.get_running_loop().time() >= self._since + GIVEN_UP_S

    def stay_idle(self) -> None:
        """A round in which we sent nothing. Whom rounds go without, since it is slow (`protocol.sharing`), is not measured any more: after some it says that it
        does not know how fast it is, and the next round waits for it again.
        """
        self._idle_rounds += 1
        if self._idle_rounds >= self._forgets_after and self.bytes_per_s:
            self._forgotten, self.bytes_per_s = self.bytes_per_s, 0.0
            self._idle_rounds, self._forgets_after = 0, 2 * self._forgets_after

    def _counted_bytes(self) -> int:
        if self._given_up:
            self._given_up = False
            return max(self._whole_bytes, self._passed_bytes() - self._passed_before)
        return self._whole_bytes

    def observe(self, bytes_per_s: float, seconds: float) -> None:
        self._idle_rounds = 0
        if bytes_per_s > 2.0 * self._forgotten:  # another link than it was
            self._forgets_after, self._forgotten = IDLE_ROUNDS, 0.0
        self._short = seconds < PACEABLE_S
        if not self._short:
            self._seen.append(bytes_per_s)
            self._count += 1
        smoothed = 0.7 * self.bytes_per_s + 0.3 * bytes_per_s if self.bytes_per_s else bytes_per_s
        self.bytes_per_s = min(smoothed, self._fast_bytes_per_s)
