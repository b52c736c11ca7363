"""Joining the DHT through seeds of which most are gone; a node of nobody's, virtual time."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from farflung.node.dht import PUT_S, REJOIN_S, RETRY_S, Records
from farflung.node.identity import from_libp2p_bytes
from farflung.node.network import PeerId
from farflung.node.seeds import SEEDS_AT_ONCE
from farflung.protocol.errors import NetworkError
from farflung.sims import clock

DIAL_S = 15.0
SEEDS = [bytes([number]) * 32 for number in range(40)]


class Lab:
    """Hivemind's node as far as joining goes, and the peers that can be reached."""

    def __init__(self, alive: set[PeerId], seeds: list[PeerId] = SEEDS) -> None:
        self.alive = alive
        self.asked: list[tuple[float, PeerId]] = []
        self.others: dict[PeerId, int | None] = {}
        """What some say for an id that is not theirs: a node of another kind, or of nobody's DHT."""
        self.searches = 0
        self.node_id = 0
        self.protocol = self
        self.ahead_s: float | None = None
        """That our clock is of theirs."""
        self.records = Records(self, self.connect)  # type: ignore[arg-type]
        for seed in seeds:
            self.records.add_seed(seed)

    async def connect(self, peer: PeerId) -> None:
        self.asked.append((asyncio.get_running_loop().time(), peer))
        if peer not in self.alive:
            await asyncio.sleep(DIAL_S)
            raise NetworkError("nobody there")

    async def call_ping_for_time(self, peer: Any) -> tuple[int | None, float | None]:
        """An id, whatever it is, and a time."""
        from farflung.node.dht_protocol import node_id_of

        return self.others.get(from_libp2p_bytes(peer.to_bytes()), int(node_id_of(peer))), self.ahead_s

    async def find_nearest_nodes(self, ids: list[int]) -> None:
        self.searches += 1

    def batches(self) -> list[list[PeerId]]:
        """Who was asked together, in the order of time."""
        times = dict.fromkeys(at for at, _ in self.asked)
        return [[peer for at, peer in self.asked if at == time] for time in times]


def test_a_put_that_hangs_is_given_up() -> None:
    """It held the announcements of its node for ever."""

    async def main() -> None:
        lab = Lab(set())

        async def hangs(*_: object, **__: object) -> bool:
            await asyncio.Event().wait()
            return True

        lab.store = hangs  # type: ignore[attr-defined]
        lab.routing_table = SimpleNamespace(get_nearest_neighbors=lambda *_, **__: [])  # type: ignore[attr-defined]
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(1000.0):
            with pytest.raises(NetworkError, match="no node took the record 'key' within 45 s"):
                await lab.records.put("key", "sub", b"value", time.time() + 3600.0)
        assert asyncio.get_running_loop().time() - began == PUT_S

    clock.run(main())


IN_BATCHES = [SEEDS[first : first + SEEDS_AT_ONCE] for first in range(0, len(SEEDS), SEEDS_AT_ONCE)]


def test_the_last_of_forty_is_found_and_is_the_first_to_be_asked_from_then_on() -> None:
    lab = Lab({SEEDS[-1]})

    async def main() -> None:
        assert not await lab.records.join_once()  # an engine that starts waits no longer than this
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.records.stay_joined())
            await asyncio.wait_for(lab.records.joined.wait(), 10 * DIAL_S)
            assert lab.batches() == IN_BATCHES
            await asyncio.sleep(REJOIN_S + 2 * DIAL_S)
            staying.cancel()

    clock.run(main())
    assert lab.batches()[3:] == [[SEEDS[-1], *SEEDS[: SEEDS_AT_ONCE - 1]]]
    assert lab.searches == 2


def test_all_are_asked_again_after_a_pause_when_none_answers() -> None:
    lab = Lab(set())

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.records.stay_joined())
            await asyncio.sleep(3 * DIAL_S + RETRY_S / 2)
            assert lab.batches() == IN_BATCHES
            lab.alive = {SEEDS[20]}
            await asyncio.wait_for(lab.records.joined.wait(), 10 * DIAL_S)
            staying.cancel()

    clock.run(main())
    assert lab.batches() == [*IN_BATCHES, *IN_BATCHES[:2]]
    times = list(dict.fromkeys(at for at, _ in lab.asked))
    assert times[3] - times[0] == pytest.approx(3 * DIAL_S + RETRY_S)


def test_who_cannot_be_asked_is_no_seed_that_answers() -> None:
    """Sixteen nodes with ids of their own choice were taken for the DHT, and those after them never asked."""
    lab = Lab(set(SEEDS))
    lab.others = dict.fromkeys(SEEDS[:SEEDS_AT_ONCE], 1) | {SEEDS[0]: None}

    async def main() -> None:
        assert not await lab.records.join_once() and not lab.records.joined.is_set()
        assert await lab.records.join_once() and lab.records.joined.is_set()

    clock.run(main())
    assert {peer for _, peer in lab.asked} == set(SEEDS[: 2 * SEEDS_AT_ONCE]) and lab.searches == 1


@pytest.mark.parametrize("seeds", [[], SEEDS[:1]])
def test_who_was_heard_of_since_leads_into_the_dht_when_the_first_ones_have_gone(seeds: list[PeerId]) -> None:
    """Of a founder, which has none, too: only those of the start were ever asked, and a restart alone brought others."""
    lab = Lab({SEEDS[-1]}, seeds)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.records.stay_joined())
            await asyncio.sleep(2 * DIAL_S)
            lab.records.found(SEEDS[-1])
            await asyncio.wait_for(lab.records.joined.wait(), 4 * DIAL_S)
            staying.cancel()

    clock.run(main())
    assert lab.searches == 1


def test_who_is_heard_of_does_not_make_us_ask_more_often() -> None:
    lab = Lab({SEEDS[0]}, SEEDS[:1])

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.records.stay_joined())
            for _ in range(100):
                await asyncio.sleep(REJOIN_S / 200)
                for number in range(200):
                    lab.records.found(number.to_bytes(32, "big"))
            staying.cancel()

    clock.run(main())
    assert lab.batches() == [SEEDS[:1]]


def test_by_what_time_others_say_it_is_they_are_not_asked_more_often() -> None:
    lab = Lab({SEEDS[0]}, SEEDS[:1])
    lab.ahead_s = 3600.0

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            staying = tasks.create_task(lab.records.stay_joined())
            await asyncio.sleep(2.5 * REJOIN_S)
            staying.cancel()

    clock.run(main())
    assert lab.records.clock_trouble() and lab.batches() == [SEEDS[:1]] * 3
