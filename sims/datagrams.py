"""Control messages on their way: the sender's uplink, what lies between, a relay's link where it takes one, the receiver's downlink.

They take a link as long as they are, and wait there for other control messages, not for bulk (`links.Rates`): nodes pace bulk below what their uplinks
carry, so that it leaves room. What `links.LinkModel` draws for a message comes between the uplink and the downlink: it is lost, doubled or late.
"""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any, Protocol

from farflung.protocol.keys import PeerId
from farflung.sims.links import LinkModel, Path, Rates, copies
from farflung.sims.process import Process

_ROUNDING_S = 1e-6
"""Of times in seconds since 1970, which are no finer than a quarter of that."""


class Wire(Protocol):
    """What messages need of the network around them."""

    def now(self) -> float:
        """Virtual seconds."""

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call back at `when` virtual seconds, in the network's own context."""

    def cut(self, a: PeerId, b: PeerId) -> bool:
        """True while nothing passes between the two."""

    def path(self, a: PeerId, b: PeerId) -> Path:
        """The path between the two at this moment."""

    def link_of(self, peer: PeerId) -> LinkModel:
        """The access link of a peer."""

    def relay(self, a: PeerId, b: PeerId) -> PeerId | None:
        """Who passes on what the two have for each other, if anybody has to."""

    def runs(self, peer: PeerId) -> bool:
        """Whether a peer has a live process."""

    def is_running(self, network: Process) -> bool:
        """True until this very process ends."""

    def record(self, what: str, sender: PeerId, receiver: PeerId, num_bytes: int, detail: str) -> None:
        """Log one event."""


class Datagrams:
    """See the module. `take` is called with what has come in, and once more for what comes twice."""

    def __init__(
        self, wire: Wire, rng: random.Random, rates: Rates, take: Callable[[PeerId, Process, bytes], None]
    ) -> None:
        self._wire = wire
        self._rng = rng
        self._rates = rates
        self._take = take

    def send(self, sender: PeerId, target: Process, message: bytes) -> None:
        """Put a message for a peer that can be reached on the sender's uplink."""
        wire, receiver = self._wire, target.peer_id
        path = wire.path(sender, receiver)
        takes = len(message) / path.byte_means
        out_s = takes / wire.link_of(sender).up_bytes_per_s
        left_at = self._rates.reserve_message(sender, "up", out_s, wire.now())
        if path.bytes_per_s < math.inf:
            left_at = self._rates.reserve_message(sender, receiver, takes / path.bytes_per_s, left_at)
        delays = copies(self._rng, path)
        if not delays:
            wire.record("drop", sender, receiver, len(message), "lost")
        elif len(delays) > 1:
            wire.record("duplicate", sender, receiver, len(message), "")
        relay = wire.relay(sender, receiver)
        for delay_s in delays:
            if relay is None:
                self._come_in_at(left_at + delay_s, sender, target, message, takes)
            else:
                wire.at(left_at + delay_s, self._pass_on, sender, relay, target, message, takes)

    def _pass_on(self, sender: PeerId, relay: PeerId, target: Process, message: bytes, takes: float) -> None:
        """It is at the relay, whose own link it takes, in and out. Both legs' latency lies behind already."""
        wire, receiver = self._wire, target.peer_id
        if not wire.runs(relay) or wire.cut(sender, relay) or wire.cut(relay, receiver):
            wire.record("drop", sender, receiver, len(message), "cut" if wire.runs(relay) else "relay gone")
            return
        wire.record("relay", sender, receiver, len(message), "message")
        link, now = wire.link_of(relay), wire.now()
        in_at = self._rates.reserve_message(relay, "down", takes / link.down_bytes_per_s, now)
        out_at = self._rates.reserve_message(relay, "up", takes / link.up_bytes_per_s, now)
        self._come_in_at(max(in_at, out_at), sender, target, message, takes)

    def _come_in_at(self, when: float, sender: PeerId, target: Process, message: bytes, takes: float) -> None:
        """Looks at the downlink when the last byte would be through: mostly it is, and needs no timer more."""
        in_s = takes / self._wire.link_of(target.peer_id).down_bytes_per_s
        self._wire.at(when + in_s, self._come_in, sender, target, message, in_s)

    def _come_in(self, sender: PeerId, target: Process, message: bytes, in_s: float) -> None:
        wire, receiver = self._wire, target.peer_id
        if wire.is_running(target) and not wire.cut(sender, receiver):  # else it takes nobody's downlink
            now = wire.now()
            in_at = self._rates.reserve_message(receiver, "down", in_s, now - in_s)
            if in_at > now + _ROUNDING_S:
                wire.at(in_at, self._take, sender, target, message)
                return
        self._take(sender, target, message)
