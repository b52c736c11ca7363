"""When a node that leaves may go: once its chain goes on without it, so that the others are not left short of a vote, or of the state; and once its own work is
done, so that there is a place to save."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.node.apply import Applier
from farflung.node.trainer import Trainer
from farflung.protocol import patience
from farflung.protocol.member import Member

LET_GO_S = 8.0
"""How long a leaving node waits to be let go: two heartbeats, the proposer's settling time, a vote."""

HAND_OVER_S = 60.0
"""The same where those who stay, or are on their way in, can decide nothing without its vote: gone too early it would leave them standing."""

SAY_S = 5.0
"""A step that takes longer is spoken of."""

STOP_S = 30.0
"""How long a node that leaves waits for the means of a commit, and for what of its last work changes nothing."""


@dataclass(slots=True)
class Departure:
    """Of one member. Times are seconds of its monotonic clock."""

    member: Member
    patience_s: float = LET_GO_S
    """How long it waits to be let go, at least where it is needed."""
    alone: bool = False
    """Whether its network has ended, so that nobody can let it go."""
    _began_at: float | None = field(default=None, init=False)
    _was_member: bool = field(default=False, init=False)

    def begin(self, now: float) -> None:
        """It leaves."""
        self._began_at, self._was_member = now, self.member.in_view

    def is_over(self, now: float) -> bool:
        """Whether it leaves and may go: nobody can be made to let us go, and they will find us gone."""
        if self._began_at is None or self.alone:
            return self._began_at is not None
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

    async def work_done(
        self,
        applier: Applier,
        trainer: Trainer,
        applying: asyncio.Task[None],
        training: asyncio.Task[None],
        say: Callable[[str], None],
    ) -> None:
        """Until nothing changes the learner any more, after `finish` of both: the step under way and the commit that is being taken are finished, however long that
        takes, for there is no place to save in the middle of them. `say` is told when it takes long.

        A download is given up at once: what it has is on disk, and the next start goes on from there. A commit that lacks its means after `STOP_S` is taken then, too.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + (0.0 if self.alone else STOP_S)
        if applier.downloading:
            applying.cancel()  # training may be waiting for it
        if not (await asyncio.wait([training], timeout=SAY_S))[0]:
            say("the step under way is finished and saved before the node ends, however long it takes")
            await asyncio.wait([training])
        await asyncio.wait([applying], timeout=max(0.0, give_up_at - loop.time()))
        async with trainer.busy:  # so it does not stop in the middle of what it makes of a commit
            applying.cancel()
        await asyncio.wait([applying])
