"""Schedules are plans that validate, take the textbook's time, and are refused once they break a rule."""

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.pipeline_cases import SEEDS, random_routes

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import BadPlan, Hop, Kind, Lane, Op, Plan
from farflung.training.pipeline_rules import Rules, broken_rule, least_visits, validate
from farflung.training.pipeline_schedules import (
    ascending,
    checkfree_plus,
    dynamic,
    gpipe,
    interleaved,
    least_loaded,
    one_f_one_b,
    swapping_lanes,
    zero_bubble_h1,
)
from farflung.training.pipeline_simulate import Timeline, simulate
from farflung.training.pipeline_trace import chrome_trace, chrome_traces


def flat(peers: int, stages: int, *, forward: float = 1.0, message: float = 0.0) -> Costs:
    """F = forward, B = 2 F, I = W = F, no loss."""
    table = tuple(tuple(message * (a != b) for b in range(peers)) for a in range(peers))
    zero = ((0.0,) * peers,) * peers
    return Costs(forward_s=((forward,) * peers,) * stages, latency_s=table, transmit_s=zero, backward=2.0, loss=0.0)


def names(peers: int) -> tuple[str, ...]:
    return tuple(f"peer {peer}" for peer in range(peers))


PEERS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


@given(PEERS, MICROBATCHES)
@settings(max_examples=30, deadline=None)
def test_schedules_have_the_bubbles_of_the_literature(peers: int, microbatches: int) -> None:
    for schedule in (gpipe, one_f_one_b):
        plan = schedule(names(peers), microbatches)
        validate(plan)
        assert simulate(plan, flat(peers, peers)).makespan_s == 3 * microbatches + 3 * (peers - 1)
    plan = zero_bubble_h1(names(peers), microbatches)
    validate(plan)
    if microbatches >= peers:
        assert simulate(plan, flat(peers, peers)).makespan_s == 3 * microbatches + peers - 1


@given(PEERS, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_interleaved_divides_the_bubble_by_the_chunks(peers: int, groups: int, chunks: int) -> None:
    plan = interleaved(names(peers), peers * groups, chunks=chunks)
    validate(plan)
    took = simulate(plan, flat(peers, peers * chunks, forward=1 / chunks)).makespan_s
    assert took == pytest.approx(3 * peers * groups + 3 * (peers - 1) / chunks)


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    plan = dataclasses.replace(gpipe(names(3), 8), slots=one_f_one_b(names(3), 8).slots)
    with pytest.raises(BadPlan, match=r"lock each other.*more slots"):
        validate(plan)


def test_1f1b_runs_in_the_textbooks_order() -> None:
    timeline = simulate(one_f_one_b(names(3), 4), flat(3, 3))
    order = ["".join(str(ran.op).split(".")[:1]) for ran in timeline.ran if ran.peer == 1]
    assert order == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


def assert_physical(plan: Plan, costs: Costs, timeline: Timeline) -> None:
    """Every operation once, one at a time per peer, after what it depends on; slots and uplinks within their limits."""
    ran = {one.op: one for one in timeline.ran}
    hops = [len(plan.lanes[lane].route) for lane, _ in plan.schedule()]
    assert len(ran) == len(timeline.ran) == sum((3 if plan.split_backward else 2) * count + 1 for count in hops)
    back = Kind.I if plan.split_backward else Kind.B
    for op, one in ran.items():
        last = hops[op.microbatch] - 1
        if op.kind is Kind.F:
            before = Op(Kind.F, op.microbatch, op.hop - 1) if op.hop else None
        elif op.kind is Kind.LOSS:
            before = Op(Kind.F, op.microbatch, last)
        elif op.kind is Kind.W:
            before = Op(Kind.I, op.microbatch, op.hop)
        else:
            loss = Op(Kind.LOSS, op.microbatch, 0 if plan.loss_at_home else last)
            before = loss if op.hop == last else Op(back, op.microbatch, op.hop + 1)
        if before is not None:
            earlier = ran[before]
            assert one.begin_s >= earlier.end_s + costs.message_s(earlier.peer, one.peer) - 1e-9
    for peer in range(len(plan.peers)):
        mine = [one for one in timeline.ran if one.peer == peer]
        assert all(b.begin_s >= a.end_s + costs.pause_s - 1e-9 for a, b in pairwise(mine))
        kept = most = 0
        for one in mine:
            kept += (one.op.kind is Kind.F) - (one.op.kind in (Kind.B, Kind.W))
            most = max(most, kept)
        assert kept == 0 and most <= plan.slots[peer]
        if costs.shared_uplinks:
            sent = [one for one in timeline.sent if one.sender == peer]
            frees = [one.begin_s + costs.transmit_s[peer][one.receiver] for one in sent]
            assert all(b.begin_s >= free - 1e-9 for free, b in zip(frees, sent[1:], strict=False))


@given(SEEDS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_routes_validate_and_their_timelines_are_physical(seed: int, ties: bool) -> None:
    routes = random_routes(seed, ties=ties)
    plan = routes.plan()
    validate(plan, routes.task.rules)
    assert_physical(plan, routes.task.costs, simulate(plan, routes.task.costs))


@given(st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_named_schedules_are_physical(peers: int, groups: int) -> None:
    costs = flat(peers, peers, message=0.7)
    for plan in (gpipe(names(peers), groups), one_f_one_b(names(peers), groups), zero_bubble_h1(names(peers), groups)):
        assert_physical(plan, costs, simulate(plan, costs))
    looped = interleaved(names(peers), peers * groups, chunks=2)
    costs = flat(peers, 2 * peers, message=0.7)
    assert_physical(looped, costs, simulate(looped, costs))


def test_dynamic_routes_follow_speed() -> None:
    plan = dynamic("abc", [[0], [1, 2]], [4, 4, 4], [(0, 6)])
    validate(plan)
    costs = dataclasses.replace(flat(3, 2), forward_s=((1.0, 1.0, 1.0), (1.0, 1.0, 2.0)))
    timeline = simulate(plan, costs, least_loaded(plan, costs))
    chosen = [ran.peer for ran in timeline.ran if ran.op.kind is Kind.F and ran.stage == 1]
    assert chosen.count(1) == 4 and chosen.count(2) == 2


def two_stages(*routes: tuple[Hop, ...], slots: int = 1) -> Plan:
    lanes = tuple(Lane(route=route) for route in routes)
    return Plan(peers=names(4), stages=((0, 1), (2,), (3,)), lanes=lanes, slots=(slots,) * 4)


SOUND = (Hop(0, 0), Hop(1, 2), Hop(2, 3))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (two_stages((Hop(1, 2), Hop(2, 3), Hop(0, 0))), "CC-a"),
        (two_stages((Hop(0, 0), Hop(1, 2))), "CC-b"),
        (two_stages((Hop(0, 0), Hop(1, 2), Hop(1, 2))), "CC-b"),
        (two_stages(SOUND, SOUND), "TC1"),
        (two_stages((Hop(0, 2), Hop(1, 2), Hop(2, 3))), "does not hold"),
        (two_stages((Hop(0, 0), Hop(3, 2), Hop(2, 3))), "there are 3 stages"),
        (two_stages(()), "no data node"),
        (two_stages(), "no microbatches"),
        (dataclasses.replace(two_stages(SOUND), program={}), "Policy.PROGRAM"),
        (dataclasses.replace(two_stages(SOUND), slots=(1,)), "each peer has one"),
        (dataclasses.replace(two_stages(SOUND), peers=("a", "a", "b", "c")), "two peers"),
    ],
)
def test_bad_plans_are_refused(plan: Plan, said: str) -> None:
    validate(two_stages(SOUND), Rules(visits=3))
    with pytest.raises(BadPlan, match=said):
        validate(plan, Rules(visits=3))


def test_a_stage_that_routes_starve_is_refused() -> None:
    one, other = (Hop(0, 0), Hop(1, 2)), (Hop(0, 1), Hop(2, 3))
    for routes, rules in (
        ((one, one, other, other), Rules(visits=2)),
        ((one, one, one, other), Rules(visits=2, least_share=0.5)),
        ((one, one, one), Rules(visits=2, least_share=0.0)),
        ((one,), Rules(visits=2)),
        ((one, one, one, one), Rules(visits=2, max_jump=1)),
    ):
        validate(two_stages(*routes, slots=4), rules)
    with pytest.raises(BadPlan, match="stage 2 has 1 visits and must have 2"):
        validate(two_stages(one, one, one, other, slots=4), Rules(visits=2))
    unable = dataclasses.replace(two_stages(one, one, slots=4), slots=(4, 4, 4, 0))
    validate(unable, Rules(visits=2))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_floors_are_feasible(slots: list[int], data: st.DataObject) -> None:
    """No more than all lanes through a stage give, or as many as it has slots, and together no more than there are."""
    visits = data.draw(st.integers(1, len(slots)))
    rules = Rules(visits=visits, least_share=data.draw(st.floats(0.0, 1.0)), max_jump=8)
    lanes, microbatches = data.draw(st.integers(1, 12)), data.draw(st.integers(12, 40))
    counts = [microbatches // lanes + (lane < microbatches % lanes) for lane in range(lanes)]
    least = least_visits(rules, slots, counts)
    assert all(floor <= sum(counts[:has]) for floor, has in zip(least, slots, strict=True))
    assert sum(least) <= microbatches * (visits - 1)


def test_routes_that_lock_each_other_are_refused_without_rules_too() -> None:
    there, back = (Hop(0, 0), Hop(1, 2), Hop(2, 3)), (Hop(0, 1), Hop(2, 3), Hop(1, 2))
    with pytest.raises(BadPlan, match="may lock each other"):
        validate(two_stages(there, back))
    validate(two_stages(there, back, slots=2))


def test_a_program_that_forgets_an_operation_is_refused() -> None:
    plan = gpipe(names(2), 2)
    assert plan.program is not None
    with pytest.raises(BadPlan, match=r"B0\.0 at peer 0"):
        validate(dataclasses.replace(plan, program={**plan.program, 0: plan.program[0][:-1]}))


def test_swaps_are_bounded() -> None:
    rules = Rules(visits=5)
    assert broken_rule((0, 2, 1, 4, 3), rules) is None
    for stages in ((0, 3, 1, 2, 4), (0, 2, 1, 4, 3, 5), (0, 5, 6, 7, 8)):
        assert broken_rule(stages, rules) is not None
    assert broken_rule((0, 2, 1, 3, 4), Rules(visits=5, max_swaps=0)) is not None


def test_checkfree_needs_two_pairs() -> None:
    with pytest.raises(BadPlan, match="5 or more"):
        checkfree_plus(two_stages(SOUND))


@pytest.mark.parametrize(
    ("microbatches", "swapping"),
    [
        ([1], set()), ([1, 1], {1}), ([1, 1, 1, 1], {1, 3}), ([2, 1, 1], {1, 2}), ([1, 1, 2], {0, 1}), ([3, 3, 1, 1], {1, 3}), ([4, 1, 1], {1, 2}),
    ],
)  # fmt: skip
def test_lanes_with_half_of_the_microbatches_swap(microbatches: list[int], swapping: set[int]) -> None:
    assert swapping_lanes(microbatches) == swapping


def test_lanes_that_swap_ascend_again_without_it() -> None:
    lane = Lane(route=tuple(Hop(stage, stage) for stage in range(5)))
    plan = Plan(peers=names(5), stages=tuple((peer,) for peer in range(5)), lanes=(lane,) * 4, slots=(4,) * 5)
    assert checkfree_plus(plan) != plan == ascending(checkfree_plus(plan))


def test_checkfree_leaves_the_loss_where_it_was() -> None:
    for plan in (one_f_one_b(names(5), 2), gpipe(names(5), 2)):
        swapped = checkfree_plus(plan)
        validate(swapped)
        assert swapped.loss_at_home == plan.loss_at_home and swapped.lanes[0] == plan.lanes[0] != swapped.lanes[1]


def test_traces_of_two_steps_do_not_mix() -> None:
    first, second = (simulate(one_f_one_b(names(3), 2), flat(3, 3, message=seconds)) for seconds in (0.5, 1.0))
    events = chrome_traces({"measured ": first, "simulated ": second})["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(named) == 6 and len(set(named.values())) == 6
    arrows: dict[object, set[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], set()).add(named[event["pid"]].split()[0])
    assert len(arrows) == len(first.sent) + len(second.sent)
    assert all(len(ends) == 1 for ends in arrows.values())


def test_a_trace_has_every_operation_and_message() -> None:
    plan = one_f_one_b(names(3), 2)
    timeline = simulate(plan, flat(3, 3, message=0.5))
    events = json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.ran) + len(timeline.sent) == 2 * 7 + 2 * 4
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= named
    assert max(event["ts"] + event["dur"] for event in spans if event["cat"] != "message") == 1e6 * timeline.makespan_s
    arrows = [event for event in events if event["ph"] in "sf"]
    assert len(arrows) == 2 * len(timeline.sent)
    assert sum(timeline.busy()) * timeline.makespan_s == pytest.approx(2 * 3 * 3)
