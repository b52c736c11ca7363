"""Executes what the member decides, in order; what takes long becomes a task of its own.

Order is what makes a vote safe: it is on disk before the message that tells of it leaves, a commit before we say that we are there, and means before we say that we hold them. So the
disk is waited for here, by whatever was decided after; transfers end with their round (`exchange`), and commits have a queue (`apply`): what one
does to the learner need not wait for the disk, what follows from it does.
"""

import asyncio
from collections.abc import Callable

from farflung.node.apply import Applier
from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.exchange import Exchange
from farflung.node.means import MeanStore
from farflung.node.sealed_mail import SealedMail
from farflung.node.storage import Storage
from farflung.node.trainer import Trainer
from farflung.protocol.effects import (
    Apply,
    Confirm,
    Contribute,
    Effect,
    Expect,
    FetchMean,
    Forget,
    Note,
    Reduce,
    Refusal,
    Repair,
    RoundOver,
    SaveVote,
    Secure,
    Send,
)
from farflung.protocol.errors import RemoteError
from farflung.protocol.member import Member
from farflung.protocol.messages import Message, Plan

STALE_S = 30.0
"""What is decided while one effect takes longer than this, as a write may for hours where the disk is full, is no news when it is over: others have counted
us as gone, and ask again what they want to know."""


class Executor:
    """See the module."""

    def __init__(
        self,
        *,
        member: Member,
        mail: SealedMail[Message],
        exchange: Exchange,
        means: MeanStore,
        applier: Applier,
        trainer: Trainer,
        storage: Storage,
        journal: Door,
        log: EventLog,
        refused: Callable[[RemoteError], None],
    ) -> None:
        self._member = member
        self._mail = mail
        self._exchange = exchange
        self._means = means
        self._applier = applier
        self._trainer = trainer
        self._storage = storage
        self._journal = journal.run
        self._log = log
        self._refused = refused
        self._queue: asyncio.Queue[list[Effect]] = asyncio.Queue()
        self._busy_since: float | None = None
        """When what is being executed began."""

    def push(self, effects: list[Effect]) -> None:
        """Execute these after everything before them. What would be said long after it was decided is not said at all."""
        now = asyncio.get_running_loop().time()
        if self._busy_since is not None and now >= self._busy_since + STALE_S:
            effects = [effect for effect in effects if not isinstance(effect, Send)]
        self._queue.put_nowait(effects)

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Execute until cancelled; transfers are tasks of `group`."""
        loop = asyncio.get_running_loop()
        while True:
            for effect in await self._queue.get():
                self._busy_since = loop.time()
                await self._execute(effect, group)
                self._busy_since = None

    async def _execute(self, effect: Effect, group: asyncio.TaskGroup) -> None:
        exchange = self._exchange
        match effect:
            case Send(to, message, via):
                self._mail.send(to, message, via)
            case SaveVote(vote):
                await self._journal(self._storage.save_vote, vote)
            case Expect(plan_id, plan):
                exchange.expect(plan_id, plan)
                exchange.meet(plan_id, group)
            case Contribute(plan_id, plan):
                fields = {"round": plan.height, "plan": plan_id.hex(), "bytes": self._contribution_bytes(plan)}
                self._log.emit("round.scatter", **self._of_group(), **fields)
                exchange.start(plan_id, exchange.contribute(plan_id), group)
            case Reduce(plan_id, _, part, weights, early):
                exchange.start(plan_id, exchange.reduce(plan_id, part, weights, early=early), group)
            case Confirm(plan_id):
                self._means.confirm(plan_id)
                exchange.start(plan_id, exchange.confirm(plan_id), group)
            case Secure(plan_id):
                await self._journal(self._storage.sync_means, plan_id)
            case FetchMean(plan_id, part, digest, holders):
                exchange.start(plan_id, exchange.fetch_due(plan_id, part, digest, holders), group)
            case Forget(plan_id, final):
                exchange.forget(plan_id)
                if final:
                    await self._means.discard(plan_id)
            case Apply(certified, anchor):
                on_disk = asyncio.Event()
                self._applier.push(certified, on_disk)
                await self._journal(self._storage.append_commit, anchor, certified)
                on_disk.set()
            case Repair():
                self._applier.push(effect)
            case RoundOver(_, contributed, reason):
                if not contributed:
                    at = self._member.head.commit.height
                    self._log.emit("round.missed", **self._of_group(), round=at, reason=reason)
                self._trainer.over()
            case Refusal(error):
                self._refused(error)
            case Note(event, fields):
                self._log.emit(event, **{**self._of_group(), **fields})

    def _of_group(self) -> dict[str, str]:
        """What a line says of our group: the commit that has made us one may not be applied yet."""
        return {"group": self._member.group.hex()} if self._member.group else {}

    def _contribution_bytes(self, plan: Plan) -> int:
        """What is about to be sent to the others, more or less."""
        others = sum(p.stop - p.start for p in plan.parts if p.owner != self._member.me)
        codec = self._exchange.uplink_of(plan)
        return int(others * codec.expected_nbytes() / codec.numel)
