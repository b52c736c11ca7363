"""Peers that move from rich stages to poor ones, under virtual time: with the judge on every chain, whoever dies meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.sims.pipeline_story import stage_of, steps_done, until, until_done
from tests.thorough import further

from farflung.node.stage_peer import StagePeer
from farflung.node.stage_self import OUTSIDE
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, Story, simulate

FOUR_ONE_ONE = {1: 1, 2: 2, 3: 0, 4: 0, 5: 0}
FOUR_ONE = {1: 1, 2: 0, 3: 0, 4: 0}


def counts(swarm: PipelineSwarm) -> list[int]:
    """Replicas of each stage: who trains there."""
    stages = [peer.serving.stage for peer in swarm.peers.values() if peer.trains]
    return [stages.count(stage) for stage in range(swarm.recipe.manifest.pipeline.stages)]


def moves(swarm: PipelineSwarm) -> list[str]:
    return [event["reason"] for event in swarm.happened("stage.move")]


def movers(swarm: PipelineSwarm) -> list[int]:
    return [who for _, who, event in swarm.events if event["event"] == "stage.move"]


def simulated(story: Story, steps: int, stages: int = 2, **options: Any) -> PipelineSwarm:
    peers = 1 + max(options["wanted"])
    return simulate(recipe(stages=stages, total_steps=steps), Counting(), signers(peers), story, tied=False, **options)


@pytest.mark.thorough
def test_two_stages_of_one_peer_gain_one_each_and_nobody_goes_back() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(6):
            swarm.start(peer)
        await until(swarm, lambda: counts(swarm) == [4, 1, 1])
        await until(swarm, lambda: counts(swarm) == [2, 2, 2])
        await until_done(swarm, *range(6))

    swarm = simulated(story, steps=40, stages=3, wanted=FOUR_ONE_ONE)
    assert not swarm.broken and swarm.rounds() == {0: 10, 1: 10, 2: 10}
    first, second = moves(swarm)
    then = {
        "stage 1 has one peer only, stage 0 has 4": "stage 2 has one peer only, stage 0 has 3",
        "stage 2 has one peer only, stage 0 has 4": "stage 1 has one peer only, stage 0 has 3",
    }
    assert second == then[first]
    # nobody lost anything by it: each went when a round had counted what it had trained
    assert not swarm.happened("stage.stay") and not swarm.happened("progress.dropped")
    for step in swarm.happened("pipeline.step"):
        assert step["cut"] == 0 and not step["lost"]
    # everybody knows of the alarm, and that it is over
    alarms = [event["replicas"] for event in swarm.happened("stage.alarm", 0)]
    assert alarms == [{"1": 1, "2": 1}, {second.split()[1]: 1}, {}]


def test_a_stage_whose_last_replica_is_alone_is_joined() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: counts(swarm) == [3, 2])
        # of two, the chain goes on without the second: half of the votes with the first one's are a quorum
        victim = max((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        await until(swarm, lambda: steps_done(swarm) >= 4)
        swarm.kill(victim)
        await until(swarm, lambda: counts(swarm) == [2, 2])
        await until_done(swarm, *(p for p in range(5) if p != victim))

    swarm = simulated(story, steps=32, wanted={1: 1, 2: 1, 3: 0, 4: 0})
    assert not swarm.broken and swarm.rounds() == {0: 8, 1: 8}
    assert moves(swarm) == ["stage 1 has one peer only, stage 0 has 3"]


def test_who_was_told_which_stage_to_take_stays_there() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until_done(swarm, *range(5))

    swarm = simulate(recipe(total_steps=12), Counting(), signers(5), story, wanted=FOUR_ONE)
    assert not swarm.broken and not moves(swarm)
    for peer in range(5):
        alarms = [event["replicas"] for event in swarm.happened("stage.alarm", peer)]
        assert alarms in ([{"1": 1}], [{"1": 1}, {}])  # it is over when the run is, for whoever looks then


@pytest.mark.thorough
def test_a_stage_of_slow_peers_gets_one_more_by_what_steps_cost() -> None:
    """Two peers of a stage are three times as slow as the four of the other."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(6):
            swarm.start(peer)
        await until_done(swarm, *range(6), seconds=3000.0)

    slow = {0: 0.3, 3: 0.3, 4: 0.3, 5: 0.3, 1: 0.1, 2: 0.1}
    swarm = simulated(story, steps=32, wanted={1: 1, 2: 1, 3: 0, 4: 0, 5: 0}, speeds=slow)
    assert not swarm.broken and swarm.rounds() == {0: 8, 1: 8}
    assert len(moves(swarm)) == 1 and moves(swarm)[0].startswith("stage 1 needs ") and not swarm.happened("stage.alarm")
    joined = min(at for at, _, event in swarm.events if event["event"] == "node.start" and at > 60.0)
    steps = [(at, event["seconds"]) for at, _, event in swarm.events if event["event"] == "pipeline.step"]
    before = [seconds for at, seconds in steps if at < joined]
    after = [seconds for at, seconds in steps if at > joined + 40.0]
    assert sum(after) / len(after) < 0.85 * sum(before) / len(before)


def waits(peer: StagePeer) -> bool:
    return peer.pipeline.balance.to == 1


def leaves(peer: StagePeer) -> bool:
    return peer.moves_to == 1


def downloads(peer: StagePeer) -> bool:
    return peer.serving.stage == 1 and not peer.trains


@pytest.mark.parametrize(
    ("moment", "stage_after"),
    [*further((waits, 0)), (leaves, 0), *further((None, 1)), (downloads, 1)],
    ids=["waits", "leaves", "builds", "downloads"],
)
def test_the_mover_is_killed_on_its_way(moment: Callable[[StagePeer], bool] | None, stage_after: int) -> None:
    """Started again it is of its old stage, or a newcomer to the new one; meanwhile another one may have gone."""
    stages: list[int | None] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: len(movers(swarm)) == 1)
        mover = movers(swarm)[0]
        if moment is None:
            await until(swarm, lambda: mover not in swarm.peers)
        else:
            await until(swarm, lambda: mover in swarm.peers and moment(swarm.peers[mover]))
        swarm.kill(mover)
        stages.append(stage_of(swarm, mover))
        await asyncio.sleep(5.0)
        swarm.start(mover)
        await until(swarm, lambda: sorted(counts(swarm)) == [2, 3])
        rounds = swarm.rounds()
        await until(
            swarm,
            lambda: all(now > before for now, before in zip(swarm.rounds().values(), rounds.values(), strict=True)),
        )

    swarm = simulated(story, steps=400, wanted=FOUR_ONE)
    assert not swarm.broken
    assert stages == [stage_after]
    for step in swarm.happened("pipeline.step"):
        assert step["cut"] == 0


@pytest.mark.thorough
def test_somebody_who_is_stopped_while_it_leaves_for_another_stage_leaves_for_good() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: any(peer.moves_to == 1 for peer in swarm.peers.values()))
        mover = movers(swarm)[0]
        swarm.leave(mover)
        await until_done(swarm, mover)
        assert stage_of(swarm, mover) == 0
        await until(swarm, lambda: counts(swarm) == [2, 2])  # another one has gone

    swarm = simulated(story, steps=400, wanted=FOUR_ONE)
    assert not swarm.broken and len(moves(swarm)) == 2


def test_nobody_calls_back_whoever_leaves_for_good() -> None:
    """Its stage is begun anew, or it is called to begin another, after its person has asked it to leave."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: counts(swarm) == [1, 2])
        for leaver, stage in ((1, 1), (2, OUTSIDE)):
            swarm.leave(leaver)
            swarm.peers[leaver].go(stage, "called")
        await until_done(swarm, 1, 2)
        assert counts(swarm) == [1, 0]

    assert not simulated(story, steps=400, wanted={1: 1, 2: 1}).broken


def test_a_chain_that_cannot_let_its_peer_go_has_it_back() -> None:
    """All others of its stage die while it leaves: it is the last replica of that, and needed there."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: any(peer.moves_to == 1 for peer in swarm.peers.values()))
        mover = movers(swarm)[0]
        victims = [p for p in range(5) if stage_of(swarm, p) == 0 and p != mover]
        for victim in victims:
            swarm.kill(victim)
        await until(swarm, lambda: len(swarm.happened("node.stop", mover)) == 1)
        await until(swarm, lambda: mover in swarm.peers and swarm.peers[mover].trains)
        assert stage_of(swarm, mover) == 0
        rounds = swarm.rounds()[0]
        for victim in victims:
            swarm.start(victim)
        await until(swarm, lambda: swarm.rounds()[0] > rounds)

    swarm = simulated(story, steps=400, wanted=FOUR_ONE)
    assert not swarm.broken


@pytest.mark.thorough
def test_no_flapping() -> None:
    """Peers of unlike speed come and go, one of them while another leaves: there are few moves, and nobody moves twice."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 20)
        swarm.start(5)
        await until(swarm, lambda: steps_done(swarm) >= 30)
        swarm.kill(5)
        await until(swarm, lambda: steps_done(swarm) >= 60, 1000.0)

    speeds = {0: 0.3, 1: 0.2, 2: 0.6, 3: 0.4, 4: 0.3, 5: 0.5}
    swarm = simulated(story, steps=120, wanted=FOUR_ONE | {5: 0}, speeds=speeds)
    assert not swarm.broken
    assert 1 <= len(moves(swarm)) <= 3 and len(set(movers(swarm))) == len(movers(swarm))
