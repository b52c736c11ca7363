"""What comes of all that is to happen to a swarm: peers' own lives and what is scripted know nothing of each other.

Nobody starts twice, or is killed while away. Whoever has gone comes back when that is over which took him, and not when something else is; who stands still
goes on after the last pause; and each partition ends by itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

from farflung.sims.faults import Fault, Heal, Kill, Leave, Partition, Pause, Presence, Resume, Start


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A fault that happens if it can; of two that are alike each is one by itself."""

    fault: Fault
    ends: "Wish | None" = None
    """The departure that a return follows, or the pause or partition that is over: without it, nothing happens. None: of a start, the peer's first one."""
    called: bool = False
    """Of a start: it brings whoever is away, however he went."""


def grant(wishes: Iterable[Wish]) -> tuple[Fault, ...]:
    """What happens of them, which are in the order of time."""
    course = _Course()
    return tuple(fault for wish in wishes if (fault := course.grant(wish)) is not None)


class _Course:
    """What has happened so far."""

    def __init__(self) -> None:
        self._presence = Presence()
        self._went: dict[int, Wish] = {}
        """By peer, its last departure."""
        self._pauses: dict[int, list[Wish]] = {}
        """By peer, what it stands still for."""
        self._cuts: dict[Wish, int] = {}
        """Numbers of the partitions that are open."""

    def grant(self, wish: Wish) -> Fault | None:
        """What happens, if anything does."""
        fault = wish.fault
        match fault:
            case Start(peer=peer) if not wish.called and self._went.get(peer) is not wish.ends:
                return None
            case Pause(peer=peer) if peer in self._presence.paused:
                self._pauses[peer].append(wish)
                return None
            case Resume(peer=peer) if not self._goes_on(peer, wish.ends):
                return None
            case Partition():
                number = self._cuts[wish] = next(n for n in count() if n not in self._presence.partitions)
                fault = replace(fault, number=number)
            case Heal() if wish.ends is not None:
                fault = replace(fault, number=self._cuts.pop(wish.ends))
        if not self._presence.allows(fault):
            return None
        self._presence.happen(fault)
        match fault:
            case Kill(peer=peer) | Leave(peer=peer):
                self._went[peer] = wish
            case Pause(peer=peer):
                self._pauses[peer] = [wish]  # those of a life before are over
        return fault

    def _goes_on(self, peer: int, pause: Wish | None) -> bool:
        """Whether the peer stands still for nothing else than a pause that is over."""
        holding = self._pauses.get(peer, [])
        if pause not in holding:
            return False
        holding.remove(pause)
        return not holding
