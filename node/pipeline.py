"""A peer's part in the pipeline of its swarm: who serves what, which step comes next, and our share of it.

    Present ──▶ roll ──▶ coordinator ──▶ StepPlan ──▶ job ──▶ trainer ──▶ carry_out ──▶ stage server, driver ──▶ gradients
                              ▲─────────── StepAnswer ◀──┘◀── StepGo

`protocol/roll.py` and `protocol/coordination.py` decide, `stage_job.py` checks what we are asked to do, `stage_work.py` does it; this module hears and
sends. What goes on within the stage (its chain, its rounds) is `peer.Peer`'s business.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from farflung.node.balance import Balance, Prepare
from farflung.node.disk_room import Room
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.facilities import Facts
from farflung.node.imprints import serve_imprints
from farflung.node.knocking import Knocking
from farflung.node.life_watch import LifeWatch
from farflung.node.network import Network, PeerId
from farflung.node.sealed_mail import PipelineMail
from farflung.node.stage_job import Done, Job, accept, as_message, leg_of
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe
from farflung.node.stage_self import Self
from farflung.node.stage_work import Report, StageWork
from farflung.node.timing import TimedDoor
from farflung.protocol.appointment import appoint
from farflung.protocol.coordination import Coordinator, Post
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.keys import Signer, digest, short
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.protocol.lives import Life
from farflung.protocol.messages import PipelineMessage
from farflung.protocol.pipeline_messages import MoveOrder, Present, StepAnswer, StepGo, StepPlan, SwarmMessage
from farflung.protocol.progress import finished, newest_step
from farflung.protocol.quorum import is_quorum
from farflung.protocol.replay import first_seq
from farflung.protocol.roll import Roll
from farflung.protocol.turns import PASSED_S, TURN_S
from farflung.protocol.types import as_text
from farflung.training.pipeline_online import Server, plan_step
from farflung.training.pipeline_plan import BadPlan, Plan, Policy

TICK_S = 0.25
"""Between two looks at deadlines."""


class Pipeline:
    """See the module. Implements `stage_trainer.Steps`."""

    def __init__(
        self,
        *,
        network: Network,
        signer: Signer,
        recipe: StageRecipe,
        life: Life,  # of our stage
        learner: StageLearner,
        doors: Doors,
        roll: Roll,
        mail: PipelineMail,
        facts: Facts,
        log: EventLog,
        refused: Callable[[RemoteError], None],
        keep: Callable[[], None],
        owed: Collection[Life],  # see `life_watch`
        fits: frozenset[int],  # other stages that we may move to
        prepare: Prepare,
    ) -> None:
        """`keep` writes the appointments and lives of `roll` to disk."""
        self.roll = roll
        self.coordinator = Coordinator(roll, may_miss=recipe.pipeline.stages - recipe.pipeline.visits)
        self.recipe = recipe
        self.life = life
        self.me: Self
        """Set by the peer."""
        self._network = network
        self._signer = signer
        self._side = doors.side
        self._door = TimedDoor(doors.learner)
        self._mail = mail
        self._facts = facts
        self._admits = recipe.own.settings().admits
        self._log = log
        self._refused = refused
        self._keep = keep
        self._room = Room(log, "its appointments of founders")
        self.work = StageWork(
            network=network,
            post=mail.send,
            recipe=recipe,
            learner=learner,
            door=self._door,
            doors=doors,
            roll=roll,
            life=life,
            refused=refused,
            lacks=lambda error: self.me.lacks(error),
            ready=lambda job, wrong: self._answer(job.coordinator, job.window, wrong),
            over=self._over,
        )
        self.watch = LifeWatch(self, roll=roll, life=life, owed=owed, log=log, keep=keep)
        self.knocking = Knocking(network=network, roll=roll, begin_task=self.begin_task)
        self.balance = Balance(self, roll=roll, recipe=recipe, log=log, fits=fits, prepare=prepare)
        self._planning: asyncio.Task[None] | None = None
        self._plans = first_seq(network.unix_time())
        self._said: Present | None = None
        """The last time that we told everybody."""
        self._beat_at = self._ways_at = -1e9
        self._last_plan: Plan | None = None
        """Of the newest step that we took part in."""
        self._ended = False
        """We are on the way out: what still comes in begins nothing any more."""
        self._step_s = 0.0
        """What a step takes: exponential mean, half of it the last one."""
        roll.by_chain = recipe.stage == 0
        roll.own_step = (recipe.stage, 0)
        self._group: asyncio.TaskGroup

    # ---- what others may read ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of the next step."""
        return newest_step(self.roll, self._now())

    @property
    def finished(self) -> bool:
        """Whether there will be no more steps."""
        counts = self.recipe.stage == 0 and (self.me.trains or self.me.finished)
        own = self.me.finished if counts else None
        return finished(self.roll, self._now(), own=own, complete=self._is_complete)

    def admitted(self, peer: PeerId) -> bool:
        """Whether a peer has shown that it may be in this swarm."""
        return peer in (self.roll.me, self.roll.founder) or self.roll.present(peer) is not None

    def _is_complete(self, steps: int) -> bool:
        manifest = self.recipe.whole.manifest
        return manifest.laps.finished(manifest.total_steps - steps)

    @property
    def told_lost(self) -> tuple[int, ...]:
        """The stages that cannot go on, as we last told everybody."""
        return () if self._said is None else self._said.lost

    @property
    def leads(self) -> bool:
        """Whether it is our turn to plan."""
        return self.recipe.stage == 0 and self.me.trains and self.coordinator.leads(self._now())

    @property
    def forward_s(self) -> float:
        """What a forward of our stage takes for one microbatch; 0 while unknown."""
        return self._door.seconds("_forward")

    def counts(self) -> tuple[int, ...]:
        """Peers of each stage, ourselves included."""
        return self.roll.counts(self._now(), self.recipe.stage if self.wants < 0 else self.wants)

    @property
    def wants(self) -> int:
        """The stage for which we are about to leave our own; -1: none."""
        return self.balance.to if self.watch.called_to < 0 else self.watch.called_to

    @property
    def idle(self) -> bool:
        """Whether we take part in no step, and have not promised to."""
        return self.work.job is None and not self.me.in_step

    def begin_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do something as long as we live, beside everything else."""
        return self._group.create_task(work, name=name)

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve our stage, and take part, until cancelled."""
        work = self.work
        self.watch.tell()
        work.server.serve()
        imprints, boundary = work.server.imprints, work.service.forward
        serve_imprints(self._network, imprints, boundary, self._side, self.admitted, self._refused)
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self.work.server.run(), name="stage server")
            try:
                while True:
                    self._tick()
                    await asyncio.sleep(TICK_S)
            finally:
                self._ended = True

    def begin(self, number: int) -> None:
        """The next step, as far as our own chain tells."""
        self.roll.own_step = (self.recipe.stage, max(self.roll.own_step[1], number))

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer of any stage."""
        if self.roll.discover(peer, self._now()):
            self._mail.send(peer, self.present())

    def changed(self) -> None:
        """Something of us may have changed: those who wait for us are told at once."""
        said, me = self._said, self.me
        changed = said is None or (said.trains, said.finished, said.lost) != (
            me.trains,
            me.finished,
            self.watch.lost(self._now()),
        )
        if changed or (me.free and said is not None and (said.free, said.step) != (True, self.step)):
            self.announce()
        self._lead()

    def announce(self) -> None:
        """Say to everybody what we are, and once in a heartbeat how far away they are."""
        now = self._beat_at = self._now()
        present = self.present()
        if now >= self._ways_at + self.roll.heartbeat_s:
            self._ways_at = now
            others = [peer for peer in self.roll.known if self.roll.alive(peer, now)]
            ways = self.roll.ways
            present = msgspec.structs.replace(present, beat=ways.say(now), ways=ways.tell(others, now))
        self._said = present
        for peer in self.roll.known:
            self._mail.send(peer, present)

    def present(self, *, reply: bool = False) -> Present:
        """What we say of ourselves."""
        word, chain = self.me.word, self.me.chain
        return Present(
            stage=self.recipe.stage,
            life=self.life.number,
            wants=self.wants,
            trains=self.me.trains,
            free=self.me.free and self.work.job is None,
            step=self.step,
            window=b"" if self.work.job is None else self.work.job.window,
            finished=self.me.finished,
            version=self.me.holds[0],
            digest=self.me.holds[1],
            forward_s=self.forward_s,
            up_bytes_per_s=self.me.up_bytes_per_s,
            admission=self._facts.admission,
            addresses=tuple(self._network.addresses()[:MAX_ADDRESSES]),
            appointments=tuple(self.roll.appointments[stage] for stage in sorted(self.roll.appointments)),
            peers=self.counts(),
            lives=word.lives,
            lost=self.watch.lost(self._now()),
            step_s=self._step_s,
            losses_per_hour=self.roll.losses.per_hour,
            grad_norm=self.me.grad_norm,
            shadows=self.me.copies,
            since=self.balance.since,
            load=self.balance.load,
            fits=tuple(sorted(self.balance.fits)),
            reply=reply,
            domains=self._facts.domains,
            call=word.call,
            apart=chain is None or not is_quorum(*chain),
            counted=self.me.counted or self.roll.hearsay.counted,
            decided=self.roll.decided,
            ended=self.roll.ended,
            loss=self.work.usual_loss or self.roll.hearsay.loss,
            tries=self.work.tries,
        )

    def _tick(self) -> None:
        now = self._now()
        self.roll.tick(now)
        self.watch.look(now)
        self.knocking.look(now)
        if self.watch.follow(now):
            self.announce()
        if now >= self._beat_at + self.roll.heartbeat_s:
            self.announce()
        self._post(self.coordinator.tick(now))
        self.work.watch(now)
        self.balance.look()
        self.changed()

    # ---- what comes in -----------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, data: bytes) -> None:
        """A message that is bound to the swarm."""
        if self._ended:
            return
        try:
            self._handle(sender, self._mail.open(sender, data, self._check_admitted))
        except RemoteError as error:
            self._refused(error)

    def _check_admitted(self, sender: PeerId, message: PipelineMessage | SwarmMessage) -> None:
        if isinstance(message, Present):
            if not self._admits(sender, message.admission):
                raise Refused("no invitation to this swarm", peer=sender)
        elif not self.admitted(sender):
            raise Refused(f"{type(message).__name__} before being admitted to the swarm", peer=sender)

    def _handle(self, sender: PeerId, message: PipelineMessage | SwarmMessage) -> None:
        now = self._now()
        match message:
            case Present():
                self._on_present(sender, message, now)
            case StepPlan():
                self._on_plan(sender, message, now)
            case StepAnswer():
                self._post(self.coordinator.answered(sender, message, now))
            case StepGo():
                job = self.work.job
                if job is not None and job.window == message.window and job.coordinator == sender:
                    if message.go and self.recipe.stage == 0:
                        self._begins(job, now)
                    self.work.hear(job, goes=message.go)
            case MoveOrder():
                self.balance.asked(sender, message, now)
            case _:
                self.work.server.handle(sender, message)

    def _begins(self, job: Job, now: float) -> None:
        for peer in self.coordinator.begins(job.coordinator, job.step.keys, now):
            reason = f"began no step for {TURN_S:.0f} s, though one could begin; {short(job.coordinator)} has"
            self._log.emit("pipeline.passed", peer=peer.hex(), step=job.number, seconds=PASSED_S, reason=reason)

    def _on_present(self, sender: PeerId, said: Present, now: float) -> None:
        news = self.roll.heard(sender, said, now)
        self._network.add_addresses(sender, list(said.addresses))
        if (said.stage, said.life) == (self.recipe.stage, self.life.number):
            self.me.met(sender)
        if said.stage < 0 < said.wants < self.roll.stages and self.roll.me == self.roll.founder:
            self._appoint(said.wants, sender)
        if news and not said.reply:
            self._mail.send(sender, self.present(reply=True))
        if self.watch.follow(now):
            self.announce()
        self._lead()
        self.me.wake()

    def _appoint(self, stage: int, peer: PeerId) -> None:
        """Let the first who asks found the chain of a stage; it is on disk before anybody hears of it."""
        if stage not in self.roll.appointments:
            self.roll.appointments[stage] = appoint(self._signer, self.roll.swarm, stage, peer)
            if not self._room.takes(self._keep):  # or another would be appointed after a restart; who asks, asks again
                del self.roll.appointments[stage]
                return
            self._log.emit("stage.founded", stage=stage, founder=peer.hex())

    def _on_plan(self, sender: PeerId, message: StepPlan, now: float) -> None:
        job = self.work.job
        if job is not None and job.window == message.window:
            if job.ready:
                self._answer(job.coordinator, job.window, "")
            return
        if job is not None or not self.me.free:
            self._answer(sender, message.window, "busy")
            return
        try:
            self.work.job = accept(message, sender, roll=self.roll, recipe=self.recipe, now=now)
        except Refused as error:
            self._answer(sender, message.window, error.reason)
            raise
        self.me.wake()

    # ---- what goes out -----------------------------------------------------------------------------------------

    def _answer(self, to: PeerId, window: bytes, wrong: str) -> None:
        """Say that we are ready, or what is wrong."""
        self.tell(to, StepAnswer(window, not wrong, as_text(wrong or "ready")))

    def _post(self, posts: list[Post]) -> None:
        for to, message in posts:
            self.tell(to, message)

    def tell(self, to: PeerId, message: SwarmMessage) -> None:
        """To ourselves as to the others, but not at once: an answer must not overtake what it answers."""
        if to != self.roll.me:
            self._mail.send(to, message)
        else:
            asyncio.get_running_loop().call_soon(self._tell_ourselves, message)

    def _tell_ourselves(self, message: SwarmMessage) -> None:
        try:
            self._handle(self.roll.me, message)
        except RemoteError as error:
            self._refused(error)

    # ---- leading -----------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        """Plan a step when it is our turn, and the time."""
        if self._ended or self._planning is not None or self.recipe.stage != 0 or not self.me.trains:
            return
        stages = self.coordinator.participants(self._now(), free=self.me.free and self.work.job is None)
        if stages is not None:
            self._planning = self._group.create_task(self._plan(stages), name="plan of a step")

    async def _plan(self, stages: list[list[PeerId]]) -> None:
        pipeline = self.recipe.pipeline
        servers = [self._server(peer, stage) for stage, peers in enumerate(stages) for peer in peers]
        trips_s = self.roll.ways.between([peer for peers in stages for peer in peers])
        self._plans += 1
        try:
            forecast = await self._side.run(
                plan_step,
                servers,
                trips_s,
                len(stages),
                self.recipe.rules(),
                microbatches=pipeline.microbatches,
                slots=pipeline.slots,
                nbytes=self.work.service.forward.max_nbytes(self.recipe.tokens_per_microbatch),
                policy=Policy(pipeline.policy),
                seed=self.step,
                before=self._last_plan,
                open_hops=pipeline.dynamic,
                twins=pipeline.has_twins,
            )
        except BadPlan as error:
            self.coordinator.reason = str(error)
            return
        finally:
            self._planning = None
        window = digest("step", self.roll.me + self._plans.to_bytes(16, "big"))
        number = self.coordinator.number(self._now())
        plan = as_message(forecast.plan, window=window, number=number, leg_s=leg_of(forecast.silence_s))
        if self.coordinator.attempt is None and self.me.free:
            self._post(self.coordinator.propose(plan, self._now()))

    def _server(self, peer: PeerId, stage: int) -> Server:
        said = self.roll.present(peer)
        if said is None:  # ourselves
            return Server(peer.hex(), stage, self.forward_s, self.me.up_bytes_per_s)
        return Server(peer.hex(), stage, said.forward_s, said.up_bytes_per_s)

    # ---- a step (`stage_trainer.Steps`) ------------------------------------------------------------------------

    def take(self) -> Job | None:
        return self.work.take()

    async def carry_out(self, job: Job, numbers: Sequence[int]) -> Done | None:
        return await self.work.carry_out(job, numbers)

    async def read(self, numbers: Sequence[int]) -> None:
        await self.work.read(numbers)

    def _over(self, report: Report | None, window: bytes) -> None:
        """Our part in a step is over. Those who were lost do not count until they are heard again."""
        self.coordinator.over(window, began=report is not None)
        if report is None:
            return
        self.balance.spent(report.diary.spent)
        job, outcome = report.job, report.outcome
        self._last_plan = job.step.plan
        self._step_s = (report.seconds + (self._step_s or report.seconds)) / 2
        self.begin(job.number + 1)
        lost = [] if outcome is None else [job.step.keys[place] for place in sorted(outcome.lost)]
        for peer in lost:
            self.roll.lose(peer)
        for tried in () if outcome is None else outcome.tried:
            self._log.emit(
                "stage.trial",
                of=tried.stage,
                life=tried.life,
                number=tried.number,
                loss=tried.loss,
                usual=tried.usual,
                passes=tried.passes,
                reason=tried.why,
            )
        self._log.emit(
            "pipeline.step",
            number=job.number,
            seconds=round(report.seconds, 3),
            landed=0 if outcome is None else len(outcome.losses),
            cut=0 if outcome is None else len(outcome.cut),
            lost=[peer.hex() for peer in lost],
            settled=[home.hex() for home in report.settled],
            visits=0 if outcome is None else sum(outcome.visits.values()),
            peers=list(self.counts()),
            coordinator=job.coordinator.hex(),
            **report.diary.told(report.began_at, job.step.keys, () if outcome is None else outcome.notes),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
