"""Peers to stages before any route is known: DT-FM's objective (Yuan et al. 2022, 2206.01288; digest, 3.2 and 1.4).

    cost(groups) = DP + 2 PP
      DP = max over groups, over pairs in it, of the message time           the slowest link of a stage's averaging
      PP = sum over consecutive groups, and from the last to the first, of   activations there, gradients back: twice
           the bottleneck matching of (message time + forward)

DT-FM searches groups by a genetic algorithm and, for each, their order by dynamic programming. Here the order is part of the
answer: annealing exchanges two peers or two whole groups, so a proposal costs at most four matchings instead of all of
them. What comes out is the full pipeline's columns (the baseline) and where the search for routes begins.

Stages need not be equal: `layers_per_stage` gives each so many layers as its peers compute in the same time (Holmes) and
as the one with the least memory can hold (Pipette).
"""

import math
import random
from collections.abc import Sequence
from heapq import heapify, heapreplace

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import BadPlan

Groups = list[list[int]]


def stage_sizes(num_peers: int, num_stages: int, visits: int) -> list[int]:
    """Peers per stage so that all do equally much: every route visits stage 0, and each other stage in
    (visits - 1) / (stages - 1) of all cases. Raises BadPlan for fewer peers than stages."""
    if num_peers < num_stages:
        raise BadPlan(f"{num_peers} peers cannot hold {num_stages} stages; use at most so many stages as peers")
    share = (visits - 1) / (num_stages - 1) if num_stages > 1 else 1.0
    need = [1.0, *(share for _ in range(num_stages - 1))]
    sizes = [1] * num_stages
    for _ in range(num_peers - num_stages):
        stage = max(range(num_stages), key=lambda one: (need[one] / sizes[one], -one))
        sizes[stage] += 1
    return sizes


def layers_per_stage(
    groups: Sequence[Sequence[int]],
    num_layers: int,
    layer_s: Sequence[float],  # per peer: forward of one layer, one microbatch
    max_layers: Sequence[int],  # per peer: what its memory holds
    visits: int,
) -> list[int]:
    """Layers of each stage: the slowest stage is as fast as it can be. Raises BadPlan when memory does not suffice.

    Each layer goes to the stage that is then the least loaded; as a stage's load grows with every layer, no other
    distribution has a lower maximum.
    """
    limits = [min(max_layers[peer] for peer in group) for group in groups]
    if sum(limits) < num_layers or min(limits) < 1 or num_layers < len(groups):
        raise BadPlan(f"{num_layers} layers do not fit into stages that hold {limits}; use more stages or larger peers")
    share = (visits - 1) / (len(groups) - 1) if len(groups) > 1 else 1.0
    rates = [sum(1.0 / layer_s[peer] for peer in group) for group in groups]
    loads = [(share if stage else 1.0) / rate for stage, rate in enumerate(rates)]  # of one layer
    layers = [1] * len(groups)
    heap = [(2 * load, stage) for stage, load in enumerate(loads) if limits[stage] > 1]
    heapify(heap)
    for _ in range(num_layers - len(groups)):
        _, stage = heap[0]
        layers[stage] += 1
        full = layers[stage] == limits[stage]
        heapreplace(heap, (math.inf if full else (layers[stage] + 1) * loads[stage], stage))
    return layers


def bottleneck_matching(costs: Sequence[Sequence[float]]) -> tuple[float, list[int]]:
    """The largest edge of the matching that has the smallest such, and the column of every row; -1 for rows left over.

    The smaller side is matched completely. Rows are matched one by one along augmenting paths, each over the
    smallest threshold that lets one through, which never falls.
    """
    rows, columns = len(costs), len(costs[0])
    if rows > columns:
        largest, inverse = bottleneck_matching([list(column) for column in zip(*costs, strict=True)])
        matched = [-1] * rows
        for column, row in enumerate(inverse):
            matched[row] = column
        return largest, matched
    row_of = [-1] * columns
    threshold = 0.0
    for row in range(rows):
        # A minimax path from this row to a free column: Dijkstra with max in place of plus.
        reach = [max(threshold, costs[row][column]) for column in range(columns)]
        via = [row] * columns
        done = [False] * columns
        while True:
            column = min((one for one in range(columns) if not done[one]), key=reach.__getitem__)
            if row_of[column] == -1:
                break
            done[column] = True
            other = row_of[column]
            for one in range(columns):
                through = max(reach[column], costs[other][one])
                if not done[one] and through < reach[one]:
                    reach[one], via[one] = through, other
        threshold = reach[column]
        while column != -1:
            other = via[column]
            previous = row_of.index(other) if other != row else -1
            row_of[column] = other
            column = previous
    matched = [-1] * rows
    for column, row in enumerate(row_of):
        if row != -1:
            matched[row] = column
    return threshold, matched


class _Score:
    """DP + 2 PP of ordered groups, with what did not change remembered."""

    def __init__(self, costs: Costs, num_layers: int = 0, max_layers: Sequence[int] = ()) -> None:
        """With `num_layers`, groups whose memory is short of them cost as much more for every layer as DP + 2 PP can differ."""
        peers = range(costs.num_peers)
        self._num_layers, self._max_layers = num_layers, max_layers
        self._message = [[costs.message_s(a, b) for b in peers] for a in peers]
        self._forward = [max(costs.forward_s[stage][peer] for stage in range(costs.num_stages)) for peer in peers]
        self._penalty = (1 + 2 * costs.num_stages) * (max(map(max, self._message)) + max(self._forward))
        self._matchings: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        self._diameters: dict[frozenset[int], float] = {}

    def edge(self, sender: int, receiver: int) -> float:
        return self._message[sender][receiver] + self._forward[sender]

    def of(self, groups: Groups) -> float:
        sets = [frozenset(group) for group in groups]
        total = max(self._diameter(one) for one in sets)
        for one, other in zip(sets, [*sets[1:], sets[0]], strict=True):
            total += 2.0 * self._matching(one, other)
        if self._num_layers:
            held = sum(min(self._max_layers[peer] for peer in group) for group in groups)
            total += self._penalty * max(0, self._num_layers - held)
        return total

    def _matching(self, one: frozenset[int], other: frozenset[int]) -> float:
        known = self._matchings.get((one, other))
        if known is None:
            known = bottleneck_matching([[self.edge(a, b) for b in sorted(other)] for a in sorted(one)])[0]
            self._matchings[one, other] = known
        return known

    def _diameter(self, group: frozenset[int]) -> float:
        known = self._diameters.get(group)
        if known is None:
            known = max(self._message[a][b] for a in group for b in group)
            self._diameters[group] = known
        return known


def assign(
    costs: Costs,
    sizes: Sequence[int],
    *,
    proposals: int,
    seed: int,
    num_layers: int = 0,
    max_layers: Sequence[int] = (),  # per peer: what its memory holds; needed with `num_layers`
) -> Groups:
    """Groups of the given sizes, in the order of the stages, with a low DP + 2 PP. Deterministic.

    With `num_layers` the smallest memories of the groups together hold so many, if the search finds a way.

    Raises BadPlan when there are fewer peers than the sizes need; peers beyond them are left out.
    """
    rng = random.Random(seed)
    if sum(sizes) > costs.num_peers or min(sizes) < 1:
        raise BadPlan(f"stages of {list(sizes)} peers need {sum(sizes)}, and there are {costs.num_peers}")
    order = list(range(costs.num_peers))
    rng.shuffle(order)
    groups: Groups = []
    for size in sizes:
        groups.append(order[:size])
        del order[:size]
    score = _Score(costs, num_layers, max_layers)
    best = current = score.of(groups)
    answer = [list(group) for group in groups]
    for number in range(proposals):
        temperature = 0.1 * best * 0.005 ** (number / proposals)
        a, b = rng.randrange(len(groups)), rng.randrange(len(groups))
        whole = rng.random() < 0.1
        if a == b or (whole and len(groups[a]) != len(groups[b])):
            continue
        i, j = rng.randrange(len(groups[a])), rng.randrange(len(groups[b]))
        _exchange(groups, a, b, i, j, whole=whole)
        new = score.of(groups)
        if new > current - temperature * math.log(1.0 - rng.random()):
            _exchange(groups, a, b, i, j, whole=whole)
            continue
        current = new
        if current < best:
            best, answer = current, [list(group) for group in groups]
    return answer


def _exchange(groups: Groups, a: int, b: int, i: int, j: int, *, whole: bool) -> None:
    """Its own inverse."""
    if whole:
        groups[a], groups[b] = groups[b], groups[a]
    else:
        groups[a][i], groups[b][j] = groups[b][j], groups[a][i]


def columns(costs: Costs, groups: Groups) -> list[list[int]]:
    """Full pipelines, one peer of each stage in each: consecutive stages joined by their bottleneck matchings.

    So many as the smallest stage has peers. They begin there and go round the ring of stages; only the step back to that stage is
    not matched.
    """
    score = _Score(costs)
    narrow = min(range(len(groups)), key=lambda stage: (len(groups[stage]), stage))
    chains = [[peer] for peer in groups[narrow]]
    for step in range(1, len(groups)):
        stage = (narrow + step) % len(groups)
        _, matched = bottleneck_matching([[score.edge(chain[-1], peer) for peer in groups[stage]] for chain in chains])
        for chain, at in zip(chains, matched, strict=True):
            chain.append(groups[stage][at])
    turn = (len(groups) - narrow) % len(groups)
    return [chain[turn:] + chain[:turn] for chain in chains]
