"""Who can reach whom: home routers, hole punching, relays.

A peer behind a router can dial out and cannot be dialled. Two peers reach each other

    directly    when either has a public address: the other dials out, asked to by a message through a relay if need be (connection reversal)
    by a hole   when both are behind routers that keep one outside port for all destinations (`cone`): both dial at once, which works for
                PUNCHES of all pairs
    by relay    otherwise, e.g. where a router picks another port for each destination (`symmetric`): a peer with a public address passes the
                bytes on, over its own link, in and out
    not at all  when there is none that runs and reaches both

Source of PUNCHES: 4.4 million attempts of libp2p's DCUtR, 70 % +- 7.1 % of them successful (Trautwein, Ihle, Schubotz and Gipp, arXiv 2510.27500). Whether a pair's hole opens is
drawn once for a pair, from the seed: routers do not change their minds.
"""

import random
from collections.abc import Iterable
from typing import Literal

from farflung.node.network import PeerId

Nat = Literal["none", "cone", "symmetric"]
"""What is between a peer and the internet; `none`: it has a public address."""

PUNCHES = 0.7

PUNCH_TRIPS = 4.0
"""One-way trips that a hole takes before the connection's own: the exchange of addresses over the relay, and the simultaneous dial."""


class Routers:
    """The routers in front of peers. `seed` draws which holes open."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._nats: dict[PeerId, Nat] = {}

    def __bool__(self) -> bool:
        """False while nobody is behind one, and everybody reaches everybody directly."""
        return bool(self._nats)

    def put(self, peer: PeerId, nat: Nat) -> None:
        """Put a router in front of a peer; `none` takes it away."""
        if nat == "none":
            self._nats.pop(peer, None)
        else:
            self._nats[peer] = nat

    def of(self, peer: PeerId) -> Nat:
        """What is in front of a peer."""
        return self._nats.get(peer, "none")

    def punched(self, a: PeerId, b: PeerId) -> bool:
        """Whether the two reach each other by a hole only."""
        if self.of(a) != "cone" or self.of(b) != "cone":
            return False
        pair = b"".join(sorted((a, b))).hex()
        return random.Random(f"{self._seed}/{pair}").random() < PUNCHES

    def direct(self, a: PeerId, b: PeerId) -> bool:
        """Whether the two reach each other without a relay."""
        return "none" in (self.of(a), self.of(b)) or self.punched(a, b)

    def relay(self, a: PeerId, b: PeerId, running: Iterable[PeerId]) -> PeerId | None:
        """Who of `running` passes on what the two have for each other; pairs are spread over those that can. None: nobody."""
        public = sorted(peer for peer in running if self.of(peer) == "none")
        if not public:
            return None
        return random.Random(b"".join(sorted((a, b))).hex()).choice(public)
