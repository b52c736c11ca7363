"""The endless order of samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.training.order import SampleOrder, permute

SIZES = st.integers(min_value=1, max_value=700)
SEEDS = st.integers(min_value=-(2**63), max_value=2**64 - 1)


@given(size=SIZES, key=SEEDS)
def test_a_permutation_hits_everything_once(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(size=SIZES, seed=SEEDS, in_order=st.booleans(), epoch=st.integers(0, 10**6))
def test_every_epoch_has_every_sample_once(size: int, seed: int, in_order: bool, epoch: int) -> None:
    order = SampleOrder(num_samples=size, seed=seed, in_order=in_order)
    numbers = range(epoch * size, (epoch + 1) * size)
    assert sorted(order.index(number) for number in numbers) == list(range(size))
    assert {order.epoch(number) for number in numbers} == {epoch}


@given(size=st.integers(10**6, 2**60), index=st.integers(0, 10**6 - 1), key=SEEDS)
def test_large_sets_stay_inside(size: int, index: int, key: int) -> None:
    assert 0 <= permute(index, size, key) < size


def test_a_stream_is_read_in_its_own_order_in_every_epoch() -> None:
    order = SampleOrder(num_samples=100, seed=3, in_order=True)
    assert [order.index(number) for number in range(300)] == 3 * list(range(100))


def test_the_order_is_fixed_for_ever() -> None:
    order = SampleOrder(num_samples=1000, seed=42)
    assert [order.index(number) for number in (0, 1, 2, 999, 1000, 10**15)] == [343, 688, 419, 316, 334, 239]


def test_epochs_and_seeds_differ() -> None:
    first = SampleOrder(num_samples=500, seed=1)
    second = SampleOrder(num_samples=500, seed=2)
    orders = [
        [first.index(i) for i in range(500)],
        [first.index(i) for i in range(500, 1000)],
        [second.index(i) for i in range(500)],
    ]
    # a random permutation keeps about one of its places
    assert all(sum(a == b for a, b in zip(x, y, strict=True)) < 10 for x in orders for y in orders if x is not y)


def test_outside_is_refused() -> None:
    with pytest.raises(ValueError):
        permute(5, 5, 0)
    with pytest.raises(ValueError):
        SampleOrder(num_samples=5, seed=0).index(-1)
    with pytest.raises(ValueError):
        SampleOrder(num_samples=0, seed=0)
