"""A stage whose peers are all gone, under virtual time: another life of it begins, and the rest of the swarm trains on."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import lives, lose_one, members_of, replace_one, replace_two, until, until_done
from torch import Tensor

from farflung.node import borrowing, offers, renewal, shadows
from farflung.node.apply import Applier
from farflung.node.imprints import Imprints
from farflung.node.recipe import Recipe
from farflung.node.stage_learner import StageLearner
from farflung.node.status import NodeStatus
from farflung.protocol.errors import NetworkError
from farflung.protocol.keys import short
from farflung.protocol.pipeline_messages import Domains
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.toy import MemoryStorage
from farflung.training.recovery_rise import RISE_STEPS
from farflung.training.recovery_rules import weighted_mean


async def lose_stage_1(swarm: PipelineSwarm, *, reset: bool = True) -> None:
    """Of two stages with a peer each, after a round."""
    for peer in range(2):
        swarm.start(peer)
    await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
    swarm.kill(1, reset=reset)


def test_a_stage_of_one_is_lost_and_a_newcomer_begins_it_anew() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until(swarm, lambda: swarm.rounds() == {0: 2, 1: 2})
        swarm.kill(1)
        await asyncio.sleep(12.0)  # till then newcomers count it
        swarm.start(2)
        await until_done(swarm, 0, 2)

    swarm = simulate(recipe(total_steps=16), Counting(), signers(3), story)
    assert not swarm.broken
    assert lives(swarm) == [(1, 1, 2)]
    assert swarm.rounds() == {0: 4, 1: 4}  # the new life counts on
    assert swarm.losses()[-1] < 0.7 * swarm.losses()[0]


def test_a_stage_of_two_is_lost_and_a_peer_of_a_rich_stage_moves() -> None:
    """Nobody new comes: the stage with most peers gives one, and all others keep their place."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(7):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1, 2: 1})
        for peer in members_of(swarm, 1):
            swarm.kill(peer)
        await until_done(swarm, 0, 1, 2, 5, 6)

    wanted = {1: 0, 2: 2, 3: 1, 4: 1, 5: 2, 6: 2}
    swarm = simulate(recipe(stages=3, total_steps=12), Counting(), signers(7), story, wanted=wanted, tied=False)
    assert not swarm.broken
    [(stage, number, founder)] = lives(swarm)
    assert (stage, number) == (1, 1) and founder in (2, 5, 6)
    assert swarm.rounds()[0] == 3
    assert [len(swarm.happened("node.start", peer)) for peer in range(7)] == [
        1 + (peer == founder) for peer in range(7)
    ]


def test_an_old_peer_comes_back_too_late_and_is_a_newcomer() -> None:
    """Its disk has the old life; it finds out, and votes in that no more."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_stage_1(swarm)
        swarm.start(2)
        await until(swarm, lambda: len(members_of(swarm, 1)) == 1 and steps_of(swarm, 2) >= 2)
        swarm.start(1)
        await until_done(swarm, 0, 1, 2)

    swarm = simulate(recipe(total_steps=28), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    assert not swarm.broken and lives(swarm) == [(1, 1, 2)]
    assert swarm.happened("node.stop", 1)[0]["reason"] == "stage 1 was begun anew while it did not hear us"
    last = swarm.happened("round.commit", 1)[-1]
    assert set(last["contributors"]) == {swarm.ids[1].hex(), swarm.ids[2].hex()}
    assert swarm.rounds()[0] == 7


def test_an_old_peer_comes_back_in_time_and_nothing_begins() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_stage_1(swarm, reset=False)  # its machine is away, too
        swarm.start(2)
        await asyncio.sleep(20.0)
        swarm.start(1)
        await until_done(swarm, 0, 1, 2)

    swarm = simulate(recipe(total_steps=12), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    assert not swarm.broken and lives(swarm) == []
    assert swarm.rounds() == {0: 3, 1: 3}


def test_the_new_founder_dies_before_it_has_begun() -> None:
    """The life that it was to begin is lost like any other: another peer begins the next."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_stage_1(swarm)
        await asyncio.sleep(12.0)
        swarm.start(2)
        await until(swarm, lambda: lives(swarm))
        swarm.kill(2)
        await asyncio.sleep(12.0)
        swarm.start(3)
        await until_done(swarm, 0, 3)

    swarm = simulate(recipe(total_steps=12), Counting(), signers(4), story)
    assert not swarm.broken
    assert lives(swarm) == [(1, 1, 2), (1, 2, 3)]
    assert swarm.rounds()[0] == 3 and not swarm.happened("round.commit", 2)


async def lose_a_founder(swarm: PipelineSwarm) -> None:
    """Who has begun stage 1 anew computes a step of the pipeline with it, and is killed before its state is on its disk."""
    await lose_stage_1(swarm)
    await asyncio.sleep(12.0)
    swarm.start(2)
    await until(swarm, lambda: steps_of(swarm, 2))
    swarm.kill(2)
    disk = storage_of(swarm, 2)
    assert disk.history and disk.learner is None  # till then nothing of what was made was written
    await asyncio.sleep(1.0)


def storage_of(swarm: PipelineSwarm, peer: int) -> MemoryStorage:
    """Of the life that a peer's disk names."""
    disk = swarm.disks[peer]
    assert disk.life is not None
    return disk.storages[disk.life]


def test_a_founder_that_is_killed_before_its_state_is_saved_comes_in_again_as_a_newcomer() -> None:
    """It has a chain and no state, says so, and waits outside until the next life begins: here by itself, for there is nobody else."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_a_founder(swarm)
        swarm.start(2)
        await until_done(swarm, 0, 2)

    swarm = simulate(recipe(total_steps=16), Counting(), signers(3), story)
    assert not swarm.broken and lives(swarm) == [(1, 1, 2), (1, 2, 2)]
    [spent] = swarm.happened("stage.spent", 2)
    assert (spent["stage"], spent["life"]) == (1, 1) and "before its state was on disk" in spent["reason"]
    assert swarm.rounds() == {0: 4, 1: 4}


def test_a_founder_that_has_lost_its_state_may_be_replaced() -> None:
    """Whoever is called next is not one that began the stage the last time, if there is another; then the first one joins that."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_a_founder(swarm)
        swarm.start(3)
        swarm.start(2)
        await until_done(swarm, 0, 2, 3)

    swarm = simulate(recipe(total_steps=24), Counting(), signers(4), story, wanted={3: 1})
    assert not swarm.broken and lives(swarm) == [(1, 1, 2), (1, 2, 3)]
    assert len(swarm.happened("stage.spent", 2)) == 1
    assert swarm.happened("round.commit", 2) and swarm.rounds()[0] == 6


def test_a_founder_that_has_lost_its_state_downloads_it_where_somebody_has_it() -> None:
    """In its own chain, with its votes; and never takes its initial parameters for what that began with."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_stage_1(swarm)
        await asyncio.sleep(12.0)
        swarm.start(2)
        await until(swarm, lambda: steps_of(swarm, 2))
        swarm.start(3)
        await until(swarm, lambda: steps_of(swarm, 3))
        swarm.kill(2)
        storage_of(swarm, 2).learner = None  # as if it had been killed sooner
        await asyncio.sleep(1.0)
        swarm.start(2)
        await until_done(swarm, 0, 2, 3)

    swarm = simulate(recipe(total_steps=48), Counting(), signers(4), story, wanted={3: 1})
    assert not swarm.broken and lives(swarm) == [(1, 1, 2)]
    assert len(swarm.happened("stage.spent", 2)) == 1 and len(swarm.happened("stage.made")) == 1
    _, again = swarm.happened("node.start", 2)
    assert not again["resumed"]
    assert any(event["contributed"] for event in swarm.happened("round.commit", 2) if event["time"] > again["time"])


def test_what_was_made_is_saved_once_it_has_computed() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_stage_1(swarm)
        await asyncio.sleep(12.0)
        swarm.start(2)
        await until(swarm, lambda: steps_of(swarm, 2))
        await until(swarm, lambda: storage_of(swarm, 2).learner, seconds=5.0)  # not after a minute, as later ones
        assert not swarm.happened("round.commit", 2)
        await until_done(swarm, 0, 2)

    swarm = simulate(recipe(total_steps=12), Counting(), signers(3), story)
    assert not swarm.broken and lives(swarm) == [(1, 1, 2)]


def test_two_adjacent_stages_are_lost_together() -> None:
    swarm = simulate(recipe(stages=4, total_steps=12, pipeline={"shadows": 0.0}), Counting(), signers(6), replace_two)
    assert not swarm.broken
    assert [life[:2] for life in lives(swarm)] == [(1, 1), (2, 1)]
    assert {founder for _, _, founder in lives(swarm)} == {4, 5}
    assert swarm.rounds()[0] == 3
    made = swarm.happened("stage.made")
    assert [event["rung"] for event in made] == ["interpolation", "interpolation"]


def test_what_a_minority_does_not_hear_is_not_lost() -> None:
    """One of three data nodes is cut off with a peer of stage 1: it hears nobody of stage 2, and must do nothing about it."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(6):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1, 2: 1})
        alone = [peer for peer in (1, 3)]
        others = [peer for peer in range(6) if peer not in alone]
        swarm.hub.partition([[swarm.ids[p] for p in alone], [swarm.ids[p] for p in others]])
        await asyncio.sleep(60.0)
        assert swarm.peers[1].pipeline.roll.lost(swarm.hub.now(), held=0) == (2,)
        swarm.hub.heal()
        await until_done(swarm, *range(6))

    wanted = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    swarm = simulate(recipe(stages=3, total_steps=32), Counting(), signers(6), story, wanted=wanted)
    assert not swarm.broken and lives(swarm) == []
    assert swarm.rounds()[0] == 8


def test_routes_leave_a_lost_stage_out_meanwhile() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 2, 1: 2, 2: 2})
        swarm.kill(members_of(swarm, 2)[0])
        await asyncio.sleep(60.0)
        before = steps_of(swarm, 0)
        await asyncio.sleep(30.0)
        assert steps_of(swarm, 0) > before  # nobody is there who could take it
        swarm.start(3)
        await until_done(swarm, *swarm.peers)

    skipping = recipe(stages=3, total_steps=64, pipeline={"skip": 0.33})
    swarm = simulate(skipping, Counting(), signers(4), story, wanted={1: 1, 2: 2})
    assert not swarm.broken and lives(swarm) == [(2, 1, 3)]
    assert swarm.rounds()[0] == 16 and swarm.happened("pipeline.step", 3)


def steps_of(swarm: PipelineSwarm, peer: int) -> int:
    return len(swarm.happened("pipeline.step", peer))


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

    swarm = simulate(without_shadows(), Counting(), signers(5), story)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    usual = {event["step"]: event["lr"] for event in swarm.happened("step", 0)}
    steps = swarm.happened("step", 4)
    assert len(swarm.happened("node.start", 4)) == 2 and steps[-1]["step"] == 16
    factors = [event["lr"] / usual[event["step"]] for event in steps]
    first = min(event["step"] for event in steps)
    for event, factor in zip(steps, factors, strict=True):
        since = event["step"] - first
        assert factor == pytest.approx((1.1 - 0.1 * since / 100) * (since + 1) / RISE_STEPS)


def test_without_memories_nothing_is_tried_nor_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Imprints, "keep", lambda *_, **__: None)
    swarm = simulate(without_shadows(), Counting(), signers(5), replace_one)
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "neighbour mean" and made["misfit"] is None


def opposite(weights: Tensor) -> Tensor:
    """They do what the lost stage did not."""
    return weights * -3.0


def shuffled(weights: Tensor) -> Tensor:
    """They do nothing of what it did."""
    return weights[torch.randperm(len(weights), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("spoilt", [opposite, shuffled])
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


def test_no_state_is_on_a_disk_before_the_stage_computes_whatever_its_chain_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where models are so small that every commit is followed by a checkpoint: the first commits of a life acknowledge what stage 0 has named."""
    saved: dict[MemoryStorage, float] = {}
    save, run = MemoryStorage.save_learner, Applier.run

    def noted(self: MemoryStorage, *args: Any) -> None:
        saved.setdefault(self, asyncio.get_running_loop().time())
        save(self, *args)

    async def at_every_commit(self: Applier) -> None:
        self._checkpoint_s = 0.0
        await run(self)

    monkeypatch.setattr(MemoryStorage, "save_learner", noted)
    monkeypatch.setattr(Applier, "run", at_every_commit)
    first: dict[str, float] = {}

    async def story(swarm: PipelineSwarm) -> None:
        await lose_one(swarm, 2)
        await until(swarm, lambda: swarm.happened("view.commit", 4))
        first["commit"] = asyncio.get_running_loop().time()
        await until(swarm, lambda: swarm.happened("pipeline.step", 4))
        first["step"] = asyncio.get_running_loop().time() - 0.2  # looked ten times a second
        await until_done(swarm, *swarm.peers)

    swarm = simulate(recipe(stages=4, total_steps=16), Counting(), signers(5), story)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    assert first["commit"] < first["step"] <= saved[storage_of(swarm, 4)]


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
