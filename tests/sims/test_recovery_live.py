"""A stage whose peers are all gone, under virtual time: another life of it begins, and the rest of the swarm trains on."""

import asyncio
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import lives, lose_one, members_of, replace_two, until, until_done
from torch import Tensor

from farflung.node import renewal
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import START_UNIX_S, PipelineSwarm, simulate
from farflung.sims.toy import MemoryStorage
from farflung.training.recovery_rules import interpolated, weighted_mean


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


@pytest.mark.thorough
def test_everybody_says_that_a_stage_is_lost_and_what_is_missing_and_when_that_is_over() -> None:
    """Each time: a log must not say for the rest of a lap that a stage is lost which has long been back."""
    back: list[float] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == dict.fromkeys(range(3), 1))
        for newcomer in (3, 4):
            swarm.kill(members_of(swarm, 2)[0])
            await asyncio.sleep(90.0)
            swarm.start(newcomer)
            await until(swarm, lambda newcomer=newcomer: swarm.happened("pipeline.step", newcomer))
            await asyncio.sleep(15.0)
            back.append(swarm.hub.now() - START_UNIX_S)
        await until_done(swarm, 0, 1, 4)

    long_laps = recipe(stages=3, inner_steps=40, total_steps=120)
    swarm = simulate(long_laps, Counting(), signers(5), story, wanted={1: 1, 2: 2})
    assert not swarm.broken and lives(swarm) == [(2, 1, 3), (2, 2, 4)]
    lost = "stage 2 is lost: begun anew as soon as a machine can take it"
    for peer in (0, 1):
        said = [(at, e["reason"]) for at, who, e in swarm.events if who == peer and e["event"] == "node.state"]
        for since, until_then in ((0.0, back[0]), (back[0], back[1])):
            reasons = [reason for at, reason in said if since < at <= until_then]
            assert any(reason.startswith(lost) for reason in reasons) and "lost" not in reasons[-1]


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


def test_no_state_is_on_a_disk_before_the_stage_computes_whatever_its_chain_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models so small have a checkpoint after every commit, and the first commits of a life acknowledge what stage 0 has named."""
    saved: dict[MemoryStorage, float] = {}
    save = MemoryStorage.save_learner

    def noted(self: MemoryStorage, *args: Any) -> None:
        saved.setdefault(self, asyncio.get_running_loop().time())
        save(self, *args)

    monkeypatch.setattr(MemoryStorage, "save_learner", noted)
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


def test_two_adjacent_stages_are_lost_together() -> None:
    told = recipe(stages=4, total_steps=12, pipeline={"shadows": 0.0})
    swarm = simulate(told, Counting(), signers(6), replace_two, seed=2)  # which calls for both in the same moment
    assert not swarm.broken
    assert [life[:2] for life in lives(swarm)] == [(1, 1), (2, 1)]
    assert {founder for _, _, founder in lives(swarm)} == {4, 5}
    assert swarm.rounds()[0] == 3
    made = swarm.happened("stage.made")
    assert [event["rung"] for event in made] == ["interpolation", "interpolation"]


def test_of_two_adjacent_stages_the_later_one_is_as_if_both_were_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called a neighbour mean then, but the first one has taken no step, and is itself a line between the same two survivors."""
    lines, means = list[dict[int, Tensor]](), list[Tensor]()

    def drawn(survivors: dict[int, Tensor], stage: int) -> Tensor:
        lines.append(survivors)
        return interpolated(survivors, stage)

    def averaged(before: Tensor, after: Tensor, *norms: float | None) -> Tensor:
        means.append(weighted_mean(before, after, *norms))
        return means[-1]

    monkeypatch.setattr(renewal, "interpolated", drawn)
    monkeypatch.setattr(renewal, "weighted_mean", averaged)
    told = recipe(stages=4, total_steps=8, pipeline={"shadows": 0.0})
    swarm = simulate(told, Counting(), signers(6), replace_two, seed=1)  # which calls for stage 2 a look later
    assert not swarm.broken
    assert [(event["stage"], event["rung"]) for event in swarm.happened("stage.made")] == [
        (1, "interpolation"),
        (2, "neighbour mean"),
    ]
    assert [set(survivors) for survivors in lines] == [{0, 3}] and len(means) == 1
    torch.testing.assert_close(means[0], interpolated(lines[0], 2))


@pytest.mark.parametrize("seed", [1, 2])
def test_two_adjacent_stages_come_back_from_their_copies_whoever_is_called_first(seed: int) -> None:
    """The later one as well, though its neighbour is there by then."""
    swarm = simulate(recipe(stages=4, total_steps=8), Counting(), signers(6), replace_two, seed=seed)
    assert not swarm.broken
    assert sorted((event["stage"], event["rung"]) for event in swarm.happened("stage.made")) == [
        (1, "shadow"),
        (2, "shadow"),
    ]


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
