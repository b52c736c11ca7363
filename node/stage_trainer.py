"""The training loop of a peer of a pipeline: `trainer` with steps that all stages take together.

A step begins when somebody plans it, not when the last one ends, and what a peer has trained in it is what came by. So three things differ:

    a step      the next one that we are asked for; then one inner step with the mean gradient of our visits
    a batch     as many samples (or tickets, see `stage_recipe`) as passed through us; those of microbatches that did not come home come first
                in the next step, in the places of as many behind them that came home already. So each is trained once, though a round in between
                counts by places; unless we are lost before that step
    a round     is due when the pipeline's steps pass a multiple of a lap, or the end of the run, for all stages at once, whoever missed some of them

A step that comes to no number (`NonFinite`) is left out here, as one that there was no room for. A microbatch with such a gradient was in no sum (`Overflow`), so neither a sample
is to blame nor what was trained before, as it may be on a replica: nothing else is given up. Where that has not helped, the node ends.

A data node that could not read its data tries that by itself before it says that it is free again: in a step all others would wait for it.

Rounds of all stages thus fall into the same pause of the pipeline, and with `delay_steps` it goes on while they are under way.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.hindrance import LONGEST_S, Hindrance
from farflung.node.stage_job import Done, Job
from farflung.node.stage_learner import StageLearner
from farflung.node.trainer import Host, Pace, Trainer
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import count, join, split
from farflung.protocol.types import Intervals
from farflung.training.errors import DataUnavailable, NonFinite


class Steps(Protocol):
    """Where steps come from: the pipeline, as one of its peers sees it."""

    @property
    def step(self) -> int:
        """Number of the next one."""

    @property
    def finished(self) -> bool:
        """Whether there will be no more."""

    def take(self) -> Job | None:
        """A step that we have been asked for."""

    async def carry_out(self, job: Job, numbers: Sequence[int]) -> Done | None:
        """Our part of it; `numbers`: the samples for our own microbatches, one after another. None when nothing came of it. Raises NotNow."""

    async def read(self, numbers: Sequence[int]) -> None:
        """Read samples for nothing but to see whether that can be done. Raises NotNow."""

    def changed(self) -> None:
        """We may have become free."""


class StageTrainer(Trainer):
    """See the module."""

    def __init__(
        self,
        me: PeerId,
        learner: StageLearner,
        door: Door,
        log: EventLog,
        pace: Pace,
        host: Host,
        steps: Steps,
    ) -> None:
        super().__init__(me, learner, door, log, pace, host)
        self.hindrance = Hindrance(LONGEST_S)  # a try that fails holds the whole pipeline up
        self._stage = learner
        self._steps = steps
        self._sizes: list[int] = []
        """Samples of each step of `progress`."""
        self._missed: list[int] = []
        """Samples of ours that were in a step and did not come home."""
        self._number: int | None = None
        """Of the pipeline's lap in which the progress that was not offered yet began."""
        self._next_after: int | None = None
        """The pipeline's step after our last one, or that at our beginning."""
        self.in_step = False
        self._unread = 0
        """Samples that could not be read when they were asked for, until so many can."""

    @property
    def global_step(self) -> int:
        return self._steps.step

    @property
    def free(self) -> bool:
        """Whether we could take part in a step now."""
        if self._finishing or self.in_step or not self._host.may_train() or self._stands() or self.out_of_samples:
            return False
        if self._unread or self.hindrance.forbids(self._now()):
            return False
        return not self._is_ready() and not self._steps.finished

    @property
    def idle(self) -> bool:
        """Whether nothing came by for a lap of the pipeline: a round has nothing to wait for."""
        if self._next_after is None:
            self._next_after = self._steps.step
        return self.progress.steps == 0 and self._steps.step >= self._next_after + self.lap

    @property
    def settled(self) -> bool:
        """Whether there is nothing left that a round could count."""
        if self.finished:
            return not self.in_step
        return not self._offering and not self.in_step and self.progress.steps == self._offered_steps

    def _steps_left(self) -> int:
        step, lap = self._steps.step, self.pace.laps.least
        new = self.progress.steps > self._offered_steps
        if new and self._number is not None and self._laps(step) > self._number:
            return 0  # it is being offered, or will be once commits are applied: others may wait for it
        left = lap - step % lap
        return min(left, self.pace.total_steps - step) if step < self.pace.total_steps else left

    def _laps(self, step: int) -> int:
        """That have ended before a step of the pipeline. Told by the manifest's lap and not by a commit's: a stage learns late that the last one is shorter."""
        lap, total = self.pace.laps.least, self.pace.total_steps
        return step // lap + (step >= total and total % lap > 0)

    def _is_ready(self) -> bool:
        if self._offering or not self._host.may_train() or self.progress.steps == 0:
            return False
        if self.finished:  # no round comes any more
            return False
        if self.progress.steps == self._offered_steps:  # no round took it; without samples nothing more will come
            return self.out_of_samples
        number = self._laps(self._steps.step)
        if self._number is None:  # restarted, with progress
            self._number = number
        return number > self._number or self.out_of_samples or self._steps.finished

    async def _step(self) -> bool:
        if self._unread:
            await self._steps.read(self._given(self._unread))
            self._unread = 0
        if self.hindrance.reason:
            self._steps.changed()  # it is over, or to be tried again
        if self._finishing or not self._host.may_train() or self._stands() or (job := self._steps.take()) is None:
            return False
        began = self._step_at = asyncio.get_running_loop().time()
        self.in_step = True
        try:
            await self._take_part(job, began)
        finally:
            self.in_step, self._step_at = False, None
        return True

    async def _take_part(self, job: Job, began: float) -> None:
        fresh, later = self._fresh(), self._missed[job.own_samples :]
        given = self._given(job.own_samples)
        try:
            done = await self._steps.carry_out(job, given)
        except DataUnavailable:
            self._unread = len(given)
            raise
        if done is None:
            return
        missed = later + list(done.missed)
        if not done.samples:
            self._missed = missed
            return
        trained = split(fresh, done.samples)[0]
        numbers = _numbers(trained)
        try:
            report = await self._door.run(self._stage.step, done.accumulated, numbers, job.number, loss=done.loss)
        except NonFinite as error:
            self._diverge("step.dropped", given, error)
            return
        self._missed = missed  # of a step that there was no room for, or that came to no number, all are trained again
        if self.progress.steps == 0:
            self.progress.began_at = began
        if self.progress.steps == self._offered_steps:
            self._number = self._laps(job.number)
        self.progress.trained = join(self.progress.trained, trained)
        self.progress.steps += 1
        self._sizes.append(done.samples)
        self._next_after = job.number + 1
        home = [number for number in given if number not in done.missed]
        self._note(
            report, began, self.pace.step_tokens, home
        )  # tokens of the pipeline: all its peers take equally long

    def count(self, samples: int) -> None:
        super().count(samples)
        if samples:
            self._diverged = 0

    def _fresh(self) -> Intervals:
        """What is left of our window."""
        return split(self.window, count(self.progress.trained))[1]

    def _given(self, own_samples: int) -> list[int]:
        """So many samples for our own microbatches: those that did not come home first."""
        again = self._missed[:own_samples]
        untouched = split(self._fresh(), len(self._missed))[1]
        return again + _numbers(split(untouched, own_samples - len(again))[0])

    def settle(self, commit: Commit, version: int, contributed_samples: int) -> bool:
        places = self._places_of_missed()
        stays = super().settle(commit, version, contributed_samples)
        if self._places_of_missed() != places:  # they are others' now, who train what lies there
            self._missed.clear()
        return stays

    def _places_of_missed(self) -> Intervals:
        """Where they will be counted: the front of what is left of our window. What lies there has been trained, but for those of them that do."""
        return join(split(self._fresh(), len(self._missed))[0])

    async def _offer(self) -> None:
        await super()._offer()
        self._steps.changed()

    def _steps_in(self, samples: int) -> int:
        if sum(self._sizes) != count(self.progress.trained):  # restarted: nobody remembers which step had how many
            each, more = divmod(count(self.progress.trained), max(1, self.progress.steps))
            self._sizes = [each + (step < more) for step in range(self.progress.steps)]
        kept = list(self._sizes)
        while kept and sum(kept) > samples:
            kept.pop(0)
        self._sizes = kept
        return len(kept)

    def drop(self) -> None:
        super().drop()
        self._sizes.clear()
        self._missed.clear()


def _numbers(intervals: Intervals) -> list[int]:
    return [number for start, stop in intervals for number in range(start, stop)]
