"""Of two members one leaves, and dies or is away whoever stays: the commit that lets it go is known to the leaver alone, under virtual time."""

import asyncio

import pytest
from tests.sims.pipeline_story import stage_of, until

from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate

STAYS, LEAVES, OTHER = 0, 1, 2
"""Two data nodes, and the other stage."""


async def leavers_turn(swarm: PipelineSwarm) -> None:
    """Until both data nodes train, have had a round, and whoever is to leave proposes the next commit."""
    await until(swarm, lambda: len(swarm.peers) == 3 and all(peer.trains for peer in swarm.peers.values()))
    await until(swarm, lambda: all(swarm.rounds().get(stage, 0) > 0 for stage in (0, 1)))
    leaver = swarm.peers[LEAVES].member.follower
    await until(swarm, lambda: leaver.in_view and leaver.turn(0) == swarm.ids[LEAVES])


async def let_go_in_secret(swarm: PipelineSwarm) -> None:
    """Whoever stays is killed as soon as both votes are with the leaver, before it knows of that."""
    leaver, stayer = swarm.peers[LEAVES].member, swarm.peers[STAYS].member
    while leaver.in_view:
        await asyncio.sleep(0.001)
    assert stayer.head.commit.height < leaver.head.commit.height, "it would know, and the test shows nothing"
    swarm.kill(STAYS)


@pytest.mark.parametrize("moves", [False, True])
def test_the_leaver_waits_until_whoever_stays_knows_that_it_is_alone(moves: bool) -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in (STAYS, LEAVES, OTHER):
            swarm.start(peer)
        await leavers_turn(swarm)
        if moves:
            swarm.peers[LEAVES].go(1, "called")
        else:
            swarm.leave(LEAVES)
        await let_go_in_secret(swarm)
        await asyncio.sleep(60.0 if moves else 4.0)
        assert stage_of(swarm, LEAVES) == 0 and LEAVES in swarm.peers
        swarm.start(STAYS)
        await until(swarm, lambda: stage_of(swarm, LEAVES) == 1 if moves else swarm.tasks[LEAVES].done())
        rounds = swarm.rounds()[0]
        await until(swarm, lambda: swarm.rounds()[0] > rounds)
        assert swarm.peers[STAYS].member.head.commit.view == (swarm.ids[STAYS],)

    swarm = simulate(
        recipe(stages=2, total_steps=4000),
        Counting(),
        signers(3),
        story,
        tied=False,
        wanted={STAYS: 0, LEAVES: 0, OTHER: 1},
    )
    assert not swarm.broken


def test_a_leaver_whose_word_nobody_hears_comes_back_to_its_stage() -> None:
    """There is nobody else who can tell whoever stays."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in (STAYS, LEAVES, OTHER):
            swarm.start(peer)
        await leavers_turn(swarm)
        swarm.peers[LEAVES].go(1, "called")
        await let_go_in_secret(swarm)
        await until(swarm, lambda: len(swarm.happened("node.stop", LEAVES)) == 1)
        await until(swarm, lambda: LEAVES in swarm.peers)
        assert stage_of(swarm, LEAVES) == 0
        rounds = swarm.rounds()[0]
        swarm.start(STAYS)
        await until(swarm, lambda: swarm.rounds()[0] > rounds)

    swarm = simulate(
        recipe(stages=2, total_steps=4000),
        Counting(),
        signers(3),
        story,
        tied=False,
        wanted={STAYS: 0, LEAVES: 0, OTHER: 1},
    )
    assert not swarm.broken
