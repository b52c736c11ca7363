"""Peers through which the DHT can be joined, and in which order they are asked. No IO.

Some are named: by the user, by an invitation, or by this machine's own disk. The first ones of a swarm leave some day, so others are found: peers
of our own swarm that announce an address. Nothing else is known of these, and keys cost nothing. So they are few; a newer one takes the place of an older
one, but never of one that has answered, nor of a named one; and as long as there are named ones left to ask, every second one asked is named.
"""

from collections.abc import Collection

from farflung.node.network import PeerId

SEEDS_AT_ONCE = 16
"""Seeds asked at a time; one that answers is enough."""
MAX_ANSWERED = 16
"""Found ones that answered when they were last asked."""
MAX_FOUND = 16
"""Found ones that have not been asked, or did not answer: those heard of last."""


class Seeds:
    """See the module."""

    def __init__(self) -> None:
        self._named: list[PeerId] = []
        """Those to ask first come first, also in these."""
        self._answered: list[PeerId] = []
        self._found: list[PeerId] = []
        self._unasked: list[PeerId] = []
        """What is left of one turn through all."""

    def __bool__(self) -> bool:
        return bool(self._named or self._answered or self._found)

    @property
    def unasked(self) -> bool:
        """Whether some have been asked since one answered, or since all were asked, and others not."""
        return bool(self._unasked)

    def name(self, peer: PeerId) -> None:
        """One that our user or our own disk knows. The best come first."""
        if peer not in self._named:
            self._named.append(peer)
            self._answered = [other for other in self._answered if other != peer]
            self._found = [other for other in self._found if other != peer]

    def is_named(self, peer: PeerId) -> bool:
        """Whether it is one that our user or our own disk knows."""
        return peer in self._named

    def find(self, peer: PeerId) -> None:
        """One of our swarm that announces an address, by a record or a heartbeat."""
        if peer in self._named or peer in self._answered:
            return
        self._found = [peer, *(other for other in self._found if other != peer)][:MAX_FOUND]

    def take(self) -> list[PeerId]:
        """Whom to ask next."""
        if not self._unasked:
            self._unasked = self._in_turn()
        batch, self._unasked = self._unasked[:SEEDS_AT_ONCE], self._unasked[SEEDS_AT_ONCE:]
        return batch

    def asked(self, batch: Collection[PeerId], answered: Collection[PeerId]) -> None:
        """What became of it. Those that answered are the first to be asked from then on; named ones that did not when only found ones did give way to the
        other named ones, or those would never be asked."""
        before = [peer for peer in self._answered if peer not in batch]
        new = [peer for peer in batch if peer in answered and peer not in self._named]
        # One that is known to answer does not give way to one that answers for the first time.
        kept = [*(peer for peer in self._answered if peer in new), *before]
        self._answered = [*kept, *(peer for peer in new if peer not in kept)][:MAX_ANSWERED]
        silent = [peer for peer in batch if peer not in answered and peer not in self._named]
        rest = (peer for peer in self._found if peer not in batch)
        self._found = [*rest, *silent][:MAX_FOUND]
        if answered:
            first = [peer for peer in batch if peer in answered and peer in self._named]
            last = [] if first else [peer for peer in batch if peer in self._named]
            self._named = [*first, *(peer for peer in self._named if peer not in (*first, *last)), *last]
            self._unasked = []

    def _in_turn(self) -> list[PeerId]:
        named, found = self._named, [*self._answered, *self._found]
        both = min(len(named), len(found))
        pairs = (peer for pair in zip(named, found, strict=False) for peer in pair)
        return [*pairs, *named[both:], *found[both:]]
