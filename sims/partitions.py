"""The cuts of a modelled network: who is separated from whom, and since when. Several can be open at the same time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId


@dataclass(frozen=True, slots=True)
class _Partition:
    at: float
    """When it began, in virtual seconds."""
    sides: dict[PeerId, int]
    bridged: bool
    """Whether who is on no side reaches all of them, instead of being on one side more."""

    def separates(self, a: PeerId, b: PeerId) -> bool:
        if self.bridged and not (a in self.sides and b in self.sides):
            return False
        return self.sides.get(a, -1) != self.sides.get(b, -1)

    def parts(self, a: PeerId, b: PeerId) -> bool:
        """Whether nothing passes between the two by way of others either."""
        return not self.bridged and self.separates(a, b)


@dataclass(slots=True)
class Partitions:
    """See the module."""

    _open: dict[int, _Partition] = field(default_factory=dict)
    _healed: list[tuple[float, _Partition]] = field(default_factory=list)
    """With the moments at which they ended, the latest last; those that open ones may have gone on from."""
    _number: int = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, at: float, groups: Sequence[Sequence[PeerId]], *, bridged: bool = False) -> int:
        """Begin one, from now on beside the others; returns its number. `bridged`: peers in no group reach all of them, instead of forming one more. Raises ValueError when a peer is in two groups."""
        sides = {peer: side for side, group in enumerate(groups) for peer in group}
        if len(sides) != sum(len(group) for group in groups):
            raise ValueError("a peer is in two groups")
        self._number += 1
        self._open[self._number] = _Partition(at, sides, bridged)
        self._forget()
        return self._number

    def heal(self, at: float, number: int | None) -> None:
        """End one now, or all. Raises KeyError when there is none of this number."""
        for one in list(self._open) if number is None else [number]:
            self._healed.append((at, self._open.pop(one)))

    def separate(self, a: PeerId, b: PeerId) -> bool:
        """True while any of them separates the two."""
        return any(one.separates(a, b) for one in self._open.values())

    def since(self, a: PeerId, b: PeerId) -> float:
        """When the two were connected last, be it by others between them; infinite where they are."""
        began = min((one.at for one in self._open.values() if one.parts(a, b)), default=math.inf)
        if math.isinf(began):
            return began
        for until, one in reversed(self._healed):
            if until < began:
                break
            if one.parts(a, b):
                began = min(began, one.at)
        return began

    def _forget(self) -> None:
        """Those healed before any that is open began, be it by going on from another."""
        began = min(one.at for one in self._open.values())
        for place in reversed(range(len(self._healed))):
            until, one = self._healed[place]
            if until < began:
                del self._healed[: place + 1]
                break
            began = min(began, one.at)
