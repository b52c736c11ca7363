"""The outer optimiser against its references, its slices, and its chunks."""

import itertools

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from farflung.training.errors import BadChunk
from farflung.training.outer import OuterState
from farflung.training.rules import Nesterov, roll_forward

pytestmark = pytest.mark.usefixtures("kernel")


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def state(n: int = 1000, *, chunk_bytes: int = 1 << 20) -> OuterState:
    return OuterState(random(n, 1), random(n, 2), chunk_bytes=chunk_bytes)


def test_steps_are_those_of_torch() -> None:
    ours = OuterState(random(1000, 1))
    theirs = torch.nn.Parameter(random(1000, 1))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(20):
        mean = random(1000, 100 + round_)
        ours.step_(0, 1000, mean, 0.7, 0.9)
        theirs.grad = mean.clone()
        optimizer.step()
    # torch fuses multiplication and addition on some machines, we on none
    torch.testing.assert_close(ours.params, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_steps_are_the_formula_to_the_bit() -> None:
    outer = OuterState(random(1000, 1))
    theta, u = outer.params.numpy().copy(), np.zeros(1000, dtype=np.float32)
    lr, mu = np.float32(0.7), np.float32(0.9)
    for round_ in range(20):
        mean = random(1000, 100 + round_)
        outer.step_(0, 1000, mean, 0.7, 0.9)
        d = mean.numpy()
        u = mu * u + d  # numpy rounds after each operation
        theta = theta - lr * (d + mu * u)
    assert np.array_equal(outer.params.numpy(), theta)
    assert np.array_equal(outer.momentum.numpy(), u)


@given(cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_slices_in_any_cut_give_the_same_bits(cuts: list[int]) -> None:
    whole, sliced = state(), state()
    mean = random(1000, 3)
    whole.step_(0, 1000, mean, 0.7, 0.9)
    bounds = [0, *sorted(cuts), 1000]
    for start, stop in reversed(list(itertools.pairwise(bounds))):
        sliced.step_(start, stop, mean[start:stop], 0.7, 0.9)
    assert torch.equal(whole.params, sliced.params)
    assert torch.equal(whole.momentum, sliced.momentum)
    assert whole.digest() == sliced.digest()


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = state(), state()
    whole.step_(10, 990, random(980, 3), 0.7, 0.9)
    monkeypatch.setattr("farflung.training.outer.BLOCK_ELEMENTS", 7)
    blocks.step_(10, 990, random(980, 3), 0.7, 0.9)
    assert whole.digest() == blocks.digest()


def test_a_downloaded_slice_rolls_forward_to_the_same_bits() -> None:
    outer = state()
    params, momentum = outer.params[100:300].clone(), outer.momentum[100:300].clone()
    for round_ in range(5):
        mean = random(1000, round_)
        outer.step_(0, 1000, mean, 0.7, 0.9)
        params, momentum = roll_forward(params, momentum, mean[100:300], 0.7, 0.9)
    assert torch.equal(params, outer.params[100:300])
    assert torch.equal(momentum, outer.momentum[100:300])


@given(numel=st.integers(0, 70), shift=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_steps_of_any_size_and_place_roll_forward_to_the_same_bits(numel: int, shift: int, seed: int) -> None:
    params, momentum = random(100, seed) * random(100, seed + 1).exp2(), random(100, seed + 2)
    mean = random(200, seed + 3)[::2][shift : shift + numel]  # not in one piece
    outer = OuterState(params.clone(), momentum.clone())
    outer.step_(shift, shift + numel, mean, 0.7, 0.9)
    here = slice(shift, shift + numel)
    params[here], momentum[here] = roll_forward(params[here], momentum[here], mean, 0.7, 0.9)
    assert torch.equal(params, outer.params) and torch.equal(momentum, outer.momentum)


def test_rolling_forward_leaves_its_arguments_alone() -> None:
    outer = state()
    before = outer.digest()
    roll_forward(outer.params, outer.momentum, random(1000, 9), 0.7, 0.9)
    assert outer.digest() == before


def test_a_state_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="in one piece"):
        OuterState(random(1000, 1)[::2])


@pytest.mark.parametrize("start,stop,size", [(0, 1001, 1001), (-1, 5, 6), (5, 3, 0), (0, 10, 9)])
def test_a_mean_that_does_not_fit_is_refused(start: int, stop: int, size: int) -> None:
    outer = state()
    before = outer.digest()
    with pytest.raises(ValueError):
        outer.step_(start, stop, torch.zeros(size), 0.7, 0.9)
    assert outer.digest() == before


def test_a_mean_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError):
        state().step_(0, 1000, torch.zeros(1000, dtype=torch.float64), 0.7, 0.9)


def test_a_chunk_is_params_then_momentum() -> None:
    outer = state(10, chunk_bytes=32)  # four elements in a chunk
    assert outer.num_chunks == 3
    assert outer.chunk_range(2) == (8, 10)
    expected = b"".join(t.numpy()[8:].astype("<f4").tobytes() for t in (outer.params, outer.momentum))
    assert outer.chunk_bytes(2) == expected
    assert outer.chunk_digests()[2] == blake3(expected).digest()
    assert outer.digest() == blake3(b"".join(outer.chunk_digests())).digest()


@given(n=st.integers(1, 300), chunk_bytes=st.integers(8, 500))
def test_chunks_carry_the_whole_state(n: int, chunk_bytes: int) -> None:
    donor = state(n, chunk_bytes=chunk_bytes)
    joiner = OuterState(torch.zeros(n), chunk_bytes=chunk_bytes)
    for index in reversed(range(donor.num_chunks)):
        joiner.load_chunk(index, donor.chunk_bytes(index))
    assert joiner.digest() == donor.digest()
    assert torch.equal(joiner.params, donor.params)
    assert torch.equal(joiner.momentum, donor.momentum)


def test_one_changed_bit_shows_in_one_chunk() -> None:
    outer = state(100, chunk_bytes=80)
    before = outer.chunk_digests()
    outer.momentum[57] += 1e-6
    after = outer.chunk_digests()
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_chunks_change_nothing(value: float) -> None:
    outer = state(100, chunk_bytes=80)
    before = outer.digest()
    poisoned = np.zeros(20, dtype="<f4")
    poisoned[13] = value
    good = b"\0" * 80
    for index, data in [(0, poisoned.tobytes()), (0, good[1:]), (0, b""), (10, good), (-1, good)]:
        with pytest.raises(BadChunk):
            outer.load_chunk(index, data)
    assert outer.digest() == before


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_impossible_outer_optimisers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Nesterov(**wrong)
