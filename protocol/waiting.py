"""How long a peer waits for a group that can decide nothing before it begins anew with another one; a newcomer also for one that is full and may not divide any more.

Who has a place is needed for the quorum of its group, and has trained for it: it waits five times as long, for its fellows may come back. What it has promised and
voted for stays on its disk (`saved_vote`), and binds it if it ever comes back to that group.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from farflung.protocol.settings import ASLEEP_S, SHUN_S

MEMBERS_WAIT = 5.0
"""Times as long as a newcomer: a quarter of an hour, in which machines are started again and networks mended."""


@dataclass(slots=True)
class Waiting:
    """See the module. All times are seconds of one monotonic clock."""

    vain_s: float
    """Of a newcomer without a group that could take it in, until it is in vain."""
    avoids: frozenset[bytes] = frozenset()
    """Groups in which it was: not to begin with again, as long as there is another."""
    _had_a_place: bool = False
    _began_at: float = math.inf
    _looked_at: float = math.inf
    _takes_at: float = -math.inf
    """When that was last so, or there was no group to hear."""

    def begin(self, now: float, *, has_voted: bool) -> None:
        """The history is another one; nobody of its view was heard yet."""
        self._had_a_place = has_voted
        self._takes_at = now

    def look(self, now: float, *, in_view: bool, takes: bool) -> None:
        """Called every now and then with how things are; `takes`: whether the group can decide, and take in who is not in its view."""
        self._began_at = min(self._began_at, now)
        if now > self._looked_at + ASLEEP_S:
            self._takes_at += now - self._looked_at  # the machine slept, and has heard nobody since
        self._looked_at = now
        self._had_a_place |= in_view
        if takes:
            self._takes_at = now

    def shuns(self, group: bytes, now: float) -> bool:
        """Whether not to begin with a group now, for we may still find another."""
        return group in self.avoids and now < self._began_at + SHUN_S

    @property
    def why(self) -> str:
        """What is in vain, for people."""
        return (
            "its group has been without a quorum for too long"
            if self._had_a_place
            else "the group in which it waits for a place can take nobody in"
        )

    def in_vain(self, now: float, others: Collection[bytes]) -> bool:
        """Whether it is; `others`: groups that we hear of."""
        is_late = now > self._takes_at + self.vain_s * (MEMBERS_WAIT if self._had_a_place else 1.0)
        return is_late and not self.avoids.issuperset(others)
