"""How much of a node's time others may have with requests of the DHT, each of them and all together.

The DHT's requests are served in the loop in which the node trains, holds rounds and answers heartbeats. What a request takes is estimated before it is
served, in seconds of the loop (`dht_protocol.py` says of what); whoever asks for more than its share is refused, and nodes that are refused ask others
for some seconds.
"""

from collections import OrderedDict
from enum import Enum, auto

from farflung.node.network import PeerId
from farflung.node.pacing import TokenBucket

SHARE_OF_ONE = 0.02
"""Of the loop's time. An honest peer of a swarm of a thousand takes a hundredth of that: it puts a record and looks for others four times in two minutes."""
BURST_OF_ONE_S = 0.5
"""A node that joins hands over what it keeps, and looks for others several times within a minute."""
SHARE_OF_ALL = 0.25
"""However many keys they have. A swarm of a thousand that is at work takes an eighth of that at each of the nodes nearest to its key; if all of it starts
within ten seconds, one look in six is refused in the first minute. Those who know each other need no DHT, and train on when it is flooded."""
BURST_OF_ALL_S = 2.0
MAX_PEERS = 4096
"""Whose requests are remembered. Who was forgotten begins anew, which is no more than another key would get it."""


class Over(Enum):
    """Whose share is used up."""

    ITS_OWN = auto()
    ALL = auto()
    """Others have had it, who may be anybody: whoever is refused for that need not have asked for much."""


class Rates:
    """Seconds of the loop that are left to each peer. `now`: of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._all = TokenBucket(SHARE_OF_ALL, BURST_OF_ALL_S, now)
        self._of: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        """Who asked last at the end."""

    def take(self, peer: PeerId, seconds: float, now: float) -> Over | None:
        """None when a request of a peer may take so long, which is counted; else what stands against it, and nothing is."""
        own = self._bucket(peer, now)
        if not own.takes(seconds, now):
            return Over.ITS_OWN
        if not self._all.takes(seconds, now):
            own.refund(seconds, now)
            return Over.ALL
        return None

    def spend(self, peer: PeerId, seconds: float, now: float) -> None:
        """Count what a request has taken that could not be estimated: later ones wait for it."""
        self._bucket(peer, now).reserve(seconds, now)
        self._all.reserve(seconds, now)

    def _bucket(self, peer: PeerId, now: float) -> TokenBucket:
        bucket = self._of.pop(peer, None)
        if bucket is None:
            if len(self._of) >= MAX_PEERS:
                self._of.popitem(last=False)
            bucket = TokenBucket(SHARE_OF_ONE, BURST_OF_ONE_S, now)
        self._of[peer] = bucket
        return bucket
