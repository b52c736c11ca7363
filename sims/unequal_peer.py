"""The peers of `bench_unequal`: members of a swarm on machines of any speed, on emulated links.

The machine is emulated, too: a step really computes, and then sleeps until it has taken as long as it would there. All of that
counts as computing. Steps whose computation alone took longer are counted, for then this machine was too slow for what it emulates.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from farflung.node.door import Doors
from farflung.node.events import Event
from farflung.node.learner import SwarmLearner
from farflung.sims.bench_model import make_training
from farflung.sims.bench_node import Hear, Say, make_node
from farflung.training.inner import StepReport
from farflung.training.schedule import Schedule

SCHEDULE = Schedule(peak=1e-3, kind="constant")
"""So that tokens are all that losses depend on: swarms that need more rounds for the same tokens have the same rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """When a peer computed. Seconds are the monotonic clock's."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each inner step."""
    late: list[float] = field(default_factory=list)
    """Seconds of the computations that took longer than the step they stand for."""
    commits: list[float] = field(default_factory=list)
    """When each round was applied here."""


class PacedLearner(SwarmLearner):
    """A step takes `step_s`. It does not evaluate: nodes bound that to 0.5 % of their time, but in a short run the first is more."""

    step_s: float
    timed: Timed

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        began = time.monotonic()
        report = super().train(numbers, global_step)
        seconds = time.monotonic() - began
        if seconds > self.step_s:
            self.timed.late.append(seconds)
        time.sleep(max(0.0, self.step_s - seconds))
        self.timed.steps.append((began, time.monotonic()))
        return report

    def evaluate(self) -> float:
        return 0.0

    def evaluate_few(self) -> float:
        return 0.0

    def losses_of(self, states: Sequence[Tensor]) -> list[float]:
        """Held-out losses of outer parameters [n] each; leaves the last in place."""
        losses = []
        for params in states:
            self.outer.params.copy_(params)
            losses.append(super().evaluate())
        return losses


async def run_paced(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """Take part in the rounds; say what was measured, and the first one the losses."""
    doors = Doors.threads()
    replica, dataset, order = await doors.learner.run(make_training, arguments, SCHEDULE)
    learner = PacedLearner(replica, dataset, order)
    learner.step_s, learner.timed = arguments.step_s, Timed()
    node = await make_node(
        arguments,
        folder,
        doors,
        learner,
        tokens_per_sample=replica.model.config.seq_len,
        patient=arguments.equal_steps,
        early=not arguments.equal_steps,
    )
    states: list[Tensor] = []

    def watch(event: Event) -> None:
        if event["event"] == "round.commit":
            learner.timed.commits.append(time.monotonic())
            if arguments.rank == 0:
                states.append(learner.outer.params.clone())
            say(round=event["version"])

    events = await node.take_part(watch, say, hear)
    commits = [e for e in events if e["event"] == "round.commit"]
    say(
        steps=learner.timed.steps,
        late=learner.timed.late,
        commits=learner.timed.commits,
        missed=sum(not e["contributed"] for e in commits[1:]),
        digests=[e["digest"] for e in commits],
        tokens=[sum(e["contributors"].values()) for e in commits],
        losses=learner.losses_of(states),
    )
