"""The dead-zone codec: its curve, its edges, and the same bytes from C and from NumPy."""

import math
import shutil
import struct
from ctypes import CDLL
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import deadzone, kernels, planes
from farflung.compression.codec import CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.wire import HEADER_NBYTES

BLOCK = planes.BLOCK
RATES = [0.05, 0.36, 1.0, 2.0, 4.0]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL | None:
    """The kernels, or None without a compiler: then NumPy is compared with itself."""
    if not any(map(shutil.which, kernels.COMPILERS)):
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        prepared = kernels.prepare(tmp_path_factory.mktemp("cache"))
        assert prepared.native, prepared.reason
        return kernels._library


@pytest.fixture(autouse=True)
def native(library: CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", library)


def by_numpy(call: Any, *arguments: Any) -> Any:
    """`call(*arguments)` without the kernels."""
    with kernels.without():
        return call(*arguments)


def gaussian(numel: int, seed: int = 0, scale: float = 1e-4) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def both_ways(codec: DeadZone, x: Tensor) -> tuple[bytes, Tensor]:
    """Payload and decoded vector, after checking that C, NumPy and decode_add_ agree and that the payload fits."""
    payload = bytes(codec.encode(x))
    assert payload == bytes(by_numpy(codec.encode, x)) and len(payload) <= codec.max_nbytes(len(x))
    codec.check(payload, len(x))
    y = codec.decode(payload, len(x))
    assert same_bits(y, by_numpy(codec.decode, payload, len(x))) and bool(y.isfinite().all())
    start = gaussian(len(x), seed=9)
    for weight in (0.3, -1.0):
        acc, acc_by_numpy = start.clone(), start.clone()
        codec.decode_add_(payload, acc, weight)
        by_numpy(codec.decode_add_, payload, acc_by_numpy, weight)
        assert same_bits(acc, start + y * weight) and same_bits(acc_by_numpy, acc)
    return payload, y


@pytest.mark.parametrize("bits", RATES)
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77])
def test_any_length(bits: float, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadzone, "SECTION", 2 * BLOCK)
    x = gaussian(numel)
    before = x.clone()
    _, y = both_ways(DeadZone(bits=bits), x)
    assert torch.equal(x, before) and y.shape == (numel,)
    assert numel == 0 or nmse(x, y) < 1


@pytest.mark.parametrize("bits", RATES)
def test_nothing_is_left_of_the_section_before(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections are decoded in the same room, one after another, and one of zeros has no planes that would fill it."""
    section = 2 * BLOCK
    monkeypatch.setattr(deadzone, "SECTION", section)
    x = gaussian(4 * section + 5)
    x[section : 2 * section] = 0.0
    x[3 * section :] *= 1e-9  # too weak for a single one
    _, y = both_ways(DeadZone(bits=bits), x)
    assert not y[section : 2 * section].any() and not y[3 * section :].any()


@pytest.mark.parametrize(
    ("bits", "error"), [(0.05, 0.954), (0.14, 0.876), (0.36, 0.712), (0.9, 0.396), (2.0, 0.0896), (4.0, 0.00566)]
)
def test_the_curve_of_a_gaussian(bits: float, error: float) -> None:
    codec, x = DeadZone(bits=bits), gaussian(1 << 20)
    payload = codec.encode(x)
    assert nmse(x, codec.decode(payload, len(x))) < error
    assert 8 * len(payload) / len(x) == pytest.approx(bits, rel=0.01, abs=0.006)


def test_weak_parts_get_fewer_bits() -> None:
    x = gaussian(1 << 19)
    x[: 1 << 18] *= 0.3
    codec = DeadZone(bits=1.0)
    even = 8 * len(codec.encode(gaussian(1 << 19))) / len(x)
    payload = codec.encode(x)
    gap = 8 * len(payload) / len(x) + 0.5 * math.log2(nmse(x, codec.decode(payload, len(x))))
    assert 8 * len(payload) / len(x) < 0.85 * even and gap < 0.05  # a Gaussian of this rate has 0.23


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=80)
@given(values=st.lists(floats, max_size=70), bits=st.sampled_from(RATES))
def test_any_finite_vector(values: list[float], bits: float) -> None:
    codec, x = DeadZone(bits=bits), torch.tensor(values, dtype=torch.float32)
    try:
        _, y = both_ways(codec, x)
    except CodecError as error:
        assert "2**127" in str(error) and float(x.abs().max()) > 2.0**120
        return
    size = codec.step * float(x.double().square().mean().sqrt()) if len(x) else 0.0
    if size < 2.0**-100:
        assert torch.count_nonzero(y) == 0
    else:
        assert nmse(x, y) < 1 and not bool((x * y < 0).any())


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
def test_magnitudes_that_are_all_alike_are_not_lost(bits: float) -> None:
    x = gaussian(20_000).sign() * (1 + 0.05 * gaussian(20_000, seed=1, scale=1.0))
    _, y = both_ways(DeadZone(bits=bits), x)
    assert nmse(x, y) < (0.01 if bits > 0.1 else 1)


@pytest.mark.parametrize("bits", RATES)
def test_an_outlier_is_exact_and_hides_nothing_else(bits: float) -> None:
    x = gaussian(50_000, scale=1.0)
    plain = nmse(x, both_ways(DeadZone(bits=bits), x)[1])
    x[777] = -3e4
    _, y = both_ways(DeadZone(bits=bits), x)
    assert y[777] == x[777]
    x[777] = y[777] = 1e3  # now the outlier moves the rms little, but is far above the highest level
    assert bits < 1 or plain < 0.36


def heavy(numel: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_cauchy(numel).astype(np.float32))


@pytest.mark.parametrize("bits", RATES)
@pytest.mark.parametrize(
    "x",
    [
        heavy(30_000),
        torch.rand(30_000) - 0.5,
        torch.rand(30_000).sub(0.5).sign() * torch.tensor([1.0, 0.3, 0.1]).repeat(10_000),
        gaussian(30_000) * torch.tensor([1.0, 0.01]).repeat_interleave(15_000),
        torch.arange(30_000) / 1e3,
        torch.eye(170).reshape(-1),
        torch.tensor([0.26, 0.74, -0.5]).repeat(10_000),
    ],
    ids=["cauchy", "uniform", "three", "two_scales", "ramp", "sparse", "repeating"],
)
def test_payloads_are_never_longer_than_promised(bits: float, x: Tensor) -> None:
    _, y = both_ways(DeadZone(bits=bits), x)
    assert nmse(x, y) < 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4095, 9999])
def test_what_is_not_finite_is_refused(bad: float, at: int) -> None:
    x = gaussian(10_000)
    x[at] = bad
    for encode in (DeadZone().encode, lambda x: by_numpy(DeadZone().encode, x)):
        with pytest.raises(CodecError, match="finite"):
            encode(x)


def test_too_large_a_step_is_refused() -> None:
    with pytest.raises(CodecError, match=r"2\*\*127"):
        DeadZone(bits=0.05).encode(torch.full((10,), 3e38))


def test_wrong_arguments_are_the_callers_fault() -> None:
    codec, x = DeadZone(), gaussian(100)
    payload = codec.encode(x)
    for bad in (x.double(), x.view(10, 10), gaussian(200)[::2]):
        with pytest.raises(ValueError, match="contiguous fp32 vector"):
            codec.encode(bad)
    with pytest.raises(ValueError, match="100 elements"):
        codec.decode(payload, 100, out=torch.empty(99))
    with pytest.raises(ValueError, match="writable"):
        codec.encode(x, out=bytearray(10))
    with pytest.raises(ValueError, match="-1"):
        codec.max_nbytes(-1)
    memory = bytearray(codec.max_nbytes(100))
    assert bytes(codec.encode(x, out=memory)) == bytes(payload)


@pytest.mark.parametrize("bits", [0.05, 0.1, 1 / 3, 0.9, 4])
def test_spec_and_header_lead_back_to_the_codec(bits: float) -> None:
    codec = DeadZone(bits=bits)
    assert codec.bits == pytest.approx(bits) and len(codec.spec) < 30
    assert parse_codec(codec.spec) == codec and codec_of(codec.encode(gaussian(10))) == codec
    assert DeadZone.from_param(codec.param) == codec


@pytest.mark.parametrize("bits", ["0", "0.049", "4.01", "nan", "inf", "-1"])
def test_rates_that_are_not_offered(bits: str) -> None:
    with pytest.raises(ValueError, match="bits must be"):
        parse_codec(f"deadzone(bits={bits})")


@pytest.mark.parametrize("param", [0, 1, 0x7FC00000, 0xBF800000, 1 << 32, 1 << 63])
def test_parameters_that_are_not_rates(param: int) -> None:
    with pytest.raises(ValueError, match=r"bits must be|not an fp32"):
        DeadZone.from_param(param)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_encodes_like_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadzone, "SECTION", 2 * BLOCK)
    x = gaussian(5 * BLOCK + 77)
    payload = DeadZone().encode(x.cuda())
    assert torch.frombuffer(payload, dtype=torch.uint8).is_pinned()
    assert bytes(payload) == bytes(DeadZone().encode(x))


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


def hostile_input() -> Tensor:
    """A vector with several planes, and exact values."""
    x = gaussian(300, scale=1.0)
    x[7], x[100] = 150.0, -200.0
    return x


def outcome(payload: bytes | bytearray, numel: int) -> bytes | None:
    """What C and NumPy alike make of it: finite numbers, or None for a CodecError that leaves `acc` as it was."""
    results = []
    for call in (lambda f, *a: f(*a), by_numpy):
        acc = torch.ones(numel)
        try:
            call(HOSTILE.decode_add_, payload, acc, 0.5)
        except CodecError:
            assert acc.eq(1).all()
            results.append(None)
        else:
            assert acc.isfinite().all()
            results.append(acc.numpy().tobytes())
    assert results[0] == results[1]
    return results[0]


def test_a_flipped_bit_is_refused_or_decodes_to_finite_numbers() -> None:
    good = bytes(HOSTILE.encode(hostile_input()))
    assert outcome(good, 300) is not None
    for bit in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert outcome(bad, 300) is None or bit >= 8 * HEADER_NBYTES


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_junk_is_a_typed_error(data: st.DataObject) -> None:
    good = bytes(HOSTILE.encode(hostile_input()))
    cut = data.draw(st.integers(0, len(good) - 1))
    tail = data.draw(st.binary(max_size=40))
    junk = bytearray(good[:cut] + tail)
    if len(junk) >= HEADER_NBYTES and data.draw(st.booleans()):
        struct.pack_into("<Q", junk, 24, len(junk) - HEADER_NBYTES)
    outcome(junk, 300)


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
