"""Whom peers find that look for others, and when they look."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from tests.sims.pipeline_story import until, until_done

from farflung.node.discovery import LOOK_S
from farflung.node.network import PeerId
from farflung.sims.clock import VirtualLoop, run
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.lookups import LOOKS, MOST_FOUND, Lookups
from farflung.sims.network import MemoryNetwork
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate


def peer(number: int) -> PeerId:
    return bytes([number]) * 32


class Lab:
    """Peers that run."""

    def __init__(self, num_peers: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.hub = MemoryHub(loop, random.Random(0), LinkModel())
        self.networks = [MemoryNetwork(self.hub, peer(number)) for number in range(num_peers)]
        self.lookups = Lookups(self.hub)

    def found(self, number: int) -> list[int]:
        return sorted(one[0] for one in self.lookups.find(peer(number)))


def in_lab(body: Callable[[Lab], Awaitable[None]], num_peers: int) -> None:
    async def main() -> None:
        await body(Lab(num_peers))

    run(main())


def test_nobody_is_found_on_the_other_side_of_a_partition() -> None:
    async def body(lab: Lab) -> None:
        assert lab.found(0) == [1, 2, 3]
        cut = lab.hub.partition([[peer(0), peer(1)]])
        assert [lab.found(number) for number in range(4)] == [[1], [0], [3], [2]]
        lab.hub.heal(cut)
        lab.hub.partition([[peer(0)], [peer(1)]], bridged=True)
        assert lab.found(0) == [1, 2, 3], "by way of those whom both reach"

    in_lab(body, 4)


def test_behind_a_router_nobody_is_found_until_somebody_can_be_dialled() -> None:
    async def body(lab: Lab) -> None:
        for number in range(2):
            lab.hub.set_nat(peer(number), "symmetric")
        assert lab.found(0) == [1, 2]
        lab.hub.kill(peer(2))
        assert lab.found(0) == []

    in_lab(body, 3)


def test_of_many_some_are_found_others_each_time() -> None:
    async def body(lab: Lab) -> None:
        looks = [lab.found(0) for _ in range(4)]
        assert all(len(one) == MOST_FOUND for one in looks)
        assert {number for one in looks for number in one} == set(range(1, 50))
        lab.hub.partition([[peer(number) for number in range(3)]])
        assert lab.found(0) == [1, 2], "however far they are from where a look begins"

    in_lab(body, 50)


def test_who_has_found_nobody_looks_again_sooner_and_who_stands_does_not() -> None:
    async def body(lab: Lab) -> None:
        looked: list[tuple[float, int]] = []

        def look(number: int) -> None:
            looked.append((lab.hub.now(), number))
            lab.found(number)

        for number in range(3):
            lab.found(number)
        cut = lab.hub.partition([[peer(0)]])
        lab.found(0)
        lab.hub.pause(peer(2))
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(lab.lookups.go_on([peer(number) for number in range(3)], {2, 1, 0}, look))
            await asyncio.sleep(2.5 * LOOK_S / LOOKS)
            lab.hub.heal(cut)
            await asyncio.sleep(2 * LOOK_S - lab.hub.now() + 1.0)
            looking.cancel()
        soon = LOOK_S / LOOKS
        assert looked == [
            (soon, 0),
            (2 * soon, 0),
            (3 * soon, 0),
            (LOOK_S, 0),
            (LOOK_S, 1),
            (2 * LOOK_S, 0),
            (2 * LOOK_S, 1),
        ]

    in_lab(body, 3)


@pytest.mark.thorough
def test_a_peer_of_a_pipeline_that_came_behind_a_cut_finds_the_others_when_that_heals() -> None:
    known: list[set[PeerId]] = []

    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
        swarm.hub.partition([[swarm.ids[2]]])
        swarm.start(2)
        await asyncio.sleep(10.0)
        known.append(set(swarm._rolls[2].known))
        swarm.hub.heal()
        await until(swarm, lambda: 2 in swarm.peers, LOOK_S)
        await until_done(swarm, 0, 1, 2)

    swarm = simulate(recipe(total_steps=64), Counting(), signers(3), story, wanted={2: 1})
    assert not swarm.broken and known == [set()]
    assert swarm.happened("round.commit", 2)
