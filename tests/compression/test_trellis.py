"""The trellis codec: its curve, its edges, the best path, and the same bytes from C and from NumPy."""

import itertools
import math
import struct
from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.rates import both_ways, by_numpy, gaussian, hostile_input, nmse, outcome

from farflung.compression import kernels, lanes, paths
from farflung.compression.deadzone import DeadZone
from farflung.compression.lanes import Model
from farflung.compression.paths import LANES, LEVEL, LEVELS, NEXT, QUANTISER, RATE_PRICE, TURNS, Prices
from farflung.compression.trellis import Trellis
from farflung.compression.wire import HEADER_NBYTES

PATH = LANES * TURNS


@pytest.fixture(autouse=True)
def native(library: CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", library)


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


def test_prices_stay_what_they_are_while_c_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads take memory meanwhile; here it is taken between the last line of Python and the call."""
    codec, x = Trellis(bits=1.0), gaussian(1 << 12)
    alone, find = bytes(codec.encode(x)), kernels.find

    def find_late(name: str, *types: type[Any]) -> Callable[..., None] | None:
        native = find(name, *types)

        def call(*arguments: Any) -> None:
            _taken = [np.full(12, 1e3, np.float32) for _ in range(8)]
            assert native is not None
            native(*arguments)

        return call if native else None

    monkeypatch.setattr(kernels, "find", find_late)
    assert bytes(codec.encode(x)) == alone


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


def counts_of(cells: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return paths.sums(cells, np.zeros(len(cells), np.float32))[0]


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
        model = Model.of(counts_of(cells))
        coded.append((cells, Model.plain(model.planes) if plain else model))
    streams = lanes.encode(coded)
    assert [bytes(stream) for stream in streams] == [bytes(stream) for stream in by_numpy(lanes.encode, coded)]
    for run in (lambda f, *a: f(*a), by_numpy):
        out = [(stream, model, np.empty_like(cells)) for stream, (cells, model) in zip(streams, coded, strict=True)]
        run(lanes.decode, out)
        assert all((found == cells).all() for (_, _, found), (cells, _) in zip(out, coded, strict=True))
    for stream, (cells, _) in zip(streams, coded, strict=True):
        assert not plain or len(stream) <= lanes.plain_nbytes(counts_of(cells))


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


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_states_that_no_encoder_leaves_decode_alike(data: st.DataObject) -> None:
    """Several sections, of different planes, that NumPy takes together: lanes that are done wait for those of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trellis, "section", LANES * 4)
        x = gaussian(LANES * 12, scale=1.0) * torch.tensor([0.3, 30.0, 1.0]).repeat_interleave(LANES * 4)
        bad = bytearray(HOSTILE.encode(x))
        shares = struct.unpack_from("<2H", bad, HEADER_NBYTES + 12 + 5)
        start = HEADER_NBYTES + 12 + 5 + 2 * (bad[HEADER_NBYTES + 12] + 1)
        for lane in range(LANES):
            state = data.draw(st.sampled_from([0, 1, *shares, 1 << 15, (1 << 16) - 1, (1 << 32) - 1]))
            struct.pack_into("<I", bad, start + 4 * lane, state)
        assert outcome(HOSTILE, bad, len(x)) is not None


def test_elements_far_below_the_step_decode() -> None:
    """A path may give one of 1e-41 level 1; a mean of such is no normal number."""
    for seed in range(40):
        x = gaussian(300, seed=seed, scale=1.0)
        x[gaussian(300, seed=100 + seed, scale=1.0) > -0.5] = 1e-41
        for bits in (2.0, 4.0):
            codec = Trellis(bits=bits)
            codec.check(codec.encode(x), len(x))


@pytest.mark.parametrize("planes", [LEVELS + 1, 127, 128])
def test_levels_that_do_not_exist_are_refused(planes: int) -> None:
    bad = bytearray(HOSTILE.encode(hostile_input()))
    bad[HEADER_NBYTES + 4] = planes
    assert outcome(HOSTILE, bad, 300) is None
