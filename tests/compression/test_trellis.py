"""The trellis codec: its curve, its edges, the best path, and the same bytes from C and from NumPy."""

import itertools
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

from farflung.compression import kernels, lanes, paths, trellis
from farflung.compression.codec import CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.lanes import Model
from farflung.compression.paths import LANES, LEVEL, LEVELS, NEXT, QUANTISER, RATE_PRICE, TURNS, Prices
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.trellis import Trellis
from farflung.compression.wire import HEADER_NBYTES

PATH = LANES * TURNS
RATES = [0.05, 0.36, 0.85, 2.0, 4.0]


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


def both_ways(codec: Trellis, x: Tensor) -> tuple[bytes, Tensor]:
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
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, PATH - 1, PATH, PATH + 1, 2 * PATH + 77])
def test_any_length(bits: float, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "SECTION", PATH)
    x = gaussian(numel)
    before = x.clone()
    _, y = both_ways(Trellis(bits=bits), x)
    assert torch.equal(x, before) and y.shape == (numel,)
    assert numel == 0 or nmse(x, y) < 1


@pytest.mark.parametrize("bits", [0.85, 4.0])
def test_sections_without_a_single_one(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "SECTION", PATH)
    x = gaussian(3 * PATH + 5)
    x[PATH : 2 * PATH] = 0.0
    x[3 * PATH :] *= 1e-9
    _, y = both_ways(Trellis(bits=bits), x)
    assert not y[PATH : 2 * PATH].any() and not y[3 * PATH :].any()


@pytest.mark.parametrize(
    ("bits", "error"), [(0.05, 0.965), (0.14, 0.89), (0.36, 0.712), (0.85, 0.378), (2.0, 0.0758), (4.0, 0.00453)]
)
def test_the_curve_of_a_gaussian(bits: float, error: float) -> None:
    """From 0.7 bits on a dead zone with 0.05 bits more errs more."""
    codec, x = Trellis(bits=bits), gaussian(1 << 20)
    payload = codec.encode(x)
    assert nmse(x, codec.decode(payload, len(x))) < error
    assert 8 * len(payload) / len(x) == pytest.approx(bits, rel=0.01, abs=0.01)
    if bits > 0.5:
        rival = DeadZone(bits=min(bits + 0.05, 4.0))
        assert nmse(x, rival.decode(rival.encode(x), len(x))) > error


def test_weak_parts_get_fewer_bits() -> None:
    x = gaussian(1 << 18)
    x[: 1 << 17] *= 0.3
    codec = Trellis(bits=1.0)
    even = 8 * len(codec.encode(gaussian(1 << 18))) / len(x)
    payload = codec.encode(x)
    gap = 8 * len(payload) / len(x) + 0.5 * math.log2(nmse(x, codec.decode(payload, len(x))))
    assert 8 * len(payload) / len(x) < 0.85 * even and gap < 0.0  # a Gaussian of this rate has 0.14


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=60)
@given(values=st.lists(floats, max_size=70), bits=st.sampled_from(RATES))
def test_any_finite_vector(values: list[float], bits: float) -> None:
    codec, x = Trellis(bits=bits), torch.tensor(values, dtype=torch.float32)
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


def heavy(numel: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_cauchy(numel).astype(np.float32))


@pytest.mark.parametrize("bits", RATES)
@pytest.mark.parametrize(
    "x",
    [
        heavy(6_000),
        torch.rand(6_000) - 0.5,
        gaussian(6_000) * torch.tensor([1.0, 0.01]).repeat_interleave(3_000),
        torch.arange(6_000) / 1e3,
        torch.eye(78).reshape(-1),
        torch.tensor([0.26, 0.74, -0.5]).repeat(2_000),
        torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).repeat(700),
        torch.full((5_000,), -2.5),
    ],
    ids=["cauchy", "uniform", "two_scales", "ramp", "sparse", "repeating", "spikes", "constant"],
)
def test_payloads_are_never_longer_than_promised(bits: float, x: Tensor) -> None:
    _, y = both_ways(Trellis(bits=bits), x)
    assert nmse(x, y) < 1


@pytest.mark.parametrize("bits", RATES)
def test_magnitudes_that_are_all_alike_are_not_lost(bits: float) -> None:
    x = gaussian(6_000).sign() * (1 + 0.05 * gaussian(6_000, seed=1, scale=1.0))
    _, y = both_ways(Trellis(bits=bits), x)
    assert nmse(x, y) < 0.01


@pytest.mark.parametrize("at", [slice(100, 112), slice(30_000, 30_012)], ids=["in_the_sample", "outside"])
@pytest.mark.parametrize("bits", [2.5, 3.0, 4.0])
def test_outliers_are_exact_and_hide_nothing_else(bits: float, at: slice) -> None:
    """Of 12 to 100 times the rms, far above the highest level."""
    codec, x = Trellis(bits=bits), gaussian(1 << 18, scale=1.0)
    clean = codec.decode(codec.encode(x), len(x))
    plain = nmse(x, clean)
    x[at] = torch.linspace(12.0 + 8 * (4 - bits), 100.0, 12) * torch.tensor([1.0, -1.0]).repeat(6)
    y = codec.decode(codec.encode(x), len(x))
    assert torch.equal(x[at][6:], y[at][6:])
    assert float((x - y).square().sum()) < 1.3 * plain * len(x)


def test_where_all_would_be_lost_the_largest_is_sent() -> None:
    """At a rate of 0.05 no path that has a one is cheaper than the one of zeros."""
    x = torch.tensor([0.9, 0.27]).repeat(1_000)
    x[1_234] = -1.01
    _, y = both_ways(Trellis(bits=0.05), x)
    assert torch.count_nonzero(y) == 1 and y[1_234] == x[1_234]


@pytest.mark.parametrize("numel", [3, LANES, 4 * LANES - 2])
def test_no_path_is_cheaper(numel: int) -> None:
    """Against all paths of each lane whose levels are 0, or the nearest even or odd one, reckoned in double precision. Lanes of one vector are
    equally long: the shorter ones have a 0 more."""
    prices = Prices.of_shares(
        np.array([[-0.2, -0.1, 0.0], [0.25, 0.1, 0.1]], np.float32), np.array([0.1, 0.5]), 0.2, 0.1
    )
    x = gaussian(numel, seed=3, scale=1.7).numpy()
    cells = paths.search(x, 1.0, prices)
    assert (cells == by_numpy(paths.search, x, 1.0, prices)).all()
    x, cells = np.append(x, np.zeros(-numel % LANES, np.float32)), np.append(cells, np.zeros(-numel % LANES, np.uint8))
    for lane in range(LANES):
        own = x[lane::LANES]
        best = min(cost_of(own, levels, prices) for levels in itertools.product(range(6), repeat=len(own)))
        assert cost_of(own, tuple(cells[lane::LANES] & LEVEL), prices) == pytest.approx(best, rel=1e-5)


def cost_of(x: np.ndarray[Any, Any], levels: tuple[int, ...], prices: Prices) -> float:
    total, state = 0.0, 0
    for value, level in zip(np.abs(x.astype(float)), map(int, levels), strict=True):
        q = state & 1
        stands_for = 2 * level - q + float(prices.shifts[q, min(level, 3) - 1]) if level else 0.0
        if level and any(
            abs(abs(value) + q - 2 * other) < abs(abs(value) + q - 2 * level)
            for other in (level - 2, level + 2)
            if other > 0
        ):
            return math.inf
        price = float(prices.ones[q]) + (level - 1) * prices.slope if level else float(prices.zeros[q])
        total += (value - stands_for) ** 2 + price
        state = int(NEXT[state, level & 1])
    return total


def test_quantisers_follow_from_the_levels() -> None:
    x = gaussian(3 * PATH + 100, scale=1.0).numpy()
    cells = paths.search(x, 1.0, paths.fit(x, 1.0))
    for lane in range(LANES):
        state = 0
        for turn, cell in enumerate(cells[lane::LANES].tolist()):
            state = 0 if turn % TURNS == 0 else state
            assert cell >> QUANTISER == state & 1
            state = int(NEXT[state, cell & LEVEL & 1])


def test_prices_agree_with_what_they_come_to() -> None:
    x = gaussian(20_000, scale=1.0).numpy()
    prices = paths.fit(x, 1.0)
    cells = paths.search(x, 1.0, prices)
    for q in range(2):
        own = cells[cells >> QUANTISER == q] & LEVEL
        share = np.count_nonzero(own) / len(own)
        assert prices.zeros[q] == pytest.approx(-RATE_PRICE * math.log2(1 - share), rel=0.1, abs=0.01)


cells_of = st.lists(st.integers(0, LEVELS) | st.just(0), min_size=1, max_size=60).filter(any)


@settings(deadline=None, max_examples=60)
@given(groups=st.lists(cells_of, min_size=1, max_size=3), plain=st.booleans())
def test_any_levels_come_back(groups: list[list[int]], plain: bool) -> None:
    """Of several groups at once; plain ones take a bit for each answer."""
    coded = []
    for levels in groups:
        cells = np.array(levels, np.uint8)
        for lane in range(LANES):
            state = 0
            for at in range(lane, len(cells), LANES):
                level = int(cells[at])
                cells[at] = level | (state & 1) << QUANTISER
                state = int(NEXT[state, level & 1])
        model = Model.of(cells)
        coded.append((cells, Model.plain(model.planes) if plain else model))
    streams = lanes.encode(coded)
    assert [bytes(stream) for stream in streams] == [bytes(stream) for stream in by_numpy(lanes.encode, coded)]
    for run in (lambda f, *a: f(*a), by_numpy):
        out = [(stream, model, np.empty_like(cells)) for stream, (cells, model) in zip(streams, coded, strict=True)]
        run(lanes.decode, out)
        assert all((found == cells).all() for (_, _, found), (cells, _) in zip(out, coded, strict=True))
    for stream, (cells, model) in zip(streams, coded, strict=True):
        assert not plain or len(stream) <= lanes.plain_nbytes(cells, model.planes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4095, 9999])
def test_what_is_not_finite_is_refused(bad: float, at: int) -> None:
    x = gaussian(10_000)
    x[at] = bad
    for encode in (Trellis().encode, lambda x: by_numpy(Trellis().encode, x)):
        with pytest.raises(CodecError, match="finite"):
            encode(x)


def test_too_large_a_step_is_refused() -> None:
    with pytest.raises(CodecError, match=r"2\*\*127"):
        Trellis(bits=0.05).encode(torch.full((10,), 3e38))


@pytest.mark.parametrize("bits", [0.05, 0.1, 1 / 3, 0.9, 4])
def test_spec_and_header_lead_back_to_the_codec(bits: float) -> None:
    codec = Trellis(bits=bits)
    assert codec.bits == pytest.approx(bits) and len(codec.spec) < 30
    assert parse_codec(codec.spec) == codec and codec_of(codec.encode(gaussian(10))) == codec
    assert Trellis.from_param(codec.param) == codec


@pytest.mark.parametrize("bits", ["0", "0.049", "4.01", "nan", "inf", "-1"])
def test_rates_that_are_not_offered(bits: str) -> None:
    with pytest.raises(ValueError, match="bits must be"):
        parse_codec(f"trellis(bits={bits})")


@pytest.mark.parametrize("param", [0, 1, 0x7FC00000, 0xBF800000, 1 << 32, 1 << 63])
def test_parameters_that_are_not_rates(param: int) -> None:
    with pytest.raises(ValueError, match=r"bits must be|not an fp32"):
        Trellis.from_param(param)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_encodes_like_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "SECTION", PATH)
    x = gaussian(5 * PATH + 77)
    payload = Trellis().encode(x.cuda())
    assert torch.frombuffer(payload, dtype=torch.uint8).is_pinned()
    assert bytes(payload) == bytes(Trellis().encode(x))


# By version 1. It changes only together with the version.
GOLDEN_INPUT = [0.0, 1.0, -2.0, 0.5, 1e-3, 9.0, -1.5, 63.4, -0.25, *[0.25, -0.75] * 5, -3.0, 2.5]
GOLDEN = (
    "4358011501000000150000000000000000000040000000004a0000000000000026000000840100000000c0090000c0090000"
    "c0090000c0090000c0090000c0040000c0040000002400000000000000000000000000009a997d4200000000000000000000"
    "000000000000"
)


def test_golden_bytes() -> None:
    payload, _ = both_ways(Trellis(bits=2.0), torch.tensor(GOLDEN_INPUT))
    assert payload.hex() == GOLDEN


HOSTILE = Trellis(bits=4.0)


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


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_states_that_no_encoder_leaves_decode_alike(data: st.DataObject) -> None:
    """Several sections, of different planes, that NumPy takes together: lanes that are done wait for those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trellis, "SECTION", LANES * 4)
        x = gaussian(LANES * 12, scale=1.0) * torch.tensor([0.3, 30.0, 1.0]).repeat_interleave(LANES * 4)
        bad = bytearray(HOSTILE.encode(x))
        shares = struct.unpack_from("<2H", bad, HEADER_NBYTES + 12 + 5)
        start = HEADER_NBYTES + 12 + 5 + 2 * (bad[HEADER_NBYTES + 12] + 1)
        for lane in range(LANES):
            state = data.draw(st.sampled_from([0, 1, *shares, 1 << 15, (1 << 16) - 1, (1 << 32) - 1]))
            struct.pack_into("<I", bad, start + 4 * lane, state)
        assert outcome(bad, len(x)) is not None


def test_elements_far_below_the_step_decode() -> None:
    """A path may give one of 1e-41 level 1; a mean of such is no normal number."""
    for seed in range(40):
        x = gaussian(300, seed=seed, scale=1.0)
        x[gaussian(300, seed=100 + seed, scale=1.0) > -0.5] = 1e-41
        for bits in (2.0, 4.0):
            codec = Trellis(bits=bits)
            codec.check(codec.encode(x), len(x))


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


@pytest.mark.parametrize("planes", [LEVELS + 1, 127, 128])
def test_levels_that_do_not_exist_are_refused(planes: int) -> None:
    bad = bytearray(HOSTILE.encode(hostile_input()))
    bad[HEADER_NBYTES + 4] = planes
    assert outcome(bad, 300) is None
