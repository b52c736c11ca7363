"""Whether this machine's clock is right, by the system's word and by the answers of peers.

Messages and records have times by which they are refused, so a clock that is minutes off keeps a node out, and by itself the node cannot tell that from
a swarm in which nobody is there. But whoever answers a ping of the DHT says what time it has. That is nobody's word for the time: it is only compared, by its
median, and told to the person.
"""

import ctypes
import math
import sys
from collections import OrderedDict
from statistics import median_low

from farflung.node.network import PeerId
from farflung.protocol.limits import MAX_CLOCK_SKEW_S

WRONG_S = MAX_CLOCK_SKEW_S / 2
"""Apart by more than this a clock is told to be wrong: two that are so far off, each its own way, refuse each other."""
MAX_PEERS = 64
"""Whose answers are remembered, the last one of each."""
KNOWN_S = 1800.0
"""How long an answer counts."""

_UNSYNCHRONISED = 5
"""adjtimex's TIME_ERROR: nobody disciplines the clock."""


class Clocks:
    """How far this machine's clock is from those of peers. `now`: of one monotonic clock."""

    def __init__(self) -> None:
        self._ahead: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Seconds that we are ahead of it, and when it said so."""

    def note(self, peer: PeerId, ahead_s: float, now: float) -> None:
        """A peer has answered with its time."""
        if not math.isfinite(ahead_s):
            return
        self._ahead.pop(peer, None)
        while len(self._ahead) >= MAX_PEERS:
            self._ahead.popitem(last=False)
        self._ahead[peer] = (ahead_s, now)

    def forget(self) -> None:
        """Our clock was set."""
        self._ahead.clear()

    def trouble(self, now: float) -> str:
        """What is wrong with this machine's clock, for people; empty while nothing is known to be."""
        apart = [ahead_s for ahead_s, at in self._ahead.values() if now - at <= KNOWN_S]
        if not apart:
            return ""
        ahead_s = median_low(apart)
        agreed = sum(abs(one - ahead_s) <= WRONG_S for one in apart)
        if abs(ahead_s) <= WRONG_S or 2 * agreed <= len(apart):
            return ""
        which = f"{about(ahead_s)} {'ahead of' if ahead_s > 0 else 'behind'}"
        if len(apart) == 1:
            return (
                f"this machine's clock is {which} that of the one peer that has told its own: set the one that is wrong"
            )
        return f"this machine's clock is {which} those of {agreed} peers: set it"


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
