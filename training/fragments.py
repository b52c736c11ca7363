"""A model's parameters cut into P fragments that are synchronised one after the other.

Streaming DiLoCo (2501.18512; digest 1.5) sends one fragment at a time, which divides the peak of the traffic by P. A
fragment here is a few slices of the flat vector (`training.flat`), found like this:

1. The layers, with embedding, head and norms around them where the model has them, are put in line: *sequential* in
   the model's order, *strided* by layer number modulo P, so that fragment p holds about the layers p, p + P, p + 2 P.
2. The line is cut at multiples of n / P elements; each cut moves to the nearest boundary of a layer if one is within
   SLACK of a fragment's share, else to that of a parameter, else it goes through a parameter.

So all fragments have the same number of bytes within twice SLACK, however large the embedding is (the paper says
nothing of embeddings; Decoupled DiLoCo balances by bytes), for any model and any P up to its number of elements. The
paper found strided as good as sequential or a little better, and its traffic is spread over the depth.

All of this follows from the names and shapes of the parameters, P and the pattern. A swarm's flat vector has its slots in line (`in_line`), so that each of its
fragments is one slice.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from farflung.training.flat import Slot

Pattern = Literal["sequential", "strided"]

SLACK = 1 / 16
"""Share of a fragment by which a cut may miss its place to spare a layer or a parameter."""

ALIGN = 64
"""Cuts through a parameter are at multiples of so many of its elements, where fragments are much larger than that."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Some slices of the flat vector."""

    slices: tuple[tuple[int, int], ...]
    """[start, stop) of each, in order, without overlap; slices that touch are one."""

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.slices)

    def take(
        self,
        flat: Tensor,  # [n]
    ) -> Tensor:  # [numel], a copy
        """The fragment's elements, slice after slice."""
        return torch.cat([flat[start:stop] for start, stop in self.slices])

    def put_(
        self,
        flat: Tensor,  # [n]
        values: Tensor,  # [numel]
    ) -> None:
        """The reverse of `take`."""
        for (start, stop), (low, high) in zip(self.slices, self._places(), strict=True):
            flat[start:stop] = values[low:high]

    def shapes(self, slots: Sequence[Slot]) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of what lies in the fragment, in its order, for a codec policy: of a parameter that is cut,
        elements [k, 1, ...] with as many dimensions as the whole has."""
        found: list[tuple[str, tuple[int, ...]]] = []
        for start, stop in self.slices:
            for slot in slots:
                low, high = max(start, slot.start), min(stop, slot.stop)
                if low < high:
                    whole = (low, high) == (slot.start, slot.stop)
                    ones = (1,) * (len(slot.shape) - 1)
                    found.append((slot.name, tuple(slot.shape) if whole else (high - low, *ones)))
        return found

    def _places(self) -> list[tuple[int, int]]:
        ends = accumulate((stop - start for start, stop in self.slices), initial=0)
        return list(pairwise(ends))


def in_line(
    slots: Sequence[Slot],  # of `flat.Layout`: they fill [0, n) in order
    count: int,  # P
    pattern: Pattern,
) -> list[Slot]:
    """The slots in the order in which fragments are cut from them (1 of the module)."""
    units = _units(slots)
    return [slot for unit in (units if pattern == "sequential" else _strided(units, count)) for slot in unit]


def cut(
    slots: Sequence[Slot],  # of `flat.Layout`: they fill [0, n) in order
    count: int,  # P
    pattern: Pattern = "strided",
) -> tuple[Fragment, ...]:
    """The `count` fragments; together they are all elements, each once. Raises ValueError."""
    numel = slots[-1].stop if slots else 0
    if not 1 <= count <= numel:
        raise ValueError(f"{numel} parameters cannot be cut into {count} fragments: choose 1 to {numel}")
    line = in_line(slots, count, pattern)
    ends = list(accumulate((slot.shape.numel() for slot in line), initial=0))
    firsts = {id(unit[0]) for unit in _units(slots)}
    layer_ends = [end for end, slot in zip(ends, line, strict=False) if id(slot) in firsts]
    share = numel / count
    cuts = [0, *(_cut_near(index * share, share, layer_ends, ends) for index in range(1, count)), numel]
    return tuple(_fragment(line, ends, low, high) for low, high in pairwise(cuts))


def _units(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbouring slots of the same layer together; every other one by itself."""
    units: list[list[Slot]] = []
    last = ""
    for slot in slots:
        match = _LAYER.search(slot.name)
        layer = slot.name[: match.end()] if match else ""
        if layer and layer == last:
            units[-1].append(slot)
        else:
            units.append([slot])
        last = layer
    return units


def _strided(units: list[list[Slot]], count: int) -> list[list[Slot]]:
    """The layers reordered by number modulo `count`; what stands before the first and after the last stays there."""
    is_layer = [_LAYER.search(unit[0].name) is not None for unit in units]
    layers = [unit for unit, is_one in zip(units, is_layer, strict=True) if is_one]
    order = sorted(range(len(layers)), key=lambda index: (index % count, index))
    first = is_layer.index(True) if layers else len(units)
    before = units[:first]
    after = [unit for unit, is_one in zip(units[first:], is_layer[first:], strict=True) if not is_one]
    return before + [layers[index] for index in order] + after


def _cut_near(place: float, share: float, *boundaries: Sequence[int]) -> int:
    """The boundary nearest to `place` on the line, the first kind that has one within the slack."""
    for candidates in boundaries:
        nearest = min(candidates, key=lambda end: abs(end - place), default=0)
        if abs(nearest - place) <= SLACK * share:
            return nearest
    inside = int(place)
    start = max(end for end in boundaries[-1] if end <= inside)
    rest = (inside - start) % ALIGN
    return inside - rest if ALIGN <= SLACK * share else inside


def _fragment(line: Sequence[Slot], ends: Sequence[int], low: int, high: int) -> Fragment:
    """Elements [low, high) of the line, as slices of the flat vector."""
    slices: list[tuple[int, int]] = []
    for slot, (begin, end) in zip(line, pairwise(ends), strict=True):
        start, stop = max(low, begin), min(high, end)
        if start < stop:
            slices.append((slot.start + start - begin, slot.start + stop - begin))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(slices):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return Fragment(tuple(merged))
