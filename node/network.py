"""The engine, as the node sees it: messages, byte streams and records between peers that are named by public key.

Two implementations: the real one (hivemind's DHT and libp2p streams, TLS for bulk), the in-memory one of
`farflung.sims` under a virtual clock, and nothing else. Guarantees, in words:

- `send` is best effort: a message arrives whole or not at all, possibly late, twice or out of order. It never waits for
  the other side longer than it takes to queue the bytes; a peer that does not drain its queue loses messages, not us.
- a `Stream` is an ordered, reliable, encrypted byte stream between two authenticated peers, with back-pressure, or it
  fails with `NetworkError`.
- records expire; "no record" is never proof of absence (transport digest, section 3).

Liveness is not the engine's business: heartbeats and deadlines are messages of the protocol.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

PeerId = bytes
"""A peer's Ed25519 public key, 32 bytes."""

MessageHandler = Callable[[PeerId, bytes], None]
"""Called in the event loop for every control message: (authenticated sender, bytes). Must not block or raise."""

StreamHandler = Callable[["Stream"], Awaitable[None]]
"""Called in a task of the network's own for every incoming stream; the stream is closed when it returns or raises."""


class Stream(Protocol):
    """One authenticated, ordered, reliable byte stream for bulk."""

    @property
    def peer(self) -> PeerId:
        """Public key of the other side, proven by the carrier."""

    async def write(self, data: bytes | bytearray | memoryview, *, follows: int = 0, overhead: int = 0) -> None:
        """Queue all of `data`; waits for back-pressure and for the pacer. `follows`: bytes that will be written right after it, as far
        as is known; a carrier may take more trouble over the last ones. `overhead`: of the first bytes, so many are not of what is sent but about it,
        which matters where bytes of vectors stand for more. Raises NetworkError."""

    async def readinto(self, buffer: memoryview) -> None:
        """Fill the whole of `buffer`. Raises NetworkError when the stream ends first."""

    async def close(self) -> None:
        """End the stream after everything written has been handed over. Never raises for a dead peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """What was measured about the way to one peer."""

    carrier: str
    """`tls` or `libp2p` (`memory` in simulations): what the next stream to this peer will use; empty before the first."""
    up_bytes_per_s: float
    """Smoothed rate of bulk sent to this peer; 0 before the first measurement."""
    down_bytes_per_s: float
    """Smoothed rate of bulk received from this peer; 0 before the first measurement."""
    sent_bytes: int
    """Bulk and control messages; without what encryption and the layers below it add, and without the DHT's own questions and answers."""
    received_bytes: int


class Network(Protocol):
    """What a node needs of an engine. `close` ends everything that the network started."""

    @property
    def peer_id(self) -> PeerId:
        """Our own public key."""

    def addresses(self) -> list[str]:
        """Addresses others can use in `add_addresses`, best first: multiaddrs, and `tls://host:port` for direct bulk."""

    def add_addresses(self, peer: PeerId, addresses: list[str]) -> None:
        """Remember where a peer may be reached. Wrong addresses only make dialling fail."""

    def on_message(self, handler: MessageHandler) -> None:
        """Set the one handler of control messages. Messages before this are dropped."""

    def send(self, peer: PeerId, message: bytes) -> None:
        """Queue one control message (at most limits.MAX_CONTROL_BYTES); best effort, returns at once."""

    def serve(self, kind: str, handler: StreamHandler) -> None:
        """Accept incoming bulk streams of `kind`."""

    def stop_serving(self) -> None:
        """Drop messages and refuse streams again, as before `on_message` and `serve`; handlers that are at it are cancelled."""

    async def open_stream(self, peer: PeerId, kind: str) -> Stream:
        """Open a bulk stream to a peer over the better carrier. Raises NetworkError."""

    async def is_gone(self, peer: PeerId) -> bool:
        """Dial a peer once more where it has answered us before. True when its machine says that nobody listens there any more: the process
        has ended. A process that is slow or stopped is not gone, nor is one that no word comes back from, for then it may be the link.
        """

    async def put_record(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a record (at most limits.MAX_RECORD_BYTES) until `expires_at` (unix seconds); True when some node took it.

        May take seconds when nodes are unreachable: never await it on a hot path. Raises NetworkError when it takes too long; some may have it then.
        """

    async def get_records(self, key: str) -> Mapping[str, bytes]:
        """All live records under `key`, by subkey. Unverified bytes: the caller checks signatures."""

    def links(self) -> Mapping[PeerId, LinkStats]:
        """What is known of each peer's bulk link; shown in `status`."""

    def delivered_bytes(self) -> int:
        """Bytes of bulk connections that have arrived at peers since the start, where the system can tell (TCP on Linux); else 0."""

    def sent_bytes(self) -> int:
        """Bytes that were sent to all peers since the start, bulk and control, arrived or not."""

    def received_bytes(self) -> int:
        """Bytes that have come from all peers since the start, bulk and control."""

    def pace(self, up_bytes_per_s: float | None) -> None:
        """Send bulk no faster than this (None: no limit but the user's own cap), so that control is not queued behind it."""

    def unix_time(self) -> float:
        """Seconds since the epoch, for stamps and expiries. Virtual in simulations."""

    def clock_trouble(self) -> str:
        """What peers' answers say is wrong with this machine's clock, for people; empty while nothing is known to be."""

    async def close(self) -> None:
        """Stop serving, end connections and child processes."""
