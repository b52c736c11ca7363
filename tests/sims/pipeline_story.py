"""What stories of swarms with a pipeline wait for and ask, under virtual time."""

import asyncio
from collections.abc import Callable

from farflung.protocol.roll import in_order
from farflung.sims.pipeline_swarm import PipelineSwarm


async def until(swarm: PipelineSwarm, holds: Callable[[], object], seconds: float = 300.0) -> None:
    """Look ten times a second. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.1)


async def until_done(swarm: PipelineSwarm, *peers: int, seconds: float = 600.0) -> None:
    """Until these have ended their run."""
    await until(swarm, lambda: all(swarm.tasks[peer].done() for peer in peers), seconds)


def coordinator_of(swarm: PipelineSwarm) -> int:
    """Who leads, all data nodes living."""
    homes = [p for p in swarm.peers if swarm.peers[p].pipeline.recipe.stage == 0]
    return swarm.ids.index(in_order(swarm.recipe.swarm, [swarm.ids[p] for p in homes])[0])


def stage_of(swarm: PipelineSwarm, peer: int) -> int | None:
    return swarm.disks[peer].stage


def steps_done(swarm: PipelineSwarm) -> int:
    return max((int(event["number"]) + 1 for event in swarm.happened("pipeline.step")), default=0)


def members_of(swarm: PipelineSwarm, stage: int) -> list[int]:
    """Living peers of a stage."""
    return [peer for peer in sorted(swarm.peers) if swarm.disks[peer].stage == stage]


def lives(swarm: PipelineSwarm) -> list[tuple[int, int, int]]:
    """(stage, number, founder) of each that was begun anew, as data nodes saw it, in order."""
    said = [(event["stage"], event["life"], event["founder"]) for event in swarm.happened("stage.anew")]
    keys = [signer.peer_id.hex() for signer in swarm.signers]
    return [(stage, life, keys.index(founder)) for stage, life, founder in dict.fromkeys(said)]


async def lose_one(swarm: PipelineSwarm, stage: int) -> None:
    """Of four stages with a peer each, after two rounds; and another peer comes."""
    for peer in range(4):
        swarm.start(peer)
    await until(swarm, lambda: swarm.rounds().get(stage) == 2)
    swarm.kill(members_of(swarm, stage)[0])
    await asyncio.sleep(12.0)
    swarm.start(4)


async def replace_one(swarm: PipelineSwarm, stage: int = 2) -> None:
    """And all train on with it to the end."""
    await lose_one(swarm, stage)
    await until_done(swarm, *swarm.peers)


async def replace_two(swarm: PipelineSwarm) -> None:
    """Stages 1 and 2 of four with a peer each, after a round; two others come, and all train on to the end."""
    for peer in range(4):
        swarm.start(peer)
    await until(swarm, lambda: swarm.rounds() == dict.fromkeys(range(4), 1))
    for stage in (1, 2):
        swarm.kill(members_of(swarm, stage)[0])
    await asyncio.sleep(12.0)
    swarm.start(4)
    swarm.start(5)
    await until_done(swarm, *swarm.peers)


async def begin(swarm: PipelineSwarm, count: int, rounds: int = 2) -> None:
    """Start so many peers, and wait until all stages have made so many rounds."""
    for peer in range(count):
        swarm.start(peer)
    stages = range(swarm.recipe.manifest.pipeline.stages)
    await until(swarm, lambda: all(swarm.rounds().get(stage, 0) >= rounds for stage in stages))


async def lose_home(swarm: PipelineSwarm, count: int, *newcomers: int, silent: bool = False) -> None:
    """All data nodes are killed, or their machines fall silent; newcomers come a little later."""
    await begin(swarm, count)
    for peer in members_of(swarm, 0):
        swarm.kill(peer, reset=not silent)
    await asyncio.sleep(12.0)
    for peer in newcomers:
        swarm.start(peer)
