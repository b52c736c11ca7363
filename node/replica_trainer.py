"""The training loop of a peer that holds the whole model: it takes batches off its window and steps by itself.

A round is due after a lap (`protocol.lap`: H steps, or H / P where P fragments are synchronised in turn), or when the fastest of the others
has made its lap (`protocol.rhythm`): a slower peer brings fewer steps.

A step that comes to no number (`NonFinite`) may be a bad sample's doing, a flipped bit's in parameters or moments, or that of a learning rate which is too
high. Nobody can tell, and what was trained before is not to be trusted either. So the peer goes on from the outer parameters, as a newcomer would, with the
same samples but for those of that step: these it passes over, and the next round counts them as if they had been trained. When that was not it, the node ends.
"""

import asyncio

from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.learner import WholeLearner
from farflung.node.trainer import Host, Pace, Trainer
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import count, join, split
from farflung.protocol.types import Intervals
from farflung.training.errors import NonFinite


class ReplicaTrainer(Trainer):
    """See the module."""

    def __init__(self, me: PeerId, learner: WholeLearner, door: Door, log: EventLog, pace: Pace, host: Host) -> None:
        super().__init__(me, learner, door, log, pace, host)
        self._whole = learner
        self._passed: set[int] = set()
        """Samples of such steps that are in our window."""

    @property
    def global_step(self) -> int:
        """Those of all rounds, and ours since, but for what laps that missed us stand for."""
        return self.counted_steps + self.progress.steps - self.progress.missed

    def _is_ready(self) -> bool:
        """When a round is due; and with whatever there is when no samples are left, for only a round brings more."""
        return not self._offering and self._host.may_train() and self._has_due()

    def _has_due(self) -> bool:
        """Whether there is something that a round waits for."""
        new = self.progress.steps - self._offered_steps
        if new >= self.lap or (self.out_of_samples and self.progress.steps > 0):
            return True
        now = self._now()
        # What missed its round is offered again, for nothing comes to it; but a try that is due comes first, for while an offer stands there may be none.
        if self.hindrance.lasts(now) and self.hindrance.forbids(now):
            # alone it would only make a round of a few steps, which counts as a lap
            return self.progress.steps > 0 and self._host.others_train()
        if new == 0 or self.tokens_per_s == 0.0:  # just offered; or just restarted, with progress
            return False
        return self._host.is_due(self.pace.step_tokens / self.tokens_per_s)

    def _steps_left(self) -> int:
        return self.lap - (self.progress.steps - self._offered_steps)

    def _steps_in(self, samples: int) -> int:
        return samples // self.pace.samples_per_step

    def _may_step(self) -> bool:
        """Also while means are on their way into the outer state: they are applied between two steps. That only where training goes on while rounds are under
        way, and not when we would offer if they were in it: with steps as long as laps that would be so whenever one ends, and nothing would ever be offered.
        """
        return self._host.may_train() or (self._trains_on and self._host.awaits_means() and not self._has_due())

    @property
    def _trains_on(self) -> bool:
        """Whether training goes on while rounds are under way."""
        return self.pace.laps.delay_of(self.lap) > 0

    async def _step(self) -> bool:
        """On the next batch of the window."""
        if self._finishing or not self._may_step() or self._stands() or (batch := self._next_batch()) is None:
            return False
        loop = asyncio.get_running_loop()
        if self.progress.steps == 0:
            self.progress.began_at = loop.time()
        began = self._step_at = loop.time()
        numbers = [number for start, stop in batch for number in range(start, stop)]
        if not self._passed.isdisjoint(numbers):
            await self._door.run(self._whole.pass_over, numbers)
            self._take(batch)
            self._log.emit("step.passed", samples=batch)
            return True
        try:
            report = await self._door.run(self._whole.train, numbers, self.global_step)
        except NonFinite as error:
            await self._begin_again(numbers, error)
            return True
        self._take(batch)
        self._note(report, began, count(batch) * self.pace.tokens_per_sample, numbers)
        return True

    def _take(self, batch: Intervals) -> None:
        self._step_at = None
        self.progress.trained = join(self.progress.trained, batch)
        self.progress.steps += 1

    async def _begin_again(self, numbers: list[int], error: NonFinite) -> None:
        """From the outer parameters, without these samples. Raises the error where that has not helped."""
        self._diverge("step.diverged", numbers, error)
        self._passed.update(numbers)
        await self._door.run(self._whole.start_over)
        self._step_at = None
        self._host.give_up("a step came to no number, and what went before it is not to be trusted")

    def count(self, samples: int) -> None:
        """See `Trainer.count`."""
        counted = split(self.progress.trained, samples)[0]
        super().count(samples)
        # In laps of a few steps all of them may have been passed over, round after round.
        if not self._passed.issuperset(n for start, stop in counted for n in range(start, stop)):
            self._diverged = 0

    def settle(self, commit: Commit, version: int, contributed_samples: int) -> bool:
        """See `Trainer.settle`."""
        lap = commit.steps - self.counted_steps
        stays = super().settle(commit, version, contributed_samples)
        if not contributed_samples:
            progress = self.progress
            progress.missed = min(progress.missed + lap, progress.steps)
            if self._trains_on:
                # A lap has ended without what the checkpoint brought, which goes into the next round when it is due: with steps to a whole lap of ours
                # it would be due at once, when the others have only begun theirs.
                self._offered_steps = max(self._offered_steps, min(progress.missed, progress.restored))
        self._passed = {n for n in self._passed if any(start <= n < stop for start, stop in self.window)}
        return stays
