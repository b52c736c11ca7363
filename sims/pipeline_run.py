"""`farflung sim plan`: what planned routes are worth on a network, as JSON or for people, and their trace."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.outputs import check_outputs
from farflung.sims.pipeline_compare import compare, quickly
from farflung.sims.pipeline_networks import Network, forty_two, reference, volunteers
from farflung.sims.pipeline_optimum import gaps_percent
from farflung.training.pipeline_search import Search
from farflung.training.pipeline_simulate import simulate
from farflung.training.pipeline_trace import chrome_trace

_QUICK = 100_000
"""Proposals of the plan that has ten seconds, with or without the kernel."""
_OPERATIONS = 270_000_000
"""Proposals times operations of a step, by default: a million for the reference network."""
_INSTANCES = 5
_INSTANCE_PROPOSALS = {True: 10_000, False: 1_500}
"""Of each small instance, with the kernel and without."""

BOUNDS = (
    "No step is shorter than lower_bound_s: somebody must go through the worst-placed peer when all slots are taken "
    "(forced), every lane makes all its rounds on a shortest walk at best (rounds), walks share peers (prices), and stage 0 "
    "computes for everybody (work); nothing ever waits in these. lower_bound_any_assignment_s holds for any assignment of peers to stages."
)
"""What the bounds are, for people."""


def network_called(name: str, peers: int, seed: int) -> Network:
    """Raises ValueError for a name that nobody has."""
    makers: dict[str, Callable[[], Network]] = {
        "reference": reference,
        "forty-two": forty_two,
        "volunteers": lambda: volunteers(peers, seed=seed),
    }
    if name not in makers:
        raise ValueError(f"no network is called {name}; there are {', '.join(makers)}")
    return makers[name]()


def run_plan(name: str, *, peers: int, proposals: int | None, seed: int, trace: Path | None) -> dict[str, Any]:
    """Plan, compare, write the trace. Raises ValueError for an unknown network, BadPlan for one that cannot be planned, ConfigError
    for a trace that cannot be written: before anything is planned.
    """
    check_outputs(files=[trace])
    prepared = kernels.prepare(resolve_paths().cache / "kernels")
    network = network_called(name, peers, seed)
    if proposals is None:
        proposals = _OPERATIONS // (network.num_microbatches * (2 * network.visits + 1))
    found = compare(network, Search(proposals=proposals, seed=seed))
    quick_s, quick_cpu_s = quickly(network, found, Search(proposals=min(proposals, _QUICK), seed=seed))
    task = found.routes.task
    unshared = replace(task.costs, shared_uplinks=False)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(simulate(found.routes.plan(), task.costs))))
    columns = {
        "": found.full_columns_s,
        "_from_matched": found.matched_columns_s,
        "_from_random": found.random_columns_s,
    }
    numbers = {
        "full_columns_s": found.full_columns_s,
        "full_columns_least_s": min(found.each_full_columns_s),
        "full_columns_most_s": max(found.each_full_columns_s),
        "matched_columns_s": found.matched_columns_s,
        "random_columns_s": found.random_columns_s,
        "planned_s": found.planned_s,
        "planning_cpu_s": found.planning_cpu_s,
        "quick_planned_s": quick_s,
        "quick_planning_cpu_s": quick_cpu_s,
        "cost_blind_skip_s": found.cost_blind_skip_s,
        "random_feasible_s": found.random_feasible_s,
        "planned_full_s": found.planned_full_s,
        **{f"reduction{which}_percent": 100.0 * (1.0 - found.planned_s / one) for which, one in columns.items()},
        **{f"routing{which}_percent": 100.0 * (1.0 - found.planned_full_s / one) for which, one in columns.items()},
        "lower_bound_s": found.bounds.best_s,
        "lower_bound_any_assignment_s": found.any_assignment.best_s,
        "full_lower_bound_any_assignment_s": found.full_bounds.best_s,
        "gap_percent": 100.0 * (found.planned_s / found.bounds.best_s - 1.0),
        "planned_with_unshared_links_s": simulate(found.routes.plan(), unshared).makespan_s,
    }
    gaps = gaps_percent(_INSTANCES, proposals=_INSTANCE_PROPOSALS[prepared.native])
    return {key: round(value, 2) for key, value in numbers.items()} | {
        "network": network.name,
        "peers": len(network.peers),
        "stages": [len(stage) for stage in found.routes.stages()],
        "lanes": len(found.routes.paths),
        "visits": network.visits,
        "microbatches": network.num_microbatches,
        "proposals": proposals,
        "native": prepared.native,
        "bounds_s": {key: round(value, 2) for key, value in asdict(found.bounds).items()},
        "explanation": BOUNDS,
        "gaps_to_optimum_percent_small": [round(gap, 2) for gap in gaps],
    }


def describe(figures: dict[str, Any]) -> str:
    """The same for people."""
    one = figures
    lines = [
        f"{one['network']}: {one['peers']} peers in stages of {one['stages']}, routes of {one['visits']}, {one['lanes']} lanes",
        f"  full columns              {one['full_columns_s']:8.1f} s   matched {one['matched_columns_s']:.1f} s, random stages {one['random_columns_s']:.1f} s",
        f"  full, routed by search    {one['planned_full_s']:8.1f} s   {one['routing_percent']:.0f} % less than columns, "
        f"{one['routing_from_matched_percent']:.0f} % less than matched ones",
        f"  skipping, blind to costs  {one['cost_blind_skip_s']:8.1f} s   random stages {one['random_feasible_s']:.1f} s",
        f"  skipping, planned         {one['planned_s']:8.1f} s   {one['reduction_percent']:.0f} % less than columns, "
        f"{one['reduction_from_matched_percent']:.0f} % less than matched ones",
        f"    after {one['quick_planning_cpu_s']:.1f} s of planning {one['quick_planned_s']:.1f} s, "
        f"after {one['planning_cpu_s']:.1f} s the above",
        f"  lower bound               {one['lower_bound_s']:8.1f} s   {one['lower_bound_any_assignment_s']:.1f} s for any assignment; the plan is {one['gap_percent']:.0f} % above the former",
        f"  above the optimum         {max(one['gaps_to_optimum_percent_small']):8.1f} %   at most, on {len(one['gaps_to_optimum_percent_small'])} instances small enough to try every plan",
        "",
        one["explanation"],
    ]
    return "\n".join(lines)
