"""Entropy coding of bitmaps: near the entropy, total, and the same in C and in NumPy."""

import math
from ctypes import CDLL

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression import bitmaps, kernels
from farflung.compression.bitmaps import Bytes, Maps


@pytest.fixture(autouse=True)
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", None)


def group(*maps: Bytes) -> Maps:
    rows = np.zeros((len(maps), max(map(len, maps), default=0)), np.uint8)
    for row, bitmap in zip(rows, maps, strict=True):
        row[: len(bitmap)] = bitmap
    return Maps(rows, [len(bitmap) for bitmap in maps], bitmaps.stream_room(rows.size))


def ones(nbytes: int, share: float, seed: int = 0) -> Bytes:
    return np.packbits(np.random.default_rng(seed).random(8 * nbytes) < share, bitorder="little")


def test_slots_are_shared_out() -> None:
    tables = bitmaps._tables()
    sizes = tables.shares & 0xFFFF
    assert (sizes.sum(axis=1) == 1 << 15).all() and (sizes[1:] > 0).all()
    assert tables.level_of.tolist() == sorted(tables.level_of) and tables.level_of[1] == 1
    assert tables.level_of[2048] == 41 and tables.level_of[4096] == bitmaps.NUM_LEVELS - 1


@pytest.mark.parametrize(("share", "excess"), [(0.01, 0.07), (0.05, 0.02), (0.2, 0.006), (0.5, 0.004), (0.9, 0.01)])
def test_close_to_the_entropy(
    share: float, excess: float, library: CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_library", library)
    bitmap = ones(1 << 16, share)
    ((levels, stream),) = bitmaps.encode([group(bitmap)])
    p = np.unpackbits(bitmap).mean()
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * len(bitmap)
    assert entropy < len(levels) + len(stream) < (1 + excess) * entropy


def test_nothing_costs_next_to_nothing() -> None:
    ((levels, stream),) = bitmaps.encode([group(np.zeros(10_000, np.uint8))])
    assert not levels.any() and len(stream) == bitmaps.STATES_NBYTES


GROUPS = [
    group(),
    group(ones(1, 1.0)),
    group(ones(1000, 0.2), ones(77, 0.01), ones(1, 0.5)),
    group(ones(9000, 0.02), np.zeros(700, np.uint8), ones(513, 0.9), np.full(513, 255, np.uint8)),
    group(ones(512, 0.5), ones(511, 0.5), ones(31, 0.001)),
]


def test_c_gives_the_same_bytes_as_numpy_and_both_decode_them(
    library: CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(coded: list[tuple[Bytes, Bytes]]) -> list[tuple[bytes, bytes]]:
        return [(levels.tobytes(), stream.tobytes()) for levels, stream in coded]

    by_numpy = bitmaps.encode(GROUPS)
    for current in (None, library):
        monkeypatch.setattr(kernels, "_library", current)
        assert plain(bitmaps.encode(GROUPS)) == plain(by_numpy)
        decoded = [group(*(np.full_like(bitmap, 7) for bitmap in maps.bitmaps())) for maps in GROUPS]
        bitmaps.decode(by_numpy, decoded)
        for maps, expected in zip(decoded, GROUPS, strict=True):
            for got, want in zip(maps.bitmaps(), expected.bitmaps(), strict=True):
                assert got.tobytes() == want.tobytes()


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    nbytes=st.integers(bitmaps.STATES_NBYTES, 800),
    lengths=st.lists(st.integers(1, 1200), max_size=3),
)
def test_any_stream_decodes_the_same_in_c_and_numpy(
    seed: int, nbytes: int, lengths: list[int], library: CDLL | None
) -> None:
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, 256, nbytes, np.uint8) * rng.integers(0, 2, dtype=np.uint8)
    levels = rng.integers(0, bitmaps.NUM_LEVELS, sum(map(bitmaps.num_blocks, lengths)), np.uint8)
    results = []
    for current in (None, library):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_library", current)
            maps = group(*(np.full(length, 7, np.uint8) for length in lengths))
            bitmaps.decode([(levels, stream)], [maps])
            results.append([bitmap.tobytes() for bitmap in maps.bitmaps()])
    assert results[0] == results[1]
