"""Routers refuse what real ones refuse, holes and relays get round them, and a relay pays for what it passes on."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import pytest

from farflung.node.network import PeerId, Stream
from farflung.protocol.errors import NetworkError
from farflung.sims.churn import make_schedule
from farflung.sims.clock import VirtualLoop, run
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.nat import PUNCHES, Nat, Routers
from farflung.sims.network import MemoryNetwork
from farflung.sims.scenario import SHIPPED, load_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate

T = TypeVar("T")

SIZE = 1_000_000
FAST = LinkModel(latency_s=0.025, jitter_s=0.0, up_bytes_per_s=1e6, down_bytes_per_s=1e6)
SLOW = LinkModel(latency_s=0.025, jitter_s=0.0, up_bytes_per_s=1e5, down_bytes_per_s=1e6)


def peer(number: int) -> PeerId:
    return bytes([number]) * 32


class Lab:
    """A hub with a peer for each router, who serve a stream of SIZE bytes and keep their messages."""

    def __init__(self, nats: tuple[Nat, ...]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.hub = MemoryHub(loop, random.Random(0), FAST)
        self.inbox: list[bytes] = []
        self.taken = 0
        self.networks = [MemoryNetwork(self.hub, peer(number)) for number in range(len(nats))]
        for network, nat in zip(self.networks, nats, strict=True):
            self.hub.set_nat(network.peer_id, nat)
            network.on_message(lambda sender, message: self.inbox.append(message))
            network.serve("bulk", self._take)

    async def _take(self, stream: Stream) -> None:
        await stream.readinto(memoryview(bytearray(SIZE)))
        self.taken += 1

    async def send(self, sender: int, receiver: int) -> float:
        """Seconds that SIZE bytes take from one to the other."""
        began = self.hub.now()
        stream = await self.networks[sender].open_stream(peer(receiver), "bulk")
        await stream.write(bytes(SIZE))
        await stream.close()
        return self.hub.now() - began


def in_lab(body: Callable[[Lab], Awaitable[T]], *nats: Nat) -> T:
    async def main() -> T:
        return await body(Lab(nats))

    return run(main())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("none", "none", 1.0),
        ("none", "symmetric", 1.0),
        ("cone", "none", 1.0),
        ("cone", "cone", PUNCHES),
        ("cone", "symmetric", 0.0),
        ("symmetric", "symmetric", 0.0),
    ],
)
def test_who_reaches_whom(a: Nat, b: Nat, expected: float) -> None:
    direct = 0
    for number in range(1000):
        routers = Routers(str(number))
        routers.put(peer(1), a)
        routers.put(peer(2), b)
        assert routers.direct(peer(1), peer(2)) == routers.direct(peer(2), peer(1))
        direct += routers.direct(peer(1), peer(2))
    assert direct / 1000 == pytest.approx(expected, abs=0.05)


def test_without_a_relay_nothing_gets_through() -> None:
    async def body(lab: Lab) -> None:
        lab.networks[0].send(peer(1), b"lost")
        with pytest.raises(NetworkError, match="no answer"):
            await lab.send(0, 1)
        assert lab.inbox == [] and lab.taken == 0
        assert lab.hub.counts["drop", "no relay"] == 1

    in_lab(body, "symmetric", "symmetric")


@pytest.mark.parametrize(("link", "seconds"), [(FAST, 1.0), (SLOW, 10.0)])
def test_what_a_relay_passes_on_takes_its_link(link: LinkModel, seconds: float) -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_link(peer(2), link)
        took = await lab.send(0, 1)
        assert seconds < took < 1.2 * seconds + 1.0
        assert lab.taken == 1 and lab.hub.counts["relay", "bulk"] > SIZE // (64 << 10)
        lab.networks[0].send(peer(1), b"hello")
        await asyncio.sleep(1.0)
        assert lab.inbox == [b"hello"]

    in_lab(body, "symmetric", "symmetric", "none")


def test_one_relay_serves_two_pairs_by_turns() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_link(peer(4), SLOW)
        both = await asyncio.gather(lab.send(0, 1), lab.send(2, 3))
        assert min(both) > 19.0

    in_lab(body, "symmetric", "symmetric", "symmetric", "symmetric", "none")


def test_a_stream_breaks_with_its_relay_and_another_takes_over() -> None:
    async def body(lab: Lab) -> None:
        relay = lab.hub.relay(peer(0), peer(1))
        assert relay in (peer(2), peer(3))
        lab.hub.loop.call_later(1.0, lab.hub.kill, relay)
        with pytest.raises(NetworkError, match="reset"):
            await lab.send(0, 1)
        assert await lab.send(0, 1) > 0.0
        assert lab.hub.relay(peer(0), peer(1)) not in (relay, None)

    in_lab(body, "symmetric", "symmetric", "none", "none")


def test_a_peer_that_is_cut_off_from_the_relay_is_cut_off() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.partition([[peer(2)]])
        assert not lab.hub.reach(peer(0), peer(1))
        lab.hub.heal()
        assert lab.hub.reach(peer(0), peer(1))

    in_lab(body, "symmetric", "symmetric", "none")


def test_the_shipped_scenario_makes_rounds_over_relays() -> None:
    found = load_scenario(SHIPPED / "nat.toml")
    goes = msgspec.structs.replace(found.happenings[0], at=200.0)  # one of the two that carry, for two minutes
    found = msgspec.structs.replace(found, duration_s=400.0, calm_s=0.0, happenings=(goes,))
    relayed = []

    async def watch(swarm: object) -> None:
        hub = swarm.hub  # type: ignore[attr-defined]
        await asyncio.sleep(390.0)
        relayed.append(sum(number for (what, _), number in hub.counts.items() if what == "relay"))

    report = simulate(prepare(found, 0, make_schedule(found, 0, SHIPPED)).plan, meddler=watch)
    assert report.violations == [] and report.rounds >= 1 and report.members >= 8
    assert relayed[0] > 100
