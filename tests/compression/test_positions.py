"""Positions come back as they were, take close to their entropy, and damaged ones are found."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression import positions
from farflung.compression.codec import CodecError

GOLDEN = "0300000000000000050000000000000005000000000000000007ffff1e"  # [0, 8, 549], stored as they are


def coded(*values: int) -> memoryview:
    return memoryview(positions.encode(np.array(values, dtype=np.int64)))


@settings(deadline=None)
@given(values=st.sets(st.integers(0, 5000), max_size=300), tail=st.binary(max_size=5))
def test_round_trip(values: set[int], tail: bytes) -> None:
    expected = np.array(sorted(values), dtype=np.int64)
    body = positions.encode(expected)
    assert len(body) <= positions.max_nbytes(5001, len(values))
    found, rest = positions.decode(memoryview(body + tail), numel=5001, max_count=len(values))
    assert found.dtype == np.int64 and np.array_equal(found, expected) and bytes(rest) == tail


@pytest.mark.parametrize(("density", "excess"), [(1 / 128, 1.03), (1 / 64, 1.02), (1 / 16, 1.02), (1 / 4, 1.03)])
def test_random_positions_take_close_to_their_entropy(density: float, excess: float) -> None:
    numel = 1 << 20
    kept = np.flatnonzero(np.random.default_rng(0).random(numel) < density)
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    body = positions.encode(kept)
    assert 8 * len(body) < excess * entropy * numel
    found, _ = positions.decode(memoryview(body), numel=numel, max_count=len(kept))
    assert np.array_equal(found, kept)


def test_golden_bytes() -> None:
    assert coded(0, 8, 549).hex() == GOLDEN
    found, _ = positions.decode(memoryview(bytes.fromhex(GOLDEN)), numel=550, max_count=3)
    assert found.tolist() == [0, 8, 549]


@pytest.mark.parametrize(
    ("count", "num_gaps", "stored", "match"),
    [
        (4, 4, b"abcd", "at most 3"),
        (1 << 60, 1 << 60, b"", "at most 3"),
        (2, 1, b"a", "2 positions"),
        (2, 5, b"abcde", "2 positions"),
        (2, 2, b"ab", "position 196"),
        (2, 2, b"\xff\x01", "1 gaps"),
        (2, 3, b"\x01\x01\xff", "2 gaps"),
        (2, 3, b"\x01\x01\x01", "3 gaps"),
        (2, 3, b"\x00", "cannot be decompressed|0 bytes"),
        (2, 3, b"\xff\xff", "cannot be decompressed"),
    ],
)
def test_damage_is_found(count: int, num_gaps: int, stored: bytes, match: str) -> None:
    body = struct.pack("<QQQ", count, num_gaps, len(stored)) + stored
    with pytest.raises(CodecError, match=match):
        positions.decode(memoryview(body), numel=2 * 255 + 10 if num_gaps > 2 else 190, max_count=3)


def test_lengths_are_checked() -> None:
    body = coded(0, 8, 549)
    for end in range(len(body)):
        with pytest.raises(CodecError):
            positions.decode(body[:end], numel=550, max_count=3)
    with pytest.raises(CodecError, match="position 549"):
        positions.decode(body, numel=549, max_count=3)


def test_a_stream_that_inflates_without_end_is_cut_off() -> None:
    kept = np.arange(0, 1 << 20, 3)
    body = bytearray(positions.encode(kept))
    found, _ = positions.decode(memoryview(body), numel=1 << 20, max_count=len(kept))
    assert np.array_equal(found, kept)
    for num_gaps in (len(kept) - 1, len(kept) + 1):
        struct.pack_into("<QQ", body, 0, len(kept) - 1, num_gaps)
        with pytest.raises(CodecError, match="bytes of gaps"):
            positions.decode(memoryview(body), numel=1 << 20, max_count=len(kept))
