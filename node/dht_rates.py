"""How much of a node's time others may have with requests of the DHT, each of them and all together.

The DHT's requests are served in the loop in which the node trains, holds rounds and answers heartbeats. What a request takes is estimated before it is
served, in seconds of the loop (`dht_protocol.py` says of what); whoever asks for more than its share is refused, and nodes that are refused ask others
for some seconds.
"""

from collections import OrderedDict

from farflung.node.network import PeerId
from farflung.node.pacing import TokenBucket

SHARE_OF_ONE = 0.02
"""Of the loop's time. An honest peer of a swarm of a thousand takes a tenth of that: it puts a record and looks for others some times in two minutes."""
BURST_OF_ONE_S = 0.5
"""A node that joins hands over what it keeps, and looks for others several times within a minute."""
SHARE_OF_ALL = 0.25
"""However many keys they have. Those who know each other need no DHT, and train on when it is flooded."""
BURST_OF_ALL_S = 2.0
MAX_PEERS = 4096
"""Whose requests are remembered. Who was forgotten begins anew, which is no more than another key would get it."""


class Rates:
    """Seconds of the loop that are left to each peer. `now`: of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._all = TokenBucket(SHARE_OF_ALL, BURST_OF_ALL_S, now)
        self._of: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        """Who asked last at the end."""

    def takes(self, peer: PeerId, seconds: float, now: float) -> bool:
        """Whether a request of a peer may take so long; then that is counted."""
        bucket = self._of.pop(peer, None)
        if bucket is None:
            if len(self._of) >= MAX_PEERS:
                self._of.popitem(last=False)
            bucket = TokenBucket(SHARE_OF_ONE, BURST_OF_ONE_S, now)
        self._of[peer] = bucket
        taken = []
        for each in (bucket, self._all):
            taken.append(each)
            if each.reserve(seconds, now) > 0.0:
                for taken_from in taken:
                    taken_from.refund(seconds, now)
                return False
        return True
