"""Intervals of sample numbers against the numbers themselves."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from farflung.sims.intervals import merge, numbers, runs


def test_merge() -> None:
    assert merge([(5, 9), (0, 2), (2, 4), (6, 7), (3, 3)]) == [(0, 4), (5, 9)]


@given(st.lists(st.integers(0, 12)))
def test_runs_give_the_same_numbers_in_the_same_order(those: list[int]) -> None:
    found = runs(those)
    assert numbers(found) == those
    assert all(start < stop for start, stop in found)
    assert all(stop != start for (_, stop), (start, _) in pairwise(found)), "as few as do"
