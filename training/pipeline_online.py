"""The plan of a step from what peers say of themselves: small, quick, and the same for the same seed.

Who holds which stage is given. Routes begin twice: near (each hop to the peer that the last message reaches first), and where those of the step before
ended, mended where somebody has come or gone (`pipeline_repair.py`), so that plans become better from step to step. Both are improved by the search of
`pipeline_search.py`, in so many proposals that a step of seconds does not wait for them, and the better ones are taken. A path's rate is that of its sender's uplink, for that is
what volunteers are short of, and its latency is half of a trip from one end to the other and back.

Where peers are to be chosen by whoever sends (`open_hops`), the search is only about what is left to plan: how many lanes there are, from which data nodes, and which
stages each leaves out. The forecast is then that of SWARM's wiring.

A peer does microbatches of few data nodes in a step (`Rules.most_homes`). Where there are more than the other stages have places for, only so many have microbatches,
and others in the next step: in turn, so that each has its share over time.

With CheckFree+'s order the search is for routes without swaps, and half of them are swapped afterwards.

What nobody has measured yet is taken to be like what somebody has: a speed like the median of the speeds, a trip like that of the trips. Where nothing is
known at all, and for the uplinks, which differ most, there are the constants below.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import BadPlan, Plan, Policy
from farflung.training.pipeline_repair import COOL, repair, whole_paths
from farflung.training.pipeline_routes import Routes, Task
from farflung.training.pipeline_rules import Rules
from farflung.training.pipeline_schedules import ascending, checkfree_plus, least_loaded, opened
from farflung.training.pipeline_search import Search, improve
from farflung.training.pipeline_simulate import simulate

TRIP_S = 0.1
"""Between two peers and back, with what it costs to hand a message on, when nobody has measured any: half of the way around the world."""

RATE_BYTES_PER_S = 2.5e6
"""Of an uplink that nobody has measured: 20 Mbit/s, a usual one of a home."""

FORWARD_S = 0.1
"""When nobody has measured anything."""

PROPOSALS = 100
"""For each lane, half of them from either beginning: 16 lanes take 0.02 s with the kernel and 0.3 s without."""

RECOMPUTED = 2.5
"""Backward over forward, with the forward in it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A peer that serves a stage."""

    name: str
    stage: int
    forward_s: float
    """One microbatch; 0 while that is not known."""
    up_bytes_per_s: float
    """0 while that is not known."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan, and what to expect of it."""

    plan: Plan
    seconds: float
    """Of the whole step."""
    silence_s: float
    """The longest time for which a microbatch that is under way gets nowhere."""


def most_homes(stages: Sequence[Sequence[int]], rules: Rules, *, open_hops: bool = False) -> int:
    """How many data nodes have microbatches in one step: all, or those for which the other stages' peers have places. Where peers are left open, any of
    them may come to any peer."""
    homes = len(stages[0])
    if rules.most_homes is None or homes <= rules.most_homes:
        return homes
    if open_hops:
        return rules.most_homes
    places = [rules.most_homes * len(stage) for stage in stages[1:]]
    while homes > rules.most_homes and sum(min(homes, has) for has in places) < homes * (rules.visits - 1):
        homes -= 1
    return homes


def in_turn(peers: Sequence[int], count: int, turn: int) -> list[int]:
    """So many of them, and the next ones in the next turn."""
    return [peers[(turn * count + number) % len(peers)] for number in range(min(count, len(peers)))]


def plan_step(
    servers: Sequence[Server],
    trips_s: Mapping[tuple[int, int], float],  # from one to another and back, by their places, the lower first
    num_stages: int,
    rules: Rules,
    *,
    microbatches: int,
    slots: int,  # of every peer
    nbytes: int,  # of a boundary
    policy: Policy,
    seed: int,
    before: Plan | None = None,  # of the last step
    open_hops: bool = False,
    twins: bool = False,  # CheckFree+'s order: routes of half of the microbatches swap stages 1 and 2 and the last two
) -> Forecast:
    """Raises BadPlan when a stage has nobody, or slots do not suffice for one lane."""
    if twins:
        rules = replace(rules, max_swap=0, max_swaps=0, max_swap_sum=0)
        before = None if before is None else ascending(before)
    measured = [one.forward_s for one in servers if one.forward_s > 0.0]
    usual_s = median(measured) if measured else FORWARD_S
    speeds = tuple(one.forward_s or usual_s for one in servers)
    rates = [one.up_bytes_per_s or RATE_BYTES_PER_S for one in servers]
    usual_trip_s = median(trips_s.values()) if trips_s else TRIP_S
    peers = range(len(servers))

    def latency_s(one: int, other: int) -> float:
        return 0.0 if one == other else trips_s.get((min(one, other), max(one, other)), usual_trip_s) / 2

    costs = Costs(
        forward_s=(speeds,) * num_stages,
        latency_s=tuple(tuple(latency_s(one, other) for other in peers) for one in peers),
        transmit_s=tuple(tuple(nbytes / rates[one] * (one != other) for other in peers) for one in peers),
        backward=RECOMPUTED,
    )
    stages = [[peer for peer in peers if servers[peer].stage == stage] for stage in range(num_stages)]
    count = most_homes(stages, rules, open_hops=open_hops)
    while True:
        rest = {*stages[0]} - {*in_turn(stages[0], count, seed)}
        task = Task(
            peers=tuple(one.name for one in servers),
            costs=costs,
            slots=tuple(0 if peer in rest else slots for peer in peers),
            rules=rules,
            num_microbatches=microbatches,
        )
        try:
            routes = Routes(task, stages, random.Random(seed), near=True)
            break
        except BadPlan:  # of fewer data nodes each finds its places
            if rules.most_homes is None or count <= rules.most_homes:
                raise
            count -= 1
    proposals = PROPOSALS * len(routes.paths)
    known = [] if before is None else whole_paths(before, task.peers, stages)
    whole = [path for path in known if path[0] not in rest]
    if whole:
        proposals //= 2
    seconds = improve(routes, Search(proposals=proposals, seed=seed, roles=False, hot=COOL))
    if whole:
        with suppress(BadPlan):  # not every beginning finds places for all data nodes
            mended, mended_s = repair(task, stages, whole, proposals=proposals, seed=seed)
            if mended_s <= seconds:
                routes, seconds = mended, mended_s
    plan = replace(routes.plan(), policy=policy)
    if open_hops:
        plan = opened(plan)
        timeline = simulate(plan, costs, least_loaded(plan, costs))
        return Forecast(plan, timeline.makespan_s, timeline.longest_silence_s)
    if twins:
        plan = checkfree_plus(plan)
        timeline = simulate(plan, costs)
        return Forecast(plan, timeline.makespan_s, timeline.longest_silence_s)
    return Forecast(plan, seconds, simulate(plan, costs).longest_silence_s)
