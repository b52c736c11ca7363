"""The planner: its fast simulator is the simulator, its moves keep every rule, its bounds are below, and it repairs."""

import dataclasses
import random
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.training.pipeline_cases import SEEDS, random_routes, random_task

from farflung.training.pipeline_bounds import lower_bounds
from farflung.training.pipeline_makespan import Makespan
from farflung.training.pipeline_plan import BadPlan
from farflung.training.pipeline_repair import repair, whole_paths
from farflung.training.pipeline_routes import Routes, Task, most_lanes
from farflung.training.pipeline_rules import validate
from farflung.training.pipeline_search import Search, improve, makespan_of
from farflung.training.pipeline_simulate import simulate


def with_most_homes(task: Task, most_homes: int | None) -> Task:
    return dataclasses.replace(task, rules=dataclasses.replace(task.rules, most_homes=most_homes))


@pytest.mark.usefixtures("kernel")
@given(seed=SEEDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_fast_simulator_is_the_simulator(seed: int) -> None:
    routes = random_routes(seed, ties=seed % 2 == 1)
    makespan = makespan_of(routes)
    exact = simulate(routes.plan(), routes.task.costs).makespan_s
    assert makespan.seconds() == exact
    assert makespan.seconds(exact) == exact
    assert makespan.seconds(exact * 0.999) == inf


@given(SEEDS, st.sampled_from([None, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_moves_keep_every_rule_and_can_be_taken_back(seed: int, most_homes: int | None) -> None:
    task, stages = random_task(seed)
    try:
        routes = Routes(with_most_homes(task, most_homes), stages, random.Random(seed))
    except BadPlan:  # of so many data nodes not all find a place
        assert most_homes is not None and len(stages[0]) > most_homes
        return
    rng = random.Random(seed)
    for _ in range(60):
        before = ([list(path) for path in routes.paths], list(routes.stage_of), list(routes.used))
        move = routes.propose(rng, roles=True)
        back = routes.inverse(move)
        routes.do(move)
        validate(routes.plan(), routes.task.rules)
        counted = [sum(path.count(peer) for path in routes.paths) for peer in range(len(routes.used))]
        assert routes.used == counted
        if rng.random() < 0.5:
            routes.do(back)
            assert (routes.paths, routes.stage_of, routes.used) == before


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_no_plan_is_shorter_than_a_bound(seed: int) -> None:
    routes = random_routes(seed)
    found = improve(routes, Search(proposals=60, seed=seed))
    for free in (False, True):
        bounds = lower_bounds(routes.task, routes.stages(), any_assignment=free, ascents=20)
        for bound in dataclasses.astuple(bounds):
            assert bound <= found * (1 + 1e-9)
        assert bounds.best_s > 0


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_searching_is_deterministic_and_never_makes_it_worse(seed: int) -> None:
    first, second = random_routes(seed), random_routes(seed)
    start = makespan_of(first).seconds()
    search = Search(proposals=200, seed=seed)
    assert improve(first, search) == improve(second, search) <= start
    assert first.plan() == second.plan()
    assert makespan_of(first).seconds() == improve(first, Search(proposals=0))


def test_the_most_lanes_fill_the_slots() -> None:
    """The reference network: 15 with a third skipped, 11 with a sixth, 9 in full (digest, 1.6)."""
    task, _ = random_task(0)
    stages = [list(range(5)), *([5 + 3 * stage + peer for peer in range(3)] for stage in range(5))]
    table = ((1.0,) * 20,) * 20
    costs = dataclasses.replace(task.costs, forward_s=((1.0,) * 20,) * 6, latency_s=table, transmit_s=table)
    for visits, lanes in ((4, 15), (5, 11), (6, 9), (3, 15)):
        rules = dataclasses.replace(task.rules, visits=visits)
        of = Task(peers=tuple(map(str, range(20))), costs=costs, slots=(3,) * 20, rules=rules, num_microbatches=30)
        assert most_lanes(of, stages) == lanes
        assert sum(Routes(of, stages, random.Random(1)).counts) == 30


def test_stages_without_slots_are_refused() -> None:
    task, stages = random_task(1)
    with pytest.raises(BadPlan, match="add peers"):
        Routes(dataclasses.replace(task, slots=(0,) * len(task.peers)), stages, random.Random(0))


def without_one(seed: int) -> tuple[Routes, list[list[int]], int]:
    """Routes, their stages after a peer was lost, and that peer."""
    routes = random_routes(seed)
    stages = [list(stage) for stage in routes.stages()]
    lost = random.Random(seed).choice([peer for stage in stages for peer in stage])
    stages[routes.stage_of[lost]].remove(lost)
    return routes, stages, lost


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_lost_peer_is_in_no_route(seed: int) -> None:
    routes, stages, lost = without_one(seed)
    task = routes.task
    whole = whole_paths(routes.plan(), task.peers, stages)
    assert whole == [path for path in routes.paths if lost not in path]
    try:
        most_lanes(task, stages)
    except BadPlan:
        with pytest.raises(BadPlan):
            repair(task, stages, whole, proposals=10, seed=seed)
        return
    repaired, seconds = repair(task, stages, whole, proposals=30, seed=seed)
    validate(repaired.plan(), task.rules)
    assert seconds == makespan_of(repaired).seconds()
    assert all(lost not in path for path in repaired.paths)
    assert len(repaired.paths) == most_lanes(task, stages)


def test_a_lost_peer_leaves_most_other_routes() -> None:
    """Not always: the peers that are left may make fewer stages meet."""
    whole = kept = 0
    for seed in range(120):
        routes, stages, _ = without_one(seed)
        others = whole_paths(routes.plan(), routes.task.peers, stages)
        try:
            paths = repair(routes.task, stages, others, proposals=0, seed=seed)[0].paths
        except BadPlan:
            continue
        whole += min(len(others), len(paths))
        kept += sum(path in others for path in paths)
    assert whole > 50 and kept > 0.6 * whole, (kept, whole)


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_peer_that_joins_or_changes_its_name_or_stage(seed: int) -> None:
    task, stages = random_task(seed)
    new = stages[-1].pop() if len(stages[-1]) > 1 else None
    if new is None:
        return
    plan = (routes := Routes(task, stages, random.Random(seed))).plan()
    stages[-1].append(new)
    whole = whole_paths(plan, task.peers, stages)
    assert whole == routes.paths
    repaired, _ = repair(task, stages, whole, proposals=30, seed=seed)
    validate(repaired.plan(), task.rules)
    assert len(repaired.paths) == most_lanes(task, stages) >= len(routes.paths)
    home = routes.paths[0][0]
    renamed = [f"new {name}" if peer == home else name for peer, name in enumerate(task.peers)]
    assert whole_paths(plan, renamed, stages) == [path for path in whole if home not in path]
    if len(stages) > 1:
        elsewhere = [[peer for peer in stage if peer != home] for stage in stages]
        elsewhere[1].append(home)
        assert whole_paths(plan, task.peers, elsewhere) == [path for path in whole if home not in path]


def test_a_makespan_needs_microbatches() -> None:
    task, _ = random_task(2)
    with pytest.raises(AssertionError):
        Makespan(task.costs, [0], 1)
