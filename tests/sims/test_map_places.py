"""Where dots and labels stand on a map, beside it and in a circle."""

import math
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.sims.map_places import DOT_IN, Point, in_a_column, label_places, on_a_circle, spread
from farflung.sims.world import PLACES, coasts


def test_places_beside_the_map_and_in_a_circle_are_apart() -> None:
    column, tall = in_a_column([1, 9, 1], 10.0)
    assert all(x == 10.0 for x, _ in column) and column[-1][1] < tall
    (below, middle, above) = (y for _, y in column)
    assert middle - below > 3.0 * DOT_IN and above - middle > 3.0 * DOT_IN
    found = spread([column[0], *[column[1]] * 9, column[2]])
    assert all(abs(at[1] - middle) < (above - below) / 2 - DOT_IN for at in found[1:10])
    assert on_a_circle(1, 11.0, 4.0, 1.0) == [(5.5, 2.0)]
    circle = on_a_circle(8, 11.0, 4.0, 1.0)
    assert all(1.0 - 1e-9 <= x <= 10.0 + 1e-9 and 0.0 < y < 4.0 for x, y in circle)
    assert min(math.dist(a, b) for a, b in combinations(circle, 2)) > 6.0 * DOT_IN


@given(st.lists(st.tuples(st.floats(0.0, 11.0), st.floats(0.0, 4.0)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_dots_on_a_map_do_not_cover_each_other(points: list[Point]) -> None:
    for given_points in (points, points[:1] * 7):
        found = spread(given_points)
        for one in range(len(found)):
            for other in range(one):
                assert math.dist(found[one], found[other]) > 1.9 * DOT_IN
            assert math.dist(found[one], given_points[one]) < 2.0 * DOT_IN * len(given_points) + 0.02


def test_labels_avoid_dots_and_each_other() -> None:
    alone = label_places([("Iowa", [(1.0, 1.0)])], [(1.0, 1.0)])
    assert alone[0][0] == 1.0 and alone[0][1] < 1.0 - DOT_IN  # below
    below_is_taken = label_places([("Iowa", [(1.0, 1.0)])], [(1.0, 1.0), (1.0, 0.75)])
    assert below_is_taken[0][1] > 1.0


def test_places_lie_on_land() -> None:
    def inside(ring: list[Point], at: Point) -> bool:
        east, north = at
        crossings = 0
        for (x1, y1), (x2, y2) in zip(ring, ring[1:] + ring[:1], strict=True):
            crossings += (y1 > north) != (y2 > north) and east < x1 + (north - y1) / (y2 - y1) * (x2 - x1)
        return crossings % 2 == 1

    lands = coasts()
    inland = ("Germany", "Iowa", "Belgium", "Canada")  # the coast is simplified to most of a degree
    assert all(any(inside(ring, PLACES[region]) for ring in lands) for region in inland)
    assert not any(inside(ring, (-40.0, 30.0)) for ring in lands)  # the Atlantic
