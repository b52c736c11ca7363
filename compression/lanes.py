"""Entropy coding of cells (`paths`): adaptive binary decisions in eight lanes, each with a state of an asymmetric numeral system.

A level is told in unary: is it above 0? above 1? ... up to the number of planes, which is the highest level there is. How
likely a yes is depends on the plane, and in the first, which has most of the bits, on the quantiser too, which a decoder
knows from the levels before. What was answered moves the chance of the next yes in this lane:

    chance += (2**24 * yes - chance) >> RATE

So nothing but the chance at the beginning, the share of yes in all of them, has to be told; and where a vector changes from
one matrix to the next, chances follow. An answer costs -log2 of its share of 2**15 slots of a binary rANS (J. Duda, arXiv
1311.2540); that of a yes is at least LEAST and at most 2**15 - LEAST. All is integer arithmetic: the same on every machine.

The states share one stream of 16-bit words, little-endian, which begins with them (u32 each). Decoding is total: a stream
of STATES_NBYTES or more decodes to cells as if zeros followed it.

Cells that would be longer so than with one bit for each answer, as hostile ones can be, are told with shares of a half that stay (`Model.plain`).

lanes.c does the same as the NumPy code here. That takes a step of several groups at a time.

Legend: g = groups, s = LANES.
"""

from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.compression import kernels, paths
from farflung.compression.bitmaps import Bytes
from farflung.compression.paths import LANES, LEVEL, LEVELS, NEXT, QUANTISER, TURNS

STATES_NBYTES = 4 * LANES
"""The shortest stream."""
RATE = 8
"""An answer is forgotten after some 2**RATE others in its lane. 6 to 9 differ by less than 1 % on pseudo-gradients."""
LEAST = 8
"""Slots."""

_PRECISION, _FINE = 15, 24  # bits of slots, and of chances
_LOWEST = 1 << 16  # of a state between decisions

_ENCODE = (c_void_p, c_size_t, c_uint, c_void_p, c_int, c_void_p, c_void_p, c_void_p)
_DECODE = (c_void_p, c_size_t, c_size_t, c_uint, c_void_p, c_int, c_void_p)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """How likely answers are."""

    shares: NDArray[np.uint16]
    """Of a yes at the beginning, in slots: of plane 1 with the one and the other quantiser, of plane 2, 3, ...; LEAST to 2**15 - LEAST."""
    adapts: bool

    @property
    def planes(self) -> int:
        """The highest level; not 0."""
        return len(self.shares) - 1

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> "Model":
        """The shares where so many cells have each quantiser and level, as `paths.sums` has it, and not all level 0."""
        above = paths.at_least(counts)
        reached = np.trim_zeros(above.sum(0), "b")
        yes = np.concatenate([above[:, 1], reached[2:]])
        asked = np.concatenate([above[:, 0], reached[1:-1]])
        shares = (yes << _PRECISION) // np.maximum(asked, 1)
        return cls(shares=np.clip(shares, LEAST, (1 << _PRECISION) - LEAST).astype(np.uint16), adapts=True)

    @classmethod
    def plain(cls, planes: int) -> "Model":
        """One bit for each answer."""
        return cls(shares=np.full(planes + 1, 1 << _PRECISION - 1, np.uint16), adapts=False)

    @property
    def is_possible(self) -> bool:
        """Whether all shares are in range, as those of a payload need not be."""
        return bool(((self.shares >= LEAST) & (self.shares <= (1 << _PRECISION) - LEAST)).all())


def plain_nbytes(counts: NDArray[np.int64]) -> int:
    """Of the stream of `Model.plain`: each cell is asked for all levels below its own, and for its own unless that is the highest."""
    reached = np.trim_zeros(paths.at_least(counts).sum(0), "b")
    return STATES_NBYTES + 2 * -(-int(reached[:-1].sum()) // 16)


def groups_at_a_time() -> int:
    """How many it pays to code together: many where NumPy takes a step of all of them in one call."""
    return 1 if kernels.find("lanes_decode", *_DECODE) else 32


def encode(groups: Sequence[tuple[Bytes, Model]]) -> list[Bytes]:
    """The stream of each group's cells."""
    native = kernels.find("lanes_encode", *_ENCODE)
    if native is None:
        return _encode(groups) if groups else []
    streams = []
    for cells, model in groups:
        steps = _most_steps(cells, model.planes)
        notes = np.empty((steps, LANES), np.uint16)
        room, used = np.empty(STATES_NBYTES + 2 * LANES * steps, np.uint8), c_size_t()
        native(
            cells.ctypes.data, len(cells), model.planes, model.shares.ctypes.data, model.adapts, notes.ctypes.data,
            room.ctypes.data + len(room), byref(used),
        )  # fmt: skip
        streams.append(room[len(room) - used.value :])
    return streams


def decode(groups: Sequence[tuple[Bytes, Model, Bytes]]) -> None:
    """Fill the cells, which come last, of each group, from a stream of at least STATES_NBYTES."""
    native = kernels.find("lanes_decode", *_DECODE)
    if native is None:
        if groups:
            _decode(groups)
        return
    for stream, model, cells in groups:
        native(
            stream.ctypes.data, len(stream), len(cells), model.planes, model.shares.ctypes.data, model.adapts, cells.ctypes.data
        )  # fmt: skip


def _most_steps(cells: Bytes, planes: int) -> int:
    """In which any lane may have an answer: one in each turn, and one more for each level."""
    turns = -(-len(cells) // LANES)
    return min(turns + int((cells & LEVEL).sum(dtype=np.int64)), turns * planes)


class _Chances:
    """Of several groups, by group, context and lane; see `Model`."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._chances = np.zeros((len(models), LEVELS + 1, LANES), np.int64)
        for chances, model in zip(self._chances, models, strict=True):
            chances[: len(model.shares)] = model.shares[:, None].astype(np.int64) << _FINE - _PRECISION
        self._adapts = np.array([model.adapts for model in models])[:, None]
        self._groups, self._lanes = np.ogrid[: len(models), :LANES]

    def shares(self, contexts: NDArray[np.intp]) -> NDArray[np.int64]:
        """[g, s]"""
        chances = self._chances[self._groups, contexts, self._lanes]
        shares: NDArray[np.int64] = np.clip(chances >> _FINE - _PRECISION, LEAST, (1 << _PRECISION) - LEAST)
        return shares

    def told(self, contexts: NDArray[np.intp], ones: NDArray[np.bool_], active: NDArray[np.bool_]) -> None:
        """Of the answers that the active lanes had."""
        chances = self._chances[self._groups, contexts, self._lanes]
        moved = chances + ((ones.astype(np.int64) << _FINE) - chances >> RATE)
        self._chances[self._groups, contexts, self._lanes] = np.where(active & self._adapts, moved, chances)


def _encode(groups: Sequence[tuple[Bytes, Model]]) -> list[Bytes]:
    longest = max(-(-len(cells) // LANES) for cells, _ in groups)
    levels, present = np.zeros((2, longest, len(groups), LANES), np.uint8)
    seconds = np.zeros((longest, len(groups), LANES), np.uint8)
    for number, (cells, _) in enumerate(groups):
        for into, values in ((levels, cells & LEVEL), (seconds, cells >> QUANTISER), (present, np.ones_like(cells))):
            padded = np.zeros(longest * LANES, np.uint8)
            padded[: len(cells)] = values
            into[:, number] = padded.reshape(longest, LANES)
    planes = np.array([model.planes for _, model in groups])[:, None]
    chances, notes = _Chances([model for _, model in groups]), []
    for level, second, there in zip(levels, seconds, present, strict=True):
        active, plane = there.astype(bool), 1
        while active.any():
            contexts = second.astype(np.intp) if plane == 1 else np.full_like(second, plane, np.intp)
            ones, shares = (level >= plane) & active, chances.shares(contexts)
            notes.append((active * (shares | ones << _PRECISION)).astype(np.uint16))  # 0 where there is no answer
            chances.told(contexts, ones, active)
            active, plane = ones & (plane < planes), plane + 1
    states = np.full((len(groups), LANES), _LOWEST, np.uint64)
    words: list[list[Bytes]] = [[] for _ in groups]
    for note in reversed(notes):
        active, ones = note > 0, note >> _PRECISION > 0
        shares = note.astype(np.int64) & (1 << _PRECISION) - 1
        sizes = np.where(active, np.where(ones, shares, (1 << _PRECISION) - shares), 1).astype(np.uint64)
        full = (states >> np.uint64(17) >= sizes) & active
        for number in np.flatnonzero(full.any(axis=1)).tolist():
            words[number].append(states[number, full[number]].astype("<u2"))
        states = np.where(full, states >> np.uint64(16), states)
        starts = np.where(ones, 0, shares).astype(np.uint64)
        put = (states // sizes << np.uint64(_PRECISION)) + states % sizes + starts
        states = np.where(active, put, states)
    return [
        np.concatenate([state.astype("<u4").view(np.uint8), *(word.view(np.uint8) for word in reversed(own))])
        for state, own in zip(states, words, strict=True)
    ]


def _decode(groups: Sequence[tuple[Bytes, Model, Bytes]]) -> None:
    lengths = np.array([len(cells) for _, _, cells in groups])[:, None]
    planes = np.array([model.planes for _, model, _ in groups])[:, None]
    longest = max(-(-len(cells) // LANES) for _, _, cells in groups)
    states = np.stack([stream[:STATES_NBYTES].copy().view("<u4").astype(np.int64) for stream, _, _ in groups])
    words = [stream[STATES_NBYTES : len(stream) - len(stream) % 2].copy().view("<u2") for stream, _, _ in groups]
    most = max(map(len, words)) + 1
    queue = np.zeros((len(groups), most), np.int64)  # with a zero at the end
    for row, own in zip(queue, words, strict=True):
        row[: len(own)] = own
    heads = np.zeros((len(groups), 1), np.int64)
    rows = np.arange(len(groups))[:, None]
    chances, places = _Chances([model for _, model, _ in groups]), np.zeros((len(groups), LANES), np.uint8)
    found = np.zeros((longest, len(groups), LANES), np.uint8)
    for turn in range(longest):
        active, plane = turn * LANES + np.arange(LANES) < lengths, 1
        level = np.zeros((len(groups), LANES), np.uint8)
        while active.any():
            contexts = (places & 1).astype(np.intp) if plane == 1 else np.full_like(places, plane, np.intp)
            shares, slots = chances.shares(contexts), states & ((1 << _PRECISION) - 1)
            ones = (slots < shares) & active
            sizes = np.where(ones, shares, (1 << _PRECISION) - shares)
            states = np.where(active, sizes * (states >> _PRECISION) + slots - np.where(ones, 0, shares), states)
            low = (states < _LOWEST) & active
            taken = np.minimum(heads + np.cumsum(low, axis=1) - 1, most - 1)
            states = np.where(low, states << 16 | queue[rows, taken], states)
            heads += low.sum(axis=1, keepdims=True)
            chances.told(contexts, ones, active)
            level += ones
            active, plane = ones & (plane < planes), plane + 1
        found[turn] = level | (places & 1) << QUANTISER
        places = NEXT[places, level & 1]
        if turn % TURNS == TURNS - 1:
            places[:] = 0
    for number, (_, _, cells) in enumerate(groups):
        cells[:] = found[:, number].reshape(-1)[: len(cells)]
