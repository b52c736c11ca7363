"""Who is there when all blows have fallen, with machines that do nothing."""

import asyncio
import random
from dataclasses import replace

import msgspec
import pytest
from tests.node.test_storage import certified

from farflung.protocol.accord import enough
from farflung.protocol.chain import Certified
from farflung.protocol.keys import PeerId
from farflung.protocol.lives import Life
from farflung.protocol.quorum import is_quorum
from farflung.sims.network import MemoryNetwork
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.stage_losing import Misfortune
from farflung.sims.stage_losses import Blow, Scene, What, draw_scene


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live(self: PipelineSwarm, index: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PipelineSwarm, "_live", live)


def replaced(first: Certified, view: tuple[PeerId, ...]) -> Certified:
    """With these members."""
    return msgspec.structs.replace(first, commit=msgspec.structs.replace(first.commit, view=view))


def running(swarm: PipelineSwarm) -> set[int]:
    return {peer for peer, task in swarm.tasks.items() if not task.done()}


async def lose_most(scene: Scene, swarm: PipelineSwarm, rng: random.Random) -> None:
    """Two of three machines, newcomers among them, are gone when the last blow has fallen."""
    coming = (Blow(at=0.0, what=What.COME),) * rng.randint(0, scene.newcomers)
    misfortune = Misfortune(replace(scene, blows=coming), swarm, lambda line, fault: None)
    for peer, stage in enumerate(scene.placed):
        life = Life(stage, 0, swarm.ids[scene.placed.index(stage)])
        view = tuple(sorted(swarm.ids[other] for other, of in enumerate(scene.placed) if of == stage))
        swarm.disks[peer].life = life
        swarm.disks[peer].storages[life].append_commit(None, replaced(certified(0), view))
        swarm.start(peer)
    await misfortune.run()
    for peer in running(swarm):
        if rng.random() < 2 / 3:
            swarm.kill(peer)
    await misfortune.end()


@pytest.mark.parametrize("seed", range(16))
def test_in_the_end_every_stage_can_have_a_machine(seed: int) -> None:
    """With fewer no swarm gets well, whatever its nodes do."""
    scene = draw_scene(seed)

    async def story(swarm: PipelineSwarm) -> None:
        await lose_most(scene, swarm, random.Random(seed))
        there = running(swarm)
        machines = {
            stage: [peer for peer, of in enumerate(scene.placed) if of == stage] for stage in range(scene.stages)
        }
        ids = {stage: [swarm.ids[peer] for peer in peers] for stage, peers in machines.items()}
        here = [swarm.ids[peer] for peer in there]
        assert enough(scene.stages, {stage for stage in ids if is_quorum(ids[stage], here)})
        if scene.tied:
            free = [peer for peer in there if swarm.disks[peer].stage is None]
            deserted = set(range(scene.stages)) - {swarm.disks[peer].stage for peer in there}
            assert len(free) >= len(deserted)
        else:
            assert len(there) > scene.stages

    simulate(recipe(stages=scene.stages, layers=scene.layers), Counting(), signers(scene.num_peers), story)


def test_who_is_stopped_twice_goes_on_after_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what stopped one life neither holds the next nor lets go of it."""

    async def live(self: PipelineSwarm, index: int) -> None:
        network = MemoryNetwork(self.hub, self.ids[index])
        try:
            await asyncio.Event().wait()
        finally:
            await network.close()

    monkeypatch.setattr(PipelineSwarm, "_live", live)
    blows = (
        Blow(at=1.0, what=What.PAUSE, which=(1,), for_s=30.0),
        Blow(at=11.0, what=What.PAUSE, which=(1,), for_s=40.0),
        Blow(at=61.0, what=What.PAUSE, which=(1,), for_s=40.0),
        Blow(at=66.0, what=What.KILL, which=(1,), for_s=5.0),
        Blow(at=81.0, what=What.PAUSE, which=(1,), for_s=50.0),
    )
    scene = replace(draw_scene(0), stages=2, layers=2, placed=(0, 1), newcomers=0, regions=(0, 0), blows=blows)
    told: list[tuple[float, str]] = []

    async def story(swarm: PipelineSwarm) -> None:
        began = swarm.hub.now()
        for peer in range(2):
            swarm.start(peer)
        await Misfortune(scene, swarm, lambda line, fault: told.append((swarm.hub.now() - began, line))).run()

    simulate(recipe(stages=2, layers=2), Counting(), signers(2), story)
    assert [(round(at), line) for at, line in told] == [
        (1, "pause peer 1"),
        (51, "resume peer 1"),
        (61, "pause peer 1"),
        (66, "kill peer 1"),
        (71, "start peer 1"),
        (81, "pause peer 1"),
        (131, "resume peer 1"),
    ]


def test_in_the_dark_all_that_was_wrong_is_over_and_all_come_back_that_were_ever_there() -> None:
    blows = (
        Blow(at=1.0, what=What.PAUSE, which=(0,), for_s=30.0),
        Blow(at=2.0, what=What.CUT, which=(1,), for_s=30.0),
        Blow(at=3.0, what=What.DROP, for_s=30.0, much=0.5),
        Blow(at=4.0, what=What.SLOW, which=(1,), for_s=2.0, much=3.0),
        Blow(at=5.0, what=What.KILL, which=(1,), for_s=30.0),
        Blow(at=20.0, what=What.COME),
    )
    scene = replace(draw_scene(0), stages=2, layers=2, placed=(0, 1), newcomers=1, regions=(0, 0, 0), blows=blows)
    told: list[tuple[float, str]] = []
    there: list[set[int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        began = swarm.hub.now()
        for peer in range(2):
            swarm.start(peer)
        misfortune = Misfortune(scene, swarm, lambda line, fault: told.append((swarm.hub.now() - began, line)))
        await misfortune.darken(10.0, 5.0)
        assert swarm.hub.quiet and set(swarm.slowness.values()) == {1.0}
        there.append(running(swarm))

    simulate(recipe(stages=2, layers=2), Counting(), signers(3), story)
    assert there == [{0, 1}], "the newcomer has not come yet"
    late = [(round(at), line) for at, line in told if at > 7.0]
    assert late == [
        (10, "peer 0 loses power"),
        (10, "end of drop 50% of messages until 33.0 s"),
        (10, "heal the partition"),
        (15, "start peer 0"),
        (15, "start peer 1"),
    ]
