"""Whom a peer finds when it looks for others, in the place of records in a DHT (`node.discovery.Finder`).

A look reads at once who runs. It finds those whose records would come to the looker: whoever reaches it, or somebody whom both reach, as over a relay. So nobody
learns anything from the other side of a partition, nor does who is behind a router while nobody can be dialled; who has found nobody looks again sooner, as
nodes do that have just begun. Not modelled: that a record takes time to be seen, outlives its peer by ten minutes, and may be missed.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from farflung.node.discovery import LOOK_S
from farflung.protocol.keys import PeerId
from farflung.sims.hub import MemoryHub

MOST_FOUND = 16
"""Peers that a look finds."""

LOOKS = 4
"""Of a peer that has found nobody, in the time between two of others."""


@dataclass(slots=True)
class Lookups:
    """Of all peers of a swarm."""

    hub: MemoryHub
    _number: int = 0
    _alone: set[PeerId] = field(default_factory=set)
    """Whose last look has found nobody."""

    def find(self, me: PeerId, most: int = MOST_FOUND) -> list[PeerId]:
        """Look once: all that can be found, or some, others each time, where there are many."""
        others = [peer for peer in self.hub.running() if peer != me]
        self._number += 1
        if len(others) > most:
            first = self._number * most % len(others)
            others = [*others[first:], *others[:first]]
        found = list(islice((peer for peer in others if self._is_told(me, peer)), most))
        if found:
            self._alone.discard(me)
        else:
            self._alone.add(me)
        return found

    async def go_on(self, ids: Sequence[PeerId], who: Collection[int], look: Callable[[int], None]) -> None:
        """Let all of `who` look now and then, by their numbers in `ids`, but for those who stand; until cancelled."""
        for number in count(1):
            await asyncio.sleep(LOOK_S / LOOKS)
            for peer in sorted(who):
                if (number % LOOKS == 0 or ids[peer] in self._alone) and not self.hub.is_paused(ids[peer]):
                    look(peer)

    def _is_told(self, me: PeerId, other: PeerId) -> bool:
        """Whether a record of one comes to the other."""
        reach = self.hub.reach
        return reach(me, other) or any(reach(me, one) and reach(one, other) for one in self.hub.running())
