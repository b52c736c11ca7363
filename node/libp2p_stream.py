"""A bulk stream over libp2p: the carrier that works everywhere, through relays and hole punching too.

Chunks have a length in front and a length of 0 ends the stream, because p2pd closes both directions when one side
closes its socket: an end has to be said and heard before the stream may be let go.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from farflung.node import frames
from farflung.node.links import Meter
from farflung.node.network import PeerId
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.protocol.errors import NetworkError, RemoteError

LINGER_S = 120.0
"""How long a closed stream may take to hand over what is queued and to hear the other side's end."""
READ_BYTES = 256 << 10
MAX_DISCARD_BYTES = 4 << 20
"""Bytes taken and dropped after we closed a stream that the other side still writes."""


class Libp2pStream:
    """Implements `network.Stream`."""

    def __init__(
        self,
        peer: PeerId,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        up: Pacer,
        down: Pacer,
        meter: Meter,
        scope: TaskScope,
        lingering: set[asyncio.Task[None]],
        refused: Callable[[RemoteError], None],
    ) -> None:
        self._peer = peer
        self._reader = reader
        self._writer = writer
        self._up = up
        self._down = down
        self._meter = meter
        self._scope = scope
        self._lingering = lingering
        self._refused = refused
        self._writing = asyncio.Lock()
        self._left = 0  # bytes of the current chunk still to read
        self._ended = False
        self._closed = False
        self._broken: str | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def write(self, data: bytes | bytearray | memoryview, *, follows: int = 0, overhead: int = 0) -> None:
        """See `network.Stream.write`. A cancelled write breaks the stream."""
        view = memoryview(data).cast("B")
        async with self._writing:
            start = 0
            while start < len(view):
                self._check()
                chunk = view[start : start + self._up.chunk_bytes]
                begun = monotonic()
                try:
                    await self._up.take(len(chunk))
                    if (
                        self._writer.is_closing()
                    ):  # the other side reset it meanwhile; uvloop raises RuntimeError for a write then
                        raise ConnectionResetError("closed by the other side")
                    # Joined, so copied: the transport may keep what it cannot send at once.
                    self._writer.write(b"".join((frames.LENGTH.pack(len(chunk)), chunk)))
                    await self._writer.drain()
                except OSError as error:
                    self._break(f"the connection broke: {error}")
                    self._check()
                except asyncio.CancelledError:
                    self._break("a write was cancelled")
                    raise
                start += len(chunk)
                self._meter.sent(len(chunk), monotonic() - begun)

    async def readinto(self, buffer: memoryview) -> None:
        """See `network.Stream.readinto`. A cancelled read breaks the stream."""
        view = buffer.cast("B")
        filled = 0
        while filled < len(view):
            self._check()
            begun = monotonic()
            try:
                size = await self._read_some(view[filled:])
            except (OSError, asyncio.IncompleteReadError) as error:
                self._break(f"the connection broke: {error}")
                self._check()
                raise AssertionError from error  # _check raised
            except RemoteError as error:
                self._refused(error)
                self._break(error.reason)
                raise NetworkError(str(error)) from error
            except asyncio.CancelledError:
                self._break("a read was cancelled")
                raise
            filled += size
            self._meter.received(size, monotonic() - begun)

    async def close(self) -> None:
        """See `network.Stream.close`. Returns at once."""
        if self._closed:
            return
        self._closed = True
        if self._broken is None and not self._writer.is_closing():
            self._writer.write(frames.LENGTH.pack(0))
            task = self._scope.start(self._linger(), "end of a libp2p stream")
            if task is None:
                self._writer.close()
            else:
                self._lingering.add(task)
                task.add_done_callback(self._lingering.discard)

    async def _read_some(self, view: memoryview) -> int:
        if not self._left:
            await self._next_chunk()
            if self._ended:
                raise NetworkError(f"stream from {self._peer.hex()[:12]}: the stream ended")
        size = min(len(view), self._left, READ_BYTES, self._down.chunk_bytes)
        await self._down.take(size)
        data = await self._reader.read(size)
        if not data:
            raise ConnectionResetError("closed by the other side")
        view[: len(data)] = data
        self._left -= len(data)
        return len(data)

    async def _next_chunk(self) -> None:
        if not self._ended:
            header = await self._reader.readexactly(frames.LENGTH.size)
            self._left = frames.chunk_length(header, self._peer)
            self._ended = not self._left

    async def _linger(self) -> None:
        """Hand over what is queued and wait for the other side's end, dropping what it still says."""
        discarded = 0
        try:
            async with asyncio.timeout(LINGER_S):
                await self._writer.drain()
                while not self._ended and discarded < MAX_DISCARD_BYTES:
                    if not self._left:
                        await self._next_chunk()
                    data = await self._reader.read(min(self._left, READ_BYTES)) if self._left else b""
                    if self._left and not data:
                        break
                    self._left -= len(data)
                    discarded += len(data)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, RemoteError):
            pass  # the stream is over either way
        finally:
            self._writer.close()

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._writer.transport.abort()

    def _check(self) -> None:
        if self._broken is not None:
            raise NetworkError(f"stream with {self._peer.hex()[:12]}: {self._broken}")
        if self._closed:
            raise NetworkError("the stream was closed")
