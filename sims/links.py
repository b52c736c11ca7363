"""What a modelled link does to bytes: how long they take, and what becomes of them.

Every peer has one access link; a path is made of the links of its two ends. Control messages suffer latency, jitter, loss,
duplication and reordering, each drawn from the caller's `random.Random`. Bulk has latency and is serialised first come, first
served at the sender's uplink and the receiver's downlink, a chunk at a time, so that streams of one peer share it by turns. Control
messages take the links as long as they are, too; they wait for one another and not for bulk, which waits for them.
`Rates` is the whole of the rate model: a fluid-flow model replaces that one class.

Not modelled: TCP's slow start and its collapse under loss, queues in the network's middle, control that waits behind bulk.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.node.network import LinkStats, PeerId

_SMOOTHING = 0.3
"""Weight of the newest rate in the smoothed one; about the last five transfers count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """The access link of one peer, or of all. The defaults are a calm home connection that loses nothing."""

    latency_s: float = 0.025
    """One way, in seconds. A path's latency is that of both ends together."""
    jitter_s: float = 0.01
    """Up to so many seconds more for a control message, uniform. A path's is the mean of its ends'."""
    message_s: float = 0.0
    """What a control message takes beside its way, at both ends together. A path's is the mean of its ends'."""
    write_s: float = 0.0
    """The same of a piece of a stream."""
    drop: float = 0.0
    """Probability that a control message is lost. A path's is the larger of its ends', as for the next two."""
    duplicate: float = 0.0
    """Probability that a control message arrives twice."""
    reorder: float = 0.0
    """Probability that a control message is held back, so that later ones overtake it."""
    reorder_s: float = 0.5
    """How long a message is held back at most, in seconds."""
    up_bytes_per_s: float = 2.5e6
    """Uplink: 20 Mbit/s."""
    down_bytes_per_s: float = 12.5e6
    """Downlink: 100 Mbit/s."""
    byte_means: float = 1.0
    """Bytes of the real thing that one byte of bulk stands for, where vectors are shorter than a model's. Control messages are as long as they are, and
    so is what comes with bulk and is about it: headers, requests. The same for all."""
    state_means: float = 1.0
    """Bytes of bulk that one byte of a state stands for, where the vectors that are sent are coded otherwise than a model's would be. The same for all."""
    window_bytes: int = 1 << 20
    """Bulk of one direction of a stream that may be written and not yet read: go-libp2p blocks after 1.1 MiB."""
    queue_messages: int = 256
    """Control messages kept for a stopped process; the rest is lost."""
    kept_s: float = 0.0
    """How long a connection that this peer has dialled stays open for its next stream, in seconds; 0: each stream dials."""
    connect_timeout_s: float = 10.0
    """How long opening a stream waits for an answer, in seconds."""
    break_after_s: tuple[float, float] = (30.0, 60.0)
    """A stream over a cut link fails after so many seconds, uniform: measured 11 s (TCP with data) to 60 s."""
    record_delay_s: float = 0.2
    """Until a stored record is seen by others, and for a store or a look-up: up to so many seconds, uniform."""
    record_miss: float = 0.0
    """Probability that a look-up misses a subkey that exists."""
    record_timeout_s: float = 3.0
    """Up to so many seconds more for stores and look-ups while the network is partitioned."""

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder", "record_miss"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a probability, not {getattr(self, name)}")
        for name in (
            "latency_s",
            "jitter_s",
            "message_s",
            "write_s",
            "reorder_s",
            "record_delay_s",
            "record_timeout_s",
            "kept_s",
            "connect_timeout_s",
        ):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a finite time of at least 0 s, not {getattr(self, name)}")
        if not 0.0 <= self.break_after_s[0] <= self.break_after_s[1] < math.inf:
            raise ValueError(f"break_after_s is a range (least, most), not {self.break_after_s}")
        if not (self.up_bytes_per_s > 0 and self.down_bytes_per_s > 0):
            raise ValueError("rates are above 0 bytes per second")
        if self.window_bytes < 1 or self.queue_messages < 0:
            raise ValueError("window_bytes is at least 1 and queue_messages at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """Something wrong with the network for a while, on top of the links."""

    drop: float = 0.0
    """Probability that a control message is lost."""
    duplicate: float = 0.0
    """Probability that a control message arrives twice."""
    delay_s: float = 0.0
    """Added to the latency of control and bulk, in seconds."""
    peers: tuple[PeerId, ...] | None = None
    """Touches only what goes from or to these; None: everything."""

    def touches(self, a: PeerId, b: PeerId) -> bool:
        """True when it disturbs the path between the two."""
        return self.peers is None or a in self.peers or b in self.peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """What lies between two peers at this moment; the fields are those of `LinkModel`."""

    latency_s: float
    jitter_s: float
    message_s: float
    write_s: float
    drop: float
    duplicate: float
    reorder: float
    reorder_s: float
    window_bytes: int
    bytes_per_s: float = math.inf
    """Of what lies between the access links."""
    byte_means: float = 1.0
    state_means: float = 1.0


def path_between(
    a: LinkModel,
    b: LinkModel,
    disturbances: tuple[Disturbance, ...] = (),
    between: tuple[float, float] = (0.0, math.inf),  # latency (s) and rate (bytes/s) of what lies between
) -> Path:
    """The path between two access links under these disturbances."""
    passed = 1.0 - max(a.drop, b.drop)
    single = 1.0 - max(a.duplicate, b.duplicate)
    for disturbance in disturbances:
        passed *= 1.0 - disturbance.drop
        single *= 1.0 - disturbance.duplicate
    return Path(
        latency_s=a.latency_s + b.latency_s + between[0] + sum(d.delay_s for d in disturbances),
        jitter_s=(a.jitter_s + b.jitter_s) / 2,
        message_s=(a.message_s + b.message_s) / 2,
        write_s=(a.write_s + b.write_s) / 2,
        drop=1.0 - passed,
        duplicate=1.0 - single,
        reorder=max(a.reorder, b.reorder),
        reorder_s=max(a.reorder_s, b.reorder_s),
        window_bytes=min(a.window_bytes, b.window_bytes),
        bytes_per_s=between[1],
        byte_means=a.byte_means,
        state_means=a.state_means,
    )


def one_after_another(legs: Sequence[Path]) -> Path:
    """The path over all of these, at least one: delays add up, losses too, and the narrowest decides."""
    if len(legs) == 1:
        return legs[0]
    return Path(
        latency_s=sum(leg.latency_s for leg in legs),
        jitter_s=sum(leg.jitter_s for leg in legs),
        message_s=max(leg.message_s for leg in legs),
        write_s=max(leg.write_s for leg in legs),
        drop=1.0 - math.prod(1.0 - leg.drop for leg in legs),
        duplicate=max(leg.duplicate for leg in legs),
        reorder=max(leg.reorder for leg in legs),
        reorder_s=max(leg.reorder_s for leg in legs),
        window_bytes=min(leg.window_bytes for leg in legs),
        bytes_per_s=min(leg.bytes_per_s for leg in legs),
        byte_means=legs[0].byte_means,
        state_means=legs[0].state_means,
    )


def copies(rng: random.Random, path: Path) -> list[float]:
    """Draw the fate of one control message: the delay in seconds of each copy that arrives, so none when it is lost.

    Always takes the same number of draws, so that changing one probability leaves the fates of other messages alone.
    """
    lost = rng.random() < path.drop
    num_copies = 2 if rng.random() < path.duplicate else 1
    delays = []
    for _ in range(2):
        jitter, held, how_long = rng.random(), rng.random() < path.reorder, rng.random()
        late_s = path.message_s + path.jitter_s * jitter + (path.reorder_s * how_long if held else 0.0)
        delays.append(path.latency_s + late_s)
    return [] if lost else delays[:num_copies]


class Rates:
    """When each uplink and each downlink is next free: for bulk, and for control messages, which let no bulk pass that comes after them."""

    def __init__(self) -> None:
        self._free_at: dict[tuple[PeerId, str | PeerId], list[float]] = {}
        """For bulk, and for messages."""

    def reserve(self, peer: PeerId, way: str | PeerId, num_bytes: float, bytes_per_s: float, now: float) -> float:
        """Queue bulk on the `up` or `down` link of a peer, or on its way to another; returns when the last byte is through, in seconds."""
        free_at = self._free(peer, way, now)
        free_at[0] = done = max(now, free_at[0]) + num_bytes / bytes_per_s
        return done

    def reserve_message(self, peer: PeerId, way: str | PeerId, takes_s: float, now: float) -> float:
        """Queue a control message that takes so long; returns when it is through. It waits for messages before it, not for bulk; what bulk comes later waits for it."""
        free_at = self._free(peer, way, now)
        bulk, messages = free_at
        free_at[0] = (bulk if bulk > now else now) + takes_s
        free_at[1] = done = (messages if messages > now else now) + takes_s
        return done

    def _free(self, peer: PeerId, way: str | PeerId, now: float) -> list[float]:
        free_at = self._free_at.get((peer, way))
        if free_at is None:
            free_at = self._free_at[peer, way] = [now, now]
        return free_at

    def forget(self, peer: PeerId) -> None:
        """Nothing of this peer is queued any more: its process is gone."""
        for key in [key for key in self._free_at if key[0] == peer]:
            del self._free_at[key]


class Meter:
    """What one peer measured about the way to another; or, as their `total`, to all of them."""

    def __init__(self, total: "Meter | None" = None) -> None:
        self._total = total
        self._up = self._down = 0.0
        self.sent_bytes = self.received_bytes = 0.0
        """Of bulk; what control messages are of that is no whole number where a byte stands for many."""

    def sent(self, num_bytes: float) -> None:
        """Count bytes sent."""
        self.sent_bytes += num_bytes
        if self._total is not None:
            self._total.sent(num_bytes)

    def sent_at(self, num_bytes: int, seconds: float) -> None:
        """Measure the rate of one write, unless it took no time."""
        self._up = _smooth(self._up, num_bytes, seconds)

    def received(self, num_bytes: float) -> None:
        """Count bytes received."""
        self.received_bytes += num_bytes
        if self._total is not None:
            self._total.received(num_bytes)

    def received_at(self, num_bytes: int, seconds: float) -> None:
        """Measure the rate of one read, unless it took no time."""
        self._down = _smooth(self._down, num_bytes, seconds)

    def stats(self) -> LinkStats:
        """A snapshot for `Network.links`."""
        return LinkStats(
            carrier="memory",
            up_bytes_per_s=self._up,
            down_bytes_per_s=self._down,
            sent_bytes=round(self.sent_bytes),
            received_bytes=round(self.received_bytes),
        )


def _smooth(old: float, num_bytes: int, seconds: float) -> float:
    if seconds <= 0.0:
        return old
    new = num_bytes / seconds
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
