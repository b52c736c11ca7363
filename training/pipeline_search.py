"""Routes by simulated annealing over the true simulator (digest, 6.1): the released SkipPipe planner searches conflict trees.

A proposal changes one or two lanes, or exchanges the stages of two peers; its threshold is drawn before it is
simulated, so that the simulation can stop once it is over (`pipeline_makespan.py`). The temperature falls
geometrically from 1 % to 0.05 % of the time at the start. Assignment and routes are searched together: which
peers share a stage matters less than which peers follow each other, and only the simulator knows both.

The same seed and the same budget, counted in proposals, give the same plan.
"""

import math
import random
from dataclasses import dataclass

from farflung.training.pipeline_makespan import Makespan
from farflung.training.pipeline_routes import Move, Routes

_HOT, _COLD = 0.01, 0.0005
"""First and last temperature over the makespan at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How to search. The defaults take about ten seconds of a core for 20 peers, with the kernel."""

    proposals: int = 600_000
    seed: int = 0
    roles: bool = True
    """Peers may exchange their stages."""
    hot: float = _HOT
    """Temperature at the start, over the makespan at the start; low to repair a good plan."""


def makespan_of(routes: Routes) -> Makespan:
    """The evaluator of these routes, with all of them put."""
    makespan = Makespan(routes.task.costs, routes.counts, routes.task.rules.visits)
    put(makespan, routes, Move(list(enumerate(routes.paths))))
    return makespan


def put(makespan: Makespan, routes: Routes, move: Move) -> None:
    """Tell the evaluator of lanes that have just moved."""
    stage_of = routes.stage_of
    for lane, path in move.paths:
        makespan.put(lane, [stage_of[peer] for peer in path], path)


def improve(routes: Routes, search: Search) -> float:
    """Leaves the best routes found in `routes` and returns their makespan in seconds."""
    rng = random.Random(search.seed)
    makespan = makespan_of(routes)
    start = best = current = makespan.seconds()
    best_paths, best_stages = list(routes.paths), list(routes.stage_of)
    cooling = math.log(_COLD / search.hot)
    for number in range(search.proposals):
        move = routes.propose(rng, roles=search.roles)
        if not move.paths:
            continue
        back = routes.inverse(move)
        routes.do(move)
        put(makespan, routes, move)
        temperature = start * search.hot * math.exp(cooling * number / search.proposals)
        limit = current - temperature * math.log(1.0 - rng.random())
        seconds = makespan.seconds(limit)
        if seconds > limit:
            routes.do(back)
            put(makespan, routes, back)
            continue
        current = seconds
        if current < best:
            best, best_paths, best_stages = current, list(routes.paths), list(routes.stage_of)
    routes.restore(best_paths, best_stages)
    return best
