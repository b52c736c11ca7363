"""How much of others' messages a peer passes on for each member, so that nobody fills its outboxes with what is not its own."""

from farflung.node.network import PeerId
from farflung.node.pacing import TokenBucket

BYTES_PER_S = 64 << 10
"""Of one member; heartbeats and what a round takes are a few kB a second."""

BURST_BYTES = 1 << 20
"""A history, and more."""


class Allowance:
    """Of everybody who has asked; of members, so they are few. Seconds are of one clock."""

    def __init__(self) -> None:
        self._buckets: dict[PeerId, TokenBucket] = {}

    def takes(self, author: PeerId, size: int, now: float) -> bool:
        """Whether so many bytes more of a member may be passed on; then they count."""
        bucket = self._buckets.setdefault(author, TokenBucket(BYTES_PER_S, BURST_BYTES, now))
        if bucket.reserve(size, now) > 0.0:
            bucket.refund(size, now)
            return False
        return True
