"""A step of one peer comes to no number: it begins again from the outer state, and keeps its place and its samples."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from tests.sims.test_laps import PEERS, run

from farflung.protocol.lap import Laps
from farflung.sims.swarm import Swarm
from farflung.sims.toy import ToyLearner
from farflung.training.errors import NonFinite
from farflung.training.inner import StepReport


@pytest.mark.parametrize("delay_steps", [0, 9])
def test_bad_samples_cost_a_peer_no_more_than_what_it_has_trained_since_the_last_round(
    monkeypatch: pytest.MonkeyPatch, delay_steps: int
) -> None:
    """Also while what it had trained before is in flight, and is counted after all."""
    usual = ToyLearner.train

    def train(self: ToyLearner, numbers: Sequence[int], global_step: int) -> StepReport:
        if {21, 50} & set(numbers):
            raise NonFinite(global_step=global_step, loss=math.nan)
        return usual(self, numbers, global_step)

    monkeypatch.setattr(ToyLearner, "train", train)
    contributors: list[int] = []

    async def watch(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or not all(p.trainer.finished for p in swarm.peers.values()):
            await asyncio.sleep(1.0)
        rounds = [c.commit.round for c in swarm.peers[0].member.history if c.commit.round]
        contributors.extend(len(result.contributors) for result in rounds)

    report = run(Laps.fixed(10, delay_steps), 60, 200.0, (1.0,) * PEERS, watch)
    assert report.violations == [] and report.members == PEERS
    assert contributors == [PEERS] * 6
    told = [line.split()[2] for line in report.events if " step." in line]
    assert told == ["step.diverged", "step.passed"] * 2
