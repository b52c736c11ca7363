"""Data nodes that cannot read their data for a while, under virtual time: others of their stage plan the steps, and the pipeline goes on."""

import asyncio
import itertools
from collections.abc import Sequence

from tests.sims.pipeline_story import stage_of, steps_done, until

from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.errors import DataUnavailable
from farflung.training.pipeline_worker import Batch

HINDERED_S = 300.0
RECIPE = recipe(total_steps=100_000)


def unreadable(numbers: Sequence[int]) -> Batch:
    raise DataUnavailable("hf:some/set cannot be read")


async def steps_in(swarm: PipelineSwarm, seconds: float) -> int:
    """That were over in the next so many."""
    before = steps_done(swarm)
    await asyncio.sleep(seconds)
    return steps_done(swarm) - before


def test_the_steps_of_a_planner_that_cannot_read_the_data_are_planned_by_another_data_node() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds().get(0, 0) >= 1)
        paces.append(await steps_in(swarm, 60.0))
        planner = next(peer for peer in swarm.peers if swarm.peers[peer].pipeline.leads)
        assert [stage_of(swarm, peer) for peer in range(4)].count(0) == 2
        swarm.learner(planner).batch = unreadable
        began_at, seen = asyncio.get_running_loop().time(), [(0.0, max(p.pipeline.step for p in swarm.peers.values()))]
        while (now := asyncio.get_running_loop().time() - began_at) < HINDERED_S:
            step = max(peer.pipeline.step for peer in swarm.peers.values())
            if step > seen[-1][1]:
                seen.append((now, step))
            freed.append(now > 120.0 and swarm.peers[planner].trainer.free)
            await asyncio.sleep(0.5)
        steps.append(seen[-1][1] - seen[0][1])
        gaps.extend(later[0] - earlier[0] for earlier, later in itertools.pairwise(seen))
        assert swarm.peers[planner].state_reason == "the data cannot be read: hf:some/set cannot be read"
        del swarm.learner(planner).batch
        await until(swarm, lambda: not swarm.peers[planner].trainer.hindrance.reason, 120.0)
        assert [peer for peer in swarm.peers if swarm.peers[peer].pipeline.leads] != [planner]
        paces.append(await steps_in(swarm, 60.0))

    steps, gaps, freed, paces = list[int](), list[float](), list[bool](), list[int]()
    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 0, 2: 1, 3: 1})
    assert not swarm.broken
    assert steps[0] > 40
    assert not any(freed), "it says that it can when it has seen that it can"
    longest = sorted(gaps, reverse=True)
    assert longest[0] < 120.0, "a turn"
    assert longest[1] < 15.0, "it tries again every minute, and nobody waits for it"
    assert paces[1] > 0.9 * paces[0], (
        "it knows that it was passed over: were it to plan as well, they would refuse each other"
    )
