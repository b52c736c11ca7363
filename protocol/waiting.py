"""How long a peer waits for a group that can decide nothing before it begins anew with another one; a newcomer also for one that is full and may not divide any more.

Who has a place is needed for the quorum of its group, and has trained for it: it waits five times as long, for its fellows may come back. What it has promised and
voted for stays on its disk (`saved_vote`), and binds it if it ever comes back to that group. Whoever comes back after it was let go has no place, and is a newcomer.

It gives up the state that it has. So there has to be another group that goes on, as we hear from its peers, whom we ask while we wait: where a network fails nobody hears
anybody, and everybody keeps what there is.
"""

import math
from dataclasses import dataclass, field

from farflung.protocol.settings import ASLEEP_S, SHUN_S

ASKED = 2
"""Peers of other groups that are asked with each of our heartbeats how far these are."""

MOST_HEARD = 64
"""Groups of which we remember how far they were."""

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
    _divided: bool = False
    _began_at: float = math.inf
    _looked_at: float = math.inf
    _takes_at: float = -math.inf
    """When our group could last decide, and take us in if we have no place, or there was none to hear."""
    _heights: dict[bytes, int] = field(default_factory=dict)
    """Of other groups, since then: the last that we heard of comes last."""
    _goes_on_at: float = -math.inf
    """When another group was last heard to go on."""

    def begin(self, now: float, *, had_a_place: bool) -> None:
        """The history is another one; nobody of its view was heard yet. `had_a_place`: whether it has one there that the history does not show."""
        self._had_a_place = had_a_place
        self._takes_at = now

    def look(self, now: float, *, in_view: bool, takes: bool, divided: bool) -> None:
        """Called every now and then with how things are; `takes`: whether the group can decide, and take in who is not in its view; `divided`: whether there are
        others by its own history, for what strangers say of groups is no reason.
        """
        self._began_at = min(self._began_at, now)
        if now > self._looked_at + ASLEEP_S:
            self._takes_at += now - self._looked_at  # the machine slept, and has heard nobody since
        self._looked_at, self._divided = now, divided
        self._had_a_place |= in_view
        if takes:
            self._takes_at, self._goes_on_at = now, -math.inf
            self._heights.clear()
            if in_view:
                self.avoids = frozenset()  # they may be well by now

    @property
    def asks(self) -> bool:
        """Whether to ask peers of other groups how far they are."""
        return self._looked_at > self._takes_at

    def heard(self, group: bytes, height: int, now: float) -> None:
        """A peer of another group says how far that is. For who has nothing to lose, that it says anything is enough; else it has to be further than it was."""
        if group in self.avoids or not self.asks:
            return
        before = self._heights.pop(group, height)
        self._heights[group] = max(before, height)
        if height > before or not self._had_a_place:
            self._goes_on_at = now
        if len(self._heights) > MOST_HEARD:
            del self._heights[next(iter(self._heights))]

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

    def outlook(self, now: float) -> str:
        """What becomes of who waits, to end the sentence that says for what; empty where no other group is heard to go on, or nothing is waited for."""
        if not self._others_go_on(now):
            return ""
        return f"; after {self._patience_s / 60.0:.0f} minutes of this the node goes to another group, which goes on"

    def in_vain(self, now: float) -> bool:
        """Whether it is, and another group goes on: time to begin anew with that."""
        return now > self._takes_at + self._patience_s and self._others_go_on(now)

    @property
    def _patience_s(self) -> float:
        return self.vain_s * (MEMBERS_WAIT if self._had_a_place else 1.0)

    def _others_go_on(self, now: float) -> bool:
        return self._divided and now <= self._goes_on_at + self.vain_s
