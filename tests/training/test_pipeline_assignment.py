"""Peers to stages: matchings and layers are the best ones, groups get better, columns are full pipelines."""

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.pipeline_cases import SEEDS

from farflung.training.pipeline_assignment import (
    _Score,
    assign,
    bottleneck_matching,
    columns,
    layers_per_stage,
    stage_sizes,
)
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import BadPlan


@given(st.integers(1, 4), st.integers(1, 4), SEEDS)
@settings(max_examples=100, deadline=None)
def test_bottleneck_matchings_are_the_best(rows: int, columns: int, seed: int) -> None:
    rng = random.Random(seed)
    costs = [[float(rng.randint(1, 6)) for _ in range(columns)] for _ in range(rows)]
    largest, matched = bottleneck_matching(costs)
    pairs = [(row, column) for row, column in enumerate(matched) if column != -1]
    assert len(pairs) == min(rows, columns) == len({column for _, column in pairs})
    assert max(costs[row][column] for row, column in pairs) == largest
    wide = costs if rows <= columns else [list(column) for column in zip(*costs, strict=True)]
    orders = permutations(range(len(wide[0])), len(wide))
    assert largest == min(max(wide[row][column] for row, column in enumerate(order)) for order in orders)


@given(st.integers(2, 4), st.integers(0, 6), SEEDS)
@settings(max_examples=50, deadline=None)
def test_layers_make_the_slowest_stage_as_fast_as_it_can_be(num_stages: int, extra: int, seed: int) -> None:
    rng = random.Random(seed)
    num_layers = num_stages + extra
    groups = [[stage] for stage in range(num_stages)]
    layer_s = [rng.uniform(0.5, 2.0) for _ in groups]
    limits = [rng.randint(1, num_layers) for _ in groups]

    def slowest(layers: list[int]) -> float:
        share = [1.0, *([(num_stages - 2) / (num_stages - 1)] * (num_stages - 1))]
        return max(share[stage] * count * layer_s[stage] for stage, count in enumerate(layers))

    def every(stages: int, left: int) -> list[list[int]]:
        if stages == 0:
            return [[]] if left == 0 else []
        return [[first, *rest] for first in range(1, left + 1) for rest in every(stages - 1, left - first)]

    possible = [one for one in every(num_stages, num_layers) if all(a <= b for a, b in zip(one, limits, strict=True))]
    if not possible:
        with pytest.raises(BadPlan, match="more stages or larger peers"):
            layers_per_stage(groups, num_layers, layer_s, limits, num_stages - 1)
        return
    found = layers_per_stage(groups, num_layers, layer_s, limits, num_stages - 1)
    assert found in possible
    assert slowest(found) == pytest.approx(min(map(slowest, possible)))


def test_published_stage_sizes() -> None:
    assert stage_sizes(20, 6, 4) == [5, 3, 3, 3, 3, 3]
    assert stage_sizes(42, 8, 6) == [7, 5, 5, 5, 5, 5, 5, 5]
    assert stage_sizes(2, 2, 2) == [1, 1]
    with pytest.raises(BadPlan, match="at most so many stages"):
        stage_sizes(3, 4, 4)


def two_islands() -> Costs:
    """Peers of the same parity are near each other."""
    message = tuple(tuple(0.1 if (a - b) % 2 == 0 else 10.0 for b in range(6)) for a in range(6))
    return Costs(forward_s=((1.0,) * 6,) * 3, latency_s=message, transmit_s=((0.0,) * 6,) * 6)


def test_assignment_finds_islands_and_columns_stay_in_them() -> None:
    costs = two_islands()
    groups = assign(costs, [2, 2, 2], proposals=2000, seed=1)
    assert sorted(peer for group in groups for peer in group) == list(range(6))
    assert groups == assign(costs, [2, 2, 2], proposals=2000, seed=1)
    blind = assign(costs, [2, 2, 2], proposals=0, seed=1)
    assert _Score(costs).of(groups) <= _Score(costs).of(blind)
    # one peer of each island in every stage: slow means, fast pipelines, which count twice per boundary
    chains = columns(costs, groups)
    assert all(len({peer % 2 for peer in chain}) == 1 for chain in chains)
    for stage, group in enumerate(groups):
        assert sorted(chain[stage] for chain in chains) == sorted(group)


def test_small_memories_share_a_stage() -> None:
    """Ten layers fit only if the two peers that hold one layer are in one stage, in different islands or not."""
    limits = [1, 1, 5, 5, 5, 5]
    groups = assign(two_islands(), [2, 2, 2], proposals=1000, seed=1, num_layers=10, max_layers=limits)
    assert [0, 1] in map(sorted, groups)
    assert sum(layers_per_stage(groups, 10, [1.0] * 6, limits, 3)) == 10


def test_columns_leave_data_nodes_over() -> None:
    costs = two_islands()
    chains = columns(costs, [[0, 1, 2, 3], [4], [5]])
    assert len(chains) == 1 and chains[0][1:] == [4, 5] and chains[0][0] in (0, 1, 2, 3)


def test_too_few_peers_are_refused() -> None:
    with pytest.raises(BadPlan, match="need 7"):
        assign(two_islands(), [3, 2, 2], proposals=0, seed=0)
