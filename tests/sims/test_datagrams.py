"""Control messages take the links: each other's time, bulk's, a relay's."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from farflung.node.network import PeerId, Stream
from farflung.sims.clock import VirtualLoop, run
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork

T = TypeVar("T")

ENDLESS = float("inf")
WIDE = LinkModel(latency_s=0.01, jitter_s=0.0, up_bytes_per_s=ENDLESS, down_bytes_per_s=ENDLESS)
NARROW_UP = replace(WIDE, up_bytes_per_s=125.0)  # 1 kbit/s
NARROW_DOWN = replace(WIDE, down_bytes_per_s=125.0)
BULK = 1_000_000


def peer(number: int) -> PeerId:
    return bytes([number]) * 32


class Lab:
    """Peers who note when messages, and BULK bytes of a stream, have come."""

    def __init__(self, *links: LinkModel) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.hub = MemoryHub(loop, random.Random(0), WIDE)
        self.came: list[tuple[float, bytes]] = []
        self.bulk_at: list[float] = []
        self.networks = [MemoryNetwork(self.hub, peer(number)) for number in range(len(links))]
        for network, link in zip(self.networks, links, strict=True):
            self.hub.set_link(network.peer_id, link)
            network.on_message(lambda sender, message: self.came.append((round(self.hub.now(), 3), message[:1])))
            network.serve("bulk", self._take)

    async def _take(self, stream: Stream) -> None:
        await stream.readinto(memoryview(bytearray(BULK)))
        self.bulk_at.append(self.hub.now())

    async def send_bulk(self, sender: int, receiver: int) -> None:
        stream = await self.networks[sender].open_stream(peer(receiver), "bulk")
        await stream.write(bytes(BULK))
        await stream.close()


def in_lab(body: Callable[[Lab], Awaitable[T]], *links: LinkModel) -> T:
    async def main() -> T:
        return await body(Lab(*links))

    return run(main())


def test_messages_leave_one_after_another() -> None:
    async def body(lab: Lab) -> None:
        for receiver, name in ((1, b"a"), (2, b"b"), (1, b"c")):
            lab.networks[0].send(peer(receiver), name * 60_000)
        await asyncio.sleep(2000.0)
        assert lab.came == [(480.02, b"a"), (960.02, b"b"), (1440.02, b"c")]
        lab.networks[0].send(peer(1), b"d" * 125)
        await asyncio.sleep(2.0)
        assert lab.came[-1] == (2001.02, b"d"), "what was sent long ago is in nobody's way"

    in_lab(body, NARROW_UP, WIDE, WIDE)


def test_messages_come_in_one_after_another() -> None:
    async def body(lab: Lab) -> None:
        for sender, name in ((0, b"a"), (1, b"b")):
            lab.networks[sender].send(peer(2), name * 60_000)
        await asyncio.sleep(2000.0)
        assert lab.came == [(480.02, b"a"), (960.02, b"b")]

    in_lab(body, WIDE, WIDE, NARROW_DOWN)


def test_what_lies_between_regions_is_taken_too() -> None:
    async def body(lab: Lab) -> None:
        lab.hub._backbone = lambda a, b: (0.5, 125.0)
        for receiver, name in ((1, b"a"), (1, b"b"), (2, b"c")):
            lab.networks[0].send(peer(receiver), name * 125)
        await asyncio.sleep(10.0)
        assert lab.came == [(1.52, b"a"), (1.52, b"c"), (2.52, b"b")]

    in_lab(body, WIDE, WIDE, WIDE)


@pytest.mark.parametrize("narrow", [0, 1])
def test_messages_pass_bulk_and_bulk_waits_for_them(narrow: int) -> None:
    wide = replace(WIDE, window_bytes=1 << 18)
    slow = replace(wide, up_bytes_per_s=1e5, down_bytes_per_s=1e5)
    links = [slow if number == narrow else wide for number in range(2)]

    def took(num_messages: int) -> float:
        async def body(lab: Lab) -> float:
            async with asyncio.TaskGroup() as group:
                group.create_task(lab.send_bulk(0, 1))
                await asyncio.sleep(1.0)
                for _ in range(num_messages):
                    lab.networks[0].send(peer(1), b"m" * 50_000)
            assert lab.came == [(1.0 + 0.5 * (number + 1) + 0.02, b"m") for number in range(num_messages)]
            return lab.bulk_at[0]

        return in_lab(body, *links)

    alone_s = took(0)
    assert alone_s == pytest.approx(BULK / 1e5, rel=0.05)
    assert took(4) - alone_s == pytest.approx(2.0, abs=0.01)


def test_where_a_byte_stands_for_many_a_message_is_as_long_as_it_is() -> None:
    async def body(lab: Lab) -> None:
        lab.networks[0].send(peer(1), b"m" * 12_500)
        await asyncio.sleep(200.0)
        assert lab.came == [(100.02, b"m")]

    scaled = replace(WIDE, up_bytes_per_s=1.25, byte_means=100.0)  # 125 bytes per second of messages
    in_lab(body, scaled, scaled)


def test_a_relay_passes_messages_on_over_its_own_link() -> None:
    async def body(lab: Lab) -> None:
        for number in range(4):
            lab.hub.set_nat(peer(number), "symmetric")
        for sender, name in ((0, b"a"), (2, b"b")):
            lab.networks[sender].send(peer(sender + 1), name * 125)
        await asyncio.sleep(10.0)
        assert lab.came == [(1.04, b"a"), (2.04, b"b")]
        assert lab.hub.counts["relay", "message"] == 2

    in_lab(body, WIDE, WIDE, WIDE, WIDE, NARROW_UP)


def test_what_is_on_its_way_to_a_relay_that_goes_is_lost() -> None:
    async def body(lab: Lab) -> None:
        for number in range(2):
            lab.hub.set_nat(peer(number), "symmetric")
        lab.networks[0].send(peer(1), b"m")
        lab.hub.kill(peer(2))
        await asyncio.sleep(10.0)
        assert lab.came == [] and lab.hub.counts["drop", "relay gone"] == 1

    in_lab(body, WIDE, WIDE, WIDE)
