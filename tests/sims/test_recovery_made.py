"""What a founder makes a lost stage of, under virtual time: a copy, its neighbours, or new weights, and how it finds out that an offer is none."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import lives, lose_one, members_of, replace_one, until, until_done
from tests.thorough import further
from torch import Tensor

from farflung.node import borrowing, offers, renewal, shadows
from farflung.node.imprints import Imprints
from farflung.node.recipe import Recipe
from farflung.node.renewal import Renewal
from farflung.node.stage_learner import StageLearner
from farflung.node.status import NodeStatus
from farflung.node.trying import LISTEN_S
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ImprintKey
from farflung.protocol.keys import short
from farflung.protocol.lives import Life
from farflung.protocol.pipeline_messages import Domains
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.errors import NotEnoughMemory
from farflung.training.recovery_rise import RISE_STEPS
from farflung.training.recovery_rules import weighted_mean
from farflung.training.stage_replica import StageReplica


def test_a_lost_stage_comes_back_from_its_shadow() -> None:
    """What the new peer begins with is what the others' copy held: the loss goes on as if nothing had been."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds().get(2) == 2)
        held = swarm.happened("shadow")
        assert {event["stage"] for event in held} == {0, 1, 2, 3}
        [victim] = members_of(swarm, 2)
        swarm.kill(victim)
        await asyncio.sleep(12.0)
        swarm.start(4)
        await until_done(swarm, *swarm.peers)

    swarm = simulate(recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0}), Counting(), signers(5), story)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "shadow" and made["bytes"] > 0
    assert made["misfit"] < 0.3
    whole, *later = [event for event in swarm.happened("shadow") if made["holders"] == [event["peer"]]]
    assert later[-1]["time"] > made["time"]  # and of the new peer, too, only what has changed is fetched
    assert all(event["bytes"] < 0.6 * whole["bytes"] for event in later)
    losses = swarm.losses()
    assert losses[-1] < 0.6 * losses[0]


def without_shadows() -> Recipe:
    return recipe(stages=4, total_steps=16, pipeline={"shadows": 0.0})


def test_a_stage_that_is_made_of_its_neighbours_is_fitted_to_what_they_remember() -> None:
    """And has more of what the lost one did than the mean alone would."""
    swarm = simulate(without_shadows(), Counting(), signers(5), replace_one)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "fitted mean" and len(made["holders"]) == 2
    assert made["misfit"] < 0.35  # 0.7 without the fit


def test_a_device_without_room_for_a_fit_serves_what_its_rule_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise NotEnoughMemory("cuda has no room for a fit")

    monkeypatch.setattr(StageReplica, "fit", full)
    swarm = simulate(without_shadows(), Counting(), signers(5), replace_one)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [made], [unfitted] = swarm.happened("stage.made"), swarm.happened("stage.unfitted")
    assert made["rung"] == "fitted mean" and made["misfit"] > 0.5
    assert (unfitted["stage"], unfitted["life"], unfitted["reason"]) == (2, 1, "cuda has no room for a fit")


def test_an_end_that_is_made_of_its_one_neighbour_is_fitted_too() -> None:
    swarm = simulate(without_shadows(), Counting(), signers(5), partial(replace_one, stage=3))
    assert not swarm.broken and lives(swarm) == [(3, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "interpolation" and len(made["holders"]) == 1
    assert made["misfit"] < 0.2  # 0.45 without the fit


def test_a_peer_that_made_its_stage_of_others_is_killed_and_goes_on_with_the_raised_rate() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_one(swarm, 2)
        await until(swarm, lambda: len(swarm.happened("step", 4)) >= 4)
        swarm.kill(4)
        await asyncio.sleep(1.0)
        swarm.start(4)
        await until_done(swarm, *swarm.peers)

    swarm = simulate(without_shadows(), Counting(), signers(5), story, checkpoint_s=60.0)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    usual = {event["step"]: event["lr"] for event in swarm.happened("step", 0)}
    steps = swarm.happened("step", 4)
    assert len(swarm.happened("node.start", 4)) == 2 and steps[-1]["step"] == 16
    first = min(event["step"] for event in steps)
    bumps = [1.1 - 0.1 * (event["step"] - first) / 100 for event in steps]
    taken = [RISE_STEPS * event["lr"] / usual[event["step"]] / bump for event, bump in zip(steps, bumps, strict=True)]
    assert taken[0] == pytest.approx(1.0)  # of its steps with these moments, this one with it
    jumps = [after - before for before, after in pairwise(taken)]
    again = [jump for jump in jumps if jump != pytest.approx(1.0)]
    assert len(again) == 1 and again[0] < 1.0  # the disk had the moments of fewer steps


def test_without_memories_nothing_is_tried_nor_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Imprints, "keep", lambda *_, **__: None)
    swarm = simulate(without_shadows(), Counting(), signers(5), replace_one)
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "neighbour mean" and made["misfit"] is None


def test_what_is_remembered_of_long_ago_refuses_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is made of others is fitted to it all the same."""
    keep = Imprints.keep

    def keep_the_first(self: Imprints, stage: int, key: ImprintKey, *given: Any, **options: Any) -> None:
        if key.step <= 1:
            keep(self, stage, key, *given, **options)

    monkeypatch.setattr(Imprints, "keep", keep_the_first)
    for shadows_share, rung in ((1.0, "shadow"), (0.0, "fitted mean")):
        one = recipe(stages=4, total_steps=16, pipeline={"shadows": shadows_share})
        swarm = simulate(one, Counting(), signers(5), replace_one)
        assert not swarm.broken and not swarm.happened("stage.unmade")
        [made] = swarm.happened("stage.made")
        assert made["rung"] == rung and made["misfit"] is None


def opposite(weights: Tensor) -> Tensor:
    """They do what the lost stage did not."""
    return weights * -3.0


def shuffled(weights: Tensor) -> Tensor:
    """They do nothing of what it did."""
    return weights[torch.randperm(len(weights), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("spoilt", [opposite, *further(shuffled)])
def test_a_shadow_that_is_none_is_found_out_before_anybody_computes_with_it(
    monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[Tensor], Tensor]
) -> None:
    """It has the right size, and other weights."""
    trained = StageLearner.local_params
    monkeypatch.setattr(StageLearner, "local_params", lambda self: spoilt(trained(self)))
    honest = recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0})
    swarm = simulate(honest, Counting(), signers(5), replace_one)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [refused] = swarm.happened("stage.unmade")
    assert refused["rung"] == "shadow" and "times that of leaving the stage out" in refused["reason"]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "fitted mean"


@pytest.mark.thorough
def test_a_link_that_breaks_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the holder of a copy, and of a neighbour; and what never comes makes room for the next offer, with the reason."""
    asked: list[int] = []

    def breaks(times: int) -> None:
        asked.clear()

        async def fetch(*args: Any, **options: Any) -> Any:
            asked.append(1)
            if len(asked) <= times:
                raise NetworkError("the link broke")
            return await shadows.fetch(*args, **options)

        async def borrow(*args: Any, **options: Any) -> Any:
            asked.append(1)
            return None if len(asked) <= times else await borrowing.borrow(*args, **options)

        monkeypatch.setattr(renewal, "fetch", fetch)
        monkeypatch.setattr(renewal, "borrow", borrow)

    with_shadows = recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0})
    for one, times, rung in (
        (with_shadows, 2, "shadow"),
        (without_shadows(), 2, "fitted mean"),
        (with_shadows, 3, "fitted mean"),
    ):
        breaks(times)
        swarm = simulate(one, Counting(), signers(5), replace_one)
        assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
        [made] = swarm.happened("stage.made")
        assert made["rung"] == rung
        failed = [(event["rung"], event["reason"]) for event in swarm.happened("stage.unmade")]
        assert failed == ([("shadow", "the link broke")] if times == 3 else [])


def test_what_comes_too_slowly_makes_room_for_the_next_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many seconds as that one is expected to cost."""

    async def fetch(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(1e6)

    monkeypatch.setattr(renewal, "fetch", fetch)
    swarm = simulate(recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0}), Counting(), signers(5), replace_one)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [unmade], [made] = swarm.happened("stage.unmade"), swarm.happened("stage.made")
    assert unmade["rung"] == "shadow" and "not here after" in unmade["reason"]
    assert made["rung"] == "fitted mean"


def test_everybody_says_how_a_lost_stage_came_back() -> None:
    """Who was there, who began it, who had its copy, and who came later."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_one(swarm, 2)
        await until(swarm, lambda: swarm.happened("stage.made"))
        swarm.start(5)
        await until_done(swarm, *swarm.peers)

    swarm = simulate(recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0}), Counting(), signers(6), story)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [made] = swarm.happened("stage.made")
    copies = []
    for peer in range(6):
        status = NodeStatus(swarm="s", peer=swarm.ids[peer].hex())
        for _, who, event in swarm.events:
            if who == peer:
                status.apply(event | {"peer": status.peer})
        if status.stage == 2 and peer < 4:  # it was killed
            assert not status.recovered
            continue
        [told] = status.recovered
        assert (told.stage, told.life, told.founder) == (2, 1, swarm.ids[4].hex())
        assert (told.rung, bool(told.reason)) == (("shadow", True) if peer == 4 else ("", False))
        if told.copy_step is not None:
            copies.append(short(swarm.ids[peer]))
    assert made["rung"] == "shadow" and copies == made["holders"]


def test_what_comes_over_a_founders_narrow_downlink_is_expected_to_take_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offers, "_downlink", lambda roll, links: 1000.0)
    swarm = simulate(without_shadows(), Counting(), signers(5), replace_one)
    [made], [decided] = swarm.happened("stage.made"), swarm.happened("stage.recovery")
    assert f"{made['bytes'] / 1e6:.3g} MB in {made['bytes'] / 1000.0:.3g} s" in decided["reason"]


def test_a_neighbour_that_comes_back_from_a_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2 is lost with the holder of its copy, which is of a stage beside it, and has a copy elsewhere itself.

    And that stage, which has taken no step since, counts in the mean as much as the other one.
    """
    lost: list[int] = []
    norms: list[tuple[float | None, float | None]] = []

    def noted(before: Tensor, after: Tensor, *of: float | None) -> Tensor:
        norms.append((of[0], of[1]))
        return weighted_mean(before, after, *of)

    monkeypatch.setattr(renewal, "weighted_mean", noted)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: all(swarm.rounds().get(stage, 0) >= 2 for stage in range(4)))
        keys = [short(key) for key in swarm.ids]
        holder = {event["stage"]: keys.index(event["peer"]) for event in swarm.happened("shadow")}
        lost.extend([2, swarm.disks[holder[2]].stage])
        assert lost == [2, 3] and holder[lost[1]] not in (holder[2], members_of(swarm, 2)[0])
        for stage in lost:
            swarm.kill(members_of(swarm, stage)[0])
        await asyncio.sleep(12.0)
        swarm.start(4)
        await asyncio.sleep(3.0)
        swarm.start(5)
        await until_done(swarm, *swarm.peers)

    one = recipe(stages=4, total_steps=16, pipeline={"shadows": 1.0})
    regions = {0: "a", 1: "b", 2: "a", 3: "c", 4: "d", 5: "e"}
    domains = {peer: Domains(region=region) for peer, region in regions.items()}
    swarm = simulate(one, Counting(), signers(6), story, wanted={0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3}, domains=domains)
    assert not swarm.broken
    made = {event["stage"]: event for event in swarm.happened("stage.made")}
    assert made[lost[1]]["rung"] == "shadow" and made[2]["rung"] == "neighbour mean"
    assert len(made[2]["holders"]) == 2 and [event["stage"] for event in swarm.happened("stage.waits")] == [2]
    ((before, after),) = norms
    assert after is None and before is not None and before > 0.0


def test_who_is_overtaken_while_a_copy_comes_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    founders: list[Renewal] = []
    made = Renewal.__init__
    since: list[float] = []

    def noted(self: Renewal, *given: Any) -> None:
        made(self, *given)
        founders.append(self)

    async def hangs(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(1e9)

    async def story(swarm: PipelineSwarm) -> None:
        await lose_one(swarm, 2)
        await until(swarm, lambda: swarm.happened("stage.recovery"))
        await asyncio.sleep(5.0)
        founders[0]._roll.renew([Life(2, 2, swarm.ids[1])], swarm.hub.now())
        since.append(swarm.hub.now())
        await until(swarm, lambda: swarm.happened("stage.unmade"))
        since.append(swarm.hub.now())

    monkeypatch.setattr(Renewal, "__init__", noted)
    monkeypatch.setattr(renewal, "fetch", hangs)
    swarm = simulate(recipe(stages=4, total_steps=40, pipeline={"shadows": 1.0}), Counting(), signers(5), story)
    [unmade] = swarm.happened("stage.unmade")
    assert "another life" in unmade["reason"] and not swarm.happened("stage.made")
    assert since[1] - since[0] <= LISTEN_S + 0.2
