"""Bulk streams of the modelled network: ordered, reliable, with back-pressure, and broken the way real ones break.

A `Connection` is two pipes and the two ends that a program holds. Bytes written travel in chunks: sender's uplink, latency,
receiver's downlink, buffer. What has been written and not yet read is bounded by the path's window, and the credit comes back
the instant that the reader takes the bytes (a real one takes a trip). How a stream ends:

- closed: the other end reads what was written, then meets the end; its own writes fail.
- the other process is killed: the reset shows one trip later, and what was unread is gone, as with TCP.
- the link is cut: nothing shows; chunks wait. When the link heals in time they go on, else both ends fail after the
  model's timeout. A machine that loses power sends no reset either.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from farflung.node import meetings
from farflung.node.network import PeerId
from farflung.protocol.errors import NetworkError
from farflung.sims.links import Meter, Path

CHUNK_BYTES = 64 << 10
"""Bulk is serialised in chunks of this size: small beside any tensor, large enough that events stay few."""

CHUNKS_PER_WINDOW = 4
"""At least: with one, a sender would wait for each chunk to be read before it sends the next."""


STATE_KINDS = frozenset(("chunk", meetings.KIND))
"""Streams that carry parameters as they are: chunks of a state, and what groups that meet tell each other."""


class Wire(Protocol):
    """What a connection needs of the network around it."""

    def now(self) -> float:
        """Virtual seconds."""

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call back at `when` virtual seconds, in the network's own context."""

    def cut(self, a: PeerId, b: PeerId) -> bool:
        """True while nothing passes between the two."""

    def path(self, a: PeerId, b: PeerId) -> Path:
        """The path between the two at this moment."""

    def up(self, peer: PeerId, num_bytes: float) -> float:
        """Queue bytes on a peer's uplink; returns when the last has left."""

    def across(self, sender: PeerId, receiver: PeerId, num_bytes: float, left_at: float) -> float:
        """Queue bytes that leave an uplink at `left_at` on what lies between; returns when the last is through."""

    def down(self, peer: PeerId, num_bytes: float) -> float:
        """Queue bytes on a peer's downlink; returns when the last is in."""

    def taken_in(self) -> float:
        """When a piece that is at its receiver's machine now has been taken in."""

    def draw_break_s(self) -> float:
        """How long a stream over a cut link takes to fail."""

    def delivered(self, sender: PeerId, num_bytes: float) -> None:
        """Count what has come to its receiver."""

    def record(self, what: str, sender: PeerId, receiver: PeerId, num_bytes: int, detail: str) -> None:
        """Log one event."""

    def forget(self, connection: "Connection") -> None:
        """Both ends are over."""


class _Signal:
    """Wakes whoever waits for a change of one stream end."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class _Pipe:
    """One direction. An arrival takes the oldest chunk on the wire, so order holds whatever the delays do."""

    def __init__(
        self,
        wire: Wire,
        sender: PeerId,
        receiver: PeerId,
        kind: str,
        changed: Callable[["_Pipe"], None],
        relay: PeerId | None,
    ) -> None:
        self._relay = relay
        self._wire = wire
        self._sender = sender
        self._receiver = receiver
        self._kind = kind
        self._changed = changed
        self._travelling: deque[tuple[bytes, float]] = deque()
        """Chunks, and the bytes of bulk that they take links as long as."""
        self._last_due = self._last_in = self._last_taken = 0.0
        self._num_stalled = 0
        self.arrived: deque[tuple[memoryview, float]] = deque()
        """Chunks, and what each of their bytes counts for."""
        self.in_flight_bytes = 0.0
        """Of bulk, and of what takes as long."""
        self.ended = False
        self.dead = False

    def offer(self, chunk: bytes, takes: float = 0.0) -> float:
        """Put a chunk, or the empty one that ends the stream, on the uplink, which it takes as long as so many bytes of bulk; returns when it has left."""
        left_at = self._wire.up(self._sender, takes)
        self._travelling.append((chunk, takes))
        self.in_flight_bytes += takes
        through_at = self._wire.across(self._sender, self._receiver, takes, left_at)
        path = self._wire.path(self._sender, self._receiver)
        self._last_due = max(self._last_due, through_at + path.latency_s + path.write_s)
        if self._relay is None:
            self._wire.at(self._last_due, self._reach_downlink)
        else:
            self._wire.at(self._last_due, self._reach_relay, self._relay, len(chunk), takes)
        return left_at

    def _reach_relay(self, relay: PeerId, num_bytes: int, takes: float) -> None:
        """What a relay passes on takes its own link, in and out. Both legs' latency lies behind already."""
        if self.dead:
            return
        self._wire.record("relay", self._sender, self._receiver, num_bytes, self._kind)
        through_at = max(self._wire.down(relay, takes), self._wire.up(relay, takes))
        self._wire.at(through_at, self._reach_downlink)

    def _reach_downlink(self) -> None:
        if self.dead:
            return
        if is_cut(self._wire, self._sender, self._relay, self._receiver):
            self._num_stalled += 1
            return
        chunk, takes = self._travelling.popleft()
        due = self._wire.down(self._receiver, takes)
        if due > self._wire.now() or due == self._last_in:  # behind what comes in at this very moment
            self._last_in = due
            self._wire.at(due, self._take_in, chunk, takes)
        else:  # the end of a stream, on an idle link
            self._take_in(chunk, takes)

    def _take_in(self, chunk: bytes, takes: float) -> None:
        """It is at the receiver's machine, and is read after what came before it."""
        self._last_taken = max(self._last_taken, self._wire.taken_in() if chunk else 0.0)
        if self._last_taken > self._wire.now():
            self._wire.at(self._last_taken, self._arrive, chunk, takes)
        else:
            self._arrive(chunk, takes)

    def _arrive(self, chunk: bytes, takes: float) -> None:
        if self.dead:
            return
        if chunk:
            self.arrived.append((memoryview(chunk), takes / len(chunk)))
            self._wire.delivered(self._sender, takes)
        else:
            self.ended = True
        what = "chunk" if chunk else "stream-end"
        self._wire.record(what, self._sender, self._receiver, len(chunk), self._kind)
        self._changed(self)

    def unstall(self) -> None:
        """The link is whole again: what waited is sent again."""
        due = self._wire.now() + self._wire.path(self._sender, self._receiver).latency_s
        self._last_due = max(self._last_due, due)
        for _ in range(self._num_stalled):
            self._wire.at(due, self._reach_downlink)
        self._num_stalled = 0

    def kill(self) -> None:
        """Nothing arrives any more, and what was unread is gone."""
        self.dead = True
        self._travelling.clear()
        self.arrived.clear()
        self.in_flight_bytes = 0.0


class MemoryStream:
    """One end of a connection: `farflung.node.network.Stream`."""

    def __init__(self, connection: "Connection", peer: PeerId, incoming: _Pipe, outgoing: _Pipe, meter: Meter) -> None:
        self._connection = connection
        self._peer = peer
        self._in = incoming
        self._out = outgoing
        self._meter = meter
        self._writing = asyncio.Lock()
        self._error: str | None = None
        self._closed = False
        self.changed = _Signal()
        """Bytes have come, or either side has ended."""
        self.credit = _Signal()
        """Bytes have left, or were read at the other end, or either side has ended."""

    @property
    def peer(self) -> PeerId:
        """Public key of the other side."""
        return self._peer

    @property
    def unread_bytes(self) -> float:
        """Bytes we wrote that the other side has not read: never above the path's window."""
        return self._out.in_flight_bytes

    @property
    def over(self) -> bool:
        """True when our side has closed it or has seen it break."""
        return self._closed or self.failed

    @property
    def failed(self) -> bool:
        """True when our side has seen it break."""
        return self._error is not None

    @property
    def done(self) -> bool:
        """True when nothing of our side is on its way any more."""
        return self.failed or (self._closed and (self._out.ended or self._in.ended))

    async def write(self, data: bytes | bytearray | memoryview, *, follows: int = 0, overhead: int = 0) -> None:
        """Send all of `data`, at the pace of the uplink and of the reader; `overhead` takes as long as it is. Raises NetworkError."""
        view = memoryview(data).cast("B")
        wire, started = self._connection.wire, self._connection.wire.now()
        is_state = self._connection.kind in STATE_KINDS
        async with self._writing:
            self._check_writable()
            position = 0
            while position < len(view):
                path = wire.path(*self._connection.peers)
                means = path.state_means if is_state else 1.0
                most = min(CHUNK_BYTES, max(1, int(path.window_bytes / means) // CHUNKS_PER_WINDOW))
                chunk = bytes(view[position : position + most])
                about = min(len(chunk), max(0, overhead - position))
                takes = (len(chunk) - about) * means + about / path.byte_means
                while self._out.in_flight_bytes + takes > path.window_bytes:
                    await self._wait()
                left_at = self._out.offer(chunk, takes)
                position += len(chunk)
                self._meter.sent(takes)
                if left_at > wire.now():
                    wire.at(left_at, self.credit.wake)
                while left_at > wire.now():
                    await self._wait()
        if len(view) >= CHUNK_BYTES:
            self._meter.sent_at(len(view), wire.now() - started)

    async def _wait(self) -> None:
        await self.credit.wait()
        self._check_writable()

    def wake(self) -> None:
        """Something has ended."""
        self.changed.wake()
        self.credit.wake()

    def _check_writable(self) -> None:
        if self._error is None and self._in.ended:
            raise NetworkError(f"stream with {self._peer.hex()[:12]}: closed by the other side")
        self._check()

    def _check(self) -> None:
        if self.over:
            raise NetworkError(f"stream with {self._peer.hex()[:12]}: {self._error or 'closed by us'}")

    async def readinto(self, buffer: memoryview) -> None:
        """Fill the whole of `buffer`. Raises NetworkError when the stream ends or breaks first."""
        view = buffer.cast("B")
        position = first_bytes = 0
        first_at = 0.0
        self._check()
        while position < len(view):
            if not self._in.arrived:
                if self._in.ended:
                    raise NetworkError(
                        f"stream with {self._peer.hex()[:12]}: ended {len(view) - position} bytes too early"
                    )
                await self.changed.wait()
                self._check()
                continue
            piece, counts = self._in.arrived.popleft()
            taken = min(len(piece), len(view) - position)
            view[position : position + taken] = piece[:taken]
            if taken < len(piece):
                self._in.arrived.appendleft((piece[taken:], counts))
            if position == 0:
                first_bytes, first_at = taken, self._connection.wire.now()
            position += taken
            self._meter.received(taken * counts)
            self._in.in_flight_bytes -= taken * counts
            self._connection.other(self).credit.wake()
        # The first bytes may have waited for us, or we for them: the rate is that of what followed.
        followed = len(view) - first_bytes
        if followed >= CHUNK_BYTES:
            self._meter.received_at(followed, self._connection.wire.now() - first_at)

    async def close(self) -> None:
        """End the stream; returns when all that was written has arrived, or will not. Never raises for a dead peer."""
        if self.over:
            return
        self._closed = True
        self.wake()
        if not self._in.ended:
            self._out.offer(b"")
        self._connection.settle()
        while not self.done:
            await self.changed.wait()

    def fail(self, reason: str) -> None:
        """Break this end, at once."""
        if self._error is None:
            self._error = reason
            self._in.kill()
            self._out.kill()
            self.wake()
            self._connection.settle()


class Connection:
    """Two ends, and what the network does to both."""

    def __init__(
        self,
        wire: Wire,
        number: int,
        kind: str,
        client: PeerId,
        server: PeerId,
        meters: tuple[Meter, Meter],
        relay: PeerId | None = None,
    ) -> None:
        self.wire = wire
        self.number = number
        self.kind = kind
        self.peers = (client, server)
        self.relay = relay
        """Who passes on what they have for each other; None: nobody has to."""
        self._there = _Pipe(wire, client, server, kind, self._wake, relay)
        self._back = _Pipe(wire, server, client, kind, self._wake, relay)
        self.client = MemoryStream(self, server, self._back, self._there, meters[0])
        self.server = MemoryStream(self, client, self._there, self._back, meters[1])
        self._breaks: asyncio.TimerHandle | None = None
        self._silent = False

    def _wake(self, pipe: _Pipe) -> None:
        if pipe.ended:
            self.client.wake()
            self.server.wake()
            self.settle()
        else:
            (self.server if pipe is self._there else self.client).changed.wake()

    def other(self, end: MemoryStream) -> MemoryStream:
        """The opposite end."""
        return self.server if end is self.client else self.client

    def check_link(self) -> None:
        """The network was cut or healed somewhere: start or stop waiting for the timeout."""
        if self._is_cut() or self._silent:
            if self._breaks is None:
                due = self.wire.now() + self.wire.draw_break_s()
                self._breaks = self.wire.at(due, self._time_out)
        elif self._breaks is not None:
            self._breaks.cancel()
            self._breaks = None
            self._there.unstall()
            self._back.unstall()
            for end in (self.client, self.server):
                if end.failed:
                    self._reset(self.other(end))

    def _time_out(self) -> None:
        for end in (self.client, self.server):
            self._fail(end, "no answer: the link is cut")

    def killed(self, peer: PeerId, *, reset: bool) -> None:
        """The process of `peer` is gone; the other side sees a reset, or nothing when the machine went silent."""
        end = self.client if peer == self.peers[0] else self.server
        end.fail("our process has ended")
        self._silent = not reset
        if self._silent or self._is_cut():
            self.check_link()
        else:
            self._reset(self.other(end))

    def relay_killed(self) -> None:
        """Whoever passed everything on is gone."""
        for end in (self.client, self.server):
            self._reset(end)

    def _is_cut(self) -> bool:
        return is_cut(self.wire, self.peers[0], self.relay, self.peers[1])

    def _reset(self, end: MemoryStream) -> None:
        due = self.wire.now() + self.wire.path(*self.peers).latency_s
        self.wire.at(due, self._fail, end, "connection reset by the other side")

    def _fail(self, end: MemoryStream, reason: str) -> None:
        if not end.over:
            self.wire.record("stream-broken", end.peer, self.other(end).peer, 0, self.kind)
        end.fail(reason)

    def settle(self) -> None:
        """Something ended: when both ends are done, nobody needs this connection."""
        if self.client.done and self.server.done:
            if self._breaks is not None:
                self._breaks.cancel()
            self.wire.forget(self)


def is_cut(wire: Wire, a: PeerId, relay: PeerId | None, b: PeerId) -> bool:
    """Whether nothing passes between the two, or between one of them and their relay."""
    return wire.cut(a, b) or (relay is not None and (wire.cut(a, relay) or wire.cut(relay, b)))
