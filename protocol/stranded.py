"""When the chain of a stage has no quorum any more, as one of those who hold its state sees it: its part in `lives`.

A member alone cannot tell machines that are gone for good from those on the other side of a partition, so time decides: what is looked at is who is
heard (`membership`), not who holds the state, for a member that downloads it for an hour will vote in the end. Anybody of the view who is heard
in that time ends it, if that makes a quorum. Whoever was itself started with nobody to vote with waits longer: perhaps the whole swarm is just being started.
"""

from collections.abc import Collection
from dataclasses import dataclass

from farflung.protocol.keys import PeerId
from farflung.protocol.lives import NO_QUORUM_AFTER, STARTING_S
from farflung.protocol.planning import no_quorum
from farflung.protocol.quorum import is_quorum


@dataclass(slots=True)
class Stranded:
    """See the module. All times are seconds of one monotonic clock."""

    heartbeat_s: float
    reason: str = ""
    """Why nothing can be decided, and that it has been so for long: a sentence for people; empty while there is a quorum, or was one lately."""
    _until: float | None = None
    """Without a quorum till then it is so."""

    def look(self, view: Collection[PeerId], live: Collection[PeerId], now: float) -> None:
        """`live`: of the chain's newest view, who is heard, and ourselves if we are in it."""
        if is_quorum(view, live):
            self._until, self.reason = now + NO_QUORUM_AFTER * self.heartbeat_s, ""
        elif self._until is None:
            self._until = now + STARTING_S
        elif now > self._until:
            self.reason = no_quorum(view, live, ())
