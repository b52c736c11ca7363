"""Peers of other groups, as far as this one knows: whom to meet.

Groups have nothing to decide together, so nobody needs all of them; a few of each of some groups are enough. Records, heartbeats that were meant for others, and the division of
our own group tell of them; nothing of it is proven, and who cannot be reached is forgotten.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_NEIGHBOURS

Found = Mapping[PeerId, bytes | None]
"""Peers that were found, and of which group each is; None: of none yet, or nobody knows."""


def smallest_group(peers: Found) -> bytes | None:
    """By those who were found; None when nobody is of any."""
    sizes = Counter(group for group in peers.values() if group is not None)
    return min(sizes, key=lambda group: (sizes[group], group), default=None)


@dataclass(slots=True)
class Neighbours:
    """See the module."""

    groups: dict[PeerId, bytes] = field(default_factory=dict)
    """By peer, the group of which it was said to be; who was spoken of last comes last."""

    shown: set[PeerId] = field(default_factory=set)
    """Who of them has shown that it may be here. It may not know yet that it is of another group."""

    def note(self, peer: PeerId, group: bytes, *, shown: bool = False) -> None:
        """A peer is of another group. Whoever was not spoken of for longest makes room."""
        self.groups.pop(peer, None)
        self.groups[peer] = group
        if shown:
            self.shown.add(peer)
        if len(self.groups) > MAX_NEIGHBOURS:
            self.forget(next(iter(self.groups)))

    def forget(self, peer: PeerId) -> None:
        """It is gone, or one of us."""
        self.groups.pop(peer, None)
        self.shown.discard(peer)

    def choose(self, turn: int) -> PeerId | None:
        """Somebody to meet: groups take turns, however many of each we know, and the peers of each do. None while nobody is known."""
        if not self.groups:
            return None
        names = sorted(set(self.groups.values()))
        group = names[turn % len(names)]
        peers = sorted(peer for peer, of in self.groups.items() if of == group)
        return peers[turn // len(names) % len(peers)]
