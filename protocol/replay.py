"""Each message counts once: a sliding window of sequence numbers per sender, as in IPsec (RFC 4303, section
3.4.3).

A window is a bitmap under the highest number seen. Numbers above it move it, numbers inside it count once,
numbers below it are refused: the window cannot tell whether they are new.

The state is bounded in time and in number. A window whose latest accepted message has expired protects
nothing, because the expiry check already refuses every message it remembers; such windows are forgotten. What
remains when the table is full is alive, and then a *new* sender is refused rather than an old one forgotten:
a flood of fresh identities may keep other fresh ones out for MAX_MESSAGE_LIFE_S, but it cannot make an old
message count twice.
"""

from copy import copy

import msgspec

from farflung.protocol.errors import LimitExceeded, Replayed
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_REPLAY_SENDERS, REPLAY_WINDOW

_COUNTER_BITS = 20
_FULL = (1 << REPLAY_WINDOW) - 1


def first_seq(boot_unix_s: float, *, after: int = 0) -> int:
    """The first sequence number of a sender that starts at `boot_unix_s`; count up by one from here.

    The time in ms stands above 20 bits of counter, so a restarted sender is above everything it sent before,
    unless its clock went back: then `after`, the highest number it remembers having used, keeps it ascending.
    """
    return max(int(boot_unix_s * 1000) << _COUNTER_BITS, after + 1)


def seq_unix_s(seq: int) -> float:
    """The boot time that `first_seq` put into a sequence number, unix seconds."""
    return (seq >> _COUNTER_BITS) / 1000


class Window(msgspec.Struct, kw_only=True):
    """What is remembered of one sender."""

    highest: int
    """Highest sequence number accepted."""
    seen: int
    """Bitmap: bit i is set when `highest - i` was accepted."""
    expires_at: float
    """Latest expiry of any message accepted, unix seconds; afterwards the window is forgotten."""


class ReplayGuard:
    """Windows of up to `max_senders` senders. Not a lock: one event loop owns it."""

    def __init__(self, *, max_senders: int = MAX_REPLAY_SENDERS) -> None:
        self._max_senders = max_senders
        self._windows: dict[PeerId, Window] = {}

    def accept(self, sender: PeerId, seq: int, expires_at: float, now: float, *, carrier: PeerId) -> None:
        """Count one authentic message that expires after `now`, or raise and change nothing.

        Raises Replayed (seen, or below the window), LimitExceeded (too many live senders); both blame
        `carrier`.
        """
        window = self._windows.get(sender)
        if window is None or window.expires_at <= now:
            if window is None and len(self._windows) >= self._max_senders:
                self._forget_expired(now, carrier)
            self._windows[sender] = Window(highest=seq, seen=1, expires_at=expires_at)
            return
        behind = window.highest - seq
        if behind >= REPLAY_WINDOW:
            raise Replayed(f"message {seq} is {behind} behind the newest, too old to tell", peer=carrier)
        if behind >= 0:
            if window.seen >> behind & 1:
                raise Replayed(f"message {seq} was seen before", peer=carrier)
            highest, seen = window.highest, window.seen | 1 << behind
        else:
            # The jump is the sender's choice; never shift by more than the window is wide.
            highest = seq
            seen = (window.seen << -behind & _FULL | 1) if -behind < REPLAY_WINDOW else 1
        window.highest, window.seen = highest, seen
        window.expires_at = max(window.expires_at, expires_at)

    def snapshot(self) -> dict[PeerId, Window]:
        """A copy of all windows, for statistics and tests."""
        return {sender: copy(window) for sender, window in self._windows.items()}

    def _forget_expired(self, now: float, carrier: PeerId) -> None:
        live = {sender: window for sender, window in self._windows.items() if window.expires_at > now}
        if len(live) >= self._max_senders:
            raise LimitExceeded(f"more than {self._max_senders} senders at once", peer=carrier)
        self._windows = live
