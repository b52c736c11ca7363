"""A stage that was begun anew has no full weight while the loss through it is much worse than before, under virtual time."""

import asyncio
import math

import pytest
from tests.sims.pipeline_story import lives, members_of, until, until_done
from torch import Tensor

from farflung.node.events import Event
from farflung.node.imprints import Imprints
from farflung.node.stage_learner import StageLearner
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.recovery_trial import TRIAL_STEPS

HOMES = (0, 4)
"""Two data nodes."""


async def replace_stage_2(swarm: PipelineSwarm) -> None:
    """Of four, after two rounds; peer 5 begins it anew."""
    for peer in range(5):
        swarm.start(peer)
    await until(swarm, lambda: swarm.rounds().get(2) == 2)
    swarm.kill(members_of(swarm, 2)[0])
    await asyncio.sleep(12.0)
    swarm.start(5)
    await until_done(swarm, *swarm.peers)


def run(shadows: float) -> PipelineSwarm:
    one = recipe(stages=4, total_steps=28, pipeline={"shadows": shadows})
    wanted = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 2}
    swarm = simulate(one, Counting(), signers(6), replace_stage_2, wanted=wanted)
    assert not swarm.broken and lives(swarm) == [(2, 1, 5)]  # a judge looks at samples and at what counts
    assert swarm.rounds()[0] == 7
    return swarm


def after(swarm: PipelineSwarm, peer: int) -> list[Event]:
    """Its steps since the stage was made."""
    [made] = swarm.happened("stage.made")
    return [event for event in swarm.happened("pipeline.step", peer) if event["time"] > made["time"]]


def test_a_copy_passes_and_every_step_counts() -> None:
    swarm = run(1.0)
    for home in HOMES:
        tried = swarm.happened("stage.trial", home)
        assert [(one["of"], one["life"], one["number"]) for one in tried] == [
            (2, 1, number) for number in range(1, TRIAL_STEPS + 1)
        ]
        assert all(one["passes"] for one in tried)
    assert all(event["settled"] for peer in (1, 3, 5) for event in after(swarm, peer))


@pytest.mark.thorough
def test_a_stage_that_breaks_the_loss_learns_while_the_others_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made of something that nobody could try before."""
    begins = StageLearner.begin_with

    def spoilt(self: StageLearner, layers: Tensor) -> None:
        begins(self, layers * -40.0)

    monkeypatch.setattr(StageLearner, "begin_with", spoilt)
    monkeypatch.setattr(Imprints, "keep", lambda *_, **__: None)
    swarm = run(0.0)
    for home in HOMES:
        tried = swarm.happened("stage.trial", home)
        assert [one["number"] for one in tried] == list(range(1, TRIAL_STEPS + 1))
        assert not tried[0]["passes"] and tried[0]["loss"] > tried[0]["usual"] + 0.5
    ids = {swarm.ids[peer].hex() for peer in HOMES}
    assert all(not event["settled"] for peer in (1, 3, *HOMES) for event in after(swarm, peer)[:1])
    assert all(set(after(swarm, peer)[TRIAL_STEPS]["settled"]) == ids for peer in (1, 3, 5))  # then it has full weight
    first = after(swarm, 5)[0]
    assert set(first["settled"]) == ids, "all that the new stage has summed up"
    losses = [loss for loss in swarm.losses() if math.isfinite(loss)]
    assert losses[-1] < losses[0]
