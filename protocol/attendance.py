"""What a member offers to the rounds of one height, and what comes of it.

A proposer plans a round anew when a plan comes to nothing, so a height may see several plans; our part in the newest is a `Participation`.
What is offered (`Ready`) ends in one `RoundOver`, unless it is withdrawn before anything of it was sent: with the commit of a round, ours or not, at this
height or a later one, or when it is given up.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from farflung.protocol.chain import Commit, RoundResult
from farflung.protocol.effects import Effect, Expect, Forget, Note, RoundOver
from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Plan, Ready
from farflung.protocol.participation import Participation
from farflung.protocol.reach import Lacking
from farflung.protocol.settings import GIVE_UP_S


@dataclass(slots=True)
class Attendance:
    """See the module. Times are seconds of one monotonic clock."""

    me: PeerId
    ready: Ready | None = None
    """What we offer."""
    ready_at: float = 0.0
    part: Participation | None = None
    """In the plan under way."""
    _over: set[bytes] = field(default_factory=set)
    """Plans of this height of which nothing can come: a late copy must not bring one back."""
    _contributing: bool = False
    """Whether a plan since the last round has had us contribute, and nobody has said what came of it."""
    _no_quorum_since: float | None = None
    _lacking: Lacking = field(default_factory=Lacking)

    def offer(self, ready: Ready, head: Commit, unheard: Collection[PeerId], now: float) -> None:
        """Local progress may go into the next round after `head`. `unheard`: members that others hear and we do not."""
        lacks = {*self._lacking.at(head.version, head.view), *unheard}
        ready = msgspec.structs.replace(ready, lacks=tuple(sorted(lacks)))
        self.ready, self.ready_at, self._no_quorum_since = ready, now, None

    def give_up(self, reason: str) -> list[Effect]:
        """No round counts what we offer, or had sent for one: training goes on from it."""
        if self.ready is None and not self._contributing:
            return []
        self.ready, self._contributing = None, False
        return [RoundOver(None, False, reason)]

    def waits_in_vain(self, *, quorum: bool, now: float) -> bool:
        """Whether we have offered something and there was no quorum for so long that we rather train on by ourselves."""
        if self.ready is None or quorum:
            self._no_quorum_since = None
            return False
        if self._no_quorum_since is None:
            self._no_quorum_since = now
        return now >= self._no_quorum_since + GIVE_UP_S

    # ---- plans -------------------------------------------------------------------------------------------------

    def part_in(self, plan: bytes) -> Participation | None:
        """Our part in the plan of this name, when it is the one under way."""
        return self.part if self.part is not None and self.part.plan_id == plan else None

    def has_seen(self, plan: bytes) -> bool:
        """Whether a plan is under way or over."""
        return plan in self._over or self.part_in(plan) is not None

    def join(self, name: bytes, plan: Plan, proposer: PeerId, now: float) -> list[Effect]:
        """Take part in a plan, which has been checked; the one before has been dropped."""
        self.part = Participation(name, plan, now, contributing=self.ready is not None)
        begun = self.part.begin(self.me)
        self._contributing |= self.part.contributing
        fields = {
            "round": plan.height,
            "ballot": plan.ballot,
            "proposer": proposer.hex(),
            "members": [p.hex() for p in plan.members],
            "contributors": [c.peer.hex() for c in plan.contributors],
            "parts": len(plan.parts),
            "reason": plan.reason,
        }
        return [Note("round.plan", fields), Expect(name, plan), *begun]

    def drop(self, *, final: bool) -> list[Effect]:
        """End our part in the plan under way. `final`: nothing can come of it any more, so what we hold of it is not needed either."""
        if self.part is None:
            return []
        plan, self.part = self.part.plan_id, None
        if final:
            self._over.add(plan)
        return [Forget(plan, final)]

    # ---- the next height ---------------------------------------------------------------------------------------

    def drop_unless(self, commit: Commit) -> list[Effect]:
        """The chain goes on with `commit`: nothing can come of a plan under way that is not its round's."""
        if commit.round is not None and self.part_in(commit.round.plan) is not None:
            return []
        return self.drop(final=True)

    def conclude(self, commit: Commit) -> list[Effect]:
        """The chain has gone on: a round ends what we have offered, whether it counts it or not; a change of view does not."""
        effects: list[Effect] = []
        if commit.round is not None and (part := self.part_in(commit.round.plan)) is not None:
            came, lacked = part.lacked()
            self._lacking.note(came - {self.me}, lacked - {self.me}, commit.version)
        if commit.round is not None and (self.ready is not None or self._contributing):
            contributed = any(c.peer == self.me for c in commit.round.contributors)
            reason = "committed" if contributed else self._why_missed(commit.round)
            effects.append(RoundOver(commit.round.plan, contributed, reason))
            self.ready, self._contributing = None, False
        self.part = None
        self._over.clear()
        return effects

    def _why_missed(self, result: RoundResult) -> str:
        if self.ready is None:
            return "what we had sent for it was given up by us before it was planned anew"
        part = self.part_in(result.plan)
        if part is None:
            return "the plan of the round did not reach us in time"
        if not part.contributing:
            return f"the round was planned without us ({part.plan.reason})"
        return "left out at the cut: not every owner had received our contribution in time"
