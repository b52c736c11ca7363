"""Distance between nodes of one machine: what is sent arrives as late as it would from far away (`rehearsal`).

Control messages, and all that is written on TLS connections after encryption, first go through the node's uplink, one after another, whoever they
are for, and then on their way. The engine's cap alone would not do for the uplink: it lets 50 ms' worth of bytes through at once, as much as a part
of a small model. The downlink is that cap. A new TLS connection costs three round trips, as it does over the internet: TCP, TLS, READY. On time are
the DHT and what libp2p does by itself, and bulk that has to go over libp2p because TLS cannot be dialled, which between nodes of one machine is a
peer that has just gone.

What waits here is at most what the cap lets through, and rate times delay; there is no other limit.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from farflung.node.network import PeerId

TICK_S = 0.001
"""What is due within this is handed on now: uvloop's timers have milliseconds, and may fire half of one early."""

TCP_WAYS = 2
"""Ways that a new connection waits before it is dialled: until TCP has an answer, or knows that nobody listens."""
TLS_WAYS = 4
"""Those it waits once it is dialled: for TLS, and for READY, which is on its way meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Distances:
    """How far away the others are."""

    one_way_s: Mapping[PeerId, float]
    """Whoever is not in it is next door."""
    jitter_s: float = 0.0
    """Up to so many seconds more for a control message, uniform."""
    up_bytes_per_s: float = math.inf
    """Of this node's uplink."""

    def to(self, peer: PeerId) -> float:
        """Seconds one way."""
        return self.one_way_s.get(peer, 0.0)

    @property
    def longest_s(self) -> float:
        """After so long everything has been handed on."""
        return max(self.one_way_s.values(), default=0.0) + self.jitter_s + TICK_S


class FarLink:
    """A node's link: what it sends leaves one after another, then is on its way. `sims.links.Rates` is the same under virtual time."""

    def __init__(self, distances: Distances) -> None:
        self.distances = distances
        self._free_at = 0.0

    def through(self, num_bytes: int) -> float:
        """When the last of these bytes, which are sent now, has left, by the loop's clock."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + num_bytes / self.distances.up_bytes_per_s
        return self._free_at


class DelayLine:
    """Calls things later, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, due: float, call: Callable[[], None]) -> None:
        """Call this at that time of the loop's clock, and after what was put before."""
        self._waiting.append((due, call))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due, self._hand_on)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _hand_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._waiting[0][0] <= loop.time() + TICK_S:
            self._waiting.popleft()[1]()
        self._timer = loop.call_at(self._waiting[0][0], self._hand_on) if self._waiting else None


class LateMail:
    """`Mail.send` from far away."""

    def __init__(self, send: Callable[[PeerId, bytes], None], link: FarLink) -> None:
        self._send = send
        self._link = link
        self._lines: dict[PeerId, DelayLine] = {}

    def send(self, peer: PeerId, message: bytes) -> None:
        """Queue the message when it has come so far. One peer's messages stay in order, as on one TCP connection."""
        distances = self._link.distances
        due = self._link.through(len(message)) + distances.to(peer) + distances.jitter_s * random.random()
        self._lines.setdefault(peer, DelayLine()).put(due, partial(self._send, peer, message))


class LateTransport(asyncio.Transport):
    """A transport whose writes, and whose end, come later; as much of one as `TlsConnection` uses."""

    def __init__(self, transport: asyncio.Transport, link: FarLink, peer: PeerId) -> None:
        super().__init__()
        self._transport = transport
        self._link = link
        self._way_s = link.distances.to(peer)
        self._line = DelayLine()
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._line.put(self._due(len(data)), partial(self._write, bytes(data)))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _due(self, num_bytes: int) -> float:
        return self._link.through(num_bytes) + self._way_s

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._closing = True
        self._line.put(self._due(0), self._transport.close)

    def abort(self) -> None:
        self._closing = True
        self._line.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
