"""libp2p through hivemind: dialling by known addresses, binary streams named by protocol, and our visible addresses.

hivemind (and with it torch) is imported when a node starts, not before. Peers are named by public key; libp2p proves
them in its handshake, and the key is inside the peer id, so a stream's sender needs no further check.
"""

import asyncio
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from farflung.node.identity import Identity, from_libp2p_bytes, libp2p_bytes
from farflung.node.network import PeerId
from farflung.node.p2pd import P2pd, P2pdConfig
from farflung.node.scope import TaskScope
from farflung.protocol.errors import NetworkError

if TYPE_CHECKING:
    from hivemind.p2p.p2p_daemon import P2P
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector

DIAL_S = 15.0
"""Budget to reach a peer, relays and hole punching included (0.55 s measured at 100 ms round trip)."""
CONTROL_OF_ONE = 4
"""Control streams of one peer: one, and some that died without telling."""
BULK_OF_ONE = 64
"""Bulk streams of one peer. It asks for eight means and some chunks at a time, brings parcels both ways, and some streams may have died without telling."""

_log = structlog.get_logger(__name__)

Accepted = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How many streams of a protocol others may hold open to us at a time; each protocol has its own, so that none is in the way of another."""

    of_one: int
    """Of one peer."""
    of_strangers: int
    """Of all peers together that are not admitted: there are as many of them as somebody likes."""
    of_all: int


CONTROL_ROOM = Room(of_one=CONTROL_OF_ONE, of_strangers=1024, of_all=4096)
"""Newcomers are strangers, too. Members of 64 groups are 4,096."""
BULK_ROOM = Room(of_one=BULK_OF_ONE, of_strangers=0, of_all=2048)


class _Held:
    """The streams of one protocol that are open."""

    def __init__(self, room: Room, admit: Callable[[PeerId], bool]) -> None:
        self._room = room
        self._admit = admit
        self._of = Counter[PeerId]()
        self._strangers = set[PeerId]()
        """Of those who have streams, those who were not admitted when one came."""

    def take(self, peer: PeerId) -> None:
        """One more. Raises NetworkError when there is no room for it."""
        if self._of[peer] >= self._room.of_one:
            raise NetworkError(f"it has {self._room.of_one} already")
        strange = not self._admit(peer)
        if strange:
            # Everybody comes as a stranger: a member is admitted by its first heartbeat, which comes over the stream.
            self._strangers = {each for each in self._strangers if not self._admit(each)}
            if sum(self._of[each] for each in self._strangers) >= self._room.of_strangers:
                raise NetworkError("no room for one that is not admitted")
        if self._of.total() >= self._room.of_all:
            raise NetworkError("no room for anybody")
        self._of[peer] += 1
        if strange:
            self._strangers.add(peer)

    def free(self, peer: PeerId) -> None:
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]
            self._strangers.discard(peer)


class Libp2p:
    """A node's libp2p host."""

    def __init__(
        self,
        daemon: P2pd,
        p2p: "P2P",
        connector: "DaemonConnector",
        scope: TaskScope,
        known: Mapping[PeerId, list[str]],
    ) -> None:
        self._daemon = daemon
        self.p2p = p2p
        self._connector = connector
        self._scope = scope
        self._known = known
        self._incoming: set[asyncio.StreamWriter] = set()
        self._closing = False

    @classmethod
    async def start(
        cls, identity: Identity, config: P2pdConfig, scope: TaskScope, known: Mapping[PeerId, list[str]]
    ) -> "Libp2p":
        """Start the daemon and attach to it. `known`: multiaddrs (without /p2p/) at which to dial peers, kept current by
        the caller. Raises NetworkError."""
        _import_hivemind()
        from hivemind.p2p.p2p_daemon import P2P
        from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
        from hivemind.utils.multiaddr import Multiaddr

        daemon = await P2pd.start(identity, config)
        started = False
        try:
            control = Multiaddr(daemon.control)
            p2p = await P2P.replicate(control)
            if p2p.peer_id.to_bytes() != libp2p_bytes(identity.public_key):
                raise NetworkError("the libp2p daemon runs under another identity")
            started = True
        except OSError as error:
            raise NetworkError(f"cannot attach to the libp2p daemon: {error}") from error
        finally:
            if not started:
                await daemon.stop()
        return cls(daemon, p2p, DaemonConnector(control), scope, known)

    async def watch(self) -> None:
        """Until the daemon ends by itself; raises NetworkError then."""
        how = await self._daemon.wait()
        if not self._closing:
            raise NetworkError(how)

    async def serve(self, protocol: str, accepted: Accepted, room: Room, admit: Callable[[PeerId], bool]) -> None:
        """Have `accepted` called, in a task of ours, for each incoming stream of `protocol` for which there is room; `admit` says who is no stranger."""
        held = _Held(room, admit)

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                peer = from_libp2p_bytes(info.peer_id.to_bytes())
            except ValueError:
                writer.close()  # a key of another kind is none of ours
                return
            try:
                if self._closing:
                    raise NetworkError("the network is closed")
                held.take(peer)
            except NetworkError as error:
                _log.info("no stream", protocol=protocol, peer=peer.hex()[:12], error=str(error))
                writer.close()
                return
            self._incoming.add(writer)

            def over(task: asyncio.Task[None] | None = None) -> None:
                held.free(peer)
                self._incoming.discard(writer)

            task = self._scope.start(accepted(peer, reader, writer), protocol)
            if task is None:
                over()
                writer.close()
            else:
                task.add_done_callback(over)

        await self.p2p.add_binary_stream_handler(protocol, handle)

    async def connect(self, peer: PeerId) -> None:
        """Make sure of a connection, by known addresses. Raises NetworkError."""
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        addresses = []
        for text in self._known.get(peer, []):
            try:
                addresses.append(Multiaddr(text))
            except ValueError as error:
                _log.debug("bad multiaddr", address=text, error=str(error))
        async with self._call(f"cannot reach {peer.hex()[:12]}") as client:
            await client.connect(PeerID(libp2p_bytes(peer)), addresses)

    async def open(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to a peer, dialled if needed. Raises NetworkError."""
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

        if self._known.get(peer):
            await self.connect(peer)  # at once when there is a connection
        async with self._call(f"cannot open a stream to {peer.hex()[:12]}") as client:
            _, reader, writer = await client.stream_open(PeerID(libp2p_bytes(peer)), (protocol,))
        return reader, writer

    async def visible(self) -> list[str]:
        """Our multiaddrs as libp2p sees them, with /p2p/; observed ones behind a NAT included. None found yet: none; a node
        without a reachable address still dials out. Raises NetworkError."""
        async with self._call("no addresses from the libp2p daemon") as client:
            ours, addresses = await client.identify()
        readable = []
        for address in addresses:
            try:
                readable.append(f"{address}/p2p/{ours.to_base58()}")
            except (
                ValueError
            ) as error:  # of a protocol that hivemind's parser does not know; a relay may have such ones
                _log.debug("unknown multiaddr", error=str(error))
        return readable

    @asynccontextmanager
    async def _call(self, failure: str) -> AsyncIterator["ControlClient"]:
        """A client of the daemon for one call. hivemind's leaves its connection to the daemon open when the daemon refuses or
        the call is cancelled: it is closed here then. Raises NetworkError, beginning with `failure`."""
        from hivemind.p2p.p2p_daemon_bindings.control import ControlClient

        connection = _Connection(self._connector)
        done = False
        try:
            async with asyncio.timeout(DIAL_S):
                yield await ControlClient.create(connection, use_persistent_conn=False)
            done = True
        except TimeoutError:
            raise NetworkError(f"{failure}: no answer in {DIAL_S:.0f} s") from None
        except _daemon_errors() as error:
            raise NetworkError(f"{failure}: {error}") from error
        finally:
            if not done:
                connection.close()

    def begin_close(self) -> None:
        """Refuse new streams."""
        self._closing = True

    async def close(self) -> None:
        """Detach and end the daemon. The scope's tasks have ended before."""
        self._closing = True
        for writer in list(self._incoming):
            writer.close()
        await self.p2p.shutdown()
        await self._daemon.stop()


class _Connection:
    """To hivemind's client a connector to the daemon; to us the connection that one call opens."""

    def __init__(self, connector: "DaemonConnector") -> None:
        self._connector = connector
        self._writer: asyncio.StreamWriter | None = None

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self._writer = await self._connector.open_connection()
        return reader, self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _daemon_errors() -> tuple[type[Exception], ...]:
    """What hivemind's bindings raise when the daemon refuses or goes away."""
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

    return (P2PDaemonError, OSError, asyncio.IncompleteReadError)


def _import_hivemind() -> None:
    """Without its own log handler, which writes to stderr, and what torch says of code in it that is older than torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        from hivemind.utils.logging import HandlerMode, use_hivemind_log_handler

    use_hivemind_log_handler(HandlerMode.NOWHERE)
