"""Deadlines follow what was measured, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.deadline import SLACK, SPREAD, adaptive

seconds = st.floats(0, 1e5)


def test_without_measurements_it_is_the_longest() -> None:
    assert adaptive([], low=1.0, high=30.0) == 30.0


@given(st.lists(seconds, min_size=1, max_size=40), seconds, seconds)
def test_within_bounds_and_above_the_median(measured: list[float], a: float, b: float) -> None:
    low, high = sorted((a, b))
    deadline = adaptive(measured, low=low, high=high)
    assert low <= deadline <= high
    assert deadline == high or deadline >= sorted(measured)[(len(measured) - 1) // 2]


def test_alike_machines_get_the_slack() -> None:
    assert adaptive([10.0] * 8, low=0.0, high=100.0) == pytest.approx(10.0 * (1 + SLACK))


def test_different_machines_get_the_spread() -> None:
    assert adaptive([8.0, 10.0, 12.0, 14.0, 16.0], low=0.0, high=100.0) == pytest.approx(12.0 + SPREAD * 2.0)


def test_one_straggler_does_not_move_it() -> None:
    usual = adaptive([10.0, 10.5, 9.5, 10.2, 9.8], low=0.0, high=1e9)
    assert adaptive([10.0, 10.5, 9.5, 10.2, 9000.0], low=0.0, high=1e9) < 1.2 * usual
