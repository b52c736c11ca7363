"""A call of the libp2p daemon that fails or is given up lets go of its connection to the daemon, which hivemind's client does not."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from farflung.node import libp2p
from farflung.node.identity import Identity, libp2p_bytes, libp2p_text
from farflung.node.libp2p import BULK_ROOM, CONTROL_ROOM, Libp2p, Room
from farflung.node.p2pd import P2pd
from farflung.node.scope import TaskScope
from farflung.protocol.errors import NetworkError

PEER = bytes(range(32))


@asynccontextmanager
async def attached(path: Path, answer: p2pd_pb2.Response | None) -> AsyncIterator[tuple[Libp2p, asyncio.Future[bytes]]]:
    """To a daemon that hears one call and gives `answer`, if any; and what else it is sent until the connection ends."""
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_pbmsg_safe(reader, p2pd_pb2.Request())
        if answer is not None:
            await write_pbmsg(writer, answer)
        ended.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_unix_server(daemon, path)
    yield Libp2p(cast(P2pd, None), cast(P2P, None), DaemonConnector(Multiaddr(f"/unix{path}")), TaskScope(), {}), ended
    server.close()
    await server.wait_closed()


def let_go(path: Path, call: Callable[[Libp2p], Awaitable[object]], answer: p2pd_pb2.Response | None) -> None:
    """Make a call that fails; returns when the daemon saw its end."""

    async def main() -> None:
        async with attached(path, answer) as (host, ended), asyncio.timeout(30):
            with pytest.raises(NetworkError) as failed:
                await call(host)
            assert await ended == b""
            assert failed.value.__traceback__ is not None  # held until now: not the collector closed it

    asyncio.run(main())


def test_a_stream_that_the_daemon_refuses(tmp_path: Path) -> None:
    refusal = p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="no such protocol"))
    let_go(tmp_path / "control", lambda host: host.open(PEER, "/bulk"), refusal)


@pytest.mark.parametrize("name", ["open", "connect", "visible"])
def test_a_daemon_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(libp2p, "DIAL_S", 1.0)
    calls: dict[str, Callable[[Libp2p], Awaitable[object]]] = {
        "open": lambda host: host.open(PEER, "/bulk"),
        "connect": lambda host: host.connect(PEER),
        "visible": lambda host: host.visible(),
    }
    let_go(tmp_path / "control", calls[name], None)


@pytest.mark.parametrize("listed", [[], ["/ip4/1.2.3.4/tcp/5"], ["unknown", "/ip4/1.2.3.4/tcp/5", "/ip6/::1/tcp/5"]])
def test_addresses_that_nobody_here_can_read_are_left_out(tmp_path: Path, listed: list[str]) -> None:
    """A relay may have some of protocols that are newer than the parser."""
    unknown = Multiaddr("/ip4/1.2.3.4/udp/5/quic").to_bytes() + bytes([0xD1, 0x03])  # webtransport
    addresses = [unknown if text == "unknown" else Multiaddr(text).to_bytes() for text in listed]
    key = Identity.generate().public_key

    about = p2pd_pb2.IdentifyResponse(id=libp2p_bytes(key), addrs=addresses)

    async def main() -> list[str]:
        answer = p2pd_pb2.Response(type=p2pd_pb2.Response.OK, identify=about)
        async with attached(tmp_path / "control", answer) as (host, _):
            return await host.visible()

    assert asyncio.run(main()) == [f"{text}/p2p/{libp2p_text(key)}" for text in listed if text != "unknown"]


class Writer:
    """All that is asked of the other end of a stream."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Door:
    """In the place of hivemind's `P2P`: lets streams in, each of which is served until it is let go."""

    def __init__(self, scope: TaskScope, admitted: set[bytes]) -> None:
        self._handlers: dict[str, Any] = {}
        self._admitted = admitted
        self._served: list[asyncio.Event] = []
        self.host = Libp2p(cast(P2pd, None), cast(P2P, self), cast(DaemonConnector, None), scope, {})

    async def add_binary_stream_handler(self, protocol: str, handle: Any) -> None:
        self._handlers[protocol] = handle

    async def serve(self, protocol: str, room: Room) -> None:
        await self.host.serve(protocol, self._accept, room, self._admitted.__contains__)

    async def _accept(self, peer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.append(gone := asyncio.Event())
        await gone.wait()

    async def opens(self, protocol: str, peer: bytes, count: int) -> int:
        """How many of so many streams of a peer stay open."""
        writers = [Writer() for _ in range(count)]
        info = SimpleNamespace(peer_id=SimpleNamespace(to_bytes=lambda: libp2p_bytes(peer)))
        for writer in writers:
            await self._handlers[protocol](info, None, writer)
        await asyncio.sleep(0)
        return sum(not writer.closed for writer in writers)

    async def all_gone(self) -> None:
        for gone in self._served:
            gone.set()
        while self.host._incoming:
            await asyncio.sleep(0)


def in_door(body: Callable[[Door], Awaitable[None]], *admitted: bytes) -> None:
    async def main() -> None:
        scope = TaskScope()
        await scope.open()
        door = Door(scope, set(admitted))
        await door.serve("control", CONTROL_ROOM)
        await door.serve("bulk", BULK_ROOM)
        await body(door)
        await scope.close()

    asyncio.run(main())


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_stranger_holds_no_bulk_streams_and_few_control_streams() -> None:
    """One held 4,096, and nobody else could say anything any more."""

    async def body(door: Door) -> None:
        assert await door.opens("bulk", key(1), 5000) == 0
        assert await door.opens("control", key(1), 5000) == libp2p.CONTROL_OF_ONE
        assert len(door.host._incoming) == libp2p.CONTROL_OF_ONE
        assert await door.opens("control", key(2), 1) == 1

    in_door(body)


def test_strangers_with_many_keys_leave_room_for_those_who_are_admitted() -> None:
    async def body(door: Door) -> None:
        taken = sum([await door.opens("control", key(number), 4) for number in range(1000, 2000)])
        assert taken == CONTROL_ROOM.of_strangers
        assert await door.opens("control", key(1), 5) == libp2p.CONTROL_OF_ONE
        assert await door.opens("bulk", key(1), 1) == 1
        await door.all_gone()
        assert await door.opens("control", key(3000), 4) == 4

    in_door(body, key(1))


def test_bulk_and_control_have_rooms_of_their_own() -> None:
    members = [key(number) for number in range(100)]

    async def body(door: Door) -> None:
        assert [await door.opens("bulk", member, 100) for member in members] == [64] * 32 + [0] * 68
        assert [await door.opens("control", member, 1) for member in members] == [1] * 100
        await door.all_gone()
        assert await door.opens("bulk", members[-1], 100) == 64

    in_door(body, *members)


def test_who_has_been_admitted_is_no_stranger_any_more_though_its_stream_stays() -> None:
    """Members are admitted by what comes over their streams: a thousand of them left no newcomer in for as long as they stayed."""
    members = [key(number) for number in range(1000, 1000 + CONTROL_ROOM.of_strangers)]

    async def body(door: Door) -> None:
        for member in members:
            assert await door.opens("control", member, 1) == 1
        assert await door.opens("control", key(1), 1) == 0
        door._admitted.update(members[:100])
        assert sum([await door.opens("control", key(number), 1) for number in range(200)]) == 100
        await door.all_gone()
        assert sum([await door.opens("control", key(number), 4) for number in range(4000, 5000)]) == len(members)

    in_door(body)


def test_nobody_comes_in_when_we_close() -> None:
    async def body(door: Door) -> None:
        door.host.begin_close()
        assert await door.opens("control", key(1), 1) == 0

    in_door(body)


def test_the_engine_comes_without_a_word_whatever_torch_says_of_it() -> None:
    program = "from farflung.node import libp2p; libp2p._import_hivemind()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
