"""The engine under virtual time: an in-memory network that implements `farflung.node.network.Network`. What lies between the processes is `hub`."""

import asyncio
import weakref
from collections.abc import Callable, Mapping

from farflung.node.network import LinkStats, MessageHandler, PeerId, StreamHandler
from farflung.protocol.errors import FarflungError, NetworkError
from farflung.protocol.limits import MAX_CONTROL_BYTES, MAX_RECORD_BYTES
from farflung.sims.clock import process_context
from farflung.sims.hub import MemoryHub
from farflung.sims.links import Meter
from farflung.sims.process import Process
from farflung.sims.streams import MemoryStream


class MemoryNetwork:
    """One process on a `MemoryHub`, alive from its construction to `close` or to the hub's `kill`."""

    def __init__(self, hub: MemoryHub, peer_id: PeerId) -> None:
        self._hub = hub
        self._peer_id = peer_id
        self._context = process_context(peer_id)
        self._on_message: MessageHandler | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._serving: dict[asyncio.Task[None], None] = {}
        self._meters: dict[PeerId, Meter] = {}
        self._total = Meter()
        self.before_count: Callable[[], None] = lambda: None
        """Counts what has been sent without a message (`repeated`)."""
        self._addresses: dict[PeerId, list[str]] = {}
        self._dialled: dict[PeerId, tuple[weakref.ReferenceType[Process], float]] = {}
        """Weak: else whoever ends stays in memory, with all of its node, for as long as anybody who knew it does."""
        hub.attach(self)

    @property
    def peer_id(self) -> PeerId:
        """Our own public key."""
        return self._peer_id

    def addresses(self) -> list[str]:
        """One address, which only says who we are: in memory everybody can reach everybody."""
        return [f"memory://{self._peer_id.hex()}"]

    def add_addresses(self, peer: PeerId, addresses: list[str]) -> None:
        """Remembered, and not needed."""
        self._addresses[peer] = list(addresses)

    def on_message(self, handler: MessageHandler) -> None:
        """Set the one handler of control messages. What it raises ends the simulation."""
        self._on_message = handler

    def send(self, peer: PeerId, message: bytes) -> None:
        """Send one control message, best effort. Raises ValueError when it is above the limit."""
        if len(message) > MAX_CONTROL_BYTES:
            raise ValueError(f"a control message of {len(message)} bytes; the limit is {MAX_CONTROL_BYTES}")
        self.meter(peer).sent(self._as_bulk(len(message)))
        self._hub.post(self, peer, bytes(message))

    def serve(self, kind: str, handler: StreamHandler) -> None:
        """Accept incoming streams of `kind`. What a handler raises closes its stream if it is a
        `FarflungError`, and ends the simulation if it is not."""
        self._handlers[kind] = handler

    async def open_stream(self, peer: PeerId, kind: str) -> MemoryStream:
        """Open a stream. Raises NetworkError when there is no answer, nobody, or nobody who serves this kind."""
        self._check_running()
        return await self._hub.dial(self, peer, kind)

    async def is_gone(self, peer: PeerId) -> bool:
        """See `network.Network`. Only of those whom we have dialled."""
        return peer in self._dialled and await self._hub.refuses(self._peer_id, peer)

    async def put_record(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a record; False when it is expired or would not outlast what is there.

        Raises ValueError above the limit, NetworkError after `close`.
        """
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(value)} bytes; the limit is {MAX_RECORD_BYTES}")
        self._check_running()
        taken = await self._hub.put(self._peer_id, key, subkey, bytes(value), expires_at)
        self._check_running()
        return taken

    async def get_records(self, key: str) -> Mapping[str, bytes]:
        """Live records, as far as they have come here and are not missed. Raises NetworkError after `close`."""
        self._check_running()
        found = await self._hub.get(self._peer_id, key)
        self._check_running()
        return found

    def links(self) -> Mapping[PeerId, LinkStats]:
        """What was measured of the way to each peer."""
        return {peer: meter.stats() for peer, meter in self._meters.items()}

    def delivered_bytes(self) -> int:
        """Also those of earlier processes of this peer."""
        return round(self._hub.delivered_bytes[self._peer_id])

    def sent_bytes(self) -> int:
        self.before_count()
        return round(self._total.sent_bytes)

    def received_bytes(self) -> int:
        return round(self._total.received_bytes)

    def pace(self, up_bytes_per_s: float | None) -> None:
        """The model's control messages do not queue behind bulk, so there is nothing to do."""

    def unix_time(self) -> float:
        """Virtual seconds, by this peer's clock."""
        return self._hub.unix_time(self._peer_id)

    def clock_trouble(self) -> str:
        """Nobody is asked for the time here."""
        return ""

    async def close(self) -> None:
        """End streams and handlers, and leave the hub. No effect the second time, or after a kill."""
        self._hub.detach(self)
        own = asyncio.current_task()
        await asyncio.gather(*(task for task in self._serving if task is not own), return_exceptions=True)

    # --- what the hub calls ---

    def deliver(self, sender: PeerId, message: bytes) -> None:
        """Hand a message to the handler, in this process's context."""
        if self._on_message is None:
            self._hub.record("drop", sender, self._peer_id, len(message), "no handler")
        else:
            self._hub.record("deliver", sender, self._peer_id, len(message), "")
            self.meter(sender).received(self._as_bulk(len(message)))
            self._hub.on_delivery(sender, self._peer_id, message)
            self._context.run(self._on_message, sender, message)

    def serves(self, kind: str) -> bool:
        """True when there is a handler for this kind of stream."""
        return kind in self._handlers

    def accept(self, kind: str, stream: MemoryStream) -> None:
        """Start the handler of an incoming stream."""
        # Not a TaskGroup's: a network has no run() that could hold one. The dict owns the task, `close` awaits it.
        serving = self._serve(kind, self._handlers[kind], stream)
        task = self._hub.loop.create_task(serving, context=self._context.copy())
        self._serving[task] = None
        task.add_done_callback(self._served)

    async def _serve(self, kind: str, handler: StreamHandler, stream: MemoryStream) -> None:
        try:
            await handler(stream)
        except FarflungError:
            self._hub.record("handler-failed", stream.peer, self._peer_id, 0, kind)
        finally:
            await stream.close()

    def _served(self, task: asyncio.Task[None]) -> None:
        del self._serving[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hub.loop.call_exception_handler({"message": "a stream handler failed", "exception": error})

    def keeps(self, target: Process | None) -> bool:
        """Whether a connection to that process, which we have dialled before, is still open."""
        if target is None or target.peer_id not in self._dialled:
            return False
        known, used_at = self._dialled[target.peer_id]
        return known() is target and self._hub.now() < used_at + self._hub.link_of(self._peer_id).kept_s

    def note_dialled(self, target: Process) -> None:
        """A stream to that process was opened now."""
        self._dialled[target.peer_id] = (weakref.ref(target), self._hub.now())

    def stop_serving(self) -> None:
        """See `network.Network`; also for the end of a process."""
        self._on_message = None
        self._handlers.clear()
        own = asyncio.current_task(self._hub.loop)  # a handler may close its own network
        for task in list(self._serving):
            if task is not own:
                task.cancel()

    def meter(self, peer: PeerId) -> Meter:
        """The meter of what goes to and comes from one peer."""
        meter = self._meters.get(peer)
        if meter is None:
            meter = self._meters[peer] = Meter(self._total)
        return meter

    def repeated(self, to: "MemoryNetwork", num_bytes: int) -> None:
        """Count control messages to another process that no message stands for (`echoes`)."""
        bulk = self._as_bulk(num_bytes)
        self.meter(to._peer_id).sent(bulk)
        to.meter(self._peer_id).received(bulk)

    def _as_bulk(self, num_bytes: int) -> float:
        """Bytes of bulk that stand for so many of control messages."""
        return num_bytes / self._hub.link_of(self._peer_id).byte_means

    def _check_running(self) -> None:
        if not self._hub.is_running(self):
            raise NetworkError("this network was closed")
