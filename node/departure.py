"""When a node that leaves may go: once its chain goes on without it, so that the others are not left short of a vote, or of the state."""

from dataclasses import dataclass, field

from farflung.protocol import patience
from farflung.protocol.member import Member

LET_GO_S = 8.0
"""How long a leaving node waits to be let go: two heartbeats, the proposer's settling time, a vote."""

HAND_OVER_S = 60.0
"""The same where those who stay, or are on their way in, can decide nothing without its vote: gone too early it would leave them standing."""


@dataclass(slots=True)
class Departure:
    """Of one member. Times are seconds of its monotonic clock."""

    member: Member
    patience_s: float = LET_GO_S
    """How long it waits to be let go, at least where it is needed."""
    _began_at: float | None = field(default=None, init=False)
    _was_member: bool = field(default=False, init=False)

    def begin(self, now: float) -> None:
        """It leaves."""
        self._began_at, self._was_member = now, self.member.in_view

    def is_over(self, now: float) -> bool:
        """Whether it leaves and may go: nobody can be made to let us go, and they will find us gone."""
        if self._began_at is None:
            return False
        since_s, deciding = now - self._began_at, self.member.consensus
        if not self.member.in_view:
            return self.is_let_go or since_s >= self.patience_s
        if patience.is_needed(deciding, now):
            return since_s >= max(self.patience_s, HAND_OVER_S)
        return since_s >= self.patience_s or not patience.not_gone(deciding, deciding.head.commit.view, now)

    @property
    def is_let_go(self) -> bool:
        """Whether our chain goes on without us: we are no member of it, and if we were one, somebody who stays knows that. Of two members the one that
        stays might have been away, and needs a vote from us for ever if it does not hear of the commit."""
        if not self._was_member or self.member.in_view:
            return not self.member.in_view
        head, heartbeat = self.member.head.commit, self.member.membership.heartbeat
        return any((beat := heartbeat(p)) is not None and beat.height >= head.height for p in head.view)
