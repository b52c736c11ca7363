"""A call of the libp2p daemon that fails or is given up lets go of its connection to the daemon, which hivemind's client does not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from farflung.node import libp2p
from farflung.node.identity import Identity, libp2p_bytes, libp2p_text
from farflung.node.libp2p import Libp2p
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
