"""A bulk stream striped over several TLS connections.

`write` cuts its bytes into segments and gives each to the connection with the shortest queue, waiting while all are
full: a connection that drains faster takes more, and one that stalls on a lost packet holds up one segment only. One TCP
flow gets a tenth of a long lossy link, eight get most of it (measured). More connections than the first are dialled when
a stream proves large (`grow`).

Over a link with latency a queue is what the other side has not acknowledged. It is kept at two windows of the connection's TCP,
and the nearer the end of a write, the shorter it must be: a connection that has lost packets crawls for seconds, and what it
has been given nobody else can send. 16 MB rounds behind 20 Mbit/s, 100 ms and 1 % loss took 1.6 times what the link needs
with cubic instead of 4.4, when a connection was given whatever its socket took, and 1.5 instead of 1.6 with bbr.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from farflung.node.links import Meter
from farflung.node.network import PeerId
from farflung.node.pacing import Pacer
from farflung.node.stripes import Reassembly
from farflung.node.tls_connection import TlsConnection
from farflung.protocol.errors import NetworkError

GROW_BYTES = 128 << 10
"""A stream that moved this much in either direction gets its further connections: a quarter of one transfer of a small round (0.5 MB: 16 MB of
fp32 parameters, int8, four owners, two waves), so that they are there when the rest goes.
"""
SEGMENT_BYTES = 16 << 10
"""On links with latency: small, so that the last segment on a slow connection does not hold up the end."""
LEAST_QUEUE_BYTES = 16 << 10
"""A connection with less on its way may have another segment: about what TCP begins with."""
QUEUE_SHARE = 0.25
"""Of an equal part of what is left to write, and is known to follow: so much more may be on a connection's way."""
WINDOWS = 2.0
"""Of a connection's TCP: one on its way, and one to follow."""
LOOK_S = 0.004
"""Between two looks at what has been acknowledged, when all connections have enough."""
TAIL_S = (0.01, 0.03, 0.06, 0.1)
"""When packets that mean nothing follow the last bytes of a large write, in seconds. TCP learns that a packet is lost from what
was sent after it; after the last one nothing was, and TCP waits two round trips and more before it tries again. 16 MB rounds behind
20 Mbit/s, 100 ms and 1 % loss: 3.8 s instead of 4.0.
"""
LINGER_S = 120.0
"""How long connections of a closed stream may take to hand over what is queued and to hear the other side's end."""


class StripedStream:
    """Implements `network.Stream`. Made by `farflung.node.tls.TlsCarrier` only."""

    def __init__(
        self,
        peer: PeerId,
        stream_id: bytes,
        kind: str,
        *,
        up: Pacer,
        down: Pacer,
        meter: Meter,
        grow: Callable[["StripedStream"], None],
        freed: Callable[[TlsConnection], None],
    ) -> None:
        self._peer = peer
        self.stream_id = stream_id
        self.kind = kind
        self._up = up
        self._down = down
        self._meter = meter
        self._grow = grow
        self._freed = freed
        self._connections: list[TlsConnection] = []
        self._in = Reassembly(peer)
        self._reader: asyncio.Future[None] | None = None
        self._writing = asyncio.Lock()
        self._writable = asyncio.Event()
        self._error: str | None = None
        self._read_over = False
        self._closed = False
        self._sent = 0
        self._moved = 0
        self._unended = 0
        """Bytes written since nothing was known to follow."""
        self._grown = False
        self._linger: asyncio.TimerHandle | None = None
        self.segment_bytes = SEGMENT_BYTES

    # --- network.Stream -------------------------------------------------------------------------------------------

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def write(self, data: bytes | bytearray | memoryview, *, follows: int = 0, overhead: int = 0) -> None:
        """See `network.Stream.write`. A cancelled write breaks the stream: nobody could tell what was sent."""
        view = memoryview(data).cast("B")
        async with self._writing:
            self._grow_for(self._moved + len(view))
            try:
                start = 0
                while start < len(view):
                    size = min(self.segment_bytes, self._up.chunk_bytes, len(view) - start)
                    begun = monotonic()
                    await self._up.take(size)
                    connection = await self._free_connection(len(view) - start + follows)
                    connection.write_segment(self._sent, view[start : start + size])
                    self._sent += size
                    start += size
                    self._count(size)
                    # Writing to a fast link never waits by itself; others must run in between.
                    await asyncio.sleep(0)
                    self._meter.sent(size, monotonic() - begun)
            except asyncio.CancelledError:
                self.fail("a write was cancelled")
                raise
            self._unended += len(view)
            if follows == 0:
                if self._unended >= GROW_BYTES and self.far:
                    for delay in TAIL_S:
                        asyncio.get_running_loop().call_later(delay, self._write_tail)
                self._unended = 0

    async def readinto(self, buffer: memoryview) -> None:
        """See `network.Stream.readinto`. A cancelled read breaks the stream: the buffer is given back at once."""
        view = buffer.cast("B")
        step = len(view) if self._down.rate is None else self._down.chunk_bytes
        start = 0
        while start < len(view):
            part = view[start : start + step]
            begun = monotonic()
            await self._down.take(len(part))
            await self._fill(part)
            self._meter.received(len(part), monotonic() - begun)
            start += len(part)

    async def close(self) -> None:
        """See `network.Stream.close`. Returns at once; the connections hand over what is queued on their own."""
        if self._closed:
            return
        if self._reader is not None:
            self.fail("closed while a read was waiting")  # its buffer must be given back at once
        self._closed = True
        self._in.drop()
        if self._error is None:
            for connection in tuple(self._connections):
                connection.retry_place()  # what waited is discarded now
                connection.write_fin(self._sent)
        if self._connections:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self.fail, "the other side never ended")

    # --- the carrier's side ---------------------------------------------------------------------------------------

    @property
    def far(self) -> bool:
        """Whether the peer is behind a link with latency."""
        return self.segment_bytes <= SEGMENT_BYTES

    @property
    def active(self) -> bool:
        """Whether more connections are of use."""
        return not self._closed and self._error is None

    @property
    def ended(self) -> bool:
        """Closed, and all connections given back."""
        return self._closed and not self._connections

    def add(self, connection: TlsConnection, open_frame: bytes | None) -> None:
        """Use one more connection; the dialler passes the OPEN payload."""
        self._connections.append(connection)
        connection.attach(self, open_frame)
        if self._error is not None:
            connection.abort(self._error)
        elif self._closed:
            connection.write_fin(self._sent)
        else:
            self._writable.set()

    def fail(self, reason: str) -> None:
        """Break the stream and cut its connections."""
        if self._error is None:
            self._error = reason
        self._in.drop()
        self._stop_reader(reason)
        self._writable.set()
        for connection in tuple(self._connections):
            connection.abort(reason)

    # --- tls_connection.Attached ----------------------------------------------------------------------------------

    def segment_claimed(self, offset: int, length: int) -> None:
        self._in.claim(offset, length)

    def segment_place(self, offset: int, length: int) -> memoryview | None:
        if self._closed or self._error is not None:
            return memoryview(b"")
        return self._in.place(offset, length)

    def segment_landed(self, offset: int, length: int) -> None:
        if self._closed or self._error is not None:
            return
        self._count(length)
        if self._in.land(offset, length):
            self._wake_reader()

    def stream_ended(self, total: int) -> None:
        self._in.end(total)
        if self._in.ended_short:
            self._end_reading()
            self._stop_reader("the stream ended")

    def connection_writable(self) -> None:
        self._writable.set()

    def connection_done(self, connection: TlsConnection) -> None:
        self._connections.remove(connection)
        if self.ended and self._linger is not None:
            self._linger.cancel()
        self._freed(connection)

    def connection_failed(self, connection: TlsConnection, reason: str) -> None:
        self._connections.remove(connection)
        self.fail(reason)
        if self._linger is not None and not self._connections:
            self._linger.cancel()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _write_tail(self) -> None:
        for connection in self._connections:
            connection.write_tail()

    async def _free_connection(self, left: int) -> TlsConnection:
        """The one to write to next, of `left` bytes."""
        while True:
            if self._error is not None:
                raise NetworkError(f"stream to {self._peer.hex()[:12]}: {self._error}")
            if self._closed:
                raise NetworkError("the stream was closed")
            free = [c for c in self._connections if c.writable and not c.closing]
            if not free:
                self._writable.clear()
                await self._writable.wait()
            elif not self.far:
                return min(free, key=lambda connection: connection.queued_bytes)
            else:
                queued = {c: c.unacknowledged_bytes() for c in free}
                share = QUEUE_SHARE * left / len(self._connections)
                room = [c for c in free if queued[c] < max(LEAST_QUEUE_BYTES, min(WINDOWS * c.window_bytes(), share))]
                if room:
                    return min(room, key=queued.__getitem__)
                await asyncio.sleep(LOOK_S)

    async def _fill(self, part: memoryview) -> None:
        if self._reader is not None:
            raise RuntimeError("a stream has one reader at a time")
        if self._closed:
            raise NetworkError("the stream was closed")
        # What arrived before the stream broke is lost with it: it may have gaps.
        if self._error is not None:
            raise NetworkError(f"stream from {self._peer.hex()[:12]}: {self._error}")
        if not self._read_over and self._in.set_target(part):
            self._retry_waiting()
            return
        if self._read_over or self._in.ended_short:
            self._end_reading()
            raise NetworkError(f"stream from {self._peer.hex()[:12]}: the stream ended")
        self._reader = asyncio.get_running_loop().create_future()
        self._retry_waiting()
        try:
            await self._reader
        except asyncio.CancelledError:
            self.fail("a read was cancelled")
            raise
        finally:
            self._reader = None
        self._retry_waiting()

    def _end_reading(self) -> None:
        self._read_over = True
        self._in.drop()

    def _retry_waiting(self) -> None:
        for connection in tuple(self._connections):
            connection.retry_place()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _stop_reader(self, reason: str) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(NetworkError(f"stream from {self._peer.hex()[:12]}: {reason}"))

    def _count(self, size: int) -> None:
        self._moved += size
        self._grow_for(self._moved)

    def _grow_for(self, size: int) -> None:
        """Ask for more connections, once, when the stream is known to carry at least so many bytes and that is a lot."""
        if not self._grown and size >= GROW_BYTES:
            self._grown = True
            self._grow(self)
