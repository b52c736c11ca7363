"""Whether a plan may be carried out: its shape, SkipPipe's constraints, and that it comes to an end.

Constraints of the digest's section 1.2, for plans that were made under `Rules`:

    CC-a  the first hop is stage 0, at the data node                     CC-b  exactly `visits` stages, none twice,
    CC-c  a hop below the highest stage so far is a swap: bounded              no hop further than `max_jump` from the
          in distance, in number and in sum                                    highest stage so far
    CC-d  no stage is on more routes than its peers have slots           TC1   no peer is on more routes than it has slots

CC-d makes routes use stages evenly only where slots are scarce: with free ones the quickest plan goes around a stage of slow peers, whose layers
then see less data than the others'. So beside it there is a floor: each stage has `least_share` of the visits that it would have if all had as many.

TC1 is more than thrift: a lane has one microbatch on its way, so under TC1 a forward never waits for a slot, and routes
in any order cannot lock each other. It implies CC-d where every hop has a peer. TC2, that microbatches should
not queue behind each other, is no rule here: queueing is in the simulated time that the search minimises.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import ceil

from farflung.training.pipeline_machine import Machine, drive
from farflung.training.pipeline_plan import BadPlan, Lane, Op, Plan, Policy, operations


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a route may leave out and swap, so that training converges. The defaults are SkipPipe's."""

    visits: int
    """Hops of every route, the data node's included: the skip ratio is 1 - visits / stages."""
    max_jump: int = 4
    """Stages between a hop and the highest stage before it."""
    max_swap: int = 1
    """How far below the highest stage so far a hop may be: 1 swaps neighbours only, 0 nobody."""
    max_swaps: int = 2
    """Swaps in one route."""
    max_swap_sum: int = 2
    """Their distances together."""
    least_share: float = 0.9
    """Of the visits that a stage would have if all (but stage 0, where every route begins) had as many: so many it has at least."""
    most_homes: int | None = None
    """Data nodes whose microbatches may come to one peer of another stage, which sums up apart for each of them; None: any number."""

    def __post_init__(self) -> None:
        if self.visits < 1 or self.max_jump < 1 or min(self.max_swap, self.max_swaps, self.max_swap_sum) < 0:
            raise ValueError("visits and max_jump are at least 1, limits of swaps at least 0")
        if not 0.0 <= self.least_share <= 1.0:
            raise ValueError("least_share is between 0 and 1")
        if self.most_homes is not None and self.most_homes < 1:
            raise ValueError("most_homes is at least 1")


def least_visits(rules: Rules, slots: Sequence[int], counts: Sequence[int]) -> list[int]:
    """How many microbatches go through each stage at least, whose peers have so many slots together, with so many microbatches on each lane.

    Always feasible: numbers of lanes, and of those that have one microbatch more than others, can be even but for one, and no stage has to be on more
    lanes than it has slots. Where a lane cannot leave out any stages it likes, because jumps are short, there is no floor.
    """
    stages, others = len(slots), rules.visits - 1
    if stages < 2 or stages - rules.visits >= rules.max_jump:
        return [0] * stages
    fewest = min(counts)
    more = sum(counts) - fewest * len(counts)
    even = fewest * (len(counts) * others // (stages - 1)) + more * others // (stages - 1)
    least = min(even, ceil(rules.least_share * sum(counts) * others / (stages - 1) - 1e-9))
    return [0, *(min(fewest * one, least) for one in slots[1:])]


def broken_rule(stages: Sequence[int], rules: Rules) -> str | None:
    """Which of CC-a to CC-c a route through these stages breaks, as a sentence; None when it keeps them."""
    if len(stages) != rules.visits:
        return f"it visits {len(stages)} stages instead of {rules.visits} (CC-b)"
    if stages[0] != 0:
        return f"it begins at stage {stages[0]} instead of 0 (CC-a)"
    if len(set(stages)) < len(stages):
        return "it visits a stage twice (CC-b)"
    frontier, swaps, distances = 0, 0, 0
    for stage in stages:
        distance = frontier - stage
        if abs(distance) > rules.max_jump:
            return f"it jumps from stage {frontier} to stage {stage} (CC-b)"
        if distance > 0:
            swaps, distances = swaps + 1, distances + distance
            if distance > rules.max_swap or swaps > rules.max_swaps or distances > rules.max_swap_sum:
                return f"it goes back from stage {frontier} to stage {stage} (CC-c)"
        frontier = max(frontier, stage)
    return None


def validate(plan: Plan, rules: Rules | None = None) -> None:
    """Raises BadPlan when the plan cannot be carried out, or breaks the rules it was made under.

    Without `rules` a route may be any sequence of hops, and more lanes than slots may meet at a peer, as long as they cannot
    lock each other. Memory and time are linear in the number of operations.
    """
    _check_shape(plan)
    for number, lane in enumerate(plan.lanes):
        _check_route(plan, number, lane, rules)
    if rules is not None:
        _check_capacity(plan, rules)
        _check_homes(plan, rules)
    if plan.policy is Policy.PROGRAM:
        _check_program(plan)
        _check_program_ends(plan)
    else:
        _check_no_lock(plan)


def _check_shape(plan: Plan) -> None:
    num_peers = len(plan.peers)
    if len(set(plan.peers)) < num_peers:
        raise BadPlan("two peers have one name; every peer is listed once")
    if len(plan.slots) != num_peers or any(slots < 0 for slots in plan.slots):
        raise BadPlan(f"{len(plan.slots)} numbers of slots for {num_peers} peers; each peer has one, of at least 0")
    if any(not 0 <= peer < num_peers for stage in plan.stages for peer in stage):
        raise BadPlan(f"a stage is held by a peer outside of the {num_peers} that the plan lists")
    if not sum(lane.microbatches for lane in plan.lanes) or any(lane.microbatches < 0 for lane in plan.lanes):
        raise BadPlan("the plan has no microbatches, or fewer than none on a lane")
    if (plan.program is not None) != (plan.policy is Policy.PROGRAM):
        raise BadPlan("a program belongs to Policy.PROGRAM, and to no other policy")


def _check_route(plan: Plan, number: int, lane: Lane, rules: Rules | None) -> None:
    if not lane.route or lane.route[0].peer is None:
        raise BadPlan(f"lane {number} has no data node; the first hop of a route names its peer")
    for stage, peer in lane.route:
        if not 0 <= stage < len(plan.stages):
            raise BadPlan(f"lane {number} goes to stage {stage}; there are {len(plan.stages)} stages")
        if peer is not None and peer not in plan.stages[stage]:
            raise BadPlan(f"lane {number} goes to peer {peer} for stage {stage}, which that peer does not hold")
        if peer is None and not plan.stages[stage]:
            raise BadPlan(f"lane {number} leaves open who does stage {stage}, which nobody holds")
    stages = [hop.stage for hop in lane.route]
    if any(hop.peer is None for hop in lane.route) and (stages != sorted(stages) or plan.policy is Policy.PROGRAM):
        raise BadPlan(
            f"lane {number} leaves hops open, so its stages must ascend and no program can name its operations"
        )
    broken = broken_rule(stages, rules) if rules is not None else None
    if broken is not None:
        raise BadPlan(f"lane {number}, stages {stages}: {broken}; plan it anew")


def _check_capacity(plan: Plan, rules: Rules) -> None:
    lanes = [lane for lane in plan.lanes if lane.microbatches]
    visits = Counter(hop.peer for lane in lanes for hop in lane.route if hop.peer is not None)
    for peer, routes in visits.items():
        if routes > plan.slots[peer]:
            raise BadPlan(f"peer {peer} is on {routes} routes and has {plan.slots[peer]} slots (TC1); plan it anew")
    load = Counter(hop.stage for lane in lanes for hop in lane.route)
    slots = [sum(plan.slots[peer] for peer in stage) for stage in plan.stages]
    for stage, routes in load.items():
        if routes > slots[stage]:
            raise BadPlan(
                f"stage {stage} is on {routes} routes and its peers have {slots[stage]} slots (CC-d); use fewer lanes"
            )
    least = least_visits(rules, slots, [lane.microbatches for lane in lanes])
    seen = Counter[int]()
    for lane in lanes:
        for hop in lane.route:
            seen[hop.stage] += lane.microbatches
    for stage, floor in enumerate(least):
        if seen[stage] < floor:
            raise BadPlan(f"stage {stage} has {seen[stage]} visits and must have {floor}; plan it anew")


def _check_homes(plan: Plan, rules: Rules) -> None:
    if rules.most_homes is None:
        return
    homes: dict[int, set[int | None]] = {}
    for lane in plan.lanes:
        for hop in lane.route[1:] if lane.microbatches else ():
            for peer in plan.stages[hop.stage] if hop.peer is None else (hop.peer,):
                homes.setdefault(peer, set()).add(lane.route[0].peer)
    for peer, its in homes.items():
        if len(its) > rules.most_homes:
            raise BadPlan(
                f"microbatches of {len(its)} data nodes may come to peer {peer}, which has room for the sums of {rules.most_homes}; plan it anew"
            )


def _all_operations(plan: Plan) -> list[tuple[Op, int | None]]:
    """Every operation with its peer, None while open."""
    found: list[tuple[Op, int | None]] = []
    for number, (lane, _) in enumerate(plan.schedule()):
        route = plan.lanes[lane].route
        found += [(op, route[op.hop].peer) for op in operations(plan, len(route), number)]
    return found


def _check_program(plan: Plan) -> None:
    assert plan.program is not None
    wanted = Counter(_all_operations(plan))
    given = Counter[tuple[Op, int | None]]((op, peer) for peer, ops in plan.program.items() for op in ops)
    if given != wanted:
        wrong = sorted(((given - wanted) + (wanted - given)).keys(), key=str)[:5]
        said = ", ".join(f"{op} at peer {peer}" for op, peer in wrong)
        raise BadPlan(f"programs and routes differ in {said}; a program lists each operation of its peer once")


def _check_no_lock(plan: Plan) -> None:
    """A microbatch holds a slot at each hop so far while it waits for one at the next. If the peers that can be full have an
    order in which all routes meet them, the last one always goes on; without one, two routes may wait for each other."""
    lanes = [lane for lane in plan.lanes if lane.microbatches]
    met = [
        [{hop.peer} if hop.peer is not None else set(plan.stages[hop.stage]) for hop in lane.route] for lane in lanes
    ]
    passing = Counter(peer for route in met for hop in route for peer in hop)
    scarce = {peer for peer, routes in passing.items() if routes > plan.slots[peer]}
    if any(plan.slots[peer] < 1 for peer in scarce):
        raise BadPlan("a route goes to a peer without slots; give it some, or route around it")
    before: dict[int, set[int]] = {peer: set() for peer in scarce}
    for route in met:
        earlier: set[int] = set()
        for hop in route:
            for peer in hop & scarce:
                before[peer] |= earlier
            earlier |= hop & scarce
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        said = f"routes may lock each other at peers {error.args[1]}; give those more slots, or one order in all routes"
        raise BadPlan(said) from error


def _check_program_ends(plan: Plan) -> None:
    """Programs leave no choice, so one run without a clock shows what every run does."""
    machine = Machine(plan)
    left = len(_all_operations(plan)) - drive(machine, lambda _: None)
    if left:
        stuck = ", ".join(map(str, machine.waiting()[:5]))
        raise BadPlan(
            f"the programs lock each other with {left} operations left, {stuck} waiting; give peers more slots"
        )
