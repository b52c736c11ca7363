"""`pipeline.recovery = "checkfree"`: a lost stage comes back by CheckFree's rule and by nothing else, under virtual time."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import lives, lose_one, replace_one, replace_two, until, until_done
from torch import Tensor

from farflung.node import renewal
from farflung.node.recipe import Recipe
from farflung.node.stage_learner import StageLearner
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.recovery_rules import weighted_mean
from farflung.training.recovery_trial import LossTrial


def by_checkfree(**changes: Any) -> Recipe:
    return recipe(stages=4, total_steps=16, pipeline={"shadows": 0.0, "recovery": "checkfree"}, **changes)


def test_checkfree_alone_takes_the_mean_of_the_neighbours_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the norms of their gradients; unfitted, untried, with fresh moments and a learning rate that is a tenth higher, and falls back."""
    means: list[tuple[Tensor, float]] = []
    begun: list[Tensor] = []
    begins = StageLearner.begin_with

    def noted(before: Tensor, after: Tensor, *norms: float | None) -> Tensor:
        mean = weighted_mean(before, after, *norms)
        one, other = norms
        assert one and other
        means.append((mean, one / (one + other)))
        assert torch.allclose(mean, before * means[-1][1] + after * (1.0 - means[-1][1]), atol=1e-4)
        return mean

    def seen(self: StageLearner, layers: Tensor) -> None:
        begins(self, layers)
        begun.append(self.local_params())
        assert not self.outer.momentum.any() and not self.replica.optimizer.steps

    def never(*_: object) -> None:
        raise AssertionError("CheckFree has no fit, and no trial")

    monkeypatch.setattr(renewal, "weighted_mean", noted)
    monkeypatch.setattr(renewal, "gather_pairs", never)
    monkeypatch.setattr(StageLearner, "begin_with", seen)
    monkeypatch.setattr(StageLearner, "fit", never)
    monkeypatch.setattr(LossTrial, "look", never)
    swarm = simulate(by_checkfree(), Counting(), signers(5), replace_one)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [made], [decided] = swarm.happened("stage.made"), swarm.happened("stage.recovery")
    assert made["rung"] == "neighbour mean" and len(made["holders"]) == 2 and made["misfit"] is None
    assert "CheckFree's rule alone" in decided["reason"]
    assert torch.equal(begun[0], means[0][0]) and means[0][1] != 0.5
    usual = {event["step"]: event["lr"] for event in swarm.happened("step", 0)}
    raised = [event["lr"] / usual[event["step"]] for event in swarm.happened("step", 4)]
    assert raised[0] == pytest.approx(1.1) and raised == sorted(raised, reverse=True) and raised[-1] < raised[0]


def test_checkfree_alone_copies_the_only_neighbour_of_an_end() -> None:
    swarm = simulate(by_checkfree(), Counting(), signers(5), partial(replace_one, stage=3))
    assert not swarm.broken and lives(swarm) == [(3, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "interpolation" and len(made["holders"]) == 1 and made["misfit"] is None


def test_checkfree_alone_has_no_rule_for_neighbours_that_are_lost_together() -> None:
    swarm = simulate(by_checkfree(), Counting(), signers(6), replace_two)
    assert not swarm.broken and swarm.rounds()[0] == 4
    first, second = swarm.happened("stage.made")
    assert first["rung"] == "random" and not swarm.happened("stage.waits")
    assert second["rung"] in ("random", "neighbour mean")  # of which the first may be one by then


def test_checkfree_alone_is_for_stages_of_which_nobody_is_left() -> None:
    """Who comes back with the old life's disk begins the next one, but not from that; a member that is still there would (`test_recovery_quorum`)."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_one(swarm, 2)
        await until(swarm, lambda: lives(swarm))
        swarm.kill(4)
        swarm.start(next(peer for peer in range(4) if peer not in swarm.peers))
        await until_done(swarm, *swarm.peers)

    swarm = simulate(by_checkfree(), Counting(), signers(5), story)
    assert not swarm.broken
    assert [number for _, number, _ in lives(swarm)] == [1, 2]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "neighbour mean"
