"""Stage 0 is lost for good, under virtual time: the other stages begin it anew (`protocol/accord.py`), and the run goes on."""

import asyncio
import math
from typing import Any

import pytest
from tests.sims.pipeline_story import begin, lives, lose_home, members_of, stage_of, until, until_done
from tests.thorough import further

from farflung.node.recipe import Recipe
from farflung.protocol.accord import number_in
from farflung.protocol.lives import HOME_GONE_AFTER, HOME_LOST_AFTER, LOST_AFTER
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import START_UNIX_S, PipelineSwarm, simulate
from farflung.training.recovery_trial import TRIAL_STEPS

HEARTBEAT_S = recipe().settings().heartbeat_s
FOUND_S = HOME_LOST_AFTER * HEARTBEAT_S
"""Of silence, before anybody is called."""
ENDED_S = HOME_GONE_AFTER * HEARTBEAT_S
"""The same where the processes of all data nodes have ended."""

SIX = {peer: peer // 2 for peer in range(1, 12)}
"""Two peers in each of six stages."""


def serves(swarm: PipelineSwarm, peer: int, life: int) -> bool:
    """Whether a peer has the state of this life of stage 0, and is no newcomer to it any more."""
    node = swarm.peers.get(peer)
    return node is not None and (node.pipeline.life.stage, node.pipeline.life.number) == (0, life) and node.trains


def trained_on(swarm: PipelineSwarm, total_steps: int) -> None:
    """To the end of the run, with losses that fall."""
    assert not swarm.broken
    losses = swarm.losses()
    assert all(map(math.isfinite, losses)) and sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert swarm.rounds()[0] == total_steps // 4


def handed_out(swarm: PipelineSwarm, life: int) -> set[int]:
    """Samples that rounds of a life of stage 0 have counted."""
    judge = next(judge for one, judge in swarm._judges.items() if (one.stage, one.number) == (0, life))
    return {number for start, stop in judge.groups[b""].done for number in range(start, stop)}


@pytest.mark.parametrize(
    ("shadows", "rung", "ends", "silent", "found_s"),
    [(1.0, "shadow", "copied", False, ENDED_S), *further((0.0, "interpolation", "new initial weights", True, FOUND_S))],
)
def test_a_newcomer_begins_stage_0_anew(shadows: float, rung: str, ends: str, silent: bool, found_s: float) -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3, silent=silent)
        await until(swarm, lambda: lives(swarm))
        begun = swarm.hub.now() - START_UNIX_S
        lost = max(time for time, peer, _ in swarm.events if peer == 0)
        assert found_s <= begun - lost < found_s + 30.0
        await until_done(swarm, 1, 2, 3)

    alike = recipe(stages=3, layers=3, total_steps=40, pipeline={"shadows": shadows})
    swarm = simulate(alike, Counting(), signers(4), story, wanted={1: 1, 2: 2})
    trained_on(swarm, 40)
    assert lives(swarm) == [(0, 1, 3)]
    [made] = swarm.happened("stage.made")
    assert (made["rung"], made["ends"]) == (rung, ends)
    tried = swarm.happened("stage.trial", 3)  # by the loss that the others remember
    assert [(one["of"], one["life"], one["number"]) for one in tried] == [
        (0, 1, number + 1) for number in range(TRIAL_STEPS)
    ]
    assert tried[0]["passes"] == (ends == "copied")
    assert [len(swarm.happened("node.start", peer)) for peer in (1, 2)] == [1, 1]  # nobody else begins anew
    assert any(event["peer"] for event in swarm.happened("outer.eval", 3))  # it evaluates the whole model


@pytest.mark.thorough
def test_two_that_begin_stage_0_together_both_try_it() -> None:
    """What the second one has summed up has no full weight either: the other stages stand."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3)
        swarm.start(4)
        await until_done(swarm, 1, 2, 3, 4)

    alike = recipe(stages=3, layers=3, total_steps=40, pipeline={"shadows": 0.0})
    swarm = simulate(alike, Counting(), signers(5), story, wanted={1: 1, 2: 2, 3: 0, 4: 0})
    assert not swarm.broken
    first, second = (swarm.happened("stage.trial", home) for home in (3, 4))
    assert {one["of"] for one in (*first, *second)} == {0} and first and second
    assert first[0]["usual"] == pytest.approx(second[0]["usual"])
    assert not first[0]["passes"] and not second[0]["passes"]
    [made] = swarm.happened("stage.made")
    since = [event for event in swarm.happened("pipeline.step", 1) if event["time"] > made["time"]]
    assert all(not event["settled"] for event in since[:2])
    assert since[TRIAL_STEPS + 2]["settled"]


@pytest.mark.thorough
def test_layers_of_another_number_give_none() -> None:
    """Then all of stage 0 is new, and learns."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3)
        await until_done(swarm, 1, 2, 3)

    unlike = recipe(stages=3, layers=5, total_steps=48, pipeline={"shadows": 0.0})
    swarm = simulate(unlike, Counting(), signers(4), story, wanted={1: 1, 2: 2})
    assert not swarm.broken and lives(swarm) == [(0, 1, 3)]
    [made] = swarm.happened("stage.made")
    assert (made["rung"], made["ends"]) == ("random", "new initial weights")


@pytest.mark.thorough
def test_all_data_nodes_of_six_by_two_are_lost_and_peers_move() -> None:
    """Nobody comes: a peer of another stage begins stage 0 anew, and all others keep their place."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 12)
        await until_done(swarm, *range(2, 12))

    one = recipe(stages=6, layers=6, total_steps=32, pipeline={"shadows": 1.0})
    swarm = simulate(one, Counting(), signers(12), story, wanted=SIX, tied=False)
    trained_on(swarm, 32)
    [(stage, number, founder)] = lives(swarm)
    assert (stage, number) == (0, 1) and founder >= 2
    [made] = swarm.happened("stage.made")
    assert (made["rung"], made["ends"]) == ("shadow", "copied")
    assert len(swarm.happened("node.start", founder)) == 2 and stage_of(swarm, founder) == 0


@pytest.mark.thorough
def test_an_old_data_node_comes_back_late_and_is_a_newcomer() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3)
        await until(swarm, lambda: serves(swarm, 3, 1))
        swarm.start(0)
        await until(swarm, lambda: serves(swarm, 0, 1))
        await until_done(swarm, 0, 1, 2, 3)

    swarm = simulate(recipe(stages=3, total_steps=64), Counting(), signers(4), story, wanted={0: 0, 1: 1, 2: 2})
    trained_on(swarm, 64)
    assert lives(swarm) == [(0, 1, 3)]
    assert swarm.happened("node.stop", 0)[0]["reason"] == "stage 0 was begun anew while it did not hear us"
    assert set(swarm.happened("round.commit", 0)[-1]["contributors"]) == {swarm.ids[0].hex(), swarm.ids[3].hex()}


@pytest.mark.parametrize(("silent", "found_s"), further((True, FOUND_S), (False, ENDED_S)))
def test_the_data_nodes_machine_comes_back_in_time_and_nothing_begins(silent: bool, found_s: float) -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3, silent=silent)
        await asyncio.sleep(found_s - 20.0)
        swarm.start(0)
        await until_done(swarm, 0, 1, 2, 3)

    swarm = simulate(recipe(stages=3, total_steps=32), Counting(), signers(4), story, wanted={1: 1, 2: 2})
    trained_on(swarm, 32)
    assert lives(swarm) == []


def test_a_data_node_without_a_quorum_goes_on_with_all_that_it_has() -> None:
    """Of two the first is gone for good. The other one has state, moments and the ledger: nothing is lost, and no sample is let go."""
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, other = sorted((0, 1), key=lambda peer: swarm.ids[peer])
        await begin(swarm, 4)
        await until(
            swarm, lambda: all(set(swarm.peers[p].member.head.commit.view) == set(swarm.ids[:2]) for p in (0, 1))
        )
        swarm.peers[other]._stage_learner.rises = True  # as if it had been begun anew before
        swarm.kill(first)
        await until(swarm, lambda: lives(swarm), 400.0)
        await until(swarm, lambda: serves(swarm, other, 1))
        seen["rises"] = swarm.peers[other]._stage_learner.rises
        seen["ledger"] = swarm.peers[other].member.head.commit.ledger
        await until_done(swarm, other, 2, 3)

    swarm = simulate(recipe(stages=3, total_steps=40), Counting(), signers(4), story, wanted={1: 0, 2: 1, 3: 2})
    trained_on(swarm, 40)
    other = max((0, 1), key=lambda peer: swarm.ids[peer])
    assert lives(swarm) == [(0, 1, other)]
    [made] = swarm.happened("stage.made")
    assert (made["rung"], made["ends"]) == ("own disk", "kept")
    assert not swarm.happened("stage.trial") and seen["rises"], "it is what it was"
    counted = sorted(handed_out(swarm, 1))
    assert counted == list(range(len(counted))), (
        "what the other one had in hand is handed out again, and nothing is skipped"
    )


def test_whoever_is_called_dies_and_the_next_number_is_called() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 3, 3)
        await until(swarm, lambda: lives(swarm))
        swarm.kill(3)
        swarm.start(4)
        await until_done(swarm, 1, 2, 4, seconds=900.0)

    swarm = simulate(recipe(stages=3, total_steps=32), Counting(), signers(5), story, wanted={1: 1, 2: 2})
    trained_on(swarm, 32)
    assert lives(swarm) == [(0, 1, 3), (0, 2, 4)]


@pytest.mark.thorough
def test_who_was_called_and_was_killed_on_its_way_goes_when_it_is_back() -> None:
    """Nobody else may begin that life; and here too few stages are left to decide another."""

    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 4)
        for peer in members_of(swarm, 2):
            swarm.kill(peer)
        await until(swarm, lambda: lives(swarm))
        swarm.kill(1)
        for peer in members_of(swarm, 1):
            swarm.kill(peer)
        await asyncio.sleep(60.0)
        swarm.start(1)
        swarm.start(4)
        await until_done(swarm, 0, 1, 4, seconds=1200.0)

    wanted = {1: 0, 2: 1, 3: 2}
    swarm = simulate(recipe(stages=3, total_steps=40), Counting(), signers(5), story, wanted=wanted, tied=False)
    trained_on(swarm, 40)
    assert lives(swarm) == [(2, 1, 1), (1, 1, 4)]
    assert [event["stage"] for event in swarm.happened("stage.made", 1)] == [2]


@pytest.mark.thorough
def test_two_stages_are_lost_with_stage_0_after_one_another() -> None:
    """The new stage 0 begins another stage anew, as the old one would have."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 4, 4)
        await until(swarm, lambda: serves(swarm, 4, 1))
        swarm.kill(3)
        swarm.start(5)
        await until_done(swarm, 1, 2, 4, 5)

    swarm = simulate(recipe(stages=4, total_steps=48), Counting(), signers(6), story, wanted={1: 1, 2: 2, 3: 3})
    trained_on(swarm, 48)
    assert lives(swarm) == [(0, 1, 4), (3, 1, 5)]


def test_of_two_stages_the_other_waits_for_stage_0() -> None:
    """As of two peers: it alone is not enough."""

    async def story(swarm: PipelineSwarm) -> None:
        await lose_home(swarm, 2, 2, 3)
        await asyncio.sleep(2 * FOUND_S)
        assert lives(swarm) == []
        swarm.start(0)
        await until_done(swarm, 0, 1, 2, 3)

    swarm = simulate(recipe(total_steps=24), Counting(), signers(4), story, wanted={1: 1})
    assert not swarm.broken and lives(swarm) == []


# ---- partitions ----------------------------------------------------------------------------------------------------


async def cut(swarm: PipelineSwarm, alone: list[int], rest: list[int], seconds: float) -> None:
    swarm.hub.partition([[swarm.ids[peer] for peer in side] for side in (alone, rest)])
    await asyncio.sleep(seconds)


def steps_since(swarm: PipelineSwarm, peers: list[int], after: float) -> int:
    """Steps of the pipeline that these took part in since then."""
    return sum(e["event"] == "pipeline.step" and peer in peers for time, peer, e in swarm.events if time > after)


def both_sides() -> tuple[Recipe, dict[int, int]]:
    """Three stages; both sides are to have members of each, and machines enough for all."""
    return recipe(stages=3, layers=3, total_steps=400), {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2}


@pytest.mark.thorough
def test_stage_0_is_cut_off_with_a_member_of_each_stage_and_its_side_stops() -> None:
    """All data nodes stand on the smaller side. They hear two chains without a quorum there, begin nothing and train nothing; the others begin stage 0 anew. When
    the sides meet there is one stage 0, and one history."""
    one, wanted = both_sides()
    alone, rest = [0, 1, 2, 3, 6], [4, 5, 7, 8, 9]
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 9)
        swarm.start(9)
        at = swarm.hub.now() - START_UNIX_S
        await cut(swarm, alone, rest, FOUND_S + 120.0)
        stopped = at + (LOST_AFTER + 25) * HEARTBEAT_S
        seen["alone"], seen["rest"] = steps_since(swarm, alone, stopped), steps_since(swarm, rest, at + FOUND_S)
        seen["begun"] = [swarm.peers[peer].pipeline.roll.number(0) for peer in (0, 4)]
        swarm.hub.heal()
        await until(swarm, lambda: all(peer in swarm.peers and swarm.peers[peer].trains for peer in range(10)))
        assert {peer.pipeline.roll.number(0) for peer in swarm.peers.values()} == {1}

    swarm = simulate(one, Counting(), signers(10), story, wanted=wanted, tied=False)
    assert not swarm.broken
    assert seen["alone"] == 0 and seen["rest"] > 0 and seen["begun"] == [0, 1]
    assert [life[:2] for life in lives(swarm)] == [(0, 1)]


@pytest.mark.thorough
def test_stage_0_is_cut_off_with_enough_stages_and_goes_on() -> None:
    """A quorum of stage 1 is on its side, and the last stage is begun anew there; the other side has machines for all stages, and begins nothing."""
    one, wanted = both_sides()
    alone, rest = [0, 1, 2, 3, 4, 6], [5, 7, 8, 9]

    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 9)
        swarm.start(9)
        await cut(swarm, alone, rest, FOUND_S + 120.0)
        assert swarm.peers[5].pipeline.roll.number(0) == 0 and number_in(swarm.peers[7].word.lives, 0) == 0
        swarm.hub.heal()
        await until(swarm, lambda: all(peer in swarm.peers and swarm.peers[peer].trains for peer in range(10)))

    swarm = simulate(one, Counting(), signers(10), story, wanted=wanted, tied=False)
    assert not swarm.broken
    assert [life[:2] for life in lives(swarm)] == [(2, 1)]
