"""Numbers to levels with signs, as bit planes, and back: the inner loops of `deadzone`, on a section of a vector.

A magnitude has level 0 if it is below its block's threshold t, else 1 + floor((magnitude - t) / UNITS), at most
LEVELS, with all in integer units of 1 / UNITS steps: sums of them are the same in any order.

Levels are in unary. Plane 1 has a bit for each element, set from level 1 on; plane 2 has a bit for each one of plane
1, set from level 2 on; and so forth. There is a sign, set for minus, for each one of plane 1. Elements of level LEVELS
are kept exactly. All bits are in order, the lowest of a byte first. By the chain rule, bits that are coded well plane
by plane take the entropy of the levels.

planes.c does the same as the NumPy code here, with the same results for any input.
"""

from ctypes import c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from farflung.compression import bitmaps, kernels
from farflung.compression.bitmaps import Bytes, Maps

LEVELS = 24
"""Magnitudes told apart, besides 0."""
UNITS = 256
"""Of a magnitude, per level."""
BLOCK = 8 * bitmaps.BLOCK
"""Elements that share a threshold; in plane 1 they also share a probability."""
SECTION = 1 << 20
"""Most elements of a section; those of one level, in units, add up to less than 2**35, as planes.c needs."""

Floats = NDArray[np.float32]

_STRIDE = SECTION // 8 + 16  # the kernels read and write whole words, up to 9 bytes past the last bit
_COLUMNS = 16  # of a block, whose sums of squares are added up in the end
_MAGIC = np.float32(1.5 * 2**23)  # with a float from 0 to 2**22 added, the lowest bits are the nearest integer

# Arguments of the kernels: see planes.c.
_SQUARES = (c_void_p, c_size_t, c_void_p)
_QUANTISE = (c_void_p, c_size_t, c_float, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p)
_EXPAND = (
    c_void_p, c_size_t, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_float, c_size_t, c_int, c_void_p,
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Planes:
    """Room for a section."""

    numel: int = 0
    """Elements of the section."""
    ones: list[int] = field(default_factory=list)
    """Ones of each plane that has any."""
    planes: Bytes = field(default_factory=lambda: np.zeros((LEVELS, _STRIDE), np.uint8))
    signs: Bytes = field(default_factory=lambda: np.zeros(_STRIDE, np.uint8))
    exact: Floats = field(default_factory=lambda: np.zeros(SECTION, np.float32))
    room: Bytes = field(default_factory=lambda: bitmaps.stream_room(LEVELS * _STRIDE))

    def counts(self) -> NDArray[np.int64]:
        """Elements of each level: [LEVELS]."""
        ones = np.zeros(LEVELS + 1, np.int64)
        ones[: len(self.ones)] = self.ones
        return ones[:-1] - ones[1:]

    def maps(self) -> Maps:
        """The planes that have ones."""
        lengths = [-(-count // 8) for count in [self.numel, *self.ones][: len(self.ones)]]
        return Maps(self.planes, lengths, self.room)

    def sign_map(self) -> Bytes:
        """The bytes of the signs."""
        return self.signs[: -(-self.ones[0] // 8)] if self.ones else self.signs[:0]

    def exact_values(self) -> Floats:
        """The elements of level LEVELS."""
        return self.exact[: self.ones[-1] if len(self.ones) == LEVELS else 0]


def sums_of_squares(x: Floats) -> NDArray[np.float64]:
    """For each block of `x`. The squares are exact, and they are added in the same order everywhere."""
    sums = np.empty(-(-len(x) // BLOCK))
    native = kernels.find("planes_squares", *_SQUARES)
    if native:
        native(x.ctypes.data, len(x), sums.ctypes.data)
        return sums
    padded = np.zeros((len(sums), BLOCK // _COLUMNS, _COLUMNS))
    padded.reshape(-1)[: len(x)] = x
    np.square(padded, out=padded)
    columns = np.add.accumulate(padded, axis=1)[:, -1]
    return np.add.accumulate(columns, axis=1)[:, -1]


def quantise(x: Floats, inverse: float, thresholds: NDArray[np.int32], into: Planes) -> NDArray[np.int64]:
    """Fill `into` from `x`, at most SECTION finite numbers, times `inverse` units, with the threshold of each block.

    Returns the sum of units over the elements of each level: int64 [LEVELS], 0 for level LEVELS.
    """
    into.numel = len(x)
    native = kernels.find("planes_quantise", *_QUANTISE)
    if native:
        ones, sums = np.empty(LEVELS, np.uint32), np.empty(LEVELS, np.int64)
        native(
            x.ctypes.data, len(x), inverse, thresholds.ctypes.data, into.planes.ctypes.data, _STRIDE,
            into.signs.ctypes.data, into.exact.ctypes.data, ones.ctypes.data, sums.ctypes.data,
        )  # fmt: skip
        into.ones = ones[: np.count_nonzero(ones)].tolist()
        return sums
    return _quantise(x, inverse, thresholds, into)


def expand(section: Planes, values: Floats, weight: float, out: Floats, *, add: bool) -> None:
    """Set or add, at the place of each element, the value of its level with its sign, or `weight` times the exact one.

    Planes that end too early, as damaged ones may, are followed by zeros, exact values by the value of level 0.
    """
    _clear_beyond(section)
    native = kernels.find("planes_expand", *_EXPAND)
    if native is None:
        _expand(section, values, weight, out, add=add)
        return
    exact = section.exact_values()
    native(
        section.planes.ctypes.data, _STRIDE, len(section.ones), section.signs.ctypes.data, exact.ctypes.data,
        len(exact), values.ctypes.data, weight, section.numel, add, out.ctypes.data,
    )  # fmt: skip


def _clear_beyond(section: Planes) -> None:
    """Zeros up to the end of the room of each plane in use, and of the signs."""
    for plane, nbytes in zip(section.planes, section.maps().lengths, strict=False):
        plane[nbytes:] = 0
    section.signs[len(section.sign_map()) :] = 0


def _quantise(x: Floats, inverse: float, thresholds: NDArray[np.int32], into: Planes) -> NDArray[np.int64]:
    with np.errstate(over="ignore"):  # an infinite magnitude has level LEVELS too
        units = (np.abs(x) * np.float32(inverse) + _MAGIC).view(np.int32) - _MAGIC.view(np.int32)
    levels = (units - np.repeat(thresholds, BLOCK)[: len(x)]) // UNITS + 1
    sums = np.zeros(LEVELS, np.int64)
    into.ones = []
    for level in range(1, LEVELS + 1):
        reached = levels >= level
        into.planes[level - 1, : -(-len(levels) // 8)] = np.packbits(reached, bitorder="little")
        x, units, levels = x[reached], units[reached], levels[reached]
        if len(x) == 0:
            return sums
        if level == 1:
            into.signs[: -(-len(x) // 8)] = np.packbits(np.signbit(x), bitorder="little")
        into.ones.append(len(x))
        if level < LEVELS:
            sums[level - 1] = units[levels == level].sum(dtype=np.int64)
    into.exact[: len(x)] = x
    return sums


def _expand(section: Planes, values: Floats, weight: float, out: Floats, *, add: bool) -> None:
    levels = np.zeros(section.numel, np.uint8)
    places = np.arange(section.numel)
    negative = np.zeros(section.numel, bool)
    for number, plane in enumerate(section.planes[: len(section.ones)]):
        places = places[np.unpackbits(plane, count=len(places), bitorder="little").view(bool)]
        levels[places] += 1
        if number == 0:
            negative[places] = np.unpackbits(section.signs, count=len(places), bitorder="little")
    decoded = values[levels]
    np.negative(decoded, out=decoded, where=negative)
    if len(section.ones) == LEVELS:
        exact = section.exact_values()
        decoded[places] = values[0]
        decoded[places[: len(exact)]] = exact[: len(places)] * np.float32(weight)
    if add:
        out += decoded
    else:
        out[:] = decoded
