"""What is known of the way to each peer: measured rates per carrier, failed dials, and the choice for the next stream.

Pure: time is an argument. Direct TLS is preferred until measurement says otherwise; the other carrier is tried again now
and then, since routes change. Rates are smoothed over samples of bulk; the first bytes of a stream are not counted for
sending, because they only fill buffers on the way.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from farflung.node.network import LinkStats, PeerId

TLS = "tls"
LIBP2P = "libp2p"

SMOOTHING = 0.3
"""Weight of the newest sample: about five samples are remembered."""
SAMPLE_BYTES = 256 << 10
"""Least bytes of a sample; smaller ones measure latency."""
SAMPLE_S = 0.02
SKIP_SENT_BYTES = 1 << 20
"""Bytes at the start of a stream that buffers may swallow at any speed."""
BETTER_BY = 1.25
"""libp2p must be this much faster than TLS to be chosen: it shares its connection with control messages."""
REPROBE_S = 1800.0
"""How often the carrier that was not chosen gets one stream, to learn whether it became better."""
DIAL_RETRY_S = 30.0
DIAL_RETRY_MAX_S = 900.0
MAX_PEERS = 4096
"""Peers remembered; the ones used longest ago are forgotten."""


@dataclass(slots=True)
class _Rate:
    value: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        sample = size / seconds
        self.value = sample if self.value == 0 else self.value + SMOOTHING * (sample - self.value)


@dataclass(slots=True)
class _Link:
    up: dict[str, _Rate] = field(default_factory=lambda: {TLS: _Rate(), LIBP2P: _Rate()})
    down: dict[str, _Rate] = field(default_factory=lambda: {TLS: _Rate(), LIBP2P: _Rate()})
    sent: int = 0
    received: int = 0
    carrier: str = ""
    last_used: dict[str, float] = field(default_factory=dict)
    pause_s: float = DIAL_RETRY_S
    """After the next dial that fails."""
    retry_at: float = float("-inf")

    def speed(self, carrier: str) -> float:
        return max(self.up[carrier].value, self.down[carrier].value)


class Meter:
    """Counts the bytes of one stream and the time spent waiting for them."""

    def __init__(self, link: _Link, carrier: str) -> None:
        self._link = link
        self._carrier = carrier
        self._skip = SKIP_SENT_BYTES
        self._up_bytes = self._down_bytes = 0
        self._up_s = self._down_s = 0.0

    def sent(self, size: int, seconds: float) -> None:
        """`size` bytes were handed over in `seconds` of waiting."""
        self._link.sent += size
        if self._skip > 0:
            self._skip -= size
            return
        self._up_bytes += size
        self._up_s += seconds
        if self._up_bytes >= SAMPLE_BYTES and self._up_s >= SAMPLE_S:
            self._link.up[self._carrier].add(self._up_bytes, self._up_s)
            self._up_bytes, self._up_s = 0, 0.0

    def received(self, size: int, seconds: float) -> None:
        """`size` bytes arrived in `seconds` of waiting."""
        self._link.received += size
        self._down_bytes += size
        self._down_s += seconds
        if self._down_bytes >= SAMPLE_BYTES and self._down_s >= SAMPLE_S:
            self._link.down[self._carrier].add(self._down_bytes, self._down_s)
            self._down_bytes, self._down_s = 0, 0.0


class LinkBook:
    """All links of a node."""

    def __init__(self) -> None:
        self._links: OrderedDict[PeerId, _Link] = OrderedDict()

    def meter(self, peer: PeerId, carrier: str) -> Meter:
        """A meter for a new stream; `carrier` is `tls` or `libp2p`."""
        link = self._link(peer)
        if not link.last_used:
            link.carrier = carrier  # we only answer so far: show what the peer chose
        return Meter(link, carrier)

    def choose(self, peer: PeerId, *, dialable: bool, now: float) -> str:
        """Carrier of the next stream to `peer`; `dialable`: a TLS address is known, or a connection is open."""
        link = self._link(peer)
        if not dialable or now < link.retry_at:
            link.carrier = LIBP2P
            return LIBP2P
        tls, libp2p = link.speed(TLS), link.speed(LIBP2P)
        better = LIBP2P if tls and libp2p > BETTER_BY * tls else TLS
        link.carrier = better
        other = TLS if better == LIBP2P else LIBP2P
        for carrier in (better, other):
            link.last_used.setdefault(carrier, now)
        chosen = other if now - link.last_used[other] >= REPROBE_S else better
        link.last_used[chosen] = now
        return chosen

    def told(self, peer: PeerId, size: int) -> None:
        """A control message was handed over; these tell nothing of the rate."""
        self._link(peer).sent += size

    def heard(self, peer: PeerId, size: int) -> None:
        """A control message came."""
        self._link(peer).received += size

    def dial_failed(self, peer: PeerId, now: float) -> None:
        """TLS could not be dialled: use libp2p for a while, twice as long after each further failure."""
        link = self._link(peer)
        link.retry_at = now + link.pause_s
        link.pause_s = min(DIAL_RETRY_MAX_S, 2 * link.pause_s)
        link.carrier = LIBP2P

    def dial_succeeded(self, peer: PeerId) -> None:
        link = self._link(peer)
        link.pause_s = DIAL_RETRY_S
        link.retry_at = float("-inf")

    def forget_failures(self, peer: PeerId) -> None:
        """The peer announced new addresses: try them at once."""
        if peer in self._links:
            self.dial_succeeded(peer)

    def sent_bytes(self) -> int:
        """To all peers, bulk and control."""
        return sum(link.sent for link in self._links.values())

    def received_bytes(self) -> int:
        """From all peers, bulk and control."""
        return sum(link.received for link in self._links.values())

    def stats(self) -> dict[PeerId, LinkStats]:
        return {
            peer: LinkStats(
                carrier=link.carrier,
                up_bytes_per_s=link.up[link.carrier].value if link.carrier else 0.0,
                down_bytes_per_s=link.down[link.carrier].value if link.carrier else 0.0,
                sent_bytes=link.sent,
                received_bytes=link.received,
            )
            for peer, link in self._links.items()
        }

    def _link(self, peer: PeerId) -> _Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link()
            if len(self._links) > MAX_PEERS:
                self._links.popitem(last=False)
        self._links.move_to_end(peer)
        return link
