"""A peer's work in one step of the pipeline: from a plan that it accepted to the gradients that count.

One job at a time. The stage server computes what others send, a driver sends our own microbatches on their way; in the end each data node of the step
has said that what we summed up for it counts, or has been lost.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farflung.node.diary import Diary
from farflung.node.door import Door, Doors
from farflung.node.network import Network, PeerId
from farflung.node.pipeline_driver import Driver, Outcome
from farflung.node.sealed_mail import Post
from farflung.node.stage_job import Done, Job
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe
from farflung.node.stage_server import StageServer
from farflung.protocol.coordination import ANSWER_S
from farflung.protocol.errors import RemoteError
from farflung.protocol.lives import Life
from farflung.protocol.roll import Roll
from farflung.training.errors import NoRoom, NotNow
from farflung.training.recovery_trial import LossTrial

WORD_S = 2 * ANSWER_S
"""A peer that is ready waits so long for the coordinator's word; it repeats it."""

LATE_S = 5.0
"""What a data node says of itself so long after a step began was not sent before it."""


@dataclass(frozen=True, slots=True)
class Report:
    """A step that is over, for people."""

    job: Job
    began_at: float
    """Seconds."""
    outcome: Outcome | None
    """Of our own microbatches."""
    seconds: float
    diary: Diary
    """What we did in it."""
    settled: tuple[PeerId, ...]
    """The data nodes for which it counts."""


class StageWork:
    """See the module."""

    def __init__(
        self,
        *,
        network: Network,
        post: Post,
        recipe: StageRecipe,
        learner: StageLearner,
        door: Door,  # to the model
        doors: Doors,
        roll: Roll,
        life: Life,  # of our stage
        refused: Callable[[RemoteError], None],
        lacks: Callable[[NoRoom], None],  # told when the device has no room for something of a step
        ready: Callable[
            [Job, str], None
        ],  # told when we are ready for a job's step, or what is wrong, so that nobody waits for us
        over: Callable[
            [Report | None, bytes], None
        ],  # told its window when a job is over, and what came of it, if it began
    ) -> None:
        self.service = recipe.service(learner)
        self.server = StageServer(
            network=network,
            post=post,
            learner=door,
            side=doors.side,
            worker=learner.worker,
            service=self.service,
            trip_s=roll.ways.trip_s,
            refused=refused,
            lacks=lacks,
        )
        self.job: Job | None = None
        self._network = network
        self._post = post
        self._recipe = recipe
        self._learner = learner
        self._side = doors.side
        self._roll = roll
        self._life = life
        self._refused = refused
        self._ready = ready
        self._over = over
        self._driver: Driver | None = None
        self._trial = LossTrial() if recipe.stage == 0 and not recipe.pipeline.by_rule else None
        """Of data nodes, but where lost stages come back by CheckFree's rules alone."""

    @property
    def usual_loss(self) -> float:
        """Of our steps of late, nats per token; 0 while there is none to tell, and in other stages than the first."""
        return 0.0 if self._trial is None else self._trial.usual

    @property
    def tries(self) -> tuple[int, ...]:
        """The stages that are on trial here."""
        if self._trial is None:
            return ()
        return self._trial.tries if self._trial.has_begun else self._made

    @property
    def _made(self) -> tuple[int, ...]:
        """The stage that was begun anew here, of which others hear before our first step."""
        return (0,) if self._learner.is_new else ()

    def take(self) -> Job | None:
        """The job that we have accepted and not begun."""
        if self.job is None or self.job.taken:
            return None
        self.job.taken = True
        return self.job

    def hear(self, job: Job, *, goes: bool) -> None:
        """The coordinator's word about our job."""
        job.tell(goes=goes)
        if not goes and not job.taken:
            self.job = None

    def watch(self, now: float) -> None:
        """Whom our step has lost."""
        job = self.job
        if job is None:
            return
        if not job.taken:  # a commit came first; and perhaps nobody has told us that nothing came of the plan
            self.job = None if now > job.since + WORD_S else job
            return
        if job.coordinator != self._roll.me and not self._roll.alive(job.coordinator, now):
            job.tell(goes=False)
        for place, key in enumerate(job.step.keys):
            if key == self._roll.me:
                continue
            if not self._roll.alive(key, now):
                self.server.avoid(job.window, place)
                if self._driver is not None:
                    self._driver.lost(place, "it has fallen silent")
            if place in job.step.homes and job.began_at is not None:
                self._watch_home(job, job.began_at, key, now)

    def _watch_home(self, job: Job, began_at: float, home: PeerId, now: float) -> None:
        """A data node that is dead, or has been started anew, settles nothing any more; nor does one that went on, for it gave us up."""
        if not self._roll.alive(home, now):
            self.server.lost(home)
            return
        entry = self._roll.entries[home]
        assert entry.present is not None
        if entry.present.window == job.window:
            return  # it is at it, also where it has heard of a newer step from somebody who is done
        # It may be further than the step is, after restarts: what it said before the step says nothing.
        if (entry.present.step > job.number and entry.since > began_at) or entry.since > began_at + LATE_S:
            self.server.lost(home)

    async def carry_out(self, job: Job, numbers: Sequence[int]) -> Done | None:
        """See `stage_trainer.Steps`."""
        report = None
        try:
            try:
                driver = await self._driver_of(job, numbers) if job.own else None
            except NotNow as error:
                self._ready(job, f"{error.what}: {error}")
                raise
            await self.server.open(job.step, None if driver is None else driver.listen)
            job.ready = True
            self._ready(job, "")
            if not await self._told_to_go(job):
                return None
            job.began_at = began_at = self._now()
            outcome = None
            if driver is not None:
                self._driver = driver
                outcome = await driver.run()
                for place in outcome.lost & job.step.homes:
                    # It has nothing to say to us, and may have lost us: we would wait for each other, and others for both.
                    self.server.lost(job.step.keys[place])
            accumulated = await self.server.settled(job.window)
            at_home = self.server.at_home(job.window)
            settled = tuple(job.step.keys[place] for place in self.server.counting(job.window))
            report = Report(job, began_at, outcome, self._now() - began_at, self.server.diary(job.window), settled)
        finally:
            self.server.close(job.window)
            self.job = self._driver = None
            self._over(report, job.window)
        if outcome is not None and not outcome.counts_here:
            return None  # our samples are trained another time; those that did not come home before still wait for it
        landed = {} if outcome is None else outcome.losses
        each = job.samples_per_microbatch
        missed = [index for index, microbatch in enumerate(job.own) if microbatch not in at_home]
        return Done(
            accumulated=accumulated,
            samples=accumulated.visits[self._recipe.stage] * each,
            loss=sum(landed.values()) / len(landed) if landed else float("nan"),
            missed=tuple(number for index in missed for number in numbers[index * each : (index + 1) * each]),
        )

    async def read(self, numbers: Sequence[int]) -> None:
        """See `stage_trainer.Steps`."""
        each = self._recipe.samples_per_microbatch
        for begin in range(0, len(numbers), each):
            await self._side.run(self._learner.batch, numbers[begin : begin + each])

    async def _driver_of(self, job: Job, numbers: Sequence[int]) -> Driver:
        if self._trial is not None and not self._trial.has_begun:
            self._trial.begin(self._roll.hearsay.loss, self._roll.on_trial(self._now()).union(self._made))
        each = job.samples_per_microbatch
        batches = {
            microbatch: await self._side.run(self._learner.batch, numbers[index * each : (index + 1) * each])
            for index, microbatch in enumerate(job.own)
        }
        return Driver(
            network=self._network,
            server=self.server,
            post=self._post,
            step=job.step,
            home=job.place,
            batches=batches,
            refused=self._refused,
            lives={stage: self._roll.number(stage) for stage in range(1, self._roll.stages)} | {0: self._life.number},
            trial=self._trial,
        )

    async def _told_to_go(self, job: Job) -> bool:
        try:
            async with asyncio.timeout(WORD_S):
                await job.told.wait()
        except TimeoutError:
            job.tell(goes=False)
        return job.goes

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
