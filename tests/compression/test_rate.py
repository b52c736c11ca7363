"""What the codecs with a rate promise alike: any vector, any rate, any bytes; the same from C and from NumPy."""

import struct
from ctypes import CDLL

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.rates import RATES, both_ways, by_numpy, gaussian, hostile_input, nmse, outcome
from tests.thorough import further
from torch import Tensor

from farflung.compression import kernels
from farflung.compression.codec import CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.planes import BLOCK
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.trellis import Trellis
from farflung.compression.wire import HEADER_NBYTES

Kind = type[DeadZone] | type[Trellis]

each_kind = pytest.mark.parametrize("kind", [DeadZone, Trellis], ids=lambda kind: kind.name)
each_rate = pytest.mark.parametrize("bits", RATES)
some_rates = pytest.mark.parametrize("bits", [*RATES[::2], *further(*RATES[1::2])])


@pytest.fixture(autouse=True)
def native(library: CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", library)


@each_kind
@some_rates
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_any_length(kind: Kind, bits: float, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "section", BLOCK)
    x = gaussian(numel)
    before = x.clone()
    _, y = both_ways(kind(bits=bits), x)
    assert torch.equal(x, before) and y.shape == (numel,)
    assert numel == 0 or nmse(x, y) < 1


@each_kind
@each_rate
def test_nothing_is_left_of_the_section_before(kind: Kind, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections may be decoded in the same room, one after another; one of zeros has nothing that would fill it."""
    monkeypatch.setattr(kind, "section", BLOCK)
    x = gaussian(3 * BLOCK + 5)
    x[BLOCK : 2 * BLOCK] = 0.0
    x[3 * BLOCK :] *= 1e-9  # too weak for a single one
    _, y = both_ways(kind(bits=bits), x)
    assert not y[BLOCK : 2 * BLOCK].any() and not y[3 * BLOCK :].any()


@pytest.mark.parametrize(("kind", "distance"), [(DeadZone, 0.23), (Trellis, 0.14)])
def test_weak_parts_get_fewer_bits(kind: Kind, distance: float) -> None:
    """`distance` is that of a Gaussian of this rate from its bound."""
    x = gaussian(1 << 18)
    x[: 1 << 17] *= 0.3
    codec = kind(bits=1.0)
    even = 8 * len(codec.encode(gaussian(1 << 18))) / len(x)
    payload = codec.encode(x)
    bits = 8 * len(payload) / len(x)
    assert bits < 0.85 * even and bits + 0.5 * np.log2(nmse(x, codec.decode(payload, len(x)))) < distance - 0.14


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@each_kind
@settings(deadline=None, max_examples=60)
@given(values=st.lists(floats, max_size=70), bits=st.sampled_from(RATES))
def test_any_finite_vector(kind: Kind, values: list[float], bits: float) -> None:
    codec, x = kind(bits=bits), torch.tensor(values, dtype=torch.float32)
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


@each_kind
@each_rate
def test_magnitudes_that_are_all_alike_are_not_lost(kind: Kind, bits: float) -> None:
    x = gaussian(6_000).sign() * (1 + 0.05 * gaussian(6_000, seed=1, scale=1.0))
    _, y = both_ways(kind(bits=bits), x)
    assert nmse(x, y) < (1 if kind is DeadZone and bits < 0.1 else 0.01)


def heavy(numel: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_cauchy(numel).astype(np.float32))


@each_kind
@some_rates
@pytest.mark.parametrize(
    "x",
    [
        heavy(6_000),
        torch.rand(6_000) - 0.5,
        torch.rand(6_000).sub(0.5).sign() * torch.tensor([1.0, 0.3, 0.1]).repeat(2_000),
        gaussian(6_000) * torch.tensor([1.0, 0.01]).repeat_interleave(3_000),
        torch.arange(6_000) / 1e3,
        torch.eye(78).reshape(-1),
        torch.tensor([0.26, 0.74, -0.5]).repeat(2_000),
        torch.tensor([3.0, *[0.0] * 8]).repeat(700),
        torch.full((5_000,), -2.5),
    ],
    ids=["cauchy", "uniform", "three", "two_scales", "ramp", "sparse", "repeating", "spikes", "constant"],
)
def test_payloads_are_never_longer_than_promised(kind: Kind, bits: float, x: Tensor) -> None:
    _, y = both_ways(kind(bits=bits), x)
    assert nmse(x, y) < 1


@each_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4095, 9999])
def test_what_is_not_finite_is_refused(kind: Kind, bad: float, at: int) -> None:
    x = gaussian(10_000)
    x[at] = bad
    for encode in (kind().encode, lambda x: by_numpy(kind().encode, x)):
        with pytest.raises(CodecError, match="finite"):
            encode(x)


@each_kind
def test_too_large_a_step_is_refused(kind: Kind) -> None:
    with pytest.raises(CodecError, match=r"2\*\*127"):
        kind(bits=0.05).encode(torch.full((10,), 3e38))


@each_kind
def test_wrong_arguments_are_the_callers_fault(kind: Kind) -> None:
    codec, x = kind(), gaussian(100)
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


@each_kind
@pytest.mark.parametrize("bits", [0.05, 0.1, 1 / 3, 0.9, 4])
def test_spec_and_header_lead_back_to_the_codec(kind: Kind, bits: float) -> None:
    codec = kind(bits=bits)
    assert codec.bits == pytest.approx(bits) and len(codec.spec) < 30
    assert parse_codec(codec.spec) == codec and codec_of(codec.encode(gaussian(10))) == codec
    assert kind.from_param(codec.param) == codec


@each_kind
@pytest.mark.parametrize("bits", ["0", "0.049", "4.01", "nan", "inf", "-1"])
def test_rates_that_are_not_offered(kind: Kind, bits: str) -> None:
    with pytest.raises(ValueError, match="bits must be"):
        parse_codec(f"{kind.name}(bits={bits})")


@each_kind
@pytest.mark.parametrize("param", [0, 1, 0x7FC00000, 0xBF800000, 1 << 32, 1 << 63])
def test_parameters_that_are_not_rates(kind: Kind, param: int) -> None:
    with pytest.raises(ValueError, match=r"bits must be|not an fp32"):
        kind.from_param(param)


@each_kind
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_encodes_like_a_cpu(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "section", 2 * BLOCK)
    x = gaussian(5 * BLOCK + 77)
    payload = kind().encode(x.cuda())
    assert torch.frombuffer(payload, dtype=torch.uint8).is_pinned()
    assert bytes(payload) == bytes(kind().encode(x))


@each_kind
def test_a_flipped_bit_is_refused_or_decodes_to_finite_numbers(kind: Kind) -> None:
    codec = kind(bits=4.0)
    good = bytes(codec.encode(hostile_input()))
    assert outcome(codec, good, 300) is not None
    for bit in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert outcome(codec, bad, 300) is None or bit >= 8 * HEADER_NBYTES


@each_kind
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_junk_is_a_typed_error(kind: Kind, data: st.DataObject) -> None:
    codec = kind(bits=4.0)
    good = bytes(codec.encode(hostile_input()))
    cut = data.draw(st.integers(0, len(good) - 1))
    junk = bytearray(good[:cut] + data.draw(st.binary(max_size=40)))
    if len(junk) >= HEADER_NBYTES and data.draw(st.booleans()):
        struct.pack_into("<Q", junk, 24, len(junk) - HEADER_NBYTES)
    outcome(codec, junk, 300)
