"""The training loop of a peer that holds the whole model: it takes batches off its window and steps by itself.

A round is due after a lap (`protocol.lap`: H steps, or H / P where P fragments are synchronised in turn), or when the fastest of the others
has made its lap (`protocol.rhythm`): a slower peer brings fewer steps.
"""

import asyncio

from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.learner import WholeLearner
from farflung.node.trainer import Host, Pace, Trainer
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import count, join


class ReplicaTrainer(Trainer):
    """See the module."""

    def __init__(self, me: PeerId, learner: WholeLearner, door: Door, log: EventLog, pace: Pace, host: Host) -> None:
        super().__init__(me, learner, door, log, pace, host)
        self._whole = learner

    @property
    def global_step(self) -> int:
        """Those of all rounds, and ours since."""
        return self.counted_steps + self.progress.steps

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
        goes_on = self.pace.laps.delay_of(self.lap) > 0
        return self._host.may_train() or (goes_on and self._host.awaits_means() and not self._has_due())

    async def _step(self) -> bool:
        """On the next batch of the window."""
        if self._finishing or not self._may_step() or self._stands() or (batch := self._next_batch()) is None:
            return False
        loop = asyncio.get_running_loop()
        if self.progress.steps == 0:
            self.progress.began_at = loop.time()
        began = self._step_at = loop.time()
        numbers = [number for start, stop in batch for number in range(start, stop)]
        report = await self._door.run(self._whole.train, numbers, self.global_step)
        self._step_at = None
        self.progress.trained = join(self.progress.trained, batch)
        self.progress.steps += 1
        self._note(report, began, count(batch) * self.pace.tokens_per_sample, numbers)
        return True
