"""Where open legs go: by speed as far as it is known, by numbers else, and not all senders to the same peer first."""

from collections import Counter

import pytest

from farflung.protocol.wiring import UNMEASURED, least_busy


def given(count: int, visit_s: dict[int, float], *, first: int = 0) -> list[int]:
    """The peers of a stage of three to which so many microbatches go."""
    so_far, order = Counter[int](), []
    for _ in range(count):
        peer = least_busy((4, 5, 6), so_far, visit_s, first=first)
        so_far[peer] += 1
        order.append(peer)
    return order


def test_shares_are_those_of_speeds() -> None:
    assert Counter(given(14, {4: 1.0, 5: 2.0, 6: 4.0})) == {4: 8, 5: 4, 6: 2}
    assert given(3, {4: 1.0, 5: 5.0, 6: 5.0}) == [4, 4, 4]  # what a slow one would only have done later


@pytest.mark.parametrize("visit_s", [{}, {5: 3.0}, {4: 0.1, 5: 0.1, 6: 0.1}])
def test_where_speeds_say_nothing_numbers_decide(visit_s: dict[int, float]) -> None:
    assert Counter(given(6, visit_s)) == {4: 2, 5: 2, 6: 2}


def test_the_unknown_one_is_like_the_median() -> None:
    assert Counter(given(9, {4: 1.0, 5: 2.0})) == Counter(given(9, {4: 1.0, 5: 2.0, 6: 1.5}))


def test_senders_begin_with_different_peers() -> None:
    assert {least_busy((4, 5, 6), {}, UNMEASURED, first=sender) for sender in (1, 2, 3)} == {4, 5, 6}
    assert given(3, {}, first=2) == [6, 4, 5]
