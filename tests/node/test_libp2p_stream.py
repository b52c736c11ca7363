"""A libp2p stream whose connection goes away while something is written to it."""

import asyncio
import socket

import pytest
import uvloop

from farflung.node.libp2p_stream import Libp2pStream
from farflung.node.links import LIBP2P, LinkBook
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.protocol.errors import NetworkError

PEER = b"p" * 32


def test_writing_to_a_connection_that_was_reset_meanwhile_breaks_the_stream_only() -> None:
    """uvloop raises RuntimeError there, which ended the node."""

    async def main() -> None:
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
        )
        writer.transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(NetworkError, match="broke"):
            await stream.write(b"x")
        await stream.close()
        theirs.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
