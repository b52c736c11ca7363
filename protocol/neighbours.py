"""Peers of other groups, as far as this one knows: whom to meet.

Groups have nothing to decide together, so nobody needs all of them; a few of each of some groups are enough. Records, heartbeats that were meant for others, and the division of
our own group tell of them; nothing of it is proven, and who cannot be reached is forgotten. Those by whose own word alone it is have a quarter of the places and of the meetings at most.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_NEIGHBOURS, MAX_OWN_WORDS

OWN_WORD_TURNS = 4
"""See `Neighbours.choose`."""

Found = Mapping[PeerId, bytes | None]
"""Peers that were found, and of which group each is; None: of none yet, or nobody knows."""


def smallest_group(peers: Found, avoids: Collection[bytes] = ()) -> bytes | None:
    """By those who were found, but for some groups; None when nobody is of any other."""
    sizes = Counter(group for group in peers.values() if group is not None and group not in avoids)
    return min(sizes, key=lambda group: (sizes[group], group), default=None)


@dataclass(slots=True)
class Neighbours:
    """See the module."""

    groups: dict[PeerId, bytes] = field(default_factory=dict)
    """By peer, the group of which it was said to be; who was spoken of last comes last."""

    shown: set[PeerId] = field(default_factory=set)
    """Who of them has shown that it may be here. It may not know yet that it is of another group."""

    own_words: set[PeerId] = field(default_factory=set)
    """Of whose group nothing but their own heartbeats tells. Such groups may be invented."""

    _asked: int = 0
    """Peers that `some` has given."""

    def note(self, peer: PeerId, group: bytes, *, shown: bool = False, own_word: bool = False) -> None:
        """A peer is of another group. Whoever was not spoken of for longest makes room, of those by whose own word it is if there are too many of them."""
        if not own_word:
            self.own_words.discard(peer)
        elif peer not in self.groups:
            self.own_words.add(peer)
        self.groups.pop(peer, None)
        self.groups[peer] = group
        if shown:
            self.shown.add(peer)
        if len(self.own_words) > MAX_OWN_WORDS:
            self.forget(next(peer for peer in self.groups if peer in self.own_words))
        if len(self.groups) > MAX_NEIGHBOURS:
            self.forget(next(iter(self.groups)))

    def forget(self, peer: PeerId) -> None:
        """It is gone, or one of us."""
        self.groups.pop(peer, None)
        self.shown.discard(peer)
        self.own_words.discard(peer)

    def some(self, number: int) -> list[PeerId]:
        """Up to so many, others each time, in the order of their turns: those whom messages go to, and messages have an order."""
        turns = range(self._asked, self._asked + number)
        self._asked += number
        return list(dict.fromkeys(peer for turn in turns if (peer := self.choose(turn)) is not None))

    def choose(self, turn: int) -> PeerId | None:
        """Somebody to meet: groups take turns, however many of each we know, and the peers of each do; groups that only their own peers speak of together have
        every `OWN_WORD_TURNS`-th, where there are others. None while nobody is known."""
        names = sorted(set(self.groups.values()))
        told = sorted({group for peer, group in self.groups.items() if peer not in self.own_words})
        claimed = sorted(set(names) - set(told))
        if told and claimed:
            round_, within = divmod(turn, OWN_WORD_TURNS)
            is_theirs = within == OWN_WORD_TURNS - 1
            names, turn = (claimed, round_) if is_theirs else (told, round_ * (OWN_WORD_TURNS - 1) + within)
        if not names:
            return None
        group = names[turn % len(names)]
        peers = sorted(peer for peer, of in self.groups.items() if of == group)
        return peers[turn // len(names) % len(peers)]
