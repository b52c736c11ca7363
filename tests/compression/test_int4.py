"""What int4 promises besides what all codecs do."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression.codec import CodecError
from farflung.compression.int4 import Int4

# Encoding of GOLDEN_INPUT by version 1. It changes only together with the codec's version.
GOLDEN_INPUT = [0.0, 1.0, -2.0, 0.5, 1e-3, 7.0, -7.0, 3.4, -0.25] + [0.0] * 7 + [3e-4, -1e-4, 2e-4]
GOLDEN = "4358010301000000130000000000000010000000000000000e00000000000000803f343888898688888f818bdf86"


def test_golden_bytes_and_values() -> None:
    codec = Int4(block=16)
    payload = codec.encode(torch.tensor(GOLDEN_INPUT))
    assert bytes(payload).hex() == GOLDEN
    step = float(torch.tensor(3e-4 / 7).bfloat16())
    expected = [0.0, 1.0, -2.0, 0.0, 0.0, 7.0, -7.0, 3.0, 0.0] + [0.0] * 7 + [7 * step, -2 * step, 5 * step]
    assert codec.decode(bytes.fromhex(GOLDEN), len(GOLDEN_INPUT)).tolist() == expected


def test_a_block_is_split_in_half() -> None:
    q = torch.tensor([-7.0, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 7])
    codes = bytes(Int4(block=16).encode(q))[-8:]
    assert [(byte & 15) - 8 for byte in codes] == q[:8].tolist()
    assert [(byte >> 4) - 8 for byte in codes] == q[8:].tolist()


@pytest.mark.parametrize("numel", range(1, 20))
def test_a_short_block_takes_half_a_byte_per_element(numel: int) -> None:
    codec = Int4(block=16)
    whole, rest = divmod(numel, 16)
    assert codec.max_nbytes(numel) == 32 + 2 * (whole + bool(rest)) + 8 * whole + (rest + 1) // 2
    x = torch.tensor([7.0, -7.0, 0.0])[torch.arange(numel) % 3]
    assert torch.equal(codec.decode(codec.encode(x), numel), x)


def test_half_is_rounded_to_even() -> None:
    x = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5])
    y = Int4(block=16).decode(Int4(block=16).encode(x), 8)
    assert y.tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 6.0]


def test_nmse_on_gaussian_data() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 1e-4
    y = Int4().decode(Int4().encode(x), len(x))
    assert float((x - y).square().sum() / x.square().sum()) < 1.4e-2  # digest, section 3.3
    assert Int4().max_nbytes(1 << 20) * 8 / (1 << 20) < 4.13


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)


@settings(deadline=None, max_examples=150)
@given(values=st.lists(floats, max_size=70), block=st.sampled_from([16, 32, 64]))
def test_any_finite_vector(values: list[float], block: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codec = Int4(block=block)
    y = codec.decode(codec.encode(x), len(x))
    assert bytes(codec.encode(y)) == bytes(codec.encode(x))
    for start in range(0, len(x), block):
        part = slice(start, start + block)
        absmax = float(x[part].abs().max())
        # half a step, and the scale's own rounding; blocks that would need a subnormal scale become zero
        bound = absmax / 7 * (0.5 + 1 / 256 + 7 / 256) if absmax >= 7 * 2.0**-126 else absmax
        assert float((x[part] - y[part]).abs().max()) <= bound * 1.001


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-45, -1e-40, 2.0**-126, 8e-38, 1e-37, 1e38])
def test_constants_zero_and_denormals(value: float) -> None:
    x = torch.full((201,), value)
    y = Int4().decode(Int4().encode(x), 201)
    if abs(value) < 7 * 2.0**-126:  # about 8.2e-38
        assert torch.count_nonzero(y) == 0
    else:
        torch.testing.assert_close(y, x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("scale", [0x7FC0, 0x7F80, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x007F, 0x7D93])
def test_hostile_scales_are_refused(scale: int) -> None:
    payload = bytearray(Int4(block=16).encode(torch.ones(20)))
    struct.pack_into("<H", payload, 32, scale)
    acc = torch.ones(20)
    with pytest.raises(CodecError, match="scale"):
        Int4(block=16).decode_add_(payload, acc, 1.0)
    assert acc.eq(1).all()


def test_the_largest_scale_and_code_stay_finite() -> None:
    payload = bytearray(Int4(block=16).encode(torch.ones(16)))
    struct.pack_into("<H", payload, 32, 0x7D92)
    payload[34:] = bytes(8)  # all -8, which our encoder never writes
    y = Int4(block=16).decode(payload, 16)
    assert y.isfinite().all() and y.unique().item() < -(2.0**127)
