"""How far the search is from the best plan, on instances small enough to try every plan.

All legal routes of one lane are listed; lanes take them in turn, as long as peers have slots, and every complete choice
is simulated under the limit of the best one so far. Lanes with the same data node and the same number of microbatches are
told apart only by ties, so their routes are tried in both orders all the same.
"""

import random
from itertools import permutations
from math import inf

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_makespan import Makespan
from farflung.training.pipeline_routes import Routes, Task
from farflung.training.pipeline_rules import Rules, broken_rule, least_visits
from farflung.training.pipeline_search import Search, improve


def small_task(seed: int) -> tuple[Task, list[list[int]]]:
    """Four stages of two peers, one skipped, three lanes with two microbatches each, heterogeneous in all; and its stages."""
    rng = random.Random(seed)
    peers = range(8)
    costs = Costs(
        forward_s=(tuple(rng.uniform(0.5, 2.0) for _ in peers),) * 4,
        latency_s=tuple(tuple(rng.uniform(0.01, 0.5) for _ in peers) for _ in peers),
        transmit_s=tuple(tuple(rng.uniform(0.1, 3.0) for _ in peers) for _ in peers),
    )
    names = tuple(f"peer {peer}" for peer in peers)
    task = Task(peers=names, costs=costs, slots=(2, 1, 2, 1, 2, 1, 2, 1), rules=Rules(visits=3), num_microbatches=6)
    return task, [[0, 1], [2, 3], [4, 5], [6, 7]]


def optimum_s(task: Task, stages: list[list[int]]) -> float:
    """The shortest step of all feasible routes with this assignment, by enumeration: exponential in the lanes."""
    counts = Routes(task, stages, random.Random(0)).counts
    held = {peer: stage for stage, members in enumerate(stages) for peer in members if task.slots[peer]}
    legal = [
        path
        for path in permutations(held, task.rules.visits)
        if broken_rule([held[peer] for peer in path], task.rules) is None
    ]
    makespan = Makespan(task.costs, counts, task.rules.visits)
    used = dict.fromkeys(held, 0)
    least = least_visits(task.rules, [sum(task.slots[peer] for peer in stage) for stage in stages], counts)
    visits = [0] * len(stages)
    best = inf

    def choose(lane: int) -> None:
        nonlocal best
        if lane == len(counts):
            if any(seen < floor for seen, floor in zip(visits, least, strict=True)):
                return
            best = min(best, makespan.seconds(best))
            return
        for path in legal:
            if all(used[peer] < task.slots[peer] for peer in path):
                for peer in path:
                    used[peer] += 1
                    visits[held[peer]] += counts[lane]
                makespan.put(lane, [held[peer] for peer in path], path)
                choose(lane + 1)
                for peer in path:
                    used[peer] -= 1
                    visits[held[peer]] -= counts[lane]

    choose(0)
    return best


def gaps_percent(instances: int, *, proposals: int) -> list[float]:
    """How much longer than the optimum the search's plan takes, for so many random instances."""
    gaps = []
    for seed in range(instances):
        task, stages = small_task(seed)
        routes = Routes(task, stages, random.Random(seed))
        found = improve(routes, Search(proposals=proposals, seed=seed, roles=False, hot=0.1))
        gaps.append(100.0 * (found / optimum_s(task, stages) - 1.0))
    return gaps
