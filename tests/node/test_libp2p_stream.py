"""A libp2p stream whose connection goes away, or whose other side does not keep to the framing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import uvloop

from farflung.node import frames
from farflung.node.engine import Engine
from farflung.node.libp2p_stream import Libp2pStream
from farflung.node.links import LIBP2P, LinkBook
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.protocol.errors import LimitExceeded, NetworkError, RemoteError

PEER = b"p" * 32


@asynccontextmanager
async def opened(refused: list[RemoteError]) -> AsyncIterator[tuple[Libp2pStream, asyncio.StreamWriter, socket.socket]]:
    """A stream, what it writes through, and the other side."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    stream = Libp2pStream(
        PEER,
        reader,
        writer,
        up=Pacer(None),
        down=Pacer(None),
        meter=LinkBook().meter(PEER, LIBP2P),
        scope=TaskScope(),
        lingering=set(),
        refused=refused.append,
    )
    yield stream, writer, theirs
    await stream.close()
    theirs.close()


def test_writing_to_a_connection_that_was_reset_meanwhile_breaks_the_stream_only() -> None:
    """uvloop raises RuntimeError there, which ended the node."""

    async def main() -> None:
        async with opened([]) as (stream, writer, _):
            writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(NetworkError, match="broke"):
                await stream.write(b"x")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_chunk_above_the_limit_breaks_the_stream_and_is_told() -> None:
    refused: list[RemoteError] = []

    async def main() -> None:
        async with opened(refused) as (stream, _, theirs):
            theirs.sendall(frames.LENGTH.pack(frames.MAX_SEGMENT_BYTES + 1))
            with pytest.raises(NetworkError, match="a bulk chunk of"):
                await stream.readinto(memoryview(bytearray(1)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    [error] = refused
    assert isinstance(error, LimitExceeded) and error.peer == PEER


def test_a_stream_that_has_not_said_its_kind_is_closed_when_the_node_stops() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(Engine._accept_bulk(cast(Engine, None), PEER, reader, writer))
            await asyncio.sleep(0)
            accepting.cancel()
        assert accepting.cancelled() and writer.is_closing()
        theirs.close()

    asyncio.run(main())
