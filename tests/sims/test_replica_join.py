"""A peer that joins a stage which others serve says from whom it has the state, and why, under virtual time."""

from tests.sims.pipeline_story import lives, until, until_done

from farflung.node.events import Event
from farflung.node.stage_recipe import stage_recipe
from farflung.node.status import NodeStatus
from farflung.protocol.keys import short
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import Disk, PipelineSwarm, simulate
from farflung.training.outer import BYTES_PER_ELEMENT


def status_of(swarm: PipelineSwarm, peer: int) -> NodeStatus:
    status = NodeStatus(swarm="s", peer=swarm.ids[peer].hex())
    for _, who, event in swarm.events:
        if who == peer:
            status.apply(event)
    return status


def is_of_a_replica(event: Event, swarm: PipelineSwarm, *holders: int) -> None:
    nbytes = BYTES_PER_ELEMENT * stage_recipe(swarm.recipe, 1).own.num_parameters
    assert (event["stage"], event["rung"], event["bytes"]) == (1, "live replica", nbytes)
    assert set(event["holders"]) <= {short(swarm.ids[peer]) for peer in holders} and event["holders"]
    assert event["fetch_s"] > 0.0 and event["expected_s"] >= 0.0
    assert event["reason"].startswith("stage 1: live replica from ") and "serves meanwhile" in event["reason"]


def test_a_peer_that_joins_a_stage_says_whose_replica_it_downloads() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds().get(1, 0) >= 2)
        swarm.start(3)
        await until_done(swarm, *range(4))

    swarm = simulate(recipe(total_steps=24), Counting(), signers(4), story, wanted={1: 1, 2: 1, 3: 1})
    assert not swarm.broken and lives(swarm) == []
    [joined] = swarm.happened("stage.join", 3)
    is_of_a_replica(joined, swarm, 1, 2)
    assert status_of(swarm, 3).joined == joined["reason"]
    began = min((event["time"], peer) for peer in (1, 2) for event in swarm.happened("node.start", peer))[1]
    assert not swarm.happened("stage.join", began) and not status_of(swarm, began).joined  # it has begun the stage
    assert not swarm.happened("stage.join", 0)


def test_a_peer_that_comes_back_without_its_disk_says_so_again() -> None:
    """Its stage was never lost."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: len(swarm.happened("round.commit", 3)) >= 2)
        swarm.kill(3)
        swarm.disks[3] = Disk()
        await until(swarm, lambda: swarm.tasks[3].done())
        swarm.start(3)
        await until_done(swarm, *range(4))

    swarm = simulate(recipe(total_steps=32), Counting(), signers(4), story, wanted={1: 1, 2: 1, 3: 1})
    assert not swarm.broken and lives(swarm) == []
    last = swarm.happened("stage.join", 3)[-1]
    is_of_a_replica(last, swarm, 1, 2)
    assert last["time"] > swarm.happened("node.start", 3)[-1]["time"]
    # In some of its rounds it has nothing to give: its stage has two other replicas, and each step's route goes through one.
    assert any(event["contributed"] for event in swarm.happened("round.commit", 3) if event["time"] > last["time"])
