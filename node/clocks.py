"""Whether this machine's clock is right, by the system's word and by the answers of peers.

Messages and records have times by which they are refused, so a clock that is minutes off keeps a node out, and by itself the node cannot tell that from
a swarm in which nobody is there. But whoever answers a ping of the DHT says what time it has. That is nobody's word for the time: it is only compared, by its
median, and told to the person. Only seeds that we chose to ask count (`seeds.py`); those that were found are strangers whose keys cost nothing, and count only where none
that our user or our own disk names has answered.
"""

import ctypes
import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from statistics import median_low

from farflung.node.network import PeerId
from farflung.protocol.limits import MAX_CLOCK_SKEW_S

WRONG_S = MAX_CLOCK_SKEW_S / 2
"""Apart by more than this a clock is told to be wrong: two that are so far off, each its own way, refuse each other."""
MAX_PEERS = 64
"""Whose answers are remembered, the last one of each."""
KNOWN_S = 1800.0
"""How long an answer counts."""
ASKING_S = 180.0
"""Answers that came within so long were asked for at the same time. A clock that was set right counts as right once the newest of them say so."""

_UNSYNCHRONISED = 5
"""adjtimex's TIME_ERROR: nobody disciplines the clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    ahead_s: float
    """Seconds that we are ahead of it."""
    at: float
    named: bool


class Clocks:
    """How far this machine's clock is from those of peers. `now`: of one monotonic clock."""

    def __init__(self) -> None:
        self._answers: OrderedDict[PeerId, _Answer] = OrderedDict()
        """The oldest first."""

    def note(self, peer: PeerId, ahead_s: float, now: float, *, named: bool) -> None:
        """A seed has answered with its time; `named` as in `seeds.py`. Found ones take the place of found ones only."""
        if not math.isfinite(ahead_s):
            return
        self._answers.pop(peer, None)
        if len(self._answers) >= MAX_PEERS:
            oldest = next((other for other, answer in self._answers.items() if not answer.named), None)
            if oldest is None and not named:
                return
            self._answers.pop(next(iter(self._answers)) if oldest is None else oldest)
        self._answers[peer] = _Answer(ahead_s=ahead_s, at=now, named=named)

    def forget(self) -> None:
        """Our clock was set."""
        self._answers.clear()

    def trouble(self, now: float) -> str:
        """What is wrong with this machine's clock, for people; empty while nothing is known to be."""
        known = [answer for answer in self._answers.values() if now - answer.at <= KNOWN_S]
        named = [answer for answer in known if answer.named]
        counting = named or known
        if not counting or not _apart(counting):
            return ""
        newest_at = max(answer.at for answer in counting)
        apart = _apart([answer for answer in counting if newest_at - answer.at <= ASKING_S])
        if not apart:
            return ""
        ahead_s, agreed = apart
        which = f"{about(ahead_s)} {'ahead of' if ahead_s > 0 else 'behind'}"
        if agreed == 1:
            return (
                f"this machine's clock is {which} that of the one peer that has told its own: set the one that is wrong"
            )
        if not named:
            return f"this machine's clock and those of {agreed} peers differ by {about(ahead_s)}: set the one that is wrong"
        return f"this machine's clock is {which} those of {agreed} peers: set it"


def _apart(answers: list[_Answer]) -> tuple[float, int] | None:
    """By how many seconds we are ahead, and of how many, when most say so; None when our clock may be right."""
    ahead_s = median_low(answer.ahead_s for answer in answers)
    agreed = sum(abs(answer.ahead_s - ahead_s) <= WRONG_S for answer in answers)
    return None if abs(ahead_s) <= WRONG_S or 2 * agreed <= len(answers) else (ahead_s, agreed)


def about(seconds: float) -> str:
    """A difference of clocks for people, without its sign: `40 s`, `3 min`, `2 h`."""
    size = abs(seconds)
    if size < 90.0:
        return f"{size:.0f} s"
    if size < 5400.0:
        return f"{size / 60:.0f} min"
    return f"{size / 3600:,.0f} h" if size < 72 * 3600.0 else f"{size / 86400:,.0f} days"


def clock_state() -> str:
    """`synchronised`, `not synchronised` or `unknown`: whether the kernel says that something keeps its clock right."""
    if sys.platform != "linux":
        return "unknown"
    only_read = ctypes.create_string_buffer(512)  # struct timex of zeros: nothing to set
    state = ctypes.CDLL(None).adjtimex(only_read)
    if state < 0:
        return "unknown"
    return "not synchronised: run ntpd, chrony or systemd-timesyncd" if state == _UNSYNCHRONISED else "synchronised"


def warnings() -> list[str]:
    """Lines for the person who starts a node."""
    state = clock_state()
    if not state.startswith("not "):
        return []
    return [f"warning: this machine's clock is {state}. Peers refuse what is a minute off"]
