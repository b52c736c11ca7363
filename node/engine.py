"""The real network: hivemind's DHT for records, libp2p streams for control, direct TLS or libp2p for bulk.

Control never shares a connection with bulk over TLS; where bulk has to go over libp2p it shares one, and is paced below
the uplink. The carrier is chosen per stream by what was measured (`links.py`). Everything runs in the caller's event
loop; p2pd is the only child process, and it ends with us however we end.

Shutdown order of `close`: refuse what is new; let queued messages and closed streams hand over, for seconds; cut the
other streams; end all our tasks; leave the DHT; detach from p2pd and end it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import structlog

from farflung.node import frames
from farflung.node.addresses import host_of, is_direct, reach, split_addresses, split_peer, tls_address
from farflung.node.dht import Records
from farflung.node.distance import Distances, FarLink, LateMail
from farflung.node.identity import Identity, libp2p_text
from farflung.node.jumps import Jumps
from farflung.node.libp2p import BULK_ROOM, CONTROL_ROOM, Libp2p
from farflung.node.libp2p_stream import Libp2pStream
from farflung.node.links import LIBP2P, MAX_PEERS, TLS, LinkBook
from farflung.node.mail import Mail
from farflung.node.network import LinkStats, MessageHandler, PeerId, Stream, StreamHandler
from farflung.node.p2pd import P2pdConfig
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.node.seeds import SEEDS_AT_ONCE
from farflung.node.tls import TlsCarrier
from farflung.node.tls_stream import StripedStream
from farflung.protocol import limits
from farflung.protocol.errors import NetworkError, RemoteError

ADDRESSES_S = 60.0
"""How often our own addresses are looked up again: networks change under laptops, NATs are learnt late."""
FLUSH_S = 5.0
"""How long `close` waits until peers have read what is queued for them, and again for closed libp2p streams."""
LETTING_GO_S = 5.0
"""What is served and cancelled has so long to end, when somebody waits for it."""
KIND_S = 15.0
"""How long an incoming libp2p stream may take to say its kind."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a node talks to the world."""

    libp2p: P2pdConfig = field(default_factory=P2pdConfig)
    """How libp2p listens and gets through NATs."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddrs with /p2p/ of peers to join through, some at a time, the first of them first; those that do not answer are tried
    again."""
    tls: bool = True
    """Offer and use direct TLS for bulk."""
    tls_hosts: tuple[str, ...] = ("0.0.0.0", "::")
    """IP addresses to listen on for TLS."""
    tls_port: int = 0
    """TCP port for TLS; 0: any free one (a port to forward on a router must be fixed)."""
    tls_announce: tuple[str, ...] = ()
    """`tls://host:port` addresses to announce instead of those found."""
    connections: int | None = None
    """TLS connections per large stream; None: 1 near by, 8 on links with latency."""
    up_bytes_per_s: float | None = None
    """Cap on bulk sent; None: no cap."""
    down_bytes_per_s: float | None = None
    """Cap on bulk received; None: no cap."""
    distances: Distances | None = None
    """In rehearsals: how far away the others are."""

    def __post_init__(self) -> None:
        for address in self.initial_peers:
            split_peer(address)
        if self.connections is not None and not 1 <= self.connections <= 16:
            raise ValueError("connections must be 1 to 16")
        if not 0 <= self.tls_port < 65536:
            raise ValueError("tls_port must be 0 to 65535")

    @classmethod
    def loopback(cls, *, initial_peers: tuple[str, ...] = (), tls: bool = True) -> "EngineConfig":
        """For several nodes on one machine: listens on 127.0.0.1 only and asks no router for anything."""
        return cls(
            libp2p=P2pdConfig(
                listen=("/ip4/127.0.0.1/tcp/0",),
                nat_port_map=False,
                auto_nat=False,
                use_relay=False,
                auto_relay=False,
            ),
            initial_peers=initial_peers,
            tls=tls,
            tls_hosts=("127.0.0.1",),
        )


def everyone(peer: PeerId) -> bool:
    """The default of `admit`: anybody may open bulk streams, which the handlers decide by the stream's peer, and nobody's control streams count as strangers'."""
    return True


def any_record(key: bytes, subkey: str, value: bytes, expires_at: float) -> None:
    """A check of records that accepts all within the limits, for tests and tools that only read."""


def told_to_the_log(error: RemoteError) -> None:
    """The default of `refused`, and where there is no node yet that could be told: developers read it."""
    _log.info("refused", error=str(error))


class Engine:
    """Implements `network.Network`. Made by `Engine.create`, ended by `close`."""

    def __init__(
        self,
        identity: Identity,
        config: EngineConfig,
        admit: Callable[[PeerId], bool],
        refused: Callable[[RemoteError], None],
    ) -> None:
        self._identity = identity
        self._config = config
        self._admit = admit
        self._refused = refused
        self._scope = TaskScope()
        self._links = LinkBook()
        self._cap = config.up_bytes_per_s
        self._up = Pacer(self._cap)
        self._down = Pacer(config.down_bytes_per_s)
        self._handlers: dict[str, StreamHandler] = {}
        self._serving = set[asyncio.Task[None]]()
        self._direct: dict[PeerId, list[tuple[str, int]]] = {}
        self._named: dict[PeerId, list[str]] = {}
        """Multiaddrs of our seeds that our user, an invitation or our disk has named."""
        self._multiaddrs: dict[PeerId, list[str]] = {}
        self._own_addresses: list[str] = []
        self._tls_port = 0
        self._closing = False
        self._lingering: set[asyncio.Task[None]] = set()
        self._tls: TlsCarrier | None = None
        self._libp2p: Libp2p  # these four from `_start` on
        self._mail: Mail
        self._send: Callable[[PeerId, bytes], None]
        self._records: Records

    @classmethod
    async def create(
        cls,
        identity: Identity,
        config: EngineConfig | None = None,
        *,
        check_record: Callable[[bytes, str, bytes, float], None] = any_record,
        admit: Callable[[PeerId], bool] = everyone,
        refused: Callable[[RemoteError], None] = told_to_the_log,
    ) -> "Engine":
        """Start a network. It is usable at once, also while seeds do not answer (`joined` says when one did).

        `check_record(key digest (dht.key_digest), subkey, value, expires_at)` raises RemoteError for records that our DHT
        node shall neither store nor believe; `admit` says who may open bulk streams to us, and for whose control streams
        there is room beyond that for strangers (`libp2p.CONTROL_ROOM`); `refused` is told of such records, each once, and of
        bytes that are no frames of ours. The latter two may not raise. Raises NetworkError, ConfigError.
        """
        config = EngineConfig() if config is None else config
        self = cls(identity, config, admit, refused)
        async with AsyncExitStack() as undo:
            await self._scope.open()
            undo.push_async_callback(self._scope.close)
            await self._start(check_record, undo)
            undo.pop_all()
        return self

    async def _start(self, check_record: Callable[[bytes, str, bytes, float], None], undo: AsyncExitStack) -> None:
        config = self._config
        seeds = [split_peer(address) for address in config.initial_peers]
        libp2p = config.libp2p
        if libp2p.use_relay and not libp2p.trusted_relays:
            libp2p = replace(libp2p, trusted_relays=_relays(seeds))  # as hivemind and libp2p do
        self._libp2p = await Libp2p.start(self._identity, libp2p, self._scope, self._multiaddrs)
        undo.push_async_callback(self._libp2p.close)
        self._scope.start(self._libp2p.watch(), "p2pd")
        self._mail = Mail(
            self._scope, lambda peer: self._libp2p.open(peer, frames.CONTROL_PROTOCOL), self._links, self._refused
        )
        self._send = self._mail.send
        link = None if config.distances is None else FarLink(config.distances)
        if link is not None:
            self._send = LateMail(self._mail.send, link).send
        await self._libp2p.serve(frames.CONTROL_PROTOCOL, self._mail.accept, CONTROL_ROOM, self._admit)
        await self._libp2p.serve(frames.BULK_PROTOCOL, self._accept_bulk, BULK_ROOM, self._admit)
        if config.tls:
            self._tls = TlsCarrier(
                self._identity,
                self._scope,
                self._links,
                up=self._up,
                down=self._down,
                connections=config.connections,
                admit=self._admit,
                served=lambda kind: kind in self._handlers,
                opened=lambda stream: self._handle(stream, stream.kind),
                refused=self._refused,
                link=link,
            )
            undo.push_async_callback(self._tls.close)
            self._tls_port = await self._tls.listen(list(config.tls_hosts), config.tls_port)
        await self._refresh_addresses()
        self._records = await Records.start(
            self._libp2p.p2p, check_record, self._refused, self._libp2p.connect, self._scope.start
        )
        for peer, multiaddr in seeds:
            self._named.setdefault(peer, []).append(multiaddr)
            self._multiaddrs[peer] = self._named[peer]
            self._records.add_seed(peer)
        if seeds:
            await self._records.join_once()
        self._scope.start(self._records.stay_joined(), "stay in the DHT")
        self._scope.start(self._watch_addresses(), "own addresses")

    # --- network.Network ------------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> PeerId:
        return self._identity.public_key

    def addresses(self) -> list[str]:
        return list(self._own_addresses)

    def add_addresses(self, peer: PeerId, addresses: list[str]) -> None:
        if peer == self.peer_id:
            return
        for known in (self._multiaddrs, self._direct):
            learnt = (one for one in known if one not in self._named)
            if peer not in known and len(known) >= MAX_PEERS and (first := next(learnt, None)) is not None:
                del known[first]  # peers announce themselves again
        multiaddrs, direct = split_addresses(peer, addresses)
        if multiaddrs:  # what a peer says of itself may be of no use from here, where what was named is: through a tunnel, or a port that is handed on
            self._multiaddrs[peer] = list(dict.fromkeys([*self._named.get(peer, ()), *multiaddrs]))
        if multiaddrs:
            self._records.found(peer)
        if direct and direct != self._direct.get(peer):
            self._direct[peer] = direct
            self._links.forget_failures(peer)

    def on_message(self, handler: MessageHandler) -> None:
        self._mail.on_message(handler)

    def send(self, peer: PeerId, message: bytes) -> None:
        self._send(peer, message)

    def serve(self, kind: str, handler: StreamHandler) -> None:
        frames.encode_kind(kind)
        self._handlers[kind] = handler

    def stop_serving(self) -> None:
        """See `Network.stop_serving`."""
        self._handlers.clear()
        self._mail.on_message(lambda peer, message: None)
        for task in tuple(self._serving):
            task.cancel()

    async def finish_serving(self) -> None:
        """`stop_serving`, and wait until what was served has let go of what it works on; not for longer than `LETTING_GO_S`."""
        self.stop_serving()
        if self._serving:
            await asyncio.wait(tuple(self._serving), timeout=LETTING_GO_S)

    async def open_stream(self, peer: PeerId, kind: str) -> Stream:
        name = frames.encode_kind(kind)
        if self._closing:
            raise NetworkError("the network is closed")
        direct = self._direct.get(peer, [])
        dialable = self._tls is not None and (bool(direct) or self._tls.connected(peer))
        now = time.monotonic()
        if self._tls is not None and self._links.choose(peer, dialable=dialable, now=now) == TLS:
            try:
                stream = await self._tls.open(peer, kind, direct)
            except NetworkError as error:
                _log.info("TLS failed, using libp2p", peer=peer.hex()[:12], error=str(error))
                self._links.dial_failed(peer, time.monotonic())
            else:
                self._links.dial_succeeded(peer)
                return stream
        reader, writer = await self._libp2p.open(peer, frames.BULK_PROTOCOL)
        writer.write(bytes([len(name)]) + name)
        return self._libp2p_stream(peer, reader, writer)

    async def is_gone(self, peer: PeerId) -> bool:
        return self._tls is not None and await self._tls.is_gone(peer)

    async def put_record(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        return await self._records.put(key, subkey, value, expires_at)

    async def get_records(self, key: str) -> Mapping[str, bytes]:
        return await self._records.get(key)

    def links(self) -> Mapping[PeerId, LinkStats]:
        return self._links.stats()

    def delivered_bytes(self) -> int:
        return 0 if self._tls is None else self._tls.delivered_bytes()

    def sent_bytes(self) -> int:
        return self._links.sent_bytes()

    def received_bytes(self) -> int:
        return self._links.received_bytes()

    def unix_time(self) -> float:
        return time.time()

    def clock_trouble(self) -> str:
        return self._records.clock_trouble()

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._libp2p.begin_close()
        if not self._scope.failed:
            if self._config.distances is not None:
                await asyncio.sleep(self._config.distances.longest_s)
            await self._mail.flush(FLUSH_S)
            if self._lingering:
                await asyncio.wait(self._lingering, timeout=FLUSH_S)
        if self._tls is not None:
            await self._tls.close()
        try:
            await self._scope.close()  # raises what broke the engine, if something did
        finally:
            try:
                await self._records.close()
            finally:
                await self._libp2p.close()

    # --- beyond the interface -------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether a seed has answered since the start."""
        return self._records.joined.is_set()

    def keep_records(self, keys: Collection[bytes]) -> None:
        """See `Records.keep`."""
        self._records.keep(keys)

    def set_caps(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        """New caps on bulk, in bytes per second."""
        self._cap = up_bytes_per_s
        self._up.set_rate(up_bytes_per_s)
        self._down.set_rate(down_bytes_per_s)

    def pace(self, up_bytes_per_s: float | None) -> None:
        """See `Network.pace`."""
        limits = [rate for rate in (self._cap, up_bytes_per_s) if rate is not None]
        rate = min(limits, default=None)
        if rate != self._up.rate:
            self._up.set_rate(rate)

    async def wait_failed(self) -> None:
        """Until the engine breaks (p2pd ended, or a fault of ours): raises an ExceptionGroup then. Returns after `close`."""
        await self._scope.wait()

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _accept_bulk(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(KIND_S):
                (size,) = await reader.readexactly(1)
                kind = frames.decode_kind(await reader.readexactly(size), peer)
            if kind not in self._handlers:
                raise NetworkError(f"{kind!r} is not served to {peer.hex()[:12]}")
        except RemoteError as error:
            self._refused(error)
            writer.close()
            return
        except (OSError, asyncio.IncompleteReadError, TimeoutError, NetworkError) as error:
            _log.info("no bulk stream", peer=peer.hex()[:12], error=str(error))
            writer.close()
            return
        except asyncio.CancelledError:
            writer.close()  # nobody else has it yet
            raise
        await self._handle(self._libp2p_stream(peer, reader, writer), kind)

    async def _handle(self, stream: StripedStream | Libp2pStream, kind: str) -> None:
        task = asyncio.current_task()  # a stream has one of its own
        assert task is not None
        self._serving.add(task)
        try:
            if kind in self._handlers:  # it was when the stream came
                await self._handlers[kind](stream)
        except RemoteError as error:
            self._refused(error)
        except NetworkError as error:
            _log.info("bulk stream failed", kind=kind, peer=stream.peer.hex()[:12], error=str(error))
        finally:
            self._serving.discard(task)
            await stream.close()

    def _libp2p_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Libp2pStream:
        return Libp2pStream(
            peer,
            reader,
            writer,
            up=self._up,
            down=self._down,
            meter=self._links.meter(peer, LIBP2P),
            scope=self._scope,
            lingering=self._lingering,
            refused=self._refused,
        )

    async def _watch_addresses(self) -> None:
        jumps = Jumps(self.unix_time)
        while True:
            is_anew = await jumps.pause(ADDRESSES_S)
            if jumps.jumped:
                self._records.look_again()
            elif is_anew:
                self._records.ask_again()
            try:
                await self._refresh_addresses()
            except NetworkError as error:  # of a daemon that has ended `Libp2p.watch` tells
                _log.info("own addresses stay as they were", error=str(error))

    async def _refresh_addresses(self) -> None:
        visible = await self._libp2p.visible()
        suffix = f"/p2p/{libp2p_text(self.peer_id)}"
        visible = [text if text.endswith(suffix) else text + suffix for text in visible]
        hosts = {text: host_of(text) for text in visible}
        # Best first: the whole internet, then relays, then the local network, then this machine.
        multiaddrs = sorted(visible, key=lambda text: 0.5 if (host := hosts[text]) is None else reach(host))
        direct = list(self._config.tls_announce)
        if not direct and self._tls is not None:
            # What p2pd listens on, TLS listens on as well; a NAT in between shows when somebody dials.
            found = dict.fromkeys(host for host in hosts.values() if host is not None)
            direct = [tls_address(host, self._tls_port) for host in sorted(found, key=reach)]
        room = limits.MAX_ADDRESSES // 2
        self._own_addresses = [*multiaddrs[: max(room, limits.MAX_ADDRESSES - len(direct))], *direct][
            : limits.MAX_ADDRESSES
        ]


def _relays(seeds: list[tuple[PeerId, str]]) -> tuple[str, ...]:
    """The seeds that are asked first, as relays. p2pd ends at an address that it cannot read, and peers may announce anything."""
    first = list(dict.fromkeys(peer for peer, _ in seeds))[:SEEDS_AT_ONCE]
    return tuple(
        f"{multiaddr}/p2p/{libp2p_text(peer)}" for peer, multiaddr in seeds if peer in first and is_direct(multiaddr)
    )
