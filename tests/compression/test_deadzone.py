"""The dead-zone codec: its curve, its edges, and the same bytes from C and from NumPy."""

import math
import struct
from ctypes import CDLL

import pytest
import torch
from tests.compression.rates import RATES, both_ways, gaussian, hostile_input, nmse

from farflung.compression import kernels, planes
from farflung.compression.codec import CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.wire import HEADER_NBYTES

BLOCK = planes.BLOCK


@pytest.fixture(autouse=True)
def native(library: CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", library)


@pytest.mark.parametrize(
    ("bits", "error"), [(0.05, 0.954), (0.14, 0.876), (0.36, 0.712), (0.9, 0.396), (2.0, 0.0896), (4.0, 0.00566)]
)
def test_the_curve_of_a_gaussian(bits: float, error: float) -> None:
    codec, x = DeadZone(bits=bits), gaussian(1 << 20)
    payload = codec.encode(x)
    assert nmse(x, codec.decode(payload, len(x))) < error
    assert 8 * len(payload) / len(x) == pytest.approx(bits, rel=0.01, abs=0.006)


@pytest.mark.parametrize("bits", RATES)
@pytest.mark.parametrize("value", [0.0, -0.0, -3.5, 1e-45, -1e-40, 1e-36, 1e-20, 3e37])
@pytest.mark.parametrize("numel", [1, 200])
def test_constants(bits: float, value: float, numel: int) -> None:
    x = torch.full((numel,), value)
    _, y = both_ways(DeadZone(bits=bits), x)
    if abs(value) < 2.0**-100:
        assert torch.count_nonzero(y) == 0
    else:
        torch.testing.assert_close(y, x, rtol=1 / 256, atol=0)


@pytest.mark.parametrize("bits", RATES)
def test_an_outlier_is_exact_and_hides_nothing_else(bits: float) -> None:
    x = gaussian(50_000, scale=1.0)
    plain = nmse(x, both_ways(DeadZone(bits=bits), x)[1])
    x[777] = -3e4
    _, y = both_ways(DeadZone(bits=bits), x)
    assert y[777] == x[777]
    x[777] = y[777] = 1e3  # now the outlier moves the rms little, but is far above the highest level
    assert bits < 1 or plain < 0.36


def test_same_bytes_for_every_thread_count() -> None:
    before = torch.get_num_threads()
    x = gaussian(100_000)
    try:
        payloads = set()
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            payloads.add(bytes(DeadZone().encode(x)))
    finally:
        torch.set_num_threads(before)
    assert len(payloads) == 1


# By version 1. It changes only together with the version.
GOLDEN_INPUT = [0.0, 1.0, -2.0, 0.5, 1e-3, 9.0, -1.5, 63.4, -0.25, *[0.25, -0.75] * 5, -3.0, 2.5]
GOLDEN = (
    "4358010c0100000015000000000000000000004000000000ac000000000000009800000004020000000100000001000000010000"
    "001b1e1e1e2efe1f001c0002001c0002000000010000000100000001000000010000000100000001000000010000000100000001"
    "00000001000000010000000100000001000000010000000100000001000000010000000100000001000000010000000100000001"
    "0000000100000001000000010000000100000001000000010000000100a53300042410410000000000000000cba87d42"
)


def test_golden_bytes() -> None:
    payload, y = both_ways(DeadZone(bits=2.0), torch.tensor(GOLDEN_INPUT))
    assert payload.hex() == GOLDEN
    assert y.tolist() == [0, 0, 0, 0, 0, pytest.approx(9, rel=0.01), 0, pytest.approx(63.4, rel=0.01), *[0] * 13]


HOSTILE = DeadZone(bits=4.0)


@pytest.mark.parametrize("numel", [300, 1 << 40])
def test_lengths_are_checked_before_anything_is_allocated(numel: int) -> None:
    good = bytearray(HOSTILE.encode(hostile_input()))
    struct.pack_into("<Q", good, 8, numel)
    at = HEADER_NBYTES + 4
    for offset, value in ((at, 255), (at + 1, 0xFFFFFFFF), (at + 5, 0), (HEADER_NBYTES, 0xFFFFFFFF)):
        bad = bytearray(good)
        struct.pack_into("<B" if value == 255 else "<I", bad, offset, value)
        with pytest.raises(CodecError):
            HOSTILE.check(bad, numel)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-40, -math.inf])
def test_values_that_are_not_normal_are_refused(value: float) -> None:
    good = bytearray(HOSTILE.encode(hostile_input()))
    for offset in (len(good) - 4, len(good) - 4 * (planes.LEVELS - 1) - 4):  # a mean; an exact value
        bad = bytearray(good)
        struct.pack_into("<f", bad, offset, value)
        with pytest.raises(CodecError, match="finite"):
            HOSTILE.check(bad, 300)
