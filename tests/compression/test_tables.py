"""bf16, fp16 and the codecs with small tables: their bytes, their errors, and what they do at the edges."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression.codec import Codec, CodecError
from farflung.compression.four_bit import E3m0, FourBit, Mxfp4, Nf4, Nvfp4
from farflung.compression.half import Bf16, Fp16
from farflung.compression.sign import Sign
from farflung.compression.stat2 import Stat2
from farflung.compression.tables import TableCodec, look_up, values_of_bytes
from farflung.compression.wire import HEADER_NBYTES

FOUR_BIT: list[FourBit] = [Nf4(), Mxfp4(), Nvfp4(), E3m0(), Nf4(block=16), E3m0(block=4096)]
CODECS: list[Codec] = [Bf16(), Fp16(), *FOUR_BIT, Sign(), Sign(block=16), Stat2()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def round_trip(codec: Codec, values: list[float] | Tensor) -> Tensor:
    x = torch.as_tensor(values, dtype=torch.float32)
    return codec.decode(codec.encode(x), len(x))


def gaussian(numel: int, scale: float = 1e-4) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * scale


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# Bodies of encodings of GOLDEN_INPUT by version 1 of each codec. They change only together with the codec's version.
GOLDEN_INPUT = [0.0, 1.0, -2.0, 0.5, 1e-3, 127.0, -127.0, 63.4, -0.25] + [0.0] * 7 + [3e-4, -1e-4, 0.0]
GOLDEN: dict[Codec, str] = {
    Bf16(): "0000803f00c0003f833afe42fec27e4280be00000000000000000000000000009d39d2b80000",
    Fp16(): "0000003c00c000381914f057f0d7ed5300b40000000000000000000000000000ea0c8e860000",
    Nf4(block=16): "fe429d397777f7c0777777774f77",
    Mxfp4(block=16): "83710000706f00000000b600",
    Nvfp4(): "0000423d7e010000705f00000000a500",
    E3m0(block=16): "fe429d391009706f00000000d700",
    Sign(block=16): "a1410c39440102",
    Stat2(): "fbfffdc2bc7dbdc27cb63fbd6666be42aaceaaaa2a",
}


@pytest.mark.parametrize("codec", GOLDEN, ids=lambda c: c.spec)
def test_golden_bytes(codec: Codec) -> None:
    body = bytes(codec.encode(torch.tensor(GOLDEN_INPUT))[HEADER_NBYTES:])
    golden = bytes.fromhex(GOLDEN[codec])
    if codec == Stat2():  # the last bit of its means depends on how wide a machine's vectors are
        assert struct.unpack("<4f", body[:16]) == pytest.approx(struct.unpack("<4f", golden[:16]), rel=1e-4)
        body, golden = body[16:], golden[16:]
    assert body == golden


# NMSE of the digest's table, section 3.3: Gauss, Laplace, Student-t with 4 degrees of freedom.
NMSE = {
    Bf16(): (2.8e-6, 2.8e-6, 2.8e-6),
    Fp16(): (4.3e-8, 4.3e-8, 4.3e-8),
    Nf4(): (8.5e-3, 1.1e-2, 1.2e-2),
    Mxfp4(): (1.3e-2, 1.6e-2, 1.7e-2),
    Nvfp4(): (9.0e-3, 8.6e-3, 8.4e-3),
    E3m0(): (3.7e-2, 3.4e-2, 3.2e-2),
    Sign(): (0.361, 0.496, 0.495),
    Stat2(): (0.179, 0.212, 0.255),
}


@pytest.mark.parametrize("codec", NMSE, ids=lambda c: c.spec)
def test_nmse_is_the_digests(codec: Codec) -> None:
    rng, numel = np.random.default_rng(0), 1 << 19
    sources = rng.standard_normal(numel), rng.laplace(size=numel), rng.standard_t(4, numel)
    for source, expected, tolerance in zip(sources, NMSE[codec], (0.03, 0.03, 0.1), strict=True):
        x = torch.from_numpy(source.astype(np.float32))
        error = (x - round_trip(codec, x)).double().square().sum() / x.double().square().sum()
        assert float(error) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (Bf16(), 16),
        (Fp16(), 16),
        (Nf4(), 4.25),
        (Mxfp4(), 4.25),
        (Nvfp4(), 4.5),
        (E3m0(), 4.125),
        (Sign(), 1.125),
        (Stat2(), 2),
    ],
)
def test_bits_per_element(codec: Codec, bits: float) -> None:
    assert 8 * codec.max_nbytes(1 << 20) / (1 << 20) == pytest.approx(bits, abs=1e-3)


@pytest.mark.parametrize("codec", FOUR_BIT, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 31, 4097, 9000])
def test_the_nearest_entry_is_found(codec: FourBit, numel: int) -> None:
    x = gaussian(numel)
    payload = codec.encode(x)
    y = codec.decode(payload, numel)
    scales = stored_scales(codec, payload, numel).repeat_interleave(codec.block)[:numel]
    choices = torch.tensor(codec.table) * scales[:, None]
    least = (choices - x[:, None]).abs().amin(dim=1)
    # A cell of a 127th shifts a threshold by half of it: the error is then larger by up to a whole cell.
    slack = 1 / 127 if codec.cells == 127 else 1e-6
    assert ((x - y).abs() <= least + slack * scales).all()


def stored_scales(codec: TableCodec, payload: memoryview, numel: int) -> Tensor:
    body = bytes(payload[HEADER_NBYTES:])
    unit = struct.unpack_from("<f", body)[0] if codec.scales.has_unit else 1.0
    num_blocks = -(-numel // codec.block)
    raw = body[4 * codec.scales.has_unit :][: num_blocks * codec.scales.dtype.itemsize]
    return codec.scales.load(torch.frombuffer(bytearray(raw), dtype=codec.scales.dtype), unit)


@pytest.mark.parametrize("codec", FOUR_BIT, ids=lambda c: c.spec)
@pytest.mark.parametrize("scale", [1.0, 0.0625, 2.0**-60])
def test_entries_of_the_table_are_exact(codec: FourBit, scale: float) -> None:
    x = torch.tensor(codec.table) * scale
    y = round_trip(codec, x)
    torch.testing.assert_close(y, x, rtol=2**-8 if codec.scales.has_unit else 0, atol=0)  # the unit is rounded


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**59), max_value=2.0**59)


@pytest.mark.parametrize("codec", [c for c in CODECS if c != Fp16()], ids=lambda c: c.spec)
@settings(deadline=None, max_examples=100)
@given(values=st.lists(floats, max_size=70))
def test_any_finite_vector(codec: Codec, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = round_trip(codec, x)
    assert y.isfinite().all()
    if isinstance(codec, FourBit) and len(x):
        # nvfp4's scales are E4M3 relative to the whole vector, 2^-6 to 448: blocks below that are zeros
        floor = 2.0**-6 / 448 * float(x.abs().max()) if isinstance(codec, Nvfp4) else 0.0
        zeros = 448 * 6 * 2.0**-116 if isinstance(codec, Nvfp4) else 2.0**-112  # vectors, or blocks, as small as that
        for start in range(0, len(x), codec.block):
            part = slice(start, start + codec.block)
            absmax = float(x[part].abs().max())
            assert ((x - y)[part].abs() <= max(0.26 * absmax, 1.01 * floor, 1.01 * zeros)).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-45, -1e-40, 2.0**-126, 1e-36, -1e-4, 6e4])
@pytest.mark.parametrize("numel", [1, 200])
def test_all_equal(codec: Codec, value: float, numel: int) -> None:
    y = round_trip(codec, torch.full((numel,), value))
    assert (y == y[0]).all()
    # powers of two as scales let up to 8 saturate to 6; all else is the rounding of one scale
    assert float(y[0]) == pytest.approx(value, rel=0.25 if codec == Mxfp4() else 2**-8, abs=1e-35)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_the_largest_numbers_are_refused_or_stay_finite(codec: Codec) -> None:
    largest = torch.finfo(torch.float32).max
    for x in (torch.full((300,), largest), torch.tensor([1.0, -largest]), torch.full((20,), 2.0**126)):
        try:
            assert round_trip(codec, x).isfinite().all()
        except CodecError:
            assert codec.name in {"bf16", "fp16", "nf4", "e3m0", "nvfp4", "sign", "stat2"}


def test_fp16_refuses_what_it_would_round_to_infinity() -> None:
    assert round_trip(Fp16(), [65504.0, -65519.0]).tolist() == [65504.0, -65504.0]
    with pytest.raises(CodecError, match="finite in fp16"):
        Fp16().encode(torch.tensor([1.0, -65520.0]))


def test_mxfp4_scales_are_floored_powers_of_two() -> None:
    payload = Mxfp4().encode(torch.tensor([7.9] + [1.0] * 31 + [8.0] + [0.0] * 31 + [3.9]))
    assert list(payload[HEADER_NBYTES:][:3]) == [127, 128, 126]  # 2**0: 7.9 saturates to 6
    assert Mxfp4().decode(payload, 65)[[0, 1, 32, 64]].tolist() == [6.0, 1.0, 8.0, 3.0]


def test_signs_and_the_mean_magnitude() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -0.0, 0.0, -6.0] + [-1.0] * 13)
    y = round_trip(Sign(block=16), x)
    assert y[:16].unique().tolist() == [-1.375, 1.375] and y[16:].tolist() == [-1.0] * 3
    assert torch.equal(y.signbit(), x.signbit())


@pytest.mark.parametrize("numel", [1, 5, 128, 1000])
def test_stat2_decodes_to_the_means_of_its_buckets(numel: int) -> None:
    x = gaussian(numel) + 1e-4
    y = round_trip(Stat2(), x)
    step = 1.5 * x.std(correction=0)
    code = ((x - x.mean()) / step).nan_to_num().round().add(2).clamp(0, 3)
    for bucket in code.unique():
        chosen = code == bucket
        torch.testing.assert_close(y[chosen], x[chosen].mean().expand(int(chosen.sum())))


def test_stat2_at_the_ends_of_buckets() -> None:
    # mean 0 and deviation 1: buckets end at -2.25, -0.75 and 0.75, and ends belong to the bucket below
    x = torch.tensor([0.75, -0.75] * 9 + [1.25, -1.25] * 7)
    below = -(9 * 0.75 + 7 * 1.25) / 16
    assert round_trip(Stat2(), x).tolist() == pytest.approx([0.75, below] * 9 + [1.25, below] * 7)


HOSTILE = [
    (Nf4(), 0, "<H", [0x7FC0, 0x7F80, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x037F]),
    (E3m0(), 0, "<H", [0x7F80, 0x8000, 0x037F]),
    (Sign(), 0, "<H", [0x7F80, 0xBF80, 0x037F]),
    (Mxfp4(), 0, "<B", [1, 253, 254, 255]),
    (Nvfp4(), 4, "<B", [0x7F, 0x80, 0xFF]),
    (Nvfp4(), 0, "<f", [float("nan"), float("inf"), -1.0, -0.5, 1e-45, 2.0**-117, 2.0**117]),
    (Stat2(), 8, "<f", [float("nan"), float("-inf")]),
    (Bf16(), 6, "<H", [0x7F80, 0xFFC0]),
    (Fp16(), 6, "<H", [0x7C00, 0xFE01]),
]


@pytest.mark.parametrize(("codec", "offset", "kind", "value"), [(c, o, k, v) for c, o, k, vs in HOSTILE for v in vs])
def test_hostile_bytes_are_refused(codec: Codec, offset: int, kind: str, value: float) -> None:
    bad = bytearray(codec.encode(torch.tensor(GOLDEN_INPUT)))
    struct.pack_into(kind, bad, HEADER_NBYTES + offset, value)
    acc = torch.ones(len(GOLDEN_INPUT))
    with pytest.raises(CodecError, match=r"scale|finite"):
        codec.decode_add_(bad, acc, 1.0)
    assert acc.eq(1).all()


EXTREMES = [
    (Nf4(), struct.pack("<H", 0x0380)),
    (Nf4(), struct.pack("<H", 0x7F7F)),
    (E3m0(), struct.pack("<H", 0x0380)),
    (E3m0(), struct.pack("<H", 0x7F7F)),
    (Sign(), struct.pack("<H", 0x7F7F)),
    (Mxfp4(), b"\x02"),
    (Mxfp4(), b"\xfc"),
    (Nvfp4(), struct.pack("<fB", 2.0**-116, 0x01)),
    (Nvfp4(), struct.pack("<fB", 2.0**116, 0x7E)),
]


@pytest.mark.parametrize(("codec", "scale"), EXTREMES)
def test_the_smallest_and_largest_scales_decode_to_normal_numbers(codec: TableCodec, scale: bytes) -> None:
    per_byte = values_of_bytes(codec.table).shape[1]
    payload = bytearray(codec.encode(torch.zeros(codec.block)))
    payload[HEADER_NBYTES : HEADER_NBYTES + len(scale)] = scale
    payload[-codec.block // per_byte :] = bytes(range(256))[:: 512 // codec.block][: codec.block // per_byte]
    magnitudes = codec.decode(payload, codec.block).abs()
    assert magnitudes.isfinite().all()
    assert ((magnitudes == 0) | (magnitudes >= 2.0**-126)).all()


@pytest.mark.parametrize("codec", [*FOUR_BIT[:4], Sign()], ids=lambda c: c.spec)
def test_flushing_subnormals_changes_nothing(codec: Codec) -> None:
    x = gaussian(1000, scale=2.0**-118)  # half of the blocks have scales too small for the format, or so
    payload = codec.encode(x)
    y = codec.decode(payload, len(x))
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        assert bytes(codec.encode(x)) == bytes(payload) and same_bits(codec.decode(payload, len(x)), y)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("table", [(1.0, -1.0), (0.0, 1.0, 2.0, 3.0), tuple(range(16))])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 64, 67])
def test_look_up_reads_codes_from_the_low_bits_on(table: tuple[float, ...], numel: int) -> None:
    bits = (len(table) - 1).bit_length()
    packed = np.random.default_rng(0).integers(0, 256, 100, dtype=np.uint8)
    number = int.from_bytes(packed.tobytes(), "little")
    out = torch.empty(numel)
    look_up(packed, values_of_bytes(table), 16, out)
    assert out.tolist() == [table[number >> bits * (16 + i) & len(table) - 1] for i in range(numel)]


@pytest.mark.parametrize("kind", [Nf4, Mxfp4, Nvfp4, E3m0, Sign])
@pytest.mark.parametrize("block", [0, 1, 8, 24, 1 << 15, -16])
def test_blocks_are_powers_of_two_in_range(kind: type[TableCodec], block: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        kind(block=block)


@pytest.mark.parametrize("kind", [Bf16, Fp16, Stat2])
def test_no_parameter_is_none(kind: type[Codec]) -> None:
    with pytest.raises(ValueError, match="no parameter"):
        kind.from_param(1)
