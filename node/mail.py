"""Control messages over libp2p: one outgoing stream per peer, a bounded queue before it.

`send` never waits. When a peer does not drain its queue, the oldest messages go: newer heartbeats, ballots and votes
supersede older ones, and the protocol repeats what matters. Messages too old to be of use are dropped as well. A stream
that breaks is opened again, with growing pauses, as long as there is something to send; a peer that is heard from is
tried at once. Pauses are drawn: two hosts that dial each other in the same moment both fail (libp2p dials from the port
at which it listens, so it is one TCP connection, and both sides begin the handshake), and must not do so for ever.

What is written lies in p2pd, not with the peer. So `flush` ends each stream with a length of 0 and waits until the peer,
having read so far, closes it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

import structlog

from farflung.node import frames
from farflung.node.links import LinkBook
from farflung.node.network import MessageHandler, PeerId
from farflung.node.scope import TaskScope
from farflung.protocol import limits
from farflung.protocol.errors import NetworkError, RemoteError

MAX_QUEUED = 256
"""Messages waiting for one peer: several rounds' worth of control traffic."""
MAX_QUEUED_BYTES = 4 * limits.MAX_CONTROL_BYTES
MAX_AGE_S = 30.0
"""A message waits no longer than this; its receiver would soon refuse it as stale."""
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
"""Both before they are drawn: half to one and a half of it."""
WRITE_S = 30.0
"""A peer that takes nothing for this long gets a new stream."""
IDLE_S = 300.0
"""An unused stream is closed after this time, by who has opened it."""
SILENT_S = 2 * IDLE_S
"""Until the next message, on a stream that another has opened; then it is closed."""
MESSAGE_S = limits.MAX_MESSAGE_LIFE_S
"""From the length of a message to its end. What takes longer would be refused as stale."""

_log = structlog.get_logger(__name__)

OpenStream = Callable[[PeerId], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass(slots=True)
class MailStats:
    """What happened to control messages since the start."""

    sent: int = 0
    received: int = 0
    dropped_full: int = 0
    """The peer's queue was full; the oldest went."""
    dropped_old: int = 0
    """Waited too long for the peer to become reachable."""


class _Outbox:
    def __init__(self) -> None:
        self.queue: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.filled = asyncio.Event()
        self.retry = asyncio.Event()
        self.ending = False
        self.task: asyncio.Task[None] | None = None


class Mail:
    """All control messages of a node, out and in."""

    def __init__(
        self, scope: TaskScope, open_stream: OpenStream, links: LinkBook, refused: Callable[[RemoteError], None]
    ) -> None:
        self._scope = scope
        self._open = open_stream
        self._links = links
        self._refused = refused
        self._handler: MessageHandler | None = None
        self._outboxes: dict[PeerId, _Outbox] = {}
        self.stats = MailStats()

    def on_message(self, handler: MessageHandler) -> None:
        self._handler = handler

    def send(self, peer: PeerId, message: bytes) -> None:
        """See `network.Network.send`. Raises ValueError for a message of ours above the limit."""
        if not 0 < len(message) <= limits.MAX_CONTROL_BYTES:
            raise ValueError(f"a control message has 1 to {limits.MAX_CONTROL_BYTES} bytes, not {len(message)}")
        outbox = self._outboxes.setdefault(peer, _Outbox())
        outbox.queue.append((monotonic(), message))
        outbox.size += len(message)
        while len(outbox.queue) > MAX_QUEUED or outbox.size > MAX_QUEUED_BYTES:
            outbox.size -= len(outbox.queue.popleft()[1])
            self.stats.dropped_full += 1
        outbox.filled.set()
        if outbox.task is None:
            outbox.task = self._scope.start(self._serve_outbox(peer, outbox), "control messages out")

    async def flush(self, seconds: float) -> None:
        """Wait until every peer has read what is queued, at most so long: for the last words of a node that leaves.

        Peers out of reach learn of our absence by our silence.
        """
        tasks = []
        for outbox in self._outboxes.values():
            outbox.ending = True
            outbox.filled.set()
            if outbox.task is not None:
                tasks.append(outbox.task)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def accept(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one incoming control stream until it ends."""
        outbox = self._outboxes.get(peer)
        if outbox is not None:
            outbox.retry.set()
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    header = await reader.readexactly(frames.LENGTH.size)
                length = frames.control_length(header, peer)
                if not length:
                    break  # closing the stream says that all was read
                async with asyncio.timeout(MESSAGE_S):
                    message = await reader.readexactly(length)
                self.stats.received += 1
                self._links.heard(peer, length)
                if self._handler is not None:
                    self._handler(peer, message)
        except RemoteError as error:
            self._refused(error)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the peer left, or says nothing; its heartbeats tell the rest
        finally:
            writer.close()

    async def _serve_outbox(self, peer: PeerId, outbox: _Outbox) -> None:
        pause = FIRST_PAUSE_S
        try:
            while outbox.queue:
                try:
                    reader, writer = await self._open(peer)
                except NetworkError as error:
                    _log.debug("control dial failed", peer=peer.hex()[:12], error=str(error))
                    await self._pause(outbox, pause)
                    pause = min(MAX_PAUSE_S, 2 * pause)
                    self._drop_old(outbox)
                    continue
                begun = monotonic()
                await self._use_stream(peer, outbox, reader, writer)
                if monotonic() - begun > MAX_PAUSE_S:
                    pause = FIRST_PAUSE_S
                elif outbox.queue:  # a peer that takes streams only to cut them
                    await self._pause(outbox, pause)
                    pause = min(MAX_PAUSE_S, 2 * pause)
        finally:
            outbox.task = None
            if not outbox.queue:
                self._outboxes.pop(peer, None)

    async def _use_stream(
        self, peer: PeerId, outbox: _Outbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send over one stream until it is idle, stuck or closed."""
        try:
            async with asyncio.TaskGroup() as group:
                closed = group.create_task(self._until_closed(reader))
                writing = group.create_task(self._write(peer, outbox, writer, closed))
                # Either ends the other; cancelling a finished task does nothing.
                closed.add_done_callback(lambda _: writing.cancel())
                writing.add_done_callback(lambda _: closed.cancel())
        finally:
            writer.close()

    async def _write(
        self, peer: PeerId, outbox: _Outbox, writer: asyncio.StreamWriter, closed: asyncio.Task[None]
    ) -> None:
        try:
            while outbox.queue or not outbox.ending:
                async with asyncio.timeout(IDLE_S):
                    await outbox.filled.wait()
                self._drop_old(outbox)
                while outbox.queue:
                    if writer.is_closing():  # uvloop raises RuntimeError for a write then
                        raise ConnectionResetError("closed by the other side")
                    _, message = outbox.queue.popleft()
                    outbox.size -= len(message)
                    writer.write(frames.LENGTH.pack(len(message)) + message)
                    self.stats.sent += 1
                    self._links.told(peer, len(message))
                    async with asyncio.timeout(WRITE_S):
                        await writer.drain()
                outbox.filled.clear()
            if not writer.is_closing():
                writer.write(frames.CONTROL_END)
                await writer.drain()
            await closed
        except (OSError, TimeoutError):
            pass  # idle, stuck or broken: what is still queued goes over a new stream

    @staticmethod
    async def _until_closed(reader: asyncio.StreamReader) -> None:
        """The other side never writes on our stream; anything but silence means that it is over."""
        try:
            await reader.read(1)
        except OSError:
            pass

    @staticmethod
    async def _pause(outbox: _Outbox, seconds: float) -> None:
        outbox.retry.clear()
        try:
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.5)):
                await outbox.retry.wait()
        except TimeoutError:
            pass

    def _drop_old(self, outbox: _Outbox) -> None:
        limit = monotonic() - MAX_AGE_S
        while outbox.queue and outbox.queue[0][0] < limit:
            outbox.size -= len(outbox.queue.popleft()[1])
            self.stats.dropped_old += 1
