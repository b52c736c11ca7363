"""The schedules of the literature as plans: each is a choice of routes, slots, and a policy or a program.

                   routes                        slots         order at a peer                    source
    GPipe          0..S-1, loss at the end       M             program: all F, then all B         1811.06965
    1F1B           the same                      S - s         backward before forward            2104.04473
    interleaved    wraps over the peers v times  by the order  Megatron's program                 2104.04473
    zero-bubble H1 as 1F1B, split backward       S             program: W(m - s) after I(m)      2401.10241
    CheckFree+     half of the microbatches      as given      as given                           2506.15461, 2.3 of the digest
                   swap both ends
    dynamic        stages only, peers bound      as given      backward before forward            SWARM, 2301.11913
                   while it runs

SkipPipe's are found by search (pipeline_search.py). All functions raise BadPlan for numbers that cannot work.
"""

from collections.abc import Sequence
from dataclasses import replace

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_machine import Bind
from farflung.training.pipeline_plan import BadPlan, Hop, Kind, Lane, Op, Plan, Policy


def _straight(peers: Sequence[str], num_microbatches: int) -> tuple[tuple[tuple[int, ...], ...], tuple[Lane, ...]]:
    if not peers or num_microbatches < 1:
        raise BadPlan("a pipeline needs a peer and a microbatch")
    route = tuple(Hop(stage, stage) for stage in range(len(peers)))
    return tuple((stage,) for stage in range(len(peers))), (Lane(route=route),) * num_microbatches


def gpipe(peers: Sequence[str], num_microbatches: int) -> Plan:
    """All forwards, then all backwards in the opposite order: as many activations as microbatches."""
    stages, lanes = _straight(peers, num_microbatches)
    last = len(peers) - 1
    program = {}
    for hop in range(len(peers)):
        forward = [Op(Kind.F, m, hop) for m in range(num_microbatches)]
        loss = [Op(Kind.LOSS, m, hop) for m in range(num_microbatches)] if hop == last else []
        program[hop] = (*forward, *loss, *(Op(Kind.B, m, hop) for m in reversed(range(num_microbatches))))
    return Plan(
        peers=tuple(peers),
        stages=stages,
        lanes=lanes,
        slots=(num_microbatches,) * len(peers),
        policy=Policy.PROGRAM,
        program=program,
        loss_at_home=False,
    )


def one_f_one_b(peers: Sequence[str], num_microbatches: int) -> Plan:
    """GPipe's time with at most as many activations as stages are left."""
    stages, lanes = _straight(peers, num_microbatches)
    slots = tuple(len(peers) - stage for stage in range(len(peers)))
    return Plan(peers=tuple(peers), stages=stages, lanes=lanes, slots=slots, policy=Policy.BACKWARD, loss_at_home=False)


def zero_bubble_h1(peers: Sequence[str], num_microbatches: int) -> Plan:
    """A third of 1F1B's bubble, with no more activations than its first stage keeps.

    The weight gradients of stage s come s microbatches late and fill what would be idle at the end. A program, because the
    policy that takes W only when nothing else is ready spends them at once on the idle time of the warm-up: with S slots
    and F = I = W its bubble is up to twice as long.
    """
    stages, lanes = _straight(peers, num_microbatches)
    last = len(peers) - 1
    program = {}
    for hop in range(len(peers)):
        warm_up = min(num_microbatches, len(peers) - hop)
        ops = [Op(Kind.F, m, hop) for m in range(warm_up)]
        for m in range(num_microbatches):
            ops += [Op(Kind.LOSS, m, hop)] if hop == last else []
            ops.append(Op(Kind.I, m, hop))
            ops += [Op(Kind.W, m - hop, hop)] if m >= hop else []
            ops += [Op(Kind.F, warm_up + m, hop)] if warm_up + m < num_microbatches else []
        ops += [Op(Kind.W, m, hop) for m in range(max(0, num_microbatches - hop), num_microbatches)]
        program[hop] = tuple(ops)
    return Plan(
        peers=tuple(peers),
        stages=stages,
        lanes=lanes,
        slots=(len(peers),) * len(peers),
        policy=Policy.PROGRAM,
        program=program,
        loss_at_home=False,
        split_backward=True,
    )


def interleaved(peers: Sequence[str], num_microbatches: int, *, chunks: int) -> Plan:
    """Peer p holds stages p, p + P, ...: a bubble smaller by the number of chunks, for so many times the messages.

    Megatron's order: groups of P microbatches go through one chunk after another, a warm-up of 2(P - p - 1) + (chunks - 1) P
    forwards, then one forward and one backward in turn. M must be a multiple of P.
    """
    num_peers = len(peers)
    if not num_peers or chunks < 1 or num_microbatches < 1 or num_microbatches % num_peers:
        raise BadPlan(
            f"{num_microbatches} microbatches on {num_peers} peers in {chunks} chunks; use a multiple of the peers"
        )
    num_stages = num_peers * chunks
    route = tuple(Hop(stage, stage % num_peers) for stage in range(num_stages))
    total = num_microbatches * chunks
    program = {}
    slots = []
    for peer in range(num_peers):

        def turn(k: int, *, backwards: bool, peer: int = peer) -> Op:
            group, within = divmod(k, num_peers * chunks)
            chunk, member = divmod(within, num_peers)
            hop = (chunks - 1 - chunk if backwards else chunk) * num_peers + peer
            return Op(Kind.B if backwards else Kind.F, group * num_peers + member, hop)

        warm_up = min(total, 2 * (num_peers - peer - 1) + (chunks - 1) * num_peers)
        ops = [turn(k, backwards=False) for k in range(warm_up)]
        for k in range(total):
            if warm_up + k < total:
                ops.append(turn(warm_up + k, backwards=False))
            back = turn(k, backwards=True)
            if back.hop == num_stages - 1:
                ops.append(Op(Kind.LOSS, back.microbatch, back.hop))
            ops.append(back)
        program[peer] = tuple(ops)
        slots.append(min(total, warm_up + 1))
    return Plan(
        peers=tuple(peers),
        stages=tuple((stage % num_peers,) for stage in range(num_stages)),
        lanes=(Lane(route=route),) * num_microbatches,
        slots=tuple(slots),
        policy=Policy.PROGRAM,
        program=program,
        loss_at_home=False,
    )


def checkfree_plus(plan: Plan) -> Plan:
    """The same plan, where lanes with half of the microbatches, as nearly as may be, swap their hops 1 and 2 and their last two, so that end stages have twins.
    What followed a program goes first come, first served."""
    lanes, swapped = [], swapping_lanes([lane.microbatches for lane in plan.lanes])
    for number, lane in enumerate(plan.lanes):
        route = list(lane.route)
        if len(route) < 5:
            raise BadPlan(
                f"lane {number} has {len(route)} hops; CheckFree+ swaps two pairs after the first, so use 5 or more"
            )
        if number in swapped:
            route[1], route[2] = route[2], route[1]
            route[-1], route[-2] = route[-2], route[-1]
        lanes.append(Lane(route=tuple(route), microbatches=lane.microbatches))
    policy = Policy.ARRIVAL if plan.policy is Policy.PROGRAM else plan.policy
    return replace(plan, lanes=tuple(lanes), policy=policy, program=None)


def swapping_lanes(microbatches: Sequence[int]) -> frozenset[int]:
    """Of lanes with so many, those that swap: the largest first, each goes to the side that has fewer, and of equal ones the first does not swap."""
    straight, swapped, found = 0, 0, set()
    for lane in sorted(range(len(microbatches)), key=lambda lane: -microbatches[lane]):
        if swapped < straight:
            swapped += microbatches[lane]
            found.add(lane)
        else:
            straight += microbatches[lane]
    return frozenset(found)


def ascending(plan: Plan) -> Plan:
    """The same lanes, each through its stages in their order."""
    return replace(plan, lanes=tuple(replace(lane, route=tuple(sorted(lane.route))) for lane in plan.lanes))


def dynamic(
    peers: Sequence[str], stages: Sequence[Sequence[int]], slots: Sequence[int], lanes: Sequence[tuple[int, int]]
) -> Plan:
    """SWARM: every lane, (data node, microbatches), visits all stages at whichever peer is bound when it gets there."""
    later = tuple(Hop(stage, None) for stage in range(1, len(stages)))
    return Plan(
        peers=tuple(peers),
        stages=tuple(map(tuple, stages)),
        lanes=tuple(Lane(route=(Hop(0, home), *later), microbatches=count) for home, count in lanes),
        slots=tuple(slots),
        policy=Policy.BACKWARD,
    )


def opened(plan: Plan) -> Plan:
    """The same lanes from the same data nodes through the same stages, each at whichever peer is bound when a microbatch gets there. The policy stays, and
    routes must ascend (`pipeline_rules.validate`)."""
    lanes = tuple(
        replace(lane, route=(lane.route[0], *(Hop(hop.stage, None) for hop in lane.route[1:]))) for lane in plan.lanes
    )
    return replace(plan, lanes=lanes)


def least_loaded(plan: Plan, costs: Costs) -> Bind:
    """SWARM's stochastic wiring: each peer is charged what it is given, and the one that will have the least charge then is next.

    The charge is the expected F there, of which B is the same multiple for all: an interleaved weighted round-robin by speed. Live, each peer charges what
    it sends itself (`protocol/wiring.py`); here one who knows all binds for all.
    """
    charged = [dict.fromkeys(stage, 0.0) for stage in plan.stages]

    def bind(stage: int, _: float) -> int:
        then = {one: so_far + costs.forward_s[stage][one] for one, so_far in charged[stage].items()}
        peer = min(then, key=lambda one: (then[one], one))
        charged[stage][peer] = then[peer]
        return peer

    return bind
