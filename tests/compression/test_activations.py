"""Codecs of pipeline boundaries, and the rotation that one of them uses."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression import hadamard
from farflung.compression.activations import ActivationCodec
from farflung.compression.codec import CodecError
from farflung.compression.registry import ACTIVATION_CODECS, CODECS, parse_activation_codec, parse_codec
from farflung.compression.rotint4 import RotInt4
from farflung.compression.subspace import Subspace
from farflung.compression.tokenint8 import TokenInt8

WIDTH = 256
ALL: list[ActivationCodec] = [
    TokenInt8(width=WIDTH),
    RotInt4(width=WIDTH),
    RotInt4(width=WIDTH, block=64, seed=7),
    Subspace(width=WIDTH, rank=16),
]
CPU = torch.device("cpu")


def gaussian(tokens: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def with_outliers(tokens: int) -> Tensor:
    x = gaussian(tokens)
    x[:, ::100] *= 20
    return x


def round_trip(codec: ActivationCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), torch.empty_like(x))


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


# Rotation


@pytest.mark.parametrize("block", [2, 4, 8, 64, 128, 512, 4096])
def test_the_rotation_is_orthonormal_and_its_inverse_exact(block: int) -> None:
    signs = hadamard.random_signs(3, block, CPU)
    x = gaussian(3, 2 * block)
    y = hadamard.rotate(x, signs)
    assert y.shape == x.shape
    torch.testing.assert_close(y.square().sum(), x.square().sum())
    torch.testing.assert_close(hadamard.rotate_back(y, signs), x, rtol=0, atol=1e-5)


def test_the_rotation_is_the_hadamard_matrix() -> None:
    signs = hadamard.random_signs(0, 8, CPU)
    rows = hadamard.rotate(torch.eye(8), signs)
    expected = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(8)] for i in range(8)]) / 8**0.5
    torch.testing.assert_close(rows, expected * signs[:, None])


def test_an_outlier_is_spread_evenly() -> None:
    x = torch.zeros(1, 128)
    x[0, 77] = 16.0
    y = hadamard.rotate(x, hadamard.random_signs(0, 128, CPU))
    torch.testing.assert_close(y.abs(), torch.full((1, 128), 2.0**0.5))


def test_signs_are_the_same_for_ever() -> None:
    signs = hadamard.random_signs(1, 4096, CPU)
    assert hashlib.sha256(signs.numpy().tobytes()).hexdigest() == GOLDEN_SIGNS
    assert abs(float(signs.mean())) < 0.05 and not torch.equal(signs, hadamard.random_signs(2, 4096, CPU))


GOLDEN_SIGNS = "9ffca127e7692825be8ee52b5751b9344378377f40c002acccedb349b435bee6"


# Codecs


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_shape_and_dtype(
    codec: ActivationCodec, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gaussian(tokens).to(dtype)
    before = x.clone()
    payload = codec.encode(x)
    assert torch.equal(x, before) and len(payload) == codec.max_nbytes(x.numel()) == 32 + tokens * codec.row_nbytes
    out = torch.empty_like(x)
    assert codec.decode(payload, out) is out and bool(torch.isfinite(out).all())
    monkeypatch.setattr(codec_module, "CPU_CHUNK", 4 * WIDTH)
    assert nmse(codec.decode(codec.encode(x), torch.empty_like(x)), out) < 1e-5 if tokens else True


@pytest.mark.parametrize(
    ("codec", "max_bits", "gaussian_nmse", "outlier_nmse"),
    [
        (TokenInt8(width=WIDTH), 8.1, 6.5e-5, 1.6e-3),
        (RotInt4(width=WIDTH), 4.13, 1.4e-2, 1.1e-2),
        (Subspace(width=WIDTH, rank=WIDTH), 16.1, 5e-6, 5e-6),
    ],
    ids=str,
)
def test_bits_and_error(codec: ActivationCodec, max_bits: float, gaussian_nmse: float, outlier_nmse: float) -> None:
    x, y = gaussian(512), with_outliers(512)
    assert 8 * len(codec.encode(x)) / x.numel() < max_bits
    assert nmse(x, round_trip(codec, x)) < gaussian_nmse and nmse(y, round_trip(codec, y)) < outlier_nmse
    z = x.bfloat16()
    assert nmse(z, round_trip(codec, z)) < gaussian_nmse + 6e-6  # of bf16 itself


def test_a_subspace_is_exact_for_what_lies_in_it() -> None:
    codec = Subspace(width=WIDTH, rank=16, seed=5)
    basis = codec.basis(CPU)
    torch.testing.assert_close(basis.T @ basis, torch.eye(16), rtol=0, atol=1e-5)
    x = gaussian(100, 16) @ basis.T
    assert nmse(x, round_trip(codec, x)) < 5e-6
    y = gaussian(100)
    torch.testing.assert_close(round_trip(codec, y), y @ basis @ basis.T, rtol=0, atol=0.02)  # z is in bf16
    assert not torch.equal(basis, Subspace(width=WIDTH, rank=16, seed=6).basis(CPU))


def test_the_basis_is_the_same_for_ever() -> None:
    basis = Subspace(width=4, rank=2, seed=1).basis(CPU)
    torch.testing.assert_close(basis, torch.tensor(GOLDEN_BASIS), rtol=0, atol=1e-6)


GOLDEN_BASIS = [[0.3322527, -0.5252036], [0.5257568, 0.2319796], [0.1274836, -0.794185], [0.7726163, 0.1990394]]


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
def test_tokens_are_coded_by_themselves(codec: ActivationCodec) -> None:
    x = gaussian(8)
    whole = round_trip(codec, x)
    x[3] *= 1000
    others = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(round_trip(codec, x)[others], whole[others], rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(values=st.lists(st.floats(width=32, min_value=-(2.0**120), max_value=2.0**120), min_size=16, max_size=16))
@pytest.mark.parametrize(
    "codec", [TokenInt8(width=8), RotInt4(width=8, block=4), Subspace(width=8, rank=3)], ids=lambda c: c.spec
)
def test_any_finite_tokens(codec: ActivationCodec, values: list[float]) -> None:
    x = torch.tensor(values).view(2, 8)
    y = round_trip(codec, x)
    assert bool(torch.isfinite(y).all())
    if not isinstance(codec, Subspace):  # half a step of the largest, and the blocks too small for a scale
        step = x.abs().amax() * (4**0.5 / 7 if isinstance(codec, RotInt4) else 1 / 127)
        assert float((x - y).abs().max()) <= max(2 * float(step), 2e-35)


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2.0**121])
def test_what_is_not_finite_is_refused(codec: ActivationCodec, bad: float) -> None:
    x = gaussian(5)
    x[4, 255] = bad
    with pytest.raises(CodecError, match="finite"):
        codec.encode(x)


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
def test_damaged_payloads_are_refused_or_decode_to_finite_numbers(codec: ActivationCodec) -> None:
    good = bytes(codec.encode(gaussian(2)))
    for bit in [*range(8 * 32), *range(8 * 32, 8 * len(good), 37), *range(8 * 32, 8 * 32 + 64)]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        for dtype in (torch.float32, torch.float16):
            try:
                assert bool(torch.isfinite(codec.decode(bad, torch.empty(2, WIDTH, dtype=dtype))).all())
            except CodecError:
                continue
            assert bit >= 8 * 32
    for wrong in (good[:-1], good + b"\0", good[:31], b""):
        with pytest.raises(CodecError):
            codec.decode(wrong, torch.empty(2, WIDTH))
    with pytest.raises(CodecError, match="number of elements"):
        codec.decode(good, torch.empty(3, WIDTH))


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
@pytest.mark.parametrize("value", [0x7FC0, 0x7F80])
def test_hostile_rows_are_refused(codec: ActivationCodec, value: int) -> None:
    payload = bytearray(codec.encode(gaussian(1)))
    payload[32:] = struct.pack("<H", value) * (codec.row_nbytes // 2)
    with pytest.raises(CodecError, match="finite"):
        codec.decode(payload, torch.empty(1, WIDTH))


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
def test_wrong_arguments_are_the_callers_fault(codec: ActivationCodec) -> None:
    payload = codec.encode(gaussian(4))
    for bad in (gaussian(4).int(), gaussian(4).view(-1), gaussian(4, 128), gaussian(8)[::2], gaussian(4)[None]):
        with pytest.raises(ValueError, match="must be contiguous"):
            codec.encode(bad)
        with pytest.raises(ValueError, match="must be contiguous"):
            codec.decode(payload, bad)
    with pytest.raises(ValueError, match="writable"):
        codec.encode(gaussian(4), out=bytearray(10))
    for numel in (-WIDTH, WIDTH + 1):
        with pytest.raises(ValueError, match="no tokens"):
            codec.max_nbytes(numel)
    memory = bytearray(len(payload))
    assert bytes(codec.encode(gaussian(4), out=memory)) == bytes(payload) == bytes(memory)


# Parameters


@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
def test_spec_and_param_lead_back_to_the_codec(codec: ActivationCodec) -> None:
    assert parse_activation_codec(codec.spec) == codec == type(codec).from_param(codec.param)
    with pytest.raises(ValueError, match="unknown codec"):
        parse_codec(codec.spec)


@pytest.mark.parametrize(
    "spec",
    [
        "tokenint8",
        "tokenint8(width=0)",
        "tokenint8(width=65536)",
        "rotint4(width=100)",
        "rotint4(width=96,block=96)",
        "rotint4(width=128,seed=-1)",
        "subspace(width=8)",
        "subspace(width=8,rank=9)",
        "subspace(width=8,rank=8,seed=4294967296)",
    ],
)
def test_wrong_parameters_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        parse_activation_codec(spec)


@pytest.mark.parametrize("kind", ACTIVATION_CODECS)
@given(param=st.integers(0, (1 << 64) - 1) | st.integers(0, 1 << 17))
def test_any_param_is_a_codec_or_refused(kind: type[ActivationCodec], param: int) -> None:
    try:
        codec = kind.from_param(param)
    except ValueError:
        return
    assert codec.param == param


def test_names_and_ids_are_all_different() -> None:
    kinds = [*CODECS, *ACTIVATION_CODECS]
    assert len({kind.name for kind in kinds}) == len({kind.codec_id for kind in kinds}) == len(kinds)


# The bytes are what they were.

GOLDEN_INPUT = torch.tensor([[1.0, -2.0, 0.5, 127.0], [0.0, 0.0, 0.0, 0.0]])
GOLDEN: dict[ActivationCodec, str] = {
    TokenInt8(width=4): ("4358011201000000080000000000000004000000000000000c00000000000000803f01fe007f000000000000"),
    RotInt4(width=4, block=4, seed=0): (
        "43580111010000000800000000000000000000000400040008000000000000001441f11f00008888"
    ),
    Subspace(width=4, rank=2, seed=0): (
        "435801130100000008000000000000000000000002000400080000000000000097c204c100000000"
    ),
}


@pytest.mark.parametrize("codec", GOLDEN, ids=lambda c: c.spec)
def test_golden_bytes(codec: ActivationCodec) -> None:
    payload = codec.encode(GOLDEN_INPUT)
    if not isinstance(codec, Subspace):  # whose products may round to another bf16 elsewhere
        assert bytes(payload).hex() == GOLDEN[codec]
    out = codec.decode(bytes.fromhex(GOLDEN[codec]), torch.empty(2, 4))
    torch.testing.assert_close(out, codec.decode(payload, torch.empty(2, 4)), rtol=2**-7, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("codec", ALL, ids=lambda c: c.spec)
def test_a_gpu_computes_about_the_same(codec: ActivationCodec) -> None:
    x = gaussian(33).bfloat16()
    payload = codec.encode(x.cuda())
    assert torch.frombuffer(payload, dtype=torch.uint8).is_pinned()
    on_gpu = codec.decode(payload, torch.empty_like(x, device="cuda")).cpu()
    torch.testing.assert_close(on_gpu, codec.decode(payload, torch.empty_like(x)))
    assert nmse(round_trip(codec, x), on_gpu) < 1e-4
