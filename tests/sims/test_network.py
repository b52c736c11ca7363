"""The modelled network does to control messages and records what it says, and each test sees that it did."""

import asyncio
import dataclasses
import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import pytest

from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.errors import NetworkError
from farflung.protocol.limits import MAX_CONTROL_BYTES, MAX_RECORD_BYTES
from farflung.sims.clock import CallbackFailed, VirtualLoop, process_context, run
from farflung.sims.hub import MemoryHub, NetEvent
from farflung.sims.links import Disturbance, LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.processors import Processors

T = TypeVar("T")

START = 1_700_000_000.0
ENDLESS = {"up_bytes_per_s": float("inf"), "down_bytes_per_s": float("inf")}
STILL = LinkModel(jitter_s=0.0, record_delay_s=0.0, **ENDLESS)
"""A link without chance in it, and as wide as one likes: 25 ms one way, from peer to peer 50."""


def peer(number: int) -> PeerId:
    return bytes([number]) * 32


class Lab:
    """A hub, its networks, all events, and what each peer received as (seconds since START, sender, message)."""

    def __init__(self, num_peers: int, link: LinkModel, seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.events: list[NetEvent] = []
        self.hub = MemoryHub(loop, random.Random(seed), link, on_event=self.events.append)
        self.inbox: list[list[tuple[float, PeerId, bytes]]] = [[] for _ in range(num_peers)]
        self.networks: list[Network] = [self.start(n) for n in range(num_peers)]

    def start(self, number: int) -> Network:
        """A new process of this peer."""

        def note(sender: PeerId, message: bytes) -> None:
            self.inbox[number].append((self.elapsed(), sender, message))

        network: Network = MemoryNetwork(self.hub, peer(number))  # the class fulfils the protocol
        network.on_message(note)
        return network

    def elapsed(self) -> float:
        return round(self.hub.now() - START, 6)

    def messages(self, number: int) -> list[bytes]:
        return [message for _, _, message in self.inbox[number]]

    def drops(self, why: str) -> int:
        return self.hub.counts["drop", why]


def in_lab(body: Callable[[Lab], Awaitable[T]], num_peers: int = 2, link: LinkModel = STILL, seed: int = 0) -> T:
    async def main() -> T:
        return await body(Lab(num_peers, link, seed))

    return run(main(), start=START)


def test_a_message_takes_the_latency_and_arrives_in_order() -> None:
    async def body(lab: Lab) -> None:
        for number in range(10):
            lab.networks[0].send(peer(1), bytes([number]))
        await asyncio.sleep(1.0)
        assert lab.inbox[1] == [(0.05, peer(0), bytes([n])) for n in range(10)]
        assert lab.hub.counts["deliver", ""] == 10
        assert lab.networks[0].links()[peer(1)].sent_bytes == lab.networks[1].links()[peer(0)].received_bytes == 10
        assert [(e.what, e.sender, e.receiver, e.num_bytes) for e in lab.events[:1]] == [
            ("deliver", peer(0), peer(1), 1)
        ]

    in_lab(body)


def test_a_path_is_made_of_both_ends() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_link(peer(1), LinkModel(latency_s=0.125, jitter_s=0.0, drop=1.0, **ENDLESS))
        lab.hub.set_link(peer(2), LinkModel(latency_s=0.125, jitter_s=0.0, **ENDLESS))
        for number in (1, 2):
            lab.networks[0].send(peer(number), b"m")
        lab.networks[0].send(peer(0), b"to myself")
        await asyncio.sleep(1.0)
        assert (lab.inbox[1], lab.inbox[2]) == ([], [(0.15, peer(0), b"m")])
        assert lab.inbox[0] == [(0.0, peer(0), b"to myself")]
        assert lab.drops("lost") == 1

    in_lab(body, num_peers=3)


def test_loss_duplication_and_reordering_have_their_rates() -> None:
    async def body(lab: Lab) -> None:
        for number in range(2000):
            lab.networks[0].send(peer(1), number.to_bytes(2, "big"))
            await asyncio.sleep(0.01)
        await asyncio.sleep(10.0)
        got = lab.messages(1)
        assert 500 < lab.drops("lost") < 700
        assert len(set(got)) == 2000 - lab.drops("lost")
        assert len(got) - len(set(got)) == lab.hub.counts["duplicate", ""]
        assert 210 < lab.hub.counts["duplicate", ""] < 350
        assert sum(a > b for a, b in pairwise(got)) > 100
        # 2,000 sleeps from START on each round to a quarter of a microsecond.
        assert all(at - int.from_bytes(m, "big") * 0.01 > 0.049 for at, _, m in lab.inbox[1])

    in_lab(body, link=LinkModel(drop=0.3, duplicate=0.2, reorder=0.2))


def test_disturbances_add_up_and_end() -> None:
    async def body(lab: Lab) -> None:
        hub, (a, _, _) = lab.hub, lab.networks
        slow = hub.disturb(Disturbance(delay_s=1.0))
        slower = hub.disturb(Disturbance(delay_s=2.0, peers=(peer(1),)))
        twice = hub.disturb(Disturbance(duplicate=1.0))
        a.send(peer(1), b"m")
        a.send(peer(2), b"m")
        hub.calm(slower)
        hub.calm(twice)
        a.send(peer(1), b"n")
        hub.calm(slow)
        none = hub.disturb(Disturbance(drop=1.0))
        a.send(peer(1), b"lost")
        hub.calm(none)
        a.send(peer(1), b"fast")
        await asyncio.sleep(10.0)
        assert [(at, m) for at, _, m in lab.inbox[1]] == [
            (0.05, b"fast"),
            (1.05, b"n"),
            (3.05, b"m"),
            (3.05, b"m"),
        ]
        assert [at for at, _, _ in lab.inbox[2]] == [1.05, 1.05]
        assert (lab.drops("lost"), hub.counts["duplicate", ""]) == (1, 2)

    in_lab(body, num_peers=3)


def test_partition_cuts_between_groups_and_heals() -> None:
    async def body(lab: Lab) -> None:
        lab.networks[0].send(peer(1), b"on its way when the cut comes")
        lab.hub.partition([[peer(0)], [peer(1)]])  # 2 and 3 are the third group
        for sender in range(4):
            for receiver in range(4):
                if sender != receiver:
                    lab.networks[sender].send(peer(receiver), b"cut")
        await asyncio.sleep(1.0)
        assert [lab.messages(n) for n in range(4)] == [[], [], [b"cut"], [b"cut"]]
        assert lab.drops("cut") == 11
        lab.hub.heal()
        lab.networks[0].send(peer(1), b"healed")
        await asyncio.sleep(1.0)
        assert lab.messages(1) == [b"healed"]
        with pytest.raises(ValueError, match="two groups"):
            lab.hub.partition([[peer(0)], [peer(0)]])

    in_lab(body, num_peers=4)


def test_each_partition_ends_by_itself() -> None:
    async def body(lab: Lab) -> None:
        first = lab.hub.partition([[peer(0)]])
        second = lab.hub.partition([[peer(1)]])
        assert [lab.hub.cut(peer(a), peer(b)) for a, b in ((0, 1), (0, 2), (1, 2), (2, 3))] == [True, True, True, False]
        lab.hub.heal(first)
        assert [lab.hub.cut(peer(a), peer(b)) for a, b in ((0, 1), (0, 2), (1, 2))] == [True, False, True]
        with pytest.raises(KeyError):
            lab.hub.heal(first)
        lab.hub.heal(second)
        assert lab.hub.quiet and not lab.hub.cut(peer(0), peer(1))

    in_lab(body, num_peers=4)


def test_a_killed_process_never_hears_again_but_its_last_words_arrive() -> None:
    async def body(lab: Lab) -> None:
        old = lab.networks[1]
        lab.networks[0].send(peer(1), b"to the old process")
        old.send(peer(0), b"last words")
        lab.hub.kill(peer(1))
        assert lab.hub.running() == [peer(0)]
        old.send(peer(0), b"from the grave")
        lab.networks[0].send(peer(1), b"to nobody")
        for refused in (
            old.open_stream(peer(0), "x"),
            old.get_records("k"),
            old.put_record("k", "s", b"v", 2e9),
        ):
            with pytest.raises(NetworkError, match="closed"):
                await refused
        lab.networks[1] = lab.start(1)
        lab.networks[0].send(peer(1), b"to the new process")
        await asyncio.sleep(1.0)
        assert lab.messages(0) == [b"last words"]
        assert lab.messages(1) == [b"to the new process"]
        assert (lab.drops("receiver gone"), lab.drops("sender gone")) == (2, 1)
        await old.close()  # no effect on the new process
        assert lab.hub.running() == [peer(0), peer(1)]
        with pytest.raises(ValueError, match="running already"):
            MemoryNetwork(lab.hub, peer(1))

    in_lab(body)


def test_a_paused_process_stands_still_and_keeps_a_bounded_queue() -> None:
    async def heartbeat(lab: Lab) -> None:
        for number in range(10):
            await asyncio.sleep(1.0)
            lab.networks[1].send(peer(0), bytes([number]))

    async def body(lab: Lab) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(heartbeat(lab), context=process_context(peer(1)))
            await asyncio.sleep(2.5)
            lab.hub.pause(peer(1))
            for number in range(8):
                lab.networks[0].send(peer(1), bytes([number]))
            await asyncio.sleep(5.0)
            assert (lab.messages(0), lab.messages(1)) == ([b"\0", b"\1"], [])
            lab.networks[1].send(peer(0), b"no stopped process sends")
            lab.hub.resume(peer(1))
            lab.hub.resume(peer(1))
        await asyncio.sleep(1.0)
        assert lab.messages(1) == [bytes([n]) for n in range(5)]
        assert [at for at, _, _ in lab.inbox[1]] == [7.5] * 5
        assert [at for at, _, _ in lab.inbox[0]][:4] == [1.05, 2.05, 7.55, 8.55]
        assert (lab.hub.counts["queue", ""], lab.drops("queue full"), lab.drops("sender paused")) == (5, 3, 1)

    in_lab(body, link=LinkModel(jitter_s=0.0, queue_messages=5))


def test_messages_before_the_handler_are_dropped_and_large_ones_refused() -> None:
    async def body(lab: Lab) -> None:
        MemoryNetwork(lab.hub, peer(7))
        lab.networks[0].send(peer(7), b"too early")
        lab.networks[0].send(peer(1), bytes(MAX_CONTROL_BYTES))
        with pytest.raises(ValueError, match="limit"):
            lab.networks[0].send(peer(1), bytes(MAX_CONTROL_BYTES + 1))
        await asyncio.sleep(1.0)
        assert lab.drops("no handler") == 1
        assert [len(message) for message in lab.messages(1)] == [MAX_CONTROL_BYTES]

    in_lab(body)


def test_a_message_handler_that_raises_ends_the_simulation() -> None:
    async def body(lab: Lab) -> None:
        def bad(sender: PeerId, message: bytes) -> None:
            raise KeyError(message)

        lab.networks[1].on_message(bad)
        lab.networks[0].send(peer(1), b"m")
        await asyncio.sleep(1.0)

    with pytest.raises(CallbackFailed) as caught:
        in_lab(body)
    assert isinstance(caught.value.__cause__, KeyError)


def test_clocks_are_skewed_one_by_one_and_addresses_named() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_skew(peer(1), -2.5)
        await asyncio.sleep(10.0)
        assert [network.unix_time() - START for network in lab.networks] == [10.0, 7.5]
        assert lab.networks[0].addresses() == ["memory://" + "00" * 32]
        lab.networks[0].add_addresses(peer(1), ["memory://nowhere"])
        assert lab.networks[0].links() == {}

    in_lab(body)


# --- records ---


def test_records_expire_in_virtual_time_and_the_later_expiry_wins() -> None:
    async def body(lab: Lab) -> None:
        a, b = lab.networks
        assert await a.put_record("k", "s2", b"old", START + 60)
        assert await a.put_record("k", "s1", b"other", START + 30)
        assert await b.put_record("k", "s2", b"new", START + 90)
        assert not await a.put_record("k", "s2", b"outlasted", START + 90)
        assert not await a.put_record("k", "s3", b"expired", START)
        assert not await a.put_record("k", "s3", b"for ever", float("inf"))
        assert dict(await a.get_records("k")) == {"s1": b"other", "s2": b"new"}
        assert list(await a.get_records("k")) == ["s1", "s2"]
        await asyncio.sleep(30.0)
        assert dict(await b.get_records("k")) == {"s2": b"new"}
        lab.hub.kill(peer(1))
        assert dict(await a.get_records("k")) == {"s2": b"new"}
        await asyncio.sleep(60.0)
        assert dict(await a.get_records("k")) == {}
        assert lab.hub.counts["put-refused", ""] == 3
        with pytest.raises(ValueError, match="limit"):
            await a.put_record("k", "s", bytes(MAX_RECORD_BYTES + 1), START + 900)

    in_lab(body)


def test_records_take_time_to_be_seen_and_may_be_missed() -> None:
    async def body(lab: Lab) -> None:
        a, b = lab.networks
        await a.put_record("k", "s", b"v", START + 1e6)
        found = [len(await a.get_records("k")) for _ in range(200)]
        assert 20 < lab.hub.counts["get-miss", ""] < 60
        assert sum(found) == 200 - lab.hub.counts["get-miss", ""]
        unseen = 0
        for number in range(50):
            await a.put_record("j", str(number), b"v", START + 1e6)
            unseen += str(number) not in await b.get_records("j")
        assert unseen > 15
        await asyncio.sleep(10.0)
        assert len(await b.get_records("j")) > 25

    in_lab(body, link=LinkModel(record_delay_s=10.0, record_miss=0.2))


def test_a_partition_hides_new_records_of_the_other_side_only() -> None:
    async def body(lab: Lab) -> None:
        a, b = lab.networks
        await a.put_record("k", "s", b"before", START + 1e3)
        lab.hub.partition([[peer(0)], [peer(1)]])
        await asyncio.sleep(1.0)
        for number in range(5):
            assert await a.put_record("k", "s", b"mine", START + 2e3 + number)
        assert await b.put_record("k", "s", b"yours", START + 1.5e3)
        assert dict(await a.get_records("k")) == {"s": b"mine"}
        assert dict(await b.get_records("k")) == {"s": b"yours"}
        lab.hub.heal()
        assert dict(await b.get_records("k")) == {"s": b"mine"}

    in_lab(body)


def test_of_two_partitions_each_hides_what_is_stored_while_it_lasts() -> None:
    async def body(lab: Lab) -> None:
        a, _, c = lab.networks
        first = lab.hub.partition([[peer(1)]])
        await asyncio.sleep(1.0)
        await a.put_record("k", "s", b"before the second", START + 1e3)
        await asyncio.sleep(1.0)
        lab.hub.partition([[peer(2)]])
        assert dict(await c.get_records("k")) == {"s": b"before the second"}
        await a.put_record("k", "s", b"in both", START + 2e3)
        lab.hub.heal(first)
        assert dict(await lab.networks[1].get_records("k")) == {"s": b"in both"}
        assert dict(await c.get_records("k")) == {"s": b"before the second"}

    in_lab(body, num_peers=3)


def test_records_do_not_pass_where_one_partition_goes_on_from_another() -> None:
    async def body(lab: Lab) -> None:
        a, b, c = lab.networks
        cuts = [lab.hub.partition([[peer(0)]])]
        await asyncio.sleep(1.0)
        await a.put_record("k", "s", b"behind the cut", START + 1e3)
        for cut in ([peer(1)], [peer(0)], [peer(1), peer(2)]):
            await asyncio.sleep(1.0)
            cuts.append(lab.hub.partition([cut]))
            await asyncio.sleep(1.0)
            lab.hub.heal(cuts.pop(0))
            assert dict(await b.get_records("k")) == {}, "they were never connected since"
        assert dict(await c.get_records("k")) == {"s": b"behind the cut"}, "it was, and is not any more"
        lab.hub.heal(cuts.pop())
        await asyncio.sleep(1.0)
        lab.hub.partition([[peer(0)]])
        assert dict(await b.get_records("k")) == dict(await c.get_records("k")) == {"s": b"behind the cut"}

    in_lab(body, num_peers=3)


def test_a_connection_is_dialled_once_and_kept_for_a_while() -> None:
    async def body(lab: Lab) -> None:
        async def nothing(stream: object) -> None:
            pass

        async def took(number: int) -> float:
            began = lab.elapsed()
            stream = await lab.networks[number].open_stream(peer(1 - number), "x")
            seconds = round(lab.elapsed() - began, 6)
            await stream.close()
            return seconds

        for network in lab.networks:
            network.serve("x", nothing)
        assert [await took(0), await took(0)] == [0.3, 0.0]
        assert await took(1) == 0.3, "only the dialler uses it again"
        await asyncio.sleep(59.0)
        assert await took(0) == 0.0
        await asyncio.sleep(61.0)
        assert await took(0) == 0.3
        lab.hub.kill(peer(1))
        lab.networks[1] = lab.start(1)
        lab.networks[1].serve("x", nothing)
        assert await took(0) == 0.3, "to another process"

    in_lab(body, link=dataclasses.replace(STILL, kept_s=60.0))


def test_that_nobody_listens_is_known_after_one_round_trip() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.kill(peer(1))
        with pytest.raises(NetworkError, match="connection refused"):
            await lab.networks[0].open_stream(peer(1), "x")
        assert lab.elapsed() == 0.1

    in_lab(body)


def test_who_has_ended_is_not_kept_in_memory_by_those_who_had_dialled_it() -> None:
    """With it its whole node would be, and whoever that had dialled: a day of a swarm took gigabytes."""

    async def body(lab: Lab) -> None:
        async def nothing(stream: object) -> None:
            pass

        lab.networks[1].serve("x", nothing)
        await (await lab.networks[0].open_stream(peer(1), "x")).close()
        lab.hub.kill(peer(1))
        gone = weakref.ref(lab.networks.pop(1))
        await asyncio.sleep(60.0)
        gc.collect()
        assert gone() is None

    in_lab(body)


def test_what_a_message_costs_beside_its_way_does_not_delay_bulk() -> None:
    async def body(lab: Lab) -> None:
        async def nothing(stream: object) -> None:
            pass

        lab.networks[1].serve("x", nothing)
        lab.networks[0].send(peer(1), b"late")
        await lab.networks[0].open_stream(peer(1), "x")
        assert lab.elapsed() == 0.3
        await asyncio.sleep(1.0)
        assert lab.inbox[1] == [(0.35, peer(0), b"late")]

    in_lab(body, link=dataclasses.replace(STILL, message_s=0.3))


def test_a_write_to_a_stream_costs_something_beside_its_way() -> None:
    async def body(lab: Lab) -> None:
        came: list[tuple[float, bytes]] = []

        async def serve(stream: Stream) -> None:
            for _ in range(3):
                byte = bytearray(1)
                await stream.readinto(memoryview(byte))
                came.append((lab.elapsed(), bytes(byte)))

        lab.networks[1].serve("x", serve)
        stream = await lab.networks[0].open_stream(peer(1), "x")
        opened = lab.elapsed()
        for byte in (b"a", b"b", b"c"):
            await stream.write(byte)
        await asyncio.sleep(2.0)
        assert [byte for _, byte in came] == [b"a", b"b", b"c"]
        assert [at - opened for at, _ in came] == pytest.approx([0.05 + 0.3] * 3, abs=1e-3)

    in_lab(body, link=dataclasses.replace(STILL, write_s=0.3))


def test_processors_that_all_share_take_in_what_streams_bring_one_after_another() -> None:
    async def body(lab: Lab) -> None:
        processors = Processors(1)
        lab.hub.read_at = lambda now: processors.reserve(0.3, now)
        came: list[float] = []

        async def serve(stream: Stream) -> None:
            for _ in range(3):
                await stream.readinto(memoryview(bytearray(1)))
                came.append(lab.elapsed())

        lab.networks[1].serve("x", serve)
        stream = await lab.networks[0].open_stream(peer(1), "x")
        opened = lab.elapsed()
        for _ in range(3):
            await stream.write(b"a")
        await stream.close()  # the end does not overtake what was written
        assert [at - opened for at in came] == pytest.approx([0.05 + 0.3, 0.05 + 0.6, 0.05 + 0.9], abs=1e-3)

    in_lab(body)
