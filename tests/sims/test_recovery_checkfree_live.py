"""`pipeline.recovery = "checkfree"`, and `"checkfree+"`: a lost stage comes back by that rule and by nothing else, under virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import (
    lives,
    lose_one,
    members_of,
    replace_one,
    replace_two,
    until,
    until_done,
)
from tests.thorough import further
from torch import Tensor

from farflung.node import renewal
from farflung.node.recipe import Recipe
from farflung.node.stage_learner import StageLearner
from farflung.protocol.keys import short
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training import pipeline_online
from farflung.training.pipeline_plan import Plan
from farflung.training.recovery_rules import weighted_mean
from farflung.training.recovery_trial import LossTrial


def by_checkfree() -> Recipe:
    return recipe(stages=4, total_steps=16, pipeline={"shadows": 0.0, "recovery": "checkfree"})


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


@pytest.mark.thorough
def test_checkfree_alone_copies_the_only_neighbour_of_an_end() -> None:
    swarm = simulate(by_checkfree(), Counting(), signers(5), partial(replace_one, stage=3))
    assert not swarm.broken and lives(swarm) == [(3, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "interpolation" and len(made["holders"]) == 1 and made["misfit"] is None


@pytest.mark.thorough
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


def with_twins(**changes: Any) -> Recipe:
    pipeline = {"shadows": 0.0, "recovery": "checkfree+", "slots": 4}
    return recipe(stages=6, layers=6, total_steps=16, pipeline=pipeline, **changes)


def lose_of_six(*lost: int) -> Callable[[PipelineSwarm], Coroutine[Any, Any, None]]:
    """Stages of six with a peer each, after a round; others come, and all train on to the end."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(6):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == dict.fromkeys(range(6), 1))
        for stage in lost:
            swarm.kill(members_of(swarm, stage)[0])
        await asyncio.sleep(12.0)
        for peer in range(6, 6 + len(lost)):
            swarm.start(peer)
        await until_done(swarm, *swarm.peers)

    return story


def stage_of_holder(swarm: PipelineSwarm, holder: str) -> int | None:
    return swarm.disks[[short(key) for key in swarm.ids].index(holder)].stage


@pytest.mark.parametrize(("lost", "twin"), [(1, 2), *further((2, 1), (4, 5), (5, 4))])
def test_checkfree_plus_brings_ends_back_as_copies_of_their_twins(
    monkeypatch: pytest.MonkeyPatch, lost: int, twin: int
) -> None:
    """Half of all microbatches visit stages 1 and 2, and the last two, in the other order; before the loss and after it."""
    orders: Counter[tuple[int, ...]] = Counter()
    swap = pipeline_online.checkfree_plus

    def noted(plan: Plan) -> Plan:
        swapped = swap(plan)
        for lane in swapped.lanes:
            orders[tuple(hop.stage for hop in lane.route)] += lane.microbatches
        return swapped

    monkeypatch.setattr(pipeline_online, "checkfree_plus", noted)
    swarm = simulate(with_twins(), Counting(), signers(7), lose_of_six(lost), wanted={peer: peer for peer in range(6)})
    assert not swarm.broken and [life[:2] for life in lives(swarm)] == [(lost, 1)] and swarm.rounds()[0] == 4
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "swap twin" and [stage_of_holder(swarm, one) for one in made["holders"]] == [twin]
    assert orders.keys() == {(0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 5, 4)}
    straight, swapped = orders.values()
    assert straight == swapped >= 2 * 16  # of four microbatches in 16 steps and more
    losses = swarm.losses()
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.thorough
def test_checkfree_plus_takes_the_mean_within_and_has_no_rule_for_twins_that_are_lost_together() -> None:
    within = simulate(with_twins(), Counting(), signers(7), lose_of_six(3), wanted={peer: peer for peer in range(6)})
    [made] = within.happened("stage.made")
    assert made["rung"] == "neighbour mean" and {stage_of_holder(within, one) for one in made["holders"]} == {2, 4}
    both = simulate(with_twins(), Counting(), signers(8), lose_of_six(4, 5), wanted={peer: peer for peer in range(6)})
    assert not both.broken and both.rounds()[0] == 4
    first, second = both.happened("stage.made")
    assert first["rung"] == "random" and second["rung"] in (
        "random",
        "swap twin",
    )  # of which the first may be one by then
