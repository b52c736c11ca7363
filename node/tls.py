"""The direct carrier of bulk: TLS 1.3 between identity keys, several connections per stream, kept for reuse.

Only the dialler of a connection puts it to a stream; connections are used by one stream at a time and return to the
dialler's pool when both sides have ended it, so flow control is TCP's own. Shutdown order (`close`): stop listening, let
closed streams hand over for a moment, cut what is left.

Measured on loopback, 256 MiB between two processes on 2 shared, loaded cores, medians of three, asyncio and uvloop:
130 to 500 MB/s with one connection, 370 to 1030 with 2 to 8, 1.5 to 2.4 CPU s/GB over both ends; libp2p 170 to 430 MB/s
at 3.8 CPU s/GB. More than two
connections are for links with latency or loss, so the count follows the round trip of the first connection.
"""

import asyncio
import math
import secrets
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import structlog

from farflung.node import frames
from farflung.node.distance import TCP_WAYS, TLS_WAYS, FarLink, LateTransport
from farflung.node.identity import Identity
from farflung.node.links import MAX_PEERS, TLS, LinkBook
from farflung.node.network import PeerId
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.node.tls_connection import Attached, TlsConnection
from farflung.node.tls_keys import make_context
from farflung.node.tls_stream import SEGMENT_BYTES, StripedStream
from farflung.protocol.errors import NetworkError, RemoteError

DIAL_S = 5.0
"""Budget for the first connection to a peer, over all its addresses."""
DIAL_STAGGER_S = 0.25
"""Head start of each address over the next (RFC 8305)."""
HANDSHAKE_S = 10.0
IDLE_S = 120.0
"""How long an unused connection is kept: about the time between two rounds of a fast swarm."""
NEAR_RTT_S = 0.004
"""Below this a peer is on our own network, where more connections than one only cost."""
FAR_CONNECTIONS = 8
MAX_CONNECTIONS_PER_PEER = 32
MAX_INCOMING = 1024
"""Connections others may hold open to us; systems allow 1024 files by default, and the daemon raises that (`runner.more_files`)."""
MAX_HANDSHAKES = 256
"""Connections of whom nobody knows yet: each may take `HANDSHAKE_S`, and a file, of anybody who reaches the port."""
MAX_HANDSHAKES_OF_HOST = 64
"""Of these, from one address, so that nobody keeps all others out by itself."""
BACKLOG = 128
"""Connections that the system keeps for us until we take them."""
ACCEPT_AGAIN_S = 1.0
"""After the system had no file for a connection."""
REMEMBERED_STREAMS = 1024
"""Closed streams remembered so that a connection which joins late is answered."""
FLUSH_S = 3.0
"""How long `close` lets closed streams hand over."""

_log = structlog.get_logger(__name__)

Opened = Callable[[StripedStream], Coroutine[Any, Any, None]]


class TlsCarrier:
    """All TLS connections of a node."""

    def __init__(
        self,
        identity: Identity,
        scope: TaskScope,
        links: LinkBook,
        *,
        up: Pacer,
        down: Pacer,
        connections: int | None,
        admit: Callable[[PeerId], bool],
        served: Callable[[str], bool],
        opened: Opened,
        refused: Callable[[RemoteError], None],
        link: FarLink | None = None,
    ) -> None:
        self._server_context = make_context(identity, server=True)
        self._client_context = make_context(identity, server=False)
        self._scope = scope
        self._links = links
        self._up = up
        self._down = down
        self._wanted = connections
        self._admit = admit
        self._served = served
        self._opened = opened
        self._refused = refused
        self._link = link
        self._listening: list[tuple[socket.socket, asyncio.Task[None] | None]] = []
        """Where others connect to, and who takes their connections."""
        self._handshakes = Counter[str]()
        """Connections of others that have shown no key yet, by their address."""
        self._all: set[TlsConnection] = set()
        self._incoming: Counter[PeerId] = Counter()
        self._idle: dict[PeerId, list[TlsConnection]] = {}
        self._streams: OrderedDict[tuple[PeerId, bytes], StripedStream] = OrderedDict()
        self._addresses: dict[StripedStream, list[tuple[str, int]]] = {}
        self._answered: dict[PeerId, tuple[str, int]] = {}
        """Where peers have proven their key, the last time that we dialled them."""
        self._delivered_by_gone = 0
        self._closing = False
        self._all_gone = asyncio.Event()

    # --- network --------------------------------------------------------------------------------------------------

    async def listen(self, hosts: list[str], port: int) -> int:
        """Listen on all hosts at one port; 0 lets the system choose. Returns the port. Raises NetworkError."""
        last_error: OSError | None = None
        for host in hosts:
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                last_error = error  # a machine without IPv6 still serves IPv4
                _log.info("cannot listen", host=host, port=port, error=str(error))
                continue
            port = listening.getsockname()[1]
            listening.setblocking(False)
            accepting = self._scope.start(self._accept(listening), "accept TLS connections")
            self._listening.append((listening, accepting))
        if not self._listening:
            raise NetworkError(f"cannot listen for TLS on {', '.join(hosts)} port {port}: {last_error}")
        self._scope.start(self._close_idle(), "close idle TLS connections")
        return port

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                accepted, (host, *_) = await loop.sock_accept(listening)
            except OSError as error:  # it was reset already, or there are no more files
                _log.info("cannot accept a TLS connection", error=str(error))
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            full = self._handshakes.total() >= MAX_HANDSHAKES or self._handshakes[host] >= MAX_HANDSHAKES_OF_HOST
            if full or self._scope.start(self._greet(accepted, host), "TLS handshake") is None:
                accepted.close()
            else:
                self._handshakes[host] += 1
            await asyncio.sleep(0)  # asyncio's own loop would take all that wait before anybody else had a turn

    async def _greet(self, accepted: socket.socket, host: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: TlsConnection(self, None),
                accepted,
                ssl=self._server_context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except OSError as error:  # ssl's errors are some, too
            _log.info("a TLS handshake failed", error=str(error) or type(error).__name__)
        finally:
            self._handshakes[host] -= 1
            if not self._handshakes[host]:
                del self._handshakes[host]

    async def open(self, peer: PeerId, kind: str, addresses: list[tuple[str, int]]) -> StripedStream:
        """A new stream. Raises NetworkError when no address answers with the peer's key."""
        if self._closing:
            raise NetworkError("the network is closed")
        connection = self._take_idle(peer) or await self._dial(peer, addresses)
        stream = self._new_stream(peer, secrets.token_bytes(frames.STREAM_ID_BYTES), kind)
        stream.segment_bytes = self._segment_bytes(connection)
        self._addresses[stream] = addresses
        stream.add(connection, stream.stream_id + frames.encode_kind(kind))
        return stream

    def connected(self, peer: PeerId) -> bool:
        """Whether an idle connection to the peer is at hand."""
        return bool(self._idle.get(peer))

    async def is_gone(self, peer: PeerId) -> bool:
        """See `Network.is_gone`."""
        if peer not in self._answered:
            return False
        host, port = self._answered[peer]
        try:
            async with asyncio.timeout(DIAL_S):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return True
        except OSError:  # no answer in time, too
            return False
        writer.close()
        return False

    def delivered_bytes(self) -> int:
        """Bytes that peers have acknowledged on all connections so far, TLS's own included; 0 where the system does not tell."""
        return self._delivered_by_gone + sum(connection.acknowledged_bytes() for connection in self._all)

    async def close(self) -> None:
        """See the module."""
        self._closing = True
        for listening, accepting in self._listening:
            if accepting is not None:
                accepting.cancel()
                await asyncio.wait([accepting])
            listening.close()
        for stream in list(self._streams.values()):
            await stream.close()
        for connection in list(self._all):
            if connection.free:
                connection.close()
        if self._all:
            self._all_gone.clear()
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._all_gone.wait()
            except TimeoutError:
                pass  # peers that do not end their side are cut
        for connection in list(self._all):
            connection.abort("the node is shutting down")
        for stream in self._streams.values():
            stream.fail("the node is shutting down")

    # --- tls_connection.Owner -------------------------------------------------------------------------------------

    def accepted(self, connection: TlsConnection) -> bool:
        peer = connection.peer
        if (
            self._closing
            or self._incoming[peer] >= MAX_CONNECTIONS_PER_PEER
            or self._incoming.total() >= MAX_INCOMING
            or not self._admit(peer)
        ):
            _log.info("TLS connection refused", peer=peer.hex()[:12])
            return False
        self._incoming[peer] += 1
        connection.rtt_s = self._rtt_s(connection, otherwise=math.inf)
        connection.idle_since = monotonic()
        self._all.add(connection)
        return True

    def stream_opened(self, connection: TlsConnection, stream_id: bytes, kind: str) -> Attached | None:
        stream = self._streams.get((connection.peer, stream_id))
        if stream is None:
            if self._closing or not self._served(kind):
                return None
            stream = self._new_stream(connection.peer, stream_id, kind)
            stream.segment_bytes = self._segment_bytes(connection)
            self._scope.start(self._opened(stream), f"TLS stream {kind}")
        elif stream.kind != kind:
            return None
        stream.add(connection, None)
        return stream

    def transport_to(self, peer: PeerId, transport: asyncio.Transport) -> asyncio.Transport:
        return transport if self._link is None else LateTransport(transport, self._link, peer)

    def misbehaved(self, error: RemoteError) -> None:
        self._refused(error)

    def gone(self, connection: TlsConnection) -> None:
        if connection in self._all:
            self._all.remove(connection)
            self._delivered_by_gone += connection.acknowledged_bytes()
            if not connection.dialed:
                self._incoming[connection.peer] -= 1
                if not self._incoming[connection.peer]:
                    del self._incoming[connection.peer]
        idle = self._idle.get(connection.peer, [])
        if connection in idle:
            idle.remove(connection)
        if not self._all:
            self._all_gone.set()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _new_stream(self, peer: PeerId, stream_id: bytes, kind: str) -> StripedStream:
        stream = StripedStream(
            peer,
            stream_id,
            kind,
            up=self._up,
            down=self._down,
            meter=self._links.meter(peer, TLS),
            grow=self._grow,
            freed=self._release,
        )
        self._streams[peer, stream_id] = stream
        if len(self._streams) > REMEMBERED_STREAMS:
            self._forget_streams()
        return stream

    def _forget_streams(self) -> None:
        for key, stream in list(self._streams.items())[: len(self._streams) // 2]:
            if stream.ended:
                del self._streams[key]
                self._addresses.pop(stream, None)

    def _release(self, connection: TlsConnection) -> None:
        connection.idle_since = monotonic()
        if self._closing or connection.closing:
            connection.close()
        elif connection.dialed:
            self._idle.setdefault(connection.peer, []).append(connection)

    def _take_idle(self, peer: PeerId) -> TlsConnection | None:
        idle = self._idle.get(peer, [])
        while idle:
            connection = idle.pop()
            if connection.free:
                return connection
        return None

    def _rtt_s(self, connection: TlsConnection, *, otherwise: float) -> float:
        """The round trip as TCP has measured it, and `otherwise` where the system does not tell."""
        measured_s = connection.measured_rtt_s()
        far_s = 0.0 if self._link is None else self._link.distances.to(connection.peer)
        return measured_s + 2 * far_s if measured_s else otherwise

    def _segment_bytes(self, connection: TlsConnection) -> int:
        near = connection.rtt_s < NEAR_RTT_S
        return frames.MAX_SEGMENT_BYTES if near else SEGMENT_BYTES

    def _grow(self, stream: StripedStream) -> None:
        addresses = self._addresses.pop(stream, None)
        if addresses is None:
            return  # the dialler adds connections
        more = (self._wanted or (FAR_CONNECTIONS if stream.far else 1)) - 1
        if more:
            self._scope.start(self._add_connections(stream, addresses, more), "more TLS connections")

    async def _add_connections(self, stream: StripedStream, addresses: list[tuple[str, int]], more: int) -> None:
        open_frame = stream.stream_id + frames.encode_kind(stream.kind)

        async def add_one() -> None:
            try:
                connection = self._take_idle(stream.peer) or await self._dial(stream.peer, addresses)
            except NetworkError as error:
                _log.info("a further TLS connection failed", peer=stream.peer.hex()[:12], error=str(error))
                return
            if stream.active:
                stream.add(connection, open_frame)
            else:
                self._release(connection)

        async with asyncio.TaskGroup() as group:
            for _ in range(more):
                group.create_task(add_one())

    async def _dial(self, peer: PeerId, addresses: list[tuple[str, int]]) -> TlsConnection:
        """The first connection that proves the peer's key, over addresses tried with a stagger."""
        errors: list[str] = []
        won: list[TlsConnection] = []

        async def attempt(index: int, host: str, port: int, tasks: list[asyncio.Task[None]]) -> None:
            await asyncio.sleep(index * DIAL_STAGGER_S)
            try:
                connection = await self._dial_one(peer, host, port)
            except (OSError, ssl.SSLError, UnicodeError) as error:  # the last one for names that there cannot be
                errors.append(f"{host}:{port}: {error or type(error).__name__}")
                return
            won.append(connection)
            if peer not in self._answered and len(self._answered) >= MAX_PEERS:
                del self._answered[next(iter(self._answered))]
            self._answered[peer] = host, port
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()

        try:
            async with asyncio.timeout(DIAL_S), asyncio.TaskGroup() as group:
                tasks: list[asyncio.Task[None]] = []
                for index, (host, port) in enumerate(addresses):
                    tasks.append(group.create_task(attempt(index, host, port, tasks)))
        except TimeoutError:
            errors.append("no answer in time")
        for late in won[1:]:
            self._release(late)
        if won and not won[0].free:  # gone since it proved its key
            errors.append("the other side closed the connection at once")
            won.clear()
        if not won:
            raise NetworkError(f"cannot dial {peer.hex()[:12]} over TLS: {'; '.join(errors) or 'no address'}")
        return won[0]

    async def _dial_one(self, peer: PeerId, host: str, port: int) -> TlsConnection:
        begun = monotonic()
        far_s = 0.0 if self._link is None else self._link.distances.to(peer)
        await asyncio.sleep(TCP_WAYS * far_s)
        connection = TlsConnection(self, peer)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                host,
                port,
                ssl=self._client_context,
                server_hostname="farflung",
                ssl_handshake_timeout=HANDSHAKE_S,
            )
            await asyncio.sleep(TLS_WAYS * far_s)
            await connection.ready
        except asyncio.CancelledError:
            connection.abort("dialling was cancelled")
            raise
        if connection.closing:
            raise ConnectionError("the connection was closed")
        # Three round trips: TCP, TLS, READY. An estimate from above.
        connection.rtt_s = self._rtt_s(connection, otherwise=(monotonic() - begun) / 3)
        connection.idle_since = monotonic()
        self._all.add(connection)
        return connection

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 4)
            limit = monotonic() - IDLE_S
            for connection in list(self._all):
                # The dialler decides when to close; the listener waits longer, for connections that stay unused.
                patience = 0.0 if connection.dialed else IDLE_S
                if connection.free and connection.idle_since < limit - patience:
                    connection.close()
