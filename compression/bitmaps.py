"""Entropy coding of sparse or dense bitmaps: a static range asymmetric numeral system (rANS) over their bytes.

A bitmap is coded in blocks of 4096 bits. A block's ones are taken as independent and equally likely, so that one byte
per block, its *level*, says all that a decoder has to know: level 0 is a block without ones, which costs nothing else;
level l from 1 to 81 stands for odds of 2**((l - 41) / 4) that a bit is one. A byte, eight bits, is one symbol of the
rANS (J. Duda, arXiv 1311.2540). For it, 2**15 slots are shared out among the 256 bytes by how many ones they have.

Measured on random bitmaps of 2**20 bits, above their entropy, with all that is stored: 0.4 % at 20 % ones, 1.2 % at 5 %,
3.0 % at 1.7 %; half of that or more are the levels. A Huffman code, as in zstd, has at least one bit per byte: 4 %
above at 5 % ones, 47 % at 1.7 %, and twice the entropy at 1 %. Where ones are denser or sparser than elsewhere, they
cost what they are worth there, as each block has its own level.

Why these choices:
- all tables follow from integers by integer arithmetic: they are the same on every machine, and no bytes of a payload;
- 32 states take turns (byte i of a block belongs to state i mod 32), as one would wait for its own multiplication most
  of the time; they share one stream of 16-bit words, little-endian, that begins with the states (u32 each);
- decoding is total: a stream of 128 bytes or more decodes to bitmaps of any lengths, as if zeros followed it. So
  damage need not be found by a pass over the data before anything is changed.

Without `kernels` NumPy gives the same bytes. It takes a step of all states of several groups of bitmaps per call, so
it likes many groups at a time.

Legend: t = turns of all states, g = groups, s = LANES.
"""

from collections.abc import Sequence
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from farflung.compression import kernels

Bytes = NDArray[np.uint8]

BLOCK = 512
"""Bytes of a bitmap that share a level."""
NUM_LEVELS = 82
LANES = 32
"""States that take turns; BLOCK is a multiple."""
STATES_NBYTES = 4 * LANES
"""The shortest stream."""


def stream_room(nbytes: int) -> Bytes:
    """Memory for any stream of bitmaps of `nbytes` bytes together."""
    return np.empty(STATES_NBYTES + 2 * nbytes + 16, np.uint8)  # the kernel writes 16 bytes at a time


_PRECISION = 15  # bits of a slot; one less costs 0.3 % at 5 % ones, and with one more the tables exceed the L1 cache
_LOWEST = 1 << 16  # of a state between symbols
_ODDS = [(16, 19, 23, 27)[i % 4] << i // 4 for i in range(NUM_LEVELS - 1)]  # that a bit is one, against _EVEN
_EVEN = 16 << 10

# Arguments of the kernels: maps, bytes from one to the next, their lengths, how many, level_of, shares, levels, end of
# the room, bytes written; and stream, its bytes, levels, shares, slots, maps, and so on.
_ENCODE = (c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
_DECODE = (c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t)


def num_blocks(nbytes: int) -> int:
    """Levels of a bitmap of `nbytes` bytes."""
    return -(-nbytes // BLOCK)


@dataclass(frozen=True, slots=True)
class Maps:
    """A group of bitmaps, coded as one."""

    rows: Bytes
    """[k, stride]: they are at the start of each."""
    lengths: Sequence[int]
    """In bytes, [k] or fewer."""
    room: Bytes
    """`stream_room` of all rows; it is kept as new memory at each call would take longer than the rest of the call."""

    def bitmaps(self) -> list[Bytes]:
        """Each one."""
        return [row[:length] for row, length in zip(self.rows, self.lengths, strict=False)]

    @property
    def num_blocks(self) -> int:
        """Levels of all of them."""
        return sum(map(num_blocks, self.lengths))


def encode(groups: Sequence[Maps]) -> list[tuple[Bytes, Bytes]]:
    """For each group, the levels of all its blocks in order, and the stream, which may be a view of its `room`."""
    native = kernels.find("bitmaps_encode", *_ENCODE)
    if native is None:
        levels = [np.concatenate([np.empty(0, np.uint8), *map(_levels, maps.bitmaps())]) for maps in groups]
        return list(zip(levels, _encode(groups, levels), strict=True))
    tables, coded = _tables(), []
    for maps in groups:
        group_levels = np.empty(maps.num_blocks, np.uint8)
        count, used = len(maps.lengths), c_size_t()
        native(
            maps.rows.ctypes.data, maps.rows.shape[1], (c_size_t * count)(*maps.lengths), count, tables.level_of_at,
            tables.shares_at, group_levels.ctypes.data, maps.room.ctypes.data + len(maps.room), byref(used),
        )  # fmt: skip
        coded.append((group_levels, maps.room[len(maps.room) - used.value :]))
    return coded


def decode(coded: Sequence[tuple[Bytes, Bytes]], groups: Sequence[Maps]) -> None:
    """Fill the bitmaps of each group, from levels below NUM_LEVELS and a stream of at least STATES_NBYTES."""
    native = kernels.find("bitmaps_decode", *_DECODE)
    if native is None:
        _decode(coded, groups)
        return
    tables = _tables()
    for (levels, stream), maps in zip(coded, groups, strict=True):
        count = len(maps.lengths)
        native(
            stream.ctypes.data, len(stream), levels.ctypes.data, tables.shares_at, tables.slots_at,
            maps.rows.ctypes.data, maps.rows.shape[1], (c_size_t * count)(*maps.lengths), count,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    shares: NDArray[np.uint32]
    """By level and byte: how many slots the byte has, and 2**16 times the first of them."""
    slots: Bytes
    """By level and slot: the byte that has it; three bytes more than that, for reading four at any place."""
    level_of: Bytes
    """By how many of a block's 4096 bits are ones."""
    shares_at: int
    slots_at: int
    level_of_at: int
    """Addresses."""


@cache
def _tables() -> _Tables:
    weights = _weights()
    shares = np.empty((NUM_LEVELS, 256), np.uint32)
    slots = np.zeros((NUM_LEVELS << _PRECISION) + 3, np.uint8)
    for level in range(NUM_LEVELS):
        sizes = np.array(_sizes(level))[weights]
        shares[level] = sizes + (np.cumsum(sizes) - sizes << 16)
        slots[level << _PRECISION : level + 1 << _PRECISION] = np.repeat(np.arange(256, dtype=np.uint8), sizes)
    level_of = _level_of()
    return _Tables(
        shares=shares, slots=slots, level_of=level_of, shares_at=shares.ctypes.data, slots_at=slots.ctypes.data,
        level_of_at=level_of.ctypes.data,
    )  # fmt: skip


@cache
def _weights() -> Bytes:
    """By byte, its ones."""
    return np.array([byte.bit_count() for byte in range(256)], np.uint8)


def _level_of() -> Bytes:
    """The level whose odds are nearest: up from where the odds exceed the geometric mean with the next level's."""
    bits = 8 * BLOCK
    borders = [low * high for low, high in pairwise(_ODDS)]
    above = [
        sum((ones * _EVEN) ** 2 > border * (bits - ones) ** 2 for border in borders) for ones in range(1, bits + 1)
    ]
    return np.array([0, *(1 + count for count in above)], np.uint8)


def _sizes(level: int) -> list[int]:
    """How many slots a byte has, by the number of its ones, 0 to 8."""
    if level == 0:
        return [1 << _PRECISION] + [0] * 8  # coding this byte leaves a state as it is
    odds = _ODDS[level - 1]
    whole = (odds + _EVEN) ** 8
    sizes = [max(1, ((odds**w * _EVEN ** (8 - w) << _PRECISION) + whole // 2) // whole) for w in range(9)]
    sizes[0 if odds < _EVEN else 8] += (1 << _PRECISION) - sum(comb(8, w) * size for w, size in enumerate(sizes))
    return sizes


def _levels(bitmap: Bytes) -> Bytes:
    ones = np.zeros(num_blocks(len(bitmap)) * BLOCK, np.int64)
    ones[: len(bitmap)] = _weights()[bitmap]
    ones = ones.reshape(-1, BLOCK).sum(axis=1)
    lengths = np.minimum(len(bitmap) - BLOCK * np.arange(len(ones)), BLOCK)
    levels: Bytes = _tables().level_of[np.maximum((ones * BLOCK + lengths // 2) // lengths, ones > 0)]
    return levels


def _turns(lengths: Sequence[int], levels: Bytes) -> tuple[NDArray[np.int64], Bytes]:
    """Which bytes of a group's bitmaps, one after the other, take turns [t, s], and their levels [t, s].

    A lane without a byte has the index of the end, and level 0. Turns that all have level 0 are left out.
    """
    end = sum(lengths)
    indices, tables = [np.empty((0, LANES), np.int64)], [np.empty((0, LANES), np.uint8)]
    start = block = 0
    for length in lengths:
        index = start + np.arange(-(-length // LANES) * LANES)
        inside = index < start + length
        level = np.repeat(levels[block : block + num_blocks(length)], BLOCK)[: len(index)] * inside
        kept = level.reshape(-1, LANES).any(axis=1)
        indices.append(np.where(inside, index, end).reshape(-1, LANES)[kept])
        tables.append(level.reshape(-1, LANES)[kept])
        start += length
        block += num_blocks(length)
    return np.concatenate(indices), np.concatenate(tables)


def _side_by_side(tables: Sequence[Bytes]) -> Bytes:
    """[t, s] of each group to [t, g, s], with zeros where a group has ended."""
    together = np.zeros((max(map(len, tables), default=0), len(tables), LANES), np.uint8)
    for group, table in enumerate(tables):
        together[: len(table), group] = table
    return together


def _encode(groups: Sequence[Maps], levels: Sequence[Bytes]) -> list[Bytes]:
    turns = [_turns(maps.lengths, group) for maps, group in zip(groups, levels, strict=True)]
    padded = [np.concatenate([*maps.bitmaps(), np.zeros(1, np.uint8)]) for maps in groups]
    symbols = _side_by_side([bytes_[index] for bytes_, (index, _) in zip(padded, turns, strict=True)])
    shares = _tables().shares[_side_by_side([table for _, table in turns]), symbols]
    sizes, starts = shares & 0xFFFF, shares >> 16
    states = np.full((len(groups), LANES), _LOWEST, np.uint32)
    before = np.empty_like(shares)
    full = np.empty(shares.shape, bool)
    for turn in reversed(range(len(shares))):
        before[turn] = states
        np.greater_equal(states >> 17, sizes[turn], out=full[turn])
        states >>= full[turn] * np.uint32(16)
        states += states // sizes[turn] * ((1 << _PRECISION) - sizes[turn]) + starts[turn]
    words = before.astype("<u2")
    return [
        np.concatenate([states[group].astype("<u4").view(np.uint8), words[:, group][full[:, group]].view(np.uint8)])
        for group in range(len(groups))
    ]


def _decode(coded: Sequence[tuple[Bytes, Bytes]], groups: Sequence[Maps]) -> None:
    turns = [_turns(maps.lengths, levels) for maps, (levels, _) in zip(groups, coded, strict=True)]
    tables, levels = _tables(), _side_by_side([table for _, table in turns])
    lengths = np.array([(len(stream) - STATES_NBYTES) // 2 for _, stream in coded])
    states = np.zeros((len(groups), LANES), np.uint32)
    words = np.zeros(
        (len(groups), max(lengths, default=0) + LANES * len(levels) + 1), np.uint32
    )  # with zeros to follow
    for number, (_, stream) in enumerate(coded):
        states[number] = stream[:STATES_NBYTES].copy().view("<u4")
        words[number, : lengths[number]] = stream[STATES_NBYTES:][: 2 * lengths[number]].copy().view("<u2")
    symbols = np.empty_like(levels)
    places = levels.astype(np.int64) << _PRECISION
    heads = words.shape[1] * np.arange(len(groups))[:, None] - 1
    for turn, level in enumerate(levels):
        slot = states & ((1 << _PRECISION) - 1)
        symbol = tables.slots[places[turn] + slot]
        symbols[turn] = symbol
        share = tables.shares[level, symbol]
        states = (share & 0xFFFF) * (states >> _PRECISION) + slot - (share >> 16)
        low = (states < _LOWEST) & (level > 0)
        taken = heads + np.cumsum(low, axis=1)
        states = np.where(low, states << 16 | words.take(taken), states)
        heads = taken[:, -1:]
    for number, (maps, (index, _)) in enumerate(zip(groups, turns, strict=True)):
        decoded = np.zeros(sum(maps.lengths) + 1, np.uint8)
        decoded[index] = symbols[: len(index), number]
        start = 0
        for bitmap in maps.bitmaps():
            bitmap[:] = decoded[start : start + len(bitmap)]
            start += len(bitmap)
