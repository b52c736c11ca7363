"""Control messages over a fake libp2p: bounds, drops, reconnection, limits."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from unittest.mock import create_autospec

import pytest

from farflung.node import frames, mail
from farflung.node.links import LinkBook
from farflung.node.mail import Mail
from farflung.node.scope import TaskScope
from farflung.protocol import limits
from farflung.protocol.errors import LimitExceeded, NetworkError, RemoteError
from farflung.sims import clock

PEER = b"p" * 32


class Wire:
    """Opens loopback TCP streams to a server of the test, or fails."""

    def __init__(self) -> None:
        self.reachable = True
        self.dials = 0
        self.refused: list[RemoteError] = []
        self.links = LinkBook()
        self.accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.port = 0

    async def open(self, peer: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.dials += 1
        if not self.reachable:
            raise NetworkError("unreachable")
        return await asyncio.open_connection("127.0.0.1", self.port)


def run(body: Callable[[Mail, Wire], Awaitable[None]]) -> None:
    async def main() -> None:
        wire, scope = Wire(), TaskScope()
        server = await asyncio.start_server(lambda r, w: wire.accepted.put_nowait((r, w)), "127.0.0.1", 0)
        wire.port = server.sockets[0].getsockname()[1]
        await scope.open()
        async with asyncio.timeout(20):
            await body(Mail(scope, wire.open, wire.links, wire.refused.append), wire)
        await scope.close()
        while not wire.accepted.empty():
            wire.accepted.get_nowait()[1].close()
        server.close()

    asyncio.run(main())


async def read(reader: asyncio.StreamReader) -> bytes:
    (length,) = frames.LENGTH.unpack(await reader.readexactly(4))
    return await reader.readexactly(length)


def test_one_stream_in_order() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        for index in range(50):
            box.send(PEER, str(index).encode())
        reader, writer = await wire.accepted.get()
        assert [await read(reader) for _ in range(50)] == [str(i).encode() for i in range(50)]
        box.send(PEER, b"later")
        assert await read(reader) == b"later"
        assert wire.dials == 1 and box.stats.sent == 51
        assert (
            wire.links.stats()[PEER].sent_bytes == 10 * 1 + 40 * 2 + 5 and not wire.links.stats()[PEER].up_bytes_per_s
        )
        writer.close()

    run(body)


def test_full_queue_drops_the_oldest() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        for index in range(mail.MAX_QUEUED + 10):
            box.send(PEER, str(index).encode())
        assert box.stats.dropped_full == 10
        reader, writer = await wire.accepted.get()
        assert await read(reader) == b"10"
        for _ in range(10):
            box.send(b"q" * 32, bytes(limits.MAX_CONTROL_BYTES))
        assert box._outboxes[b"q" * 32].size <= mail.MAX_QUEUED_BYTES
        _, other = await wire.accepted.get()
        other.close()
        writer.close()

    run(body)


def test_broken_stream_is_opened_again() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        box.send(PEER, b"one")
        reader, writer = await wire.accepted.get()
        assert await read(reader) == b"one"
        writer.transport.abort()
        while wire.dials < 2:  # what is written before the break is noticed may be lost
            box.send(PEER, b"two")
            await asyncio.sleep(0.01)
        reader, writer = await wire.accepted.get()
        assert await read(reader) == b"two"
        writer.close()

    run(body)


def test_unreachable_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FIRST_PAUSE_S", 0.01)

    async def body(box: Mail, wire: Wire) -> None:
        wire.reachable = False
        box.send(PEER, b"kept")
        while wire.dials < 3:
            await asyncio.sleep(0.01)
        wire.reachable = True
        reader, writer = await wire.accepted.get()
        assert await read(reader) == b"kept"
        writer.close()

    run(body)


class Crossing:
    """Two hosts with 50 ms between them, as libp2p has them: who dials while the other's dial is on its way fails with it, and then
    for five seconds whatever it tries."""

    def __init__(self) -> None:
        self.dialled: dict[bytes, float] = {}
        self.barred_until: dict[bytes, float] = {}
        self.connected = asyncio.Event()

    async def open(self, me: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        now = asyncio.get_running_loop().time
        if not self.connected.is_set():
            if now() < self.barred_until.get(me, 0.0):
                raise NetworkError("dial backoff")
            self.dialled[me] = began = now()
            await asyncio.sleep(0.1)
            if any(abs(at - began) < 0.05 for host, at in self.dialled.items() if host != me):
                self.barred_until[me] = now() + 5.0
                raise NetworkError("both sides began the handshake")
            self.connected.set()
        return asyncio.StreamReader(), create_autospec(asyncio.StreamWriter, instance=True)


def test_hosts_that_dial_each_other_at_once_get_through_later() -> None:
    """Every pause the same on both sides, they met again each time: a pair of members never heard of each other."""
    random.seed(0)

    async def main() -> None:
        wire, scope = Crossing(), TaskScope()
        await scope.open()
        for me in (b"a" * 32, b"b" * 32):
            Mail(scope, lambda peer, me=me: wire.open(me), LinkBook(), lambda error: None).send(PEER, b"hello")
        async with asyncio.timeout(60):
            await wire.connected.wait()
        await scope.close()

    clock.run(main())


def test_old_messages_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mail, "MAX_AGE_S", 0.05)

    async def body(box: Mail, wire: Wire) -> None:
        wire.reachable = False
        box.send(PEER, b"old")
        while not box.stats.dropped_old:
            await asyncio.sleep(0.01)
        assert PEER not in box._outboxes or not box._outboxes[PEER].queue

    run(body)


@pytest.mark.parametrize("size", [0, limits.MAX_CONTROL_BYTES + 1])
def test_our_own_messages_have_limits(size: int) -> None:
    async def body(box: Mail, wire: Wire) -> None:
        with pytest.raises(ValueError):
            box.send(PEER, bytes(size))

    run(body)


def test_incoming_limits() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        received: list[tuple[bytes, bytes]] = []
        box.on_message(lambda peer, message: received.append((peer, message)))
        _, ours = await asyncio.open_connection("127.0.0.1", wire.port)
        reader, writer = await wire.accepted.get()
        ours.write(frames.LENGTH.pack(2) + b"ok" + frames.LENGTH.pack(limits.MAX_CONTROL_BYTES + 1))
        await box.accept(PEER, reader, writer)  # returns: the stream was cut
        assert received == [(PEER, b"ok")]
        assert wire.links.stats()[PEER].received_bytes == len(b"ok"), "what was refused was not read"
        [error] = wire.refused
        assert isinstance(error, LimitExceeded) and error.peer == PEER
        ours.close()

    run(body)


def test_flush_waits_until_the_peer_has_read_all() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        box.send(PEER, b"said long ago")
        reader, writer = await wire.accepted.get()
        assert await read(reader) == b"said long ago"
        box.send(PEER, b"last words")
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(box.flush(20))
            assert await read(reader) == b"last words"
            assert await reader.readexactly(4) == frames.CONTROL_END
            await asyncio.sleep(0.05)
            assert not flushing.done()
            writer.close()  # as `accept` does
        assert not box._outboxes

    run(body)


def test_flush_gives_up_on_a_silent_peer() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        box.send(PEER, b"hello")
        _, writer = await wire.accepted.get()
        await box.flush(0.05)
        writer.close()

    run(body)


def test_accept_answers_the_end_by_closing() -> None:
    async def body(box: Mail, wire: Wire) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", wire.port)
        reader, writer = await wire.accepted.get()
        ours.write(frames.LENGTH.pack(2) + b"ok" + frames.CONTROL_END)
        await box.accept(PEER, reader, writer)
        assert box.stats.received == 1
        assert await theirs.read() == b""
        ours.close()

    run(body)


@pytest.mark.parametrize(
    ("said", "waited_s"),
    [
        (b"", mail.SILENT_S),
        (frames.LENGTH.pack(100), mail.MESSAGE_S),
        (frames.LENGTH.pack(limits.MAX_CONTROL_BYTES) + b"the beginning", mail.MESSAGE_S),
    ],
)
def test_a_message_that_does_not_end_is_waited_for_so_long(said: bytes, waited_s: float) -> None:
    """Each held a stream for ever, and up to a megabyte with it."""

    async def main() -> None:
        wire, now = Wire(), asyncio.get_running_loop().time
        box = Mail(TaskScope(), wire.open, wire.links, wire.refused.append)
        reader, writer = asyncio.StreamReader(), create_autospec(asyncio.StreamWriter, instance=True)
        reader.feed_data(frames.LENGTH.pack(2) + b"ok" + said)
        began = now()
        await box.accept(PEER, reader, writer)
        assert box.stats.received == 1 and not wire.refused
        assert now() - began == pytest.approx(waited_s)
        writer.close.assert_called_once()

    clock.run(main())
