"""Low rank: what it finds, in how many bits, and what it refuses."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression.codec import CodecError
from farflung.compression.lowrank import LowRank
from farflung.compression.registry import parse_codec


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: LowRank, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), len(x))


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("numel", [0, 1, 9, 10, 11, 99, 100, 999, 1000, 5001])
def test_every_length(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "CPU_CHUNK", 1024)
    codec = LowRank(rank=3, cols=10)
    x = gaussian(numel)
    payload = codec.encode(x)
    assert len(payload) == codec.max_nbytes(numel)
    y = codec.decode(payload, numel)
    assert y.shape == (numel,) and bool(torch.isfinite(y).all())
    if 0 < numel <= 30:  # up to three rows: nothing is lost but what int8 rounds
        assert nmse(x, y) < 1e-3


def test_a_matrix_of_low_rank_is_found() -> None:
    x = (gaussian(300, 4) @ gaussian(4, 200, seed=1)).flatten() * 1e-4
    assert nmse(x, round_trip(LowRank(rank=4, cols=200), x)) < 2e-4
    assert nmse(x, round_trip(LowRank(rank=32, cols=200), x)) < 2e-4  # more columns than there are: no noise in them
    assert 0.2 < nmse(x, round_trip(LowRank(rank=2, cols=200), x)) < 0.8


def test_close_to_the_exact_decomposition() -> None:
    spectrum = torch.arange(1, 101).float() ** -0.7
    left, right = torch.linalg.qr(gaussian(400, 100)).Q, torch.linalg.qr(gaussian(100, 100, seed=1)).Q
    x = (left * spectrum @ right).flatten()
    exact = float(spectrum[8:].square().sum() / spectrum.square().sum())
    assert nmse(x, round_trip(LowRank(rank=8, cols=100), x)) < exact + 0.03


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.floats(width=32, min_value=-(2.0**90), max_value=2.0**90), max_size=60),
    rank=st.integers(1, 5),
    cols=st.integers(1, 12),
)
def test_any_finite_vector(values: list[float], rank: int, cols: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert bool(torch.isfinite(round_trip(LowRank(rank=rank, cols=cols), x)).all())


def test_flushing_subnormals_changes_nothing() -> None:
    x = gaussian(5000) * 2.0**-58
    codec = LowRank(rank=4, cols=50)
    payload = codec.encode(x)
    plain = codec.decode(payload, len(x))
    assert torch.set_flush_denormal(True)
    try:
        flushed = codec.decode(payload, len(x))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain.view(torch.int32), flushed.view(torch.int32))


@pytest.mark.parametrize(("p_scale", "q_scale"), [(0x7B00, 0x7B00), (0x0080, 0x0080), (0x7B00, 0x0080)])
def test_factors_that_would_overflow_or_underflow_are_refused(p_scale: int, q_scale: int) -> None:
    codec = LowRank(rank=1, cols=4)
    payload = bytearray(codec.encode(gaussian(16)))
    struct.pack_into("<H", payload, 64, p_scale)
    struct.pack_into("<H", payload, 64 + 2 + 4 + 32, q_scale)
    acc = torch.ones(16)
    if p_scale == q_scale:
        with pytest.raises(CodecError, match="too large or too small"):
            codec.decode_add_(payload, acc, 1.0)
        assert acc.eq(1).all()
    else:
        assert bool(torch.isfinite(codec.decode(payload, 16)).all())


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(CodecError, match="finite"):
        LowRank(cols=4).encode(torch.full((16,), 2.0**91))


@pytest.mark.parametrize("spec", ["lowrank", "lowrank(rank=0,cols=4)", "lowrank(rank=257,cols=4)", "lowrank(cols=0)"])
def test_wrong_parameters_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"must be|needs cols"):
        parse_codec(spec)


@given(param=st.integers(0, (1 << 64) - 1))
def test_any_param_is_a_codec_or_refused(param: int) -> None:
    try:
        codec = LowRank.from_param(param)
    except ValueError:
        return
    assert codec.param == param


GOLDEN = (
    "4358010f0100000008000000000000000300000002000000500000000000000043580102010000000600000000000000800000000000"
    "00000800000000000000ea3be58237ddd0814358010201000000060000000000000080000000000000000800000000000000a03d4fec"
    "b4bd81dc"
)
GOLDEN_VALUES = [
    "0x1.e474000000000p-4",
    "0x1.63fc080000000p+1",
    "0x1.d907000000000p+0",
    "-0x1.e12b100000000p+1",
    "0x1.33a3a00000000p+2",
    "0x1.939da00000000p+2",
    "0x1.caf5980000000p+2",
    "0x1.0c4f3a0000000p+3",
]


def test_golden_bytes_decode_to_golden_values() -> None:
    values = LowRank(rank=2, cols=3).decode(bytes.fromhex(GOLDEN), 8)
    assert [value.hex() for value in values.tolist()] == GOLDEN_VALUES
