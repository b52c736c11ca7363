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
