"""Top-k, random-k and DCT-top-k: what is kept, how exactly, in how many bits."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression.codec import Codec, CodecError
from farflung.compression.dct import Dct
from farflung.compression.randk import RandK
from farflung.compression.registry import parse_codec
from farflung.compression.topk import TopK

SMALL = [TopK(chunk=64, k=4, bits=bits) for bits in (1, 2, 8)]
TILES = [Dct(cols=128, k=40, bits=bits) for bits in (1, 2, 8)]
LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 8192 + 77]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-4


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), len(x))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


def bits_per_element(codec: Codec, x: Tensor) -> float:
    return 8 * len(codec.encode(x)) / len(x)


# Top-k


@pytest.mark.parametrize("codec", SMALL, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", LENGTHS)
def test_every_length_keeps_its_quota_of_the_largest(codec: TopK, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "CPU_CHUNK", 1024)
    x = gaussian(numel)
    payload = codec.encode(x)
    assert len(payload) <= codec.max_nbytes(numel)
    y = codec.decode(payload, numel)
    for start in range(0, numel, codec.chunk):
        part, decoded = x[start : start + codec.chunk], y[start : start + codec.chunk]
        quota = -(-codec.k * len(part) // codec.chunk)
        kept = decoded.nonzero().flatten()
        assert kept.tolist() == sorted(part.abs().topk(quota).indices.tolist())
        assert torch.equal(decoded[kept].sign(), part[kept].sign())
    assert bytes(codec.encode(y)) == bytes(payload)  # what is decoded keeps the same elements, at the same values


floats = st.floats(width=32, min_value=-(2.0**89), max_value=2.0**89) | st.sampled_from([0.0, -0.0, 1e-45, 1.0, -1.0])


@settings(deadline=None, max_examples=150)
@given(values=st.lists(floats, max_size=150), codec=st.sampled_from([*SMALL, TopK(chunk=64, k=16, bits=2)]))
def test_any_finite_vector(values: list[float], codec: TopK) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    payload = bytes(codec.encode(x))
    y = codec.decode(payload, len(x))
    assert bool(torch.isfinite(y).all()) and bytes(codec.encode(y)) == payload
    assert not bool((y * x < 0).any())  # underflow aside, signs are kept
    if codec.bits == 8:
        for start in range(0, len(x), codec.chunk):
            part, decoded = x[start : start + codec.chunk], y[start : start + codec.chunk]
            kept = decoded != 0
            step = float(part.abs().amax()) / 127
            assert float((part - decoded)[kept].abs().max() if kept.any() else 0) <= max(step, 2.0**-90) * 1.01


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_ties_go_to_the_first(bits: int) -> None:
    codec = TopK(chunk=64, k=4, bits=bits)
    x = torch.full((64,), -0.5)
    assert round_trip(codec, x).nonzero().flatten().tolist() == [0, 1, 2, 3]
    x[40], x[50] = 0.75, 0.75
    assert round_trip(codec, x).nonzero().flatten().tolist() == [0, 1, 40, 50]
    torch.testing.assert_close(round_trip(replace(codec, bits=2), x)[40], torch.tensor(0.75), rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", SMALL, ids=lambda c: c.spec)
def test_zeros_are_never_kept(codec: TopK) -> None:
    x = torch.zeros(200)
    assert torch.count_nonzero(round_trip(codec, x)) == 0
    x[70], x[71] = 1e-40, -1e-45  # subnormal: some machines would call them zero
    assert torch.count_nonzero(round_trip(codec, x)) == 0
    x[3] = -2.0
    assert round_trip(codec, x).nonzero().tolist() == [[3]] and float(round_trip(codec, x)[3]) == pytest.approx(
        -2, 0.01
    )


def test_a_chunk_without_a_kept_element_takes_little() -> None:
    x = torch.zeros(1 << 20)
    x[:4096] = gaussian(4096)
    assert len(TopK().encode(x)) < 800  # of it 512 are scales


@pytest.mark.parametrize(
    ("codec", "max_bits", "max_nmse"),
    [
        (TopK(), 0.137, 0.883),
        (TopK(k=66), 0.1405, 0.880),
        (TopK(chunk=16384, k=270), 0.140, 0.878),
        (TopK(bits=2), 0.155, 0.882),
        (TopK(bits=8), 0.247, 0.8815),
        (TopK(k=128), 0.239, 0.804),
        (TopK(k=256), 0.409, 0.684),
        (RandK(), 0.1275, 0.986),
        (Dct(cols=1024), 0.137, 0.8835),
        (Dct(cols=1024, bits=8), 0.247, 0.882),
    ],
    ids=str,
)
def test_bits_and_error_on_gaussian_data(codec: Codec, max_bits: float, max_nmse: float) -> None:
    x = gaussian(1 << 20)
    assert bits_per_element(codec, x) <= max_bits
    assert nmse(x, round_trip(codec, x)) <= max_nmse


def test_magnitudes_out_of_range_are_refused() -> None:
    x = gaussian(100)
    x[7] = -(2.0**90)
    assert float(round_trip(TopK(bits=8), x)[7]) == pytest.approx(-(2.0**90), rel=2**-8)
    x[7] *= 1.01
    with pytest.raises(CodecError, match="finite"):
        TopK().encode(x)


@pytest.mark.parametrize("scale", [0x7FC0, 0x7F80, 0xBF80, 0x8000, 0x0001, 0x127F, 0x6C81])
@pytest.mark.parametrize("codec", [*SMALL, Dct(cols=64, k=4)], ids=lambda c: c.spec)
def test_hostile_scales_are_refused(codec: Codec, scale: int) -> None:
    payload = bytearray(codec.encode(gaussian(60)))
    at = 32 + 24 + struct.unpack_from("<Q", payload, 48)[0]
    struct.pack_into("<H", payload, at, scale)
    acc = torch.ones(60)
    with pytest.raises(CodecError, match="scale"):
        codec.decode_add_(payload, acc, 1.0)
    assert acc.eq(1).all()


@pytest.mark.parametrize("codec", [*SMALL, *TILES], ids=lambda c: c.spec)
def test_the_largest_scales_and_codes_stay_finite(codec: Codec) -> None:
    numel = 64 * 128
    payload = bytearray(codec.encode(gaussian(numel)))
    at = 32 + 24 + struct.unpack_from("<Q", payload, 48)[0]
    num_chunks = numel // (codec.chunk if isinstance(codec, TopK) else 4096)
    payload[at : at + 2 * num_chunks] = struct.pack("<H", 0x6C80) * num_chunks
    payload[at + 2 * num_chunks :] = b"\x80" * (len(payload) - at - 2 * num_chunks)
    assert bool(torch.isfinite(codec.decode(payload, numel)).all())


@pytest.mark.parametrize("codec", [*SMALL, *TILES, RandK(every=3)], ids=lambda c: c.spec)
def test_flushing_subnormals_changes_nothing(codec: Codec) -> None:
    x = gaussian(20_000) * 2.0**-70  # down to the smallest magnitudes that are coded
    payload = bytes(codec.encode(x))
    plain = codec.decode(payload, len(x))
    assert torch.set_flush_denormal(True)
    try:
        flushed, again = codec.decode(payload, len(x)), bytes(codec.encode(x))
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(plain, flushed) and again == payload


def test_what_is_not_kept_is_not_touched() -> None:
    for codec in (TopK(chunk=64, k=1), RandK(every=64)):
        payload = codec.encode(gaussian(1000))
        acc = torch.full((1000,), -0.0)
        codec.decode_add_(payload, acc, 1.0)
        decoded = codec.decode(payload, 1000)
        assert torch.equal(acc, decoded) and 984 <= int(torch.signbit(acc[decoded == 0]).sum()) <= 985


@pytest.mark.parametrize("codec", SMALL, ids=lambda c: c.spec)
def test_parts_decode_to_slices_of_the_whole(codec: TopK) -> None:
    x = gaussian(3000)
    whole = round_trip(codec, x)
    assert same_bits(torch.cat([round_trip(codec, x[:1024]), round_trip(codec, x[1024:])]), whole)


# Random-k

GOLDEN_POSITIONS = [5, 8, 21, 31, 32]
GOLDEN_RANDK = (
    "4358010e010000002800000000000000000000000800000027000000000000004358010201000000"
    "050000000000000080000000000000000700000000000000813e1420537b7f"
)


def test_the_choice_is_the_same_for_ever() -> None:
    assert RandK(every=8).positions(40).tolist() == GOLDEN_POSITIONS
    assert RandK(every=8).positions(41).tolist() != [*GOLDEN_POSITIONS, 40]  # another length, another choice
    assert RandK(every=8, seed=1).positions(40).tolist() != GOLDEN_POSITIONS
    assert bytes(RandK(every=8).encode(torch.arange(40.0))).hex() == GOLDEN_RANDK


@given(numel=st.integers(0, 3000), every=st.integers(2, 300), seed=st.integers(0, (1 << 32) - 1))
def test_one_of_every_group(numel: int, every: int, seed: int) -> None:
    positions = RandK(every=every, seed=seed).positions(numel)
    assert (positions // every).tolist() == list(range(-(-numel // every)))
    assert not len(positions) or positions[-1] < numel


def test_every_element_is_as_likely_and_every_seed_new() -> None:
    offsets = RandK(every=16).positions(1 << 20) % 16
    counts = np.bincount(offsets, minlength=16) / len(offsets) * 16
    assert 0.95 < counts.min() and counts.max() < 1.05
    agreeing = (RandK(every=16, seed=1).positions(1 << 20) % 16 == offsets).mean()
    assert 0.9 < 16 * agreeing < 1.1


def test_random_k_is_unbiased_when_scaled() -> None:
    x = gaussian(1000)
    total = torch.zeros(1000)
    for seed in range(400):
        codec = RandK(every=4, seed=seed)
        codec.decode_add_(codec.encode(x), total, 4 / 400)
    assert nmse(x, total) < 2 * 3 / 400


# DCT


@pytest.mark.parametrize("codec", TILES, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 64 * 128, 64 * 128 + 1, 3 * 64 * 128 - 5])
def test_dct_of_every_length(codec: Dct, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "CPU_CHUNK", 1024)
    x = gaussian(numel)
    payload = codec.encode(x)
    assert len(payload) <= codec.max_nbytes(numel)
    y = codec.decode(payload, numel)
    assert y.shape == (numel,) and bool(torch.isfinite(y).all())


def test_a_smooth_matrix_needs_few_coefficients() -> None:
    rows, cols = torch.arange(100.0)[:, None], torch.arange(192.0)
    x = (torch.cos(rows / 30) * torch.sin(cols / 40) * 1e-3).flatten()
    assert nmse(x, round_trip(Dct(cols=192, k=64, bits=8), x)) < 0.01
    assert nmse(x, round_trip(TopK(k=64, bits=8), x)) > 0.9


def test_one_coefficient_is_one_cosine() -> None:
    i = torch.arange(64, dtype=torch.float64)
    wave = torch.cos(torch.pi * (i + 0.5) * 5 / 64) * (2 / 64) ** 0.5 * 64**-0.5
    x = (3.0 * wave.expand(64, 64)).float().flatten()
    torch.testing.assert_close(round_trip(Dct(cols=64, k=1), x), x, rtol=2**-7, atol=1e-5)


# What was written stays readable. So few gaps are stored as they are, so that these bytes do not depend on zlib.

GOLDEN_INPUT = [*[0.0] * 40, 1.0, -3.0, 0.25, 2.0, *[0.0] * 50, -0.5, 4e-4]
GOLDEN: dict[Codec, tuple[str, dict[int, float]]] = {
    TopK(chunk=64, k=8, bits=1): (
        "4358010d01000000600000000000000001080000400000002300000000000000"
        "060000000000000006000000000000000600000000000000280000003200c83f803e12",
        {40: 1.5625, 41: -1.5625, 42: 1.5625, 43: 1.5625, 94: -0.25, 95: 0.25},
    ),
    TopK(chunk=64, k=8, bits=2): (
        "4358010d01000000600000000000000002080000400000002600000000000000"
        "060000000000000006000000000000000600000000000000280000003200a13c813b2001121a",
        {
            40: 0.62890625,
            41: -2.4959716796875,
            42: 0.62890625,
            43: 2.4959716796875,
            94: -0.499969482421875,
            95: 0.003936767578125,
        },
    ),
    TopK(chunk=64, k=8, bits=8): (
        "4358010d01000000600000000000000008080000400000002800000000000000"
        "060000000000000006000000000000000600000000000000280000003200c23c813b2a810b548101",
        {
            40: 0.99462890625,
            41: -3.007568359375,
            42: 0.260498046875,
            43: 1.9892578125,
            94: -0.499969482421875,
            95: 0.003936767578125,
        },
    ),
}


@pytest.mark.parametrize("codec", GOLDEN, ids=lambda c: c.spec)
def test_golden_bytes(codec: Codec) -> None:
    expected_bytes, expected_values = GOLDEN[codec]
    assert bytes(codec.encode(torch.tensor(GOLDEN_INPUT))).hex() == expected_bytes
    decoded = codec.decode(bytes.fromhex(expected_bytes), len(GOLDEN_INPUT))
    assert {int(i): float(decoded[i]) for i in decoded.nonzero()} == expected_values


GOLDEN_COMPRESSED = (
    "4358010d01000000a00f00000000000001c800000004000033010000000000000e030000000000000e03000000000000b10000000000"
    "000005c1810900000cc3a02185fcfff1f4924c32c9249964924932c9249364924926c924934c9249269924934c3249269964924c3249"
    "49492629c924934c9249269924934c3249269964924c32c9249964924932c9249364924926c924934c5292494a32c9249364924926c9"
    "24934c9249269924934c3249269964924c32c9249964924932c924252599a4a424934c9249269924934c3249269964924c32c9249964"
    "924932c9249364924926c924934c52d203bb47bb47bb47bb4755555555555555555555555555555555555555555555ad54b5aaaaaaaa"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2a55adaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa6aa5aa95aaaaaaaaaaaaaaaa"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa14"
)
GOLDEN_DCT = (
    "4358011001000000a00f00000000000008100000400000004300000000000000"
    "100000000000000019000000000000001900000000000000ff0f3e013effffffffffffff0ff23e003e00f9003e00ff0e3ed04abbb74b53c83e8148c1acc9725f3a4338"
)


def test_a_compressed_payload_stays_readable() -> None:
    codec = TopK(chunk=1024, k=200)
    decoded = codec.decode(bytes.fromhex(GOLDEN_COMPRESSED), 4000)
    assert same_bits(decoded, round_trip(codec, (torch.arange(4000) * 37 % 101 - 50.0) ** 3))
    digest = hashlib.sha256(decoded.numpy().tobytes()).hexdigest()
    assert digest == "16b4e1e3463f0c400d82e8fd5362c081bb8ea5e7d73433c179952fa6468a1687"


def test_the_inverse_dct_has_the_same_bits_everywhere() -> None:
    decoded = Dct(cols=64, k=16, bits=8).decode(bytes.fromhex(GOLDEN_DCT), 4000)
    digest = hashlib.sha256(decoded.numpy().tobytes()).hexdigest()
    assert digest == "c4fda87f0bbb2a98565842aba7167351916d80f74136952eb556360db7827334"


# Parameters


@pytest.mark.parametrize(
    "spec",
    [
        "topk(chunk=100)",
        "topk(chunk=32)",
        "topk(chunk=131072)",
        "topk(k=0)",
        "topk(k=1025)",
        "topk(bits=3)",
        "randk(every=1)",
        "randk(every=65537)",
        "randk(seed=-1)",
        "randk(seed=4294967296)",
        "dct",
        "dct(cols=100)",
        "dct(cols=0)",
        "dct(cols=64,k=1025)",
        "dct(cols=64,bits=4)",
    ],
)
def test_wrong_parameters_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"must be|needs cols"):
        parse_codec(spec)


@pytest.mark.parametrize("kind", [TopK, RandK, Dct])
@given(param=st.integers(0, (1 << 64) - 1))
def test_any_param_is_a_codec_or_refused(kind: type[TopK | RandK | Dct], param: int) -> None:
    try:
        codec = kind.from_param(param)
    except ValueError:
        return
    assert codec.param == param
