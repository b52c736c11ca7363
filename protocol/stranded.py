"""When the chain of a stage has no quorum any more, as one of those who hold its state sees it: its part in `lives`.

A member alone cannot tell machines that are gone for good from those on the other side of a partition, so time decides: what is looked at is who is
heard (`membership`), not who holds the state, for a member that downloads it for an hour will vote in the end. Anybody of the view who is heard
in that time ends it, if that makes a quorum. Whoever was itself started with nobody to vote with waits longer, unless the swarm has been running for long:
perhaps all of it is just being started.
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
    _had_one: bool = False
    _since: float | None = None
    """When there was a quorum last, or when we first looked."""

    def look(self, view: Collection[PeerId], live: Collection[PeerId], now: float, *, swarm_s: float) -> None:
        """`live`: of the chain's newest view, who is heard, and ourselves if we are in it. `swarm_s`: for how long the swarm has been running
        (`Roll.swarm_s`)."""
        if is_quorum(view, live):
            self._since, self._had_one, self.reason = now, True, ""
            return
        self._since = now if self._since is None else self._since
        starting = not self._had_one and swarm_s <= STARTING_S
        if now > self._since + (STARTING_S if starting else NO_QUORUM_AFTER * self.heartbeat_s):
            self.reason = no_quorum(view, live, ())
