"""Who may do the microbatches of a data node, by a plan that all have."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.route import Leg, Route
from farflung.protocol.route_rules import takers


def route(*peers: int) -> Route:
    return tuple(Leg(stage, peer) for stage, peer in enumerate(peers))


STAGES = ((0, 1, 2, 3), (4, 5))


@pytest.mark.parametrize("most", [None, 4])
def test_anybody_takes_over_where_there_is_room_for_all(most: int | None) -> None:
    planned = [route(home, 4) for home in range(4)]
    assert takers(planned, STAGES, most) == dict.fromkeys(range(4), STAGES)


def test_places_that_are_left_are_of_those_whom_fewest_help() -> None:
    planned = [route(0, 4), route(0, 5), route(1, 4), route(2, 5), route(3, 5)]
    assert {home: its[1] for home, its in takers(planned, STAGES, 3).items()} == {
        0: (4, 5),
        1: (4,),
        2: (4, 5),
        3: (5,),
    }
    assert takers([*planned, route(2, 4)], STAGES, 3)[3][1] == (5,), "there is none"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(6, 8), st.integers(9, 10)), min_size=1), st.integers(1, 6))
def test_nobody_sums_up_for_more_than_it_may_or_than_the_plan_brings_it(
    ways: list[tuple[int, int, int]], most: int
) -> None:
    stages = ((0, 1, 2, 3, 4, 5), (6, 7, 8), (9, 10))
    planned = [route(*way) for way in ways]
    may = takers(planned, stages, most)
    assert may.keys() == {home for home, *_ in ways} and may == takers(planned[::-1], stages, most)
    brings = Counter(peer for _, peer in {(way[0], peer) for way in ways for peer in way[1:]})
    comes = Counter(peer for its in may.values() for stage in its[1:] for peer in stage)
    assert all(comes[peer] == max(brings[peer], min(most, len(may))) for stage in stages[1:] for peer in stage)
    assert all(peer in may[way[0]][stage] for way in ways for stage, peer in enumerate(way))
