"""Bulk streams: content, pace, back-pressure, and every way to end."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.errors import Malformed, NetworkError
from farflung.sims.clock import CallbackFailed, VirtualLoop, process_context, run
from farflung.sims.hub import MemoryHub
from farflung.sims.links import Disturbance, LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.streams import CHUNK_BYTES, MemoryStream

T = TypeVar("T")

A, B, C = (bytes([number]) * 32 for number in range(3))
FAST = LinkModel(up_bytes_per_s=float("inf"), down_bytes_per_s=float("inf"))
MEGABYTE = LinkModel(up_bytes_per_s=1e6, down_bytes_per_s=1e6, window_bytes=1 << 19)


class Lab:
    """Three peers; B and C accept streams of kind `x`, which wait in `accepted`."""

    def __init__(self, link: LinkModel) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.hub = MemoryHub(loop, random.Random(0), link)
        self.networks: dict[PeerId, Network] = {p: MemoryNetwork(self.hub, p) for p in (A, B, C)}
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue(8)
        self.finish = asyncio.Event()
        for network in (self.networks[B], self.networks[C]):
            network.serve("x", self.accept)

    async def accept(self, stream: Stream) -> None:
        await self.accepted.put(stream)
        await self.finish.wait()

    async def pair(self, client: PeerId = A, server: PeerId = B) -> tuple[Stream, Stream]:
        """Both ends of a new stream."""
        return await self.networks[client].open_stream(server, "x"), await self.accepted.get()


def in_lab(body: Callable[[Lab], Awaitable[T]], link: LinkModel = FAST) -> T:
    async def main() -> T:
        return await body(Lab(link))

    return run(main())


async def read(stream: Stream, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await stream.readinto(memoryview(buffer))
    return bytes(buffer)


async def seconds(lab: Lab, *work: Awaitable[object]) -> float:
    began = lab.hub.now()
    await asyncio.gather(*work)
    return lab.hub.now() - began


@settings(max_examples=60, deadline=None)
@given(
    writes=st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=12),
    reads=st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=12),
    window_bytes=st.integers(1, 4 * CHUNK_BYTES) | st.just(1000),
    seed=st.integers(0, 1000),
)
def test_content_is_intact_whatever_the_sizes(
    writes: list[int], reads: list[int], window_bytes: int, seed: int
) -> None:
    num_bytes = sum(writes)
    if window_bytes < 500:
        window_bytes += 500  # a chunk per byte only makes the test slow
    content = random.Random(seed).randbytes(num_bytes)

    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        assert isinstance(client, MemoryStream)
        most = 0

        async def write_all() -> None:
            position = 0
            for size in writes:
                await client.write(memoryview(content)[position : position + size])
                position += size
            await client.close()

        async def read_all() -> bytes:
            nonlocal most
            got = bytearray()
            for size in [*reads, num_bytes]:
                got += await read(server, min(size, num_bytes - len(got)))
                most = max(most, client.unread_bytes)
                await asyncio.sleep(0.01)
            return bytes(got)

        async with asyncio.TaskGroup() as group:
            group.create_task(write_all())
            reader = group.create_task(read_all())
        assert reader.result() == content
        assert most <= window_bytes
        with pytest.raises(NetworkError, match="ended 1 bytes too early"):
            await read(server, 1)

    rng = random.Random(seed)
    rate = rng.choice([1e5, 1e6, float("inf")])
    in_lab(
        body,
        LinkModel(latency_s=rng.random() / 2, up_bytes_per_s=rate, down_bytes_per_s=1e6, window_bytes=window_bytes),
    )


def test_opening_takes_three_round_trips_and_both_ends_know_each_other() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        assert lab.hub.now() == pytest.approx(0.3)  # at 50 ms: TCP, TLS, READY
        assert (client.peer, server.peer) == (B, A)
        await server.write(b"hello")
        assert await read(client, 5) == b"hello"
        await asyncio.gather(client.close(), server.close())
        assert lab.hub.counts["stream-end", "x"] == 2
        assert not lab.hub._connections

    in_lab(body)


def test_bulk_takes_the_time_of_the_narrower_link() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_link(B, LinkModel(up_bytes_per_s=4e6, down_bytes_per_s=2e6))
        for (client, server), rate in (((A, B), 1e6), ((B, A), 1e6), ((B, C), 1e6), ((C, B), 1e6)):
            near, far = await lab.pair(client, server) if server != A else (await lab.pair(A, client))[::-1]
            took = await seconds(lab, near.write(bytes(4_000_000)), read(far, 4_000_000))
            assert took == pytest.approx(4e6 / rate, rel=0.1)
        measured = lab.networks[A].links()[B]
        assert measured.up_bytes_per_s == pytest.approx(1e6, rel=0.1)
        assert measured.down_bytes_per_s == pytest.approx(1e6, rel=0.1)
        assert (measured.sent_bytes, measured.received_bytes, measured.carrier) == (
            4_000_000,
            4_000_000,
            "memory",
        )

    in_lab(body, MEGABYTE)


def test_streams_share_an_uplink_and_a_downlink_by_turns() -> None:
    async def body(lab: Lab) -> None:
        lab.hub.set_link(C, FAST)
        to_b, from_a = await lab.pair(A, B)
        to_c, also_from_a = await lab.pair(A, C)
        size, began = 2_000_000, lab.hub.now()

        async def done_at(stream: Stream) -> float:
            await read(stream, size)
            return lab.hub.now() - began

        async with asyncio.TaskGroup() as group:
            group.create_task(to_b.write(bytes(size)))
            group.create_task(to_c.write(bytes(size)))
            ends = [group.create_task(done_at(stream)) for stream in (from_a, also_from_a)]
        first, second = sorted(end.result() for end in ends)
        assert second == pytest.approx(4.1, rel=0.1)
        assert second - first < 0.3  # neither waited for the whole of the other
        down, up = await lab.pair(C, B)
        to_b2, from_a2 = await lab.pair(A, B)
        took = await seconds(
            lab, down.write(bytes(size)), to_b2.write(bytes(size)), read(up, size), read(from_a2, size)
        )
        assert took == pytest.approx(4.1, rel=0.1)

    in_lab(body, MEGABYTE)


def test_back_pressure_stops_the_writer_until_somebody_reads() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        assert isinstance(client, MemoryStream)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(client.write(bytes(1 << 21)))
            await asyncio.sleep(1000.0)
            assert not writing.done()
            assert client.unread_bytes == 1 << 19
            await read(server, 1 << 20)
            await asyncio.sleep(1000.0)
            assert not writing.done()
            await read(server, 1 << 20)
        assert client.unread_bytes == 0

    in_lab(body, MEGABYTE)


def test_a_kill_resets_the_other_end_one_trip_later() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        bystander, other = await lab.pair(A, C)
        await server.write(b"unread")
        await asyncio.sleep(1.0)
        killed_at = lab.hub.now()
        lab.hub.kill(B)
        with pytest.raises(NetworkError, match="ended"):
            await server.write(b"x")
        with pytest.raises(NetworkError, match="reset"):
            await read(client, 100)  # the six bytes that were unread do not help
        assert lab.hub.now() - killed_at == pytest.approx(0.05)
        with pytest.raises(NetworkError, match="reset"):
            await client.write(b"x")
        await client.close()
        await server.close()
        assert lab.hub.counts["stream-broken", "x"] == 1
        with pytest.raises(NetworkError, match="connection refused"):
            await lab.networks[A].open_stream(B, "x")
        await other.write(b"ok")
        assert await read(bystander, 2) == b"ok"

    in_lab(body)


def test_a_writer_that_waits_is_told_of_the_kill() -> None:
    async def body(lab: Lab) -> None:
        client, _ = await lab.pair()

        async def write() -> None:
            with pytest.raises(NetworkError, match="reset"):
                await client.write(bytes(1 << 24))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            await asyncio.sleep(100.0)
            lab.hub.kill(B)

    in_lab(body)


def test_a_machine_that_loses_power_while_it_is_dialled_does_not_answer() -> None:
    async def body(lab: Lab) -> None:
        began = lab.hub.now()
        lab.hub.at(began + 0.01, lambda: lab.hub.kill(B, reset=False))
        with pytest.raises(NetworkError, match="no answer"):
            await lab.networks[A].open_stream(B, "x")
        assert lab.hub.now() - began == pytest.approx(10.0)

    in_lab(body)


def test_power_loss_and_a_cut_show_only_after_the_timeout() -> None:
    async def body(lab: Lab) -> None:
        to_b, _ = await lab.pair(A, B)
        to_c, from_a = await lab.pair(A, C)
        began = lab.hub.now()
        lab.hub.kill(B, reset=False)
        lab.hub.partition([[A], [C]])
        lab.hub.heal()  # brings no reset from a dead machine
        lab.hub.partition([[A], [C]])

        async def broken_after(stream: Stream) -> float:
            with pytest.raises(NetworkError, match="no answer"):
                await read(stream, 1)
            return lab.hub.now() - began

        for after in await asyncio.gather(*map(broken_after, (to_b, to_c, from_a))):
            assert 30.0 <= after <= 60.0
        for away in (B, C):
            began = lab.hub.now()
            with pytest.raises(NetworkError, match="no answer"):
                await lab.networks[A].open_stream(away, "x")
            assert lab.hub.now() - began == pytest.approx(10.0)

    in_lab(body)


def test_a_short_cut_only_stalls_and_nothing_is_lost() -> None:
    content = random.Random(1).randbytes(1_000_000)

    async def body(lab: Lab) -> None:
        client, server = await lab.pair()

        async def cut() -> None:
            await asyncio.sleep(0.3)
            lab.hub.partition([[A], [B]])
            await asyncio.sleep(20.0)
            lab.hub.heal()
            lab.hub.disturb(Disturbance(delay_s=0.5))

        async def send() -> None:
            await client.write(content)
            await client.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(cut())
            group.create_task(send())
            assert await read(server, len(content)) == content
        assert lab.hub.now() > 20.0
        assert lab.hub.counts["stream-broken", "x"] == 0

    in_lab(body, MEGABYTE)


def test_a_kill_behind_a_cut_shows_when_the_link_heals() -> None:
    async def body(lab: Lab) -> None:
        client, _ = await lab.pair()
        lab.hub.partition([[A], [B]])
        lab.hub.kill(B)
        await asyncio.sleep(10.0)
        lab.hub.heal()
        with pytest.raises(NetworkError, match="reset"):
            await read(client, 1)
        assert lab.hub.now() == pytest.approx(10.35)

    in_lab(body)


def test_close_hands_over_everything_then_both_sides_end() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        await client.write(b"all of it")
        await client.close()
        await client.close()
        with pytest.raises(NetworkError, match="closed by us"):
            await client.write(b"x")
        with pytest.raises(NetworkError, match="closed by the other side"):
            await server.write(b"too late")
        assert await read(server, 9) == b"all of it"
        lab.finish.set()
        await asyncio.sleep(1.0)
        assert not lab.hub._connections

    in_lab(body)


def test_close_over_a_cut_link_gives_up_with_the_stream() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        lab.hub.partition([[A], [B, C]])
        took = await seconds(lab, client.close(), server.close())
        assert 30.0 <= took <= 60.0
        client, server = await lab.pair(B, C)  # on the other side, nothing is cut
        lab.hub.heal()
        lab.hub.partition([[A], [B], [C]])
        async with asyncio.TaskGroup() as group:
            closing = [group.create_task(stream.close()) for stream in (client, server)]
            await asyncio.sleep(5.0)
            assert not any(task.done() for task in closing)
            lab.hub.heal()
        assert not lab.hub._connections

    in_lab(body)


def test_closing_a_network_ends_its_streams_and_its_handlers() -> None:
    async def body(lab: Lab) -> None:
        client, _ = await lab.pair()
        await lab.networks[B].close()
        await lab.networks[B].close()
        with pytest.raises(NetworkError, match="reset"):
            await read(client, 1)
        assert lab.hub.running() == [A, C]

    in_lab(body)


def test_streams_of_a_kind_nobody_serves_are_refused() -> None:
    async def body(lab: Lab) -> None:
        with pytest.raises(NetworkError, match="kind not served"):
            await lab.networks[A].open_stream(B, "y")
        assert lab.hub.counts["refuse", "kind not served"] == 1

    in_lab(body)


def test_a_handler_may_fail_with_our_errors_and_with_no_others() -> None:
    async def refuses(stream: Stream) -> None:
        await read(stream, 1)
        raise Malformed("no", peer=stream.peer)

    async def breaks(stream: Stream) -> None:
        await read(stream, 1)
        raise ZeroDivisionError

    async def body(lab: Lab) -> None:
        lab.networks[B].serve("refuses", refuses)
        lab.networks[B].serve("breaks", breaks)
        for kind in ("refuses", "breaks"):
            stream = await lab.networks[A].open_stream(B, kind)
            await stream.write(b"x")
            with pytest.raises(NetworkError, match="too early"):
                await read(stream, 1)
            assert lab.hub.counts["handler-failed", "refuses"] == 1

    with pytest.raises(CallbackFailed) as caught:
        in_lab(body)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_stopped_reader_holds_the_writer_up() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read(server, 1 << 21), context=process_context(B))
            writing = group.create_task(client.write(bytes(1 << 21)))
            await asyncio.sleep(0.5)
            lab.hub.pause(B)
            await asyncio.sleep(1000.0)
            assert not reading.done() and not writing.done()
            with pytest.raises(NetworkError, match="no answer"):
                await lab.networks[A].open_stream(B, "x")
            lab.hub.resume(B)

    in_lab(body, MEGABYTE)


def test_cancelling_a_read_or_a_write_leaves_nobody_waiting() -> None:
    async def body(lab: Lab) -> None:
        client, server = await lab.pair()
        assert isinstance(client, MemoryStream)
        for work in (read(client, 1), client.write(bytes(1 << 24))):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.0):
                    await work
        assert not client.changed._waiters
        await server.close()
        with pytest.raises(NetworkError, match="closed by the other side"):
            await client.write(b"x")

    in_lab(body)


def test_what_is_about_bulk_takes_as_long_as_it_is_where_bytes_of_bulk_stand_for_more() -> None:
    link = LinkModel(up_bytes_per_s=1000.0, down_bytes_per_s=1e9, latency_s=0.0, byte_means=100.0, window_bytes=300)

    async def body(lab: Lab) -> tuple[list[float], float]:
        ours, theirs = await lab.pair()
        now, took = asyncio.get_running_loop().time, []
        for data, overhead in ((bytes(1000), 0), (bytes(1000), 1000), (bytes(1000), 400)):
            began = now()
            async with asyncio.TaskGroup() as group:
                group.create_task(read(theirs, len(data)))
                await ours.write(data, overhead=overhead)
            took.append(now() - began)
        sent = lab.networks[A].links()[B].sent_bytes
        assert lab.networks[A].delivered_bytes() == sent == lab.networks[B].received_bytes()
        lab.finish.set()
        return took, sent

    took, sent = in_lab(body, link)
    assert took == pytest.approx([1.0, 0.01, 0.604], rel=1e-3)
    assert sent == (1000 + 10 + 604)


@pytest.mark.parametrize("down", [7.5e7, 1.25e8])
def test_small_pieces_on_fast_links_keep_their_order_whatever_the_time_of_day(down: float) -> None:
    """What the last ones take may be less than a clock of that size can tell."""
    link = LinkModel(up_bytes_per_s=1.25e7, down_bytes_per_s=down, latency_s=0.005)

    async def body(lab: Lab) -> None:
        await asyncio.sleep(1.7e9)
        ours, theirs = await lab.pair()
        for size in range(20, 92, 4):
            await ours.write(b"1" * size, overhead=size)
            await ours.write(b"2" * 8, overhead=8)
            assert await read(theirs, size + 8) == b"1" * size + b"2" * 8
        lab.finish.set()

    in_lab(body, link)
