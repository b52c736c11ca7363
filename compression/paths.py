"""Numbers to levels on the cheapest path through a trellis, and back: the quantiser of `trellis`.

There are two scalar quantisers, in units of a step: one has 0, 2, 4, 6, ..., the other 0, 1, 3, 5, ..., both with signs;
level k stands for 2k, or 2k - 1. Which of them an element has follows from the parities of the levels before it, by a
machine of eight states (`NEXT`), so a decoder knows it without being told. Together they have a value at each step, and
each element is told one of half of them: as a code of points in many dimensions these lie denser than on a grid. This is
trellis-coded quantisation (M. Marcellin and T. Fischer, IEEE Trans. Commun. 38, 1990), in the form of "dependent
quantisation" of H.266, whose states and zeros in both quantisers these are (H. Schwarz et al., DCC 2019).

    cost of a path = sum of (magnitude - value)**2 + RATE_PRICE * bits, magnitudes in steps

is least on the path that `search` finds (Viterbi's algorithm). What bits a level costs and which value it stands for are
estimates, `Prices`, which `fit` makes from a sample: from one search to the next they become what that search found. Once
found, values are sent: each the mean of the magnitudes that have the quantiser and the level.

Elements take turns: number i is in lane i mod LANES, and each lane has its own path, which begins anew after TURNS turns. So
paths can be searched side by side. A cell is a level, with the number of its quantiser in the highest bit.

paths.c does the same as the NumPy code here, with the same results for any input.
"""

from ctypes import c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from farflung.compression import kernels
from farflung.compression.bitmaps import Bytes
from farflung.compression.planes import Floats

LEVELS = 24
"""Magnitudes told apart, besides 0; what has the highest is kept exactly."""
LEVEL = 31
"""Mask of the level of a cell."""
QUANTISER = 7
"""Bit of a cell."""
NEXT = np.array([[0, 2], [5, 7], [1, 3], [6, 4], [2, 0], [4, 6], [3, 1], [7, 5]], np.uint8)
"""By state and parity of the level, the state of the next element of the lane; its last bit is the quantiser."""
LANES = 8
TURNS = 512
RATE_PRICE = 0.39
"""Of a bit, in squares of the step. At any rate of Gaussian data it is within 0.003 bits of the best."""
EXACT_BITS = 32.0

_STATES = len(NEXT)
_MAGIC = np.float32(1.5 * 2**23)  # added and taken away again, it leaves the nearest integer
_FARTHEST = 4 * LEVELS  # steps: what is beyond is exact in either case
_MANY = 1e6  # more than any path costs at its beginning
_ALIKE = 1.6  # kurtosis: of equal magnitudes 1, of uniform deviates 1.8, of Gaussian ones 3
_FITS = 5  # searches of a sample; the last of them changes bits by less than 0.002

# Arguments of the kernels: see paths.c.
_SEARCH = (c_void_p, c_size_t, c_float, c_void_p, c_void_p)
_SUMS = (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)
_EXPAND = (
    c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_float, c_int, c_void_p,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What a search reckons with, for each of the two quantisers; prices in squares of the step."""

    shifts: Floats
    """By which a level's value is off 2k, or 2k - 1: [2, 3], of levels 1, 2 and the others."""
    zeros: Floats
    """Of level 0: [2]."""
    ones: Floats
    """Of level 1, with its sign: [2]."""
    slope: float
    """Of each level more."""

    @classmethod
    def of_shares(
        cls,
        shifts: Floats,
        ones: NDArray[np.float64],  # by quantiser, share above level 0
        twos: float,  # of these, above level 1
        more: float,  # of any above level 1, one more level
    ) -> Self:
        """By what bits cost where these are the shares."""
        bits = -np.log2(np.stack([1 - ones, ones])) + [[0], [1 - np.log2(1 - twos)]]
        slope = -np.log2(twos) - np.log2(1 - more) + np.log2(1 - twos)
        zeros, firsts = (RATE_PRICE * bits).astype(np.float32)
        return cls(shifts=shifts, zeros=zeros, ones=firsts, slope=float(RATE_PRICE * max(slope, 0.0)))

    def flat(self) -> Floats:
        """All of them, and what an exact value costs besides, as the kernel has it."""
        last = [self.slope, RATE_PRICE * EXACT_BITS]
        return np.concatenate([self.shifts.ravel(), self.zeros, self.ones, last]).astype(np.float32)


def search(x: Floats, inverse: float, prices: Prices) -> Bytes:
    """The cells of finite numbers, times `inverse` steps."""
    cells = np.empty(len(x), np.uint8)
    native = kernels.find("paths_search", *_SEARCH)
    if native:
        flat = prices.flat()  # has a name, for an address keeps no memory
        native(x.ctypes.data, len(x), inverse, flat.ctypes.data, cells.ctypes.data)
        return cells
    whole = len(x) // (LANES * TURNS) * LANES * TURNS
    for part, into in ((x[:whole], cells[:whole]), (x[whole:], cells[whole:])):
        if len(part):
            _search(part, np.float32(inverse), prices.flat(), into)
    return cells


def fit(sample: Floats, inverse: float) -> Prices:
    """Prices that agree with what a search comes to by them. Magnitudes that are much alike are all above level 0 or none is: it begins with all of them."""
    shifts = np.array([[-0.2, -0.2, 0.0], [0.25, 0.1, 0.1]], np.float32)
    squares = np.square(sample.astype(np.float64) * inverse)
    alike = len(sample) * np.square(squares).sum() < _ALIKE * squares.sum() ** 2
    prices = Prices.of_shares(shifts, np.array([0.9, 0.9]) if alike else np.array([0.1, 0.5]), 0.1, 0.1)
    for _ in range(_FITS - 1):
        prices = _as_found(sample, inverse, search(sample, inverse, prices), prices)
    return prices


def single(numel: int, at: int | None) -> Bytes:
    """Cells of level 0, but for one of level 1 if it is among them."""
    cells = np.zeros(numel, np.uint8)
    if at is not None and 0 <= at < numel:
        state = 0
        for place in range(at, min(numel, (at // (LANES * TURNS) + 1) * LANES * TURNS), LANES):
            cells[place] = (place == at) | (state & 1) << QUANTISER
            state = NEXT[state, int(place == at)]
    return cells


def sums(cells: Bytes, x: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How many elements have each quantiser and level, and above level 0 the sums of their magnitudes: [2, LEVELS + 1]."""
    counts, magnitudes = np.zeros(256, np.int64), np.zeros(256)
    native = kernels.find("paths_sums", *_SUMS)
    if native:
        native(cells.ctypes.data, x.ctypes.data, len(x), counts.ctypes.data, magnitudes.ctypes.data)
    else:
        above = np.flatnonzero(cells & LEVEL)
        counts += np.bincount(cells, minlength=256)
        magnitudes += np.bincount(cells[above], np.abs(x[above].astype(np.float64)), minlength=256)
    return counts.reshape(2, -1)[:, : LEVELS + 1], magnitudes.reshape(2, -1)[:, : LEVELS + 1]


def at_least(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """From how many elements have each level, how many have that or a higher one: [2, LEVELS + 1]."""
    return counts[:, ::-1].cumsum(1)[:, ::-1]


def expand(
    cells: Bytes,
    signs: Bytes,  # a bit for each element above level 0, set for minus
    exact: Floats,  # those of level LEVELS
    values: Floats,  # of each cell: [256]
    weight: float,  # of exact ones
    out: Floats,
    *,
    add: bool,
) -> None:
    """Set or add the value of each cell with its sign. Signs that are missing are plus, exact values 0."""
    native = kernels.find("paths_expand", *_EXPAND)
    if native:
        native(
            cells.ctypes.data, len(cells), signs.ctypes.data, 8 * len(signs), exact.ctypes.data, len(exact), values.ctypes.data,
            weight, add, out.ctypes.data,
        )  # fmt: skip
        return
    decoded = values[cells]
    above = np.flatnonzero(cells & LEVEL)[: 8 * len(signs)]
    negative = above[np.unpackbits(signs, count=len(above), bitorder="little").view(bool)]
    decoded[negative] = -decoded[negative]
    places = np.flatnonzero(cells & LEVEL == LEVELS)
    decoded[places] = 0.0
    with np.errstate(over="ignore"):  # as in C
        decoded[places[: len(exact)]] = exact[: len(places)] * np.float32(weight)
        if add:
            out += decoded
        else:
            out[:] = decoded


def _as_found(sample: Floats, inverse: float, cells: Bytes, before: Prices) -> Prices:
    """From how many and which elements have each quantiser and level; what hardly any have stays as it was."""
    counts, magnitudes = sums(cells, sample)
    off = magnitudes * inverse - counts * (2 * np.arange(LEVELS + 1) - [[0], [1]])
    groups, offs = (np.stack([a[:, 1], a[:, 2], a[:, 3:LEVELS].sum(1)], axis=1) for a in (counts, off))
    shifts = np.where(groups > 8, offs / np.maximum(groups, 1), before.shifts).astype(np.float32)
    above = at_least(counts)
    reached = above.sum(0)
    return Prices.of_shares(
        shifts,
        (above[:, 1] + [3.2, 25.6]) / (above[:, 0] + 64),  # as if 64 had been seen before
        (reached[2] + 0.2) / (reached[1] + 1),
        (reached[3:].sum() + 0.2) / (reached[2:-1].sum() + 1),
    )


def _search(x: Floats, inverse: np.float32, prices: Floats, cells: Bytes) -> None:
    """Paths of one length: whole ones, or what is left of one."""
    turns = min(-(-len(x) // LANES), TURNS)
    padded = np.zeros(-(-len(x) // (turns * LANES)) * turns * LANES, np.float32)
    padded[: len(x)] = np.abs(x) * inverse
    np.minimum(padded, np.float32(_FARTHEST), out=padded)
    magnitudes = np.ascontiguousarray(padded.reshape(-1, turns, LANES).transpose(1, 0, 2)).reshape(turns, -1)
    totals = np.full((_STATES, magnitudes.shape[1]), np.float32(_MANY))
    totals[0] = 0
    levels = np.empty((turns, 2, 2, magnitudes.shape[1]), np.uint8)
    seconds = np.empty((turns, _STATES, magnitudes.shape[1]), bool)
    ways = [
        [(state, odd) for state in range(_STATES) for odd in (0, 1) if NEXT[state, odd] == to] for to in range(_STATES)
    ]
    for turn, magnitude in enumerate(magnitudes):
        costs = _costs(magnitude, prices, levels[turn])
        now = np.empty_like(totals)
        for to, ((one, odd), (other, odder)) in enumerate(ways):
            first, second = totals[one] + costs[one & 1][odd], totals[other] + costs[other & 1][odder]
            np.less(second, first, out=seconds[turn, to])
            now[to] = np.where(seconds[turn, to], second, first)
        totals = now
    states = totals.argmin(axis=0)
    every = np.arange(len(states))
    from_, odds = (np.array([[way[i] for way in pair] for pair in ways]) for i in (0, 1))
    found = np.empty(magnitudes.shape, np.uint8)
    for turn in reversed(range(turns)):
        which = seconds[turn, states, every].astype(np.intp)
        odd, states = odds[states, which], from_[states, which]
        found[turn] = levels[turn, states & 1, odd, every] | (states & 1) << QUANTISER
    cells[:] = found.reshape(turns, -1, LANES).transpose(1, 0, 2).reshape(-1)[: len(x)]


def _costs(magnitude: Floats, prices: Floats, levels: Bytes) -> list[list[Floats]]:
    """By quantiser and parity; `levels` [2, 2, paths] becomes the levels that cost as much. Each operation as in paths.c."""
    slope, exact = prices[10], prices[11]
    square, costs = magnitude * magnitude, []
    for quantiser in range(2):
        shifts, zero, one = prices[3 * quantiser : 3 * quantiser + 3], prices[6 + quantiser], prices[8 + quantiser]
        pair = []
        for lowest, highest in ((2, LEVELS), (1, LEVELS - 1)):
            steps = (magnitude + np.float32(quantiser - 2 * lowest)) * np.float32(0.25)
            steps = np.maximum(steps + _MAGIC - _MAGIC, np.float32(0))
            level = np.minimum(np.float32(lowest) + steps * np.float32(2), np.float32(highest))
            shift = shifts[np.minimum(level, 3).astype(np.intp) - 1]
            error = magnitude - (level * np.float32(2) - np.float32(quantiser) + shift)
            pair.append((error * error + (one + (level - np.float32(1)) * slope), level))
        (cost, even), (odd_cost, odd) = pair
        cost = np.where(even == LEVELS, one + exact, cost)
        nothing = square + zero
        least = nothing <= cost
        levels[quantiser] = np.where(least, 0, even), odd
        costs.append([np.where(least, nothing, cost), odd_cost])
    return costs
