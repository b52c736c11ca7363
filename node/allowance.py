"""How much of others' messages a peer passes on, of each author and to each receiver, so that nobody fills its outboxes with what is not its own."""

from farflung.node.network import PeerId
from farflung.node.pacing import TokenBucket

BYTES_PER_S = 64 << 10
"""Heartbeats and what a round takes are a few kB a second."""

BURST_BYTES = 1 << 20
"""A history, and more."""

LEAST_BYTES = 4 << 10
"""As which the shortest message counts: an outbox holds 256 of them."""


class Allowance:
    """See the module. Who asks has been admitted, and who is asked for lives: they are few at a time. Seconds are of one monotonic clock."""

    def __init__(self) -> None:
        self._authors: dict[PeerId, TokenBucket] = {}
        """Of those for whom something was passed on lately."""
        self._receivers: dict[PeerId, TokenBucket] = {}

    def takes(self, author: PeerId, to: PeerId, size: int, now: float) -> bool:
        """Whether so many bytes more may be passed on; then they count."""
        size = max(size, LEAST_BYTES)
        of_author, of_receiver = _of(self._authors, author, now), _of(self._receivers, to, now)
        if not of_author.takes(size, now):
            return False
        if not of_receiver.takes(size, now):
            of_author.refund(size, now)
            return False
        return True


def _of(buckets: dict[PeerId, TokenBucket], peer: PeerId, now: float) -> TokenBucket:
    """That of `peer`. Where it is new, those go that are as new ones: else there would be one of each peer that has ever been here."""
    if peer not in buckets:
        for other in [other for other, bucket in buckets.items() if bucket.is_full(now)]:
            del buckets[other]
        buckets[peer] = TokenBucket(BYTES_PER_S, BURST_BYTES, now)
    return buckets[peer]
