"""What is far away arrives late, in order and whole; what is cut arrives not at all."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node.tls_lab import ask, echo, end, run, until

from farflung.node.distance import DelayLine, Distances, FarLink, LateMail, LateTransport
from farflung.sims import clock

NEAR, FAR = b"n" * 32, b"f" * 32


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), min_size=1, max_size=30))
def test_a_line_keeps_the_order_and_hands_on_nothing_early(plan: list[tuple[float, float]]) -> None:
    due: list[float] = []
    seen: list[tuple[int, float]] = []

    async def main() -> None:
        loop, line = asyncio.get_running_loop(), DelayLine()
        for number, (pause, delay) in enumerate(plan):
            await asyncio.sleep(pause)
            due.append(max([loop.time() + delay, *due[-1:]]))
            line.put(loop.time() + delay, lambda number=number: seen.append((number, loop.time())))  # type: ignore[misc]
        await asyncio.sleep(10.0)

    clock.run(main())
    assert [number for number, _ in seen] == list(range(len(plan)))
    assert all(wanted - 0.0011 <= at <= wanted + 0.0011 for wanted, (_, at) in zip(due, seen, strict=True))


def test_mail_comes_as_late_as_its_peer_is_far_and_in_order() -> None:
    came: list[tuple[bytes, bytes, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        mail = LateMail(
            lambda peer, message: came.append((peer, message, loop.time() - began)),
            FarLink(Distances(one_way_s={FAR: 0.5}, jitter_s=0.1)),
        )
        for number in range(20):
            mail.send(FAR, b"%d" % number)
        mail.send(NEAR, b"hello")
        await asyncio.sleep(1.0)

    clock.run(main())
    assert came[0][:2] == (NEAR, b"hello") and came[0][2] <= 0.102
    assert [message for _, message, _ in came[1:]] == [b"%d" % n for n in range(20)]
    assert all(0.499 <= at <= 0.602 for _, _, at in came[1:])


def test_everything_shares_one_uplink_without_a_burst() -> None:
    came: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        link = FarLink(Distances(one_way_s={FAR: 0.5}, up_bytes_per_s=1000.0))
        mail = LateMail(lambda peer, message: came.append(loop.time() - began), link)
        wire = Wire()
        late = LateTransport(wire, link, FAR)
        late.write(bytes(2000))
        mail.send(NEAR, bytes(100))
        late.write(bytes(400))
        mail.send(FAR, bytes(100))
        for seconds, count in ((2.4, 0), (2.6, 1), (2.9, 1), (3.1, 2)):
            await asyncio.sleep(began + seconds - loop.time())
            assert len(wire.said) == count

    clock.run(main())
    assert came == pytest.approx([2.1, 3.1], abs=0.002)


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said.append(bytes(data))

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.said or "abort" in self.said


@pytest.mark.parametrize(("how", "left"), [("close", [b"ab", b"cd", "close"]), ("abort", ["abort"])])
def test_an_end_comes_after_what_was_written_and_a_cut_at_once(how: str, left: Sequence[bytes | str]) -> None:
    wire = Wire()

    async def main() -> None:
        late = LateTransport(wire, FarLink(Distances(one_way_s={FAR: 0.2})), FAR)
        buffer = bytearray(b"ab")
        late.write(buffer)
        buffer[:] = b"xx"  # its owner may use it again
        late.writelines((b"c", b"d"))
        getattr(late, how)()
        assert late.is_closing()
        await asyncio.sleep(1.0)

    clock.run(main())
    assert wire.said == left


def test_a_stream_from_far_away_is_whole_and_late() -> None:
    async def main() -> None:
        async with end(connections=1) as client, end(connections=1) as server:  # none still being dialled at the end
            for one, other in ((client, server), (server, client)):
                one.carrier._link = FarLink(Distances(one_way_s={other.key: 0.02}))
            server.handlers["echo"] = echo
            loop = asyncio.get_running_loop()
            for ways in (8, 2):  # six for the connection, which is then used again, and there and back
                began = loop.time()
                data = bytes(range(256)) * (4096 if ways == 8 else 1)
                assert await ask(client, server, data) == data
                assert loop.time() - began >= ways * 0.02 - 0.005
                await until(lambda: client.carrier.connected(server.key))
            assert not client.problems and not server.problems

    run(main)
