"""Plans for one network beside their baselines, all timed by the same simulator with the same number of microbatches.

    full columns         every route visits all stages of its column: DT-FM's assignment by our annealing, columns of the peers
                         that have the same place in their stages' lists, as the digest's: mean of thirty orders
    matched columns      the same assignment, consecutive stages joined by DT-FM's bottleneck matchings
    random columns       the same matchings, peers dealt to stages at random: mean of five
    cost-blind skip      DT-FM's assignment, random feasible routes ("DT-FM skip"): mean of five
    random feasible      peers dealt to stages at random, random feasible routes: mean of five
    planned              routes that skip, by search
    planned full         routes that skip nothing, by search: what routing alone is worth

Time per step is not work per step: routes that skip a third do a third less, and what that costs in loss is not told here.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from farflung.sims.pipeline_networks import Network
from farflung.training.pipeline_assignment import Groups, assign, columns, layers_per_stage, stage_sizes
from farflung.training.pipeline_bounds import Bounds, lower_bounds
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_makespan import Makespan
from farflung.training.pipeline_plan import BadPlan
from farflung.training.pipeline_routes import Routes, Task, most_lanes
from farflung.training.pipeline_rules import Rules, validate
from farflung.training.pipeline_search import Search, improve, makespan_of

_REPEATS = 5
_ORDERS = 30
"""Of the peers in their stages' lists, for full columns."""
_FULL_HOT = 0.05
"""Fewer and longer lanes: the search for full routes needs more heat to get from one plan to another."""
_ASSIGNMENT_WORK = 600_000
"""Proposals for DT-FM's assignment times the square of the largest stage: some seconds, whatever the network."""
_MOST_ASSIGNMENTS = 10_000
"""Proposals at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Seconds of a step, unless said otherwise."""

    each_full_columns_s: tuple[float, ...]
    """Of each order of the lists."""
    matched_columns_s: float
    random_columns_s: float
    cost_blind_skip_s: float
    random_feasible_s: float
    planned_full_s: float
    planned_s: float
    planning_cpu_s: float
    """For `planned_s`: assignment and search."""
    bounds: Bounds
    """For the assignment of the plan."""
    full_bounds: Bounds
    """Of full routes, for whatever assignment."""
    any_assignment: Bounds
    """For whatever assignment."""
    groups: Groups
    """DT-FM's assignment, where both searches began."""
    assigning_s: float
    """CPU seconds that it took."""
    routes: Routes

    @property
    def full_columns_s(self) -> float:
        return fmean(self.each_full_columns_s)


def task_for(network: Network, groups: Groups, *, visits: int) -> Task:
    """With as many layers in each stage as its peers do in equal time and their memory holds."""
    layers = layers_per_stage(groups, network.num_layers, network.layer_s, network.max_layers, visits)
    everybody = range(len(network.peers))
    return Task(
        peers=network.peers,
        costs=network.costs(layers),
        slots=(network.slots,) * len(network.peers),
        rules=Rules(visits=visits),
        num_microbatches=network.num_microbatches,
        may_hold=tuple(tuple(size <= network.max_layers[peer] for peer in everybody) for size in layers),
    )


def even_costs(network: Network) -> Costs:
    """With equal stages, for the time before anybody has one."""
    return network.costs([network.num_layers // network.num_stages] * network.num_stages)


def dealt(network: Network, sizes: list[int], rng: random.Random) -> Groups:
    """Peers to stages at random, whose memory holds the model: drawn again until it does."""
    order = list(range(len(network.peers)))
    for _ in range(1000):
        rng.shuffle(order)
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        groups = [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        if sum(min(network.max_layers[peer] for peer in group) for group in groups) >= network.num_layers:
            return groups
    raise BadPlan(f"{network.name}: no assignment holds {network.num_layers} layers; use more stages")


def matched_columns_s(network: Network, groups: Groups) -> float:
    """A step of full columns of matched peers."""
    task = task_for(network, groups, visits=network.num_stages)
    return _chains_s(network, task, columns(task.costs, groups))


def full_columns_s(network: Network, groups: Groups, rng: random.Random) -> float:
    """A step of full columns whose peers are those with the same place in each stage's list, in some order of the lists."""
    lists = [rng.sample(group, len(group)) for group in groups]
    task = task_for(network, groups, visits=network.num_stages)
    return _chains_s(network, task, [list(chain) for chain in zip(*lists, strict=False)])


def _chains_s(network: Network, task: Task, chains: Sequence[Sequence[int]]) -> float:
    """A step of these columns, each with as many lanes as a peer has slots."""
    lanes = min(len(chains) * network.slots, network.num_microbatches)
    each, more = divmod(network.num_microbatches, lanes)
    makespan = Makespan(task.costs, [each + (lane < more) for lane in range(lanes)], network.num_stages)
    for lane in range(lanes):
        makespan.put(lane, range(network.num_stages), chains[lane % len(chains)])
    return makespan.seconds()


def blind_s(network: Network, groups: Groups, seed: int) -> float:
    """A step of random feasible routes that skip."""
    task = task_for(network, groups, visits=network.visits)
    return makespan_of(Routes(task, groups, random.Random(seed))).seconds()


def planned(network: Network, groups: Groups, search: Search, *, visits: int) -> tuple[Routes, float]:
    """Validated routes, and the CPU seconds of their search."""
    began = time.process_time()
    task = task_for(network, groups, visits=visits)
    routes = Routes(task, groups, random.Random(search.seed))
    improve(routes, search)
    took = time.process_time() - began
    validate(routes.plan(), task.rules)
    return routes, took


def planned_full(network: Network, groups: Groups, search: Search) -> tuple[Routes, float]:
    """Validated routes that skip nothing, and their step: the better of a warm search from near hops and one from columns."""
    task = task_for(network, groups, visits=network.num_stages)
    half = replace(search, proposals=search.proposals // 2)
    free = Routes(task, groups, random.Random(search.seed), near=True)
    free_s = improve(free, replace(half, hot=_FULL_HOT))
    chains = columns(task.costs, groups)
    lanes = min(most_lanes(task, groups), len(chains) * network.slots)
    held = Routes(task, groups, random.Random(search.seed), [list(chains[lane % len(chains)]) for lane in range(lanes)])
    held_s = improve(held, half)
    routes = held if held_s < free_s else free
    validate(routes.plan(), task.rules)
    return routes, min(held_s, free_s)


def compare(network: Network, search: Search) -> Comparison:
    """All of the module's table for one network. Raises BadPlan when it cannot hold the model."""
    sizes = stage_sizes(len(network.peers), network.num_stages, network.visits)
    began = time.process_time()
    proposals = min(_MOST_ASSIGNMENTS, _ASSIGNMENT_WORK // max(sizes) ** 2)
    groups = assign(
        even_costs(network),
        sizes,
        proposals=proposals,
        seed=search.seed,
        num_layers=network.num_layers,
        max_layers=network.max_layers,
    )
    assigning_s = time.process_time() - began
    shuffled = [dealt(network, sizes, random.Random(seed)) for seed in range(_REPEATS)]
    routes, searching_s = planned(network, groups, search, visits=network.visits)
    full, full_s = planned_full(network, groups, search)
    task = routes.task
    seeds = range(_REPEATS)
    return Comparison(
        each_full_columns_s=tuple(full_columns_s(network, groups, random.Random(order)) for order in range(_ORDERS)),
        matched_columns_s=matched_columns_s(network, groups),
        random_columns_s=fmean(matched_columns_s(network, one) for one in shuffled),
        cost_blind_skip_s=fmean(blind_s(network, groups, seed) for seed in seeds),
        random_feasible_s=fmean(blind_s(network, shuffled[seed], seed) for seed in seeds),
        planned_full_s=full_s,
        planned_s=makespan_of(routes).seconds(),
        planning_cpu_s=assigning_s + searching_s,
        bounds=lower_bounds(task, routes.stages()),
        full_bounds=lower_bounds(full.task, full.stages(), any_assignment=True),
        any_assignment=lower_bounds(task, routes.stages(), any_assignment=True),
        groups=groups,
        assigning_s=assigning_s,
        routes=routes,
    )


def quickly(network: Network, found: Comparison, search: Search) -> tuple[float, float]:
    """The step and the planning of a smaller search from the same assignment: seconds, CPU seconds."""
    routes, took = planned(network, found.groups, search, visits=network.visits)
    return makespan_of(routes).seconds(), took + found.assigning_s
