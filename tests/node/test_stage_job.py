"""A plan is checked against what a peer knows, and refused for what breaks a rule."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.protocol.pipeline_says import says

from farflung.node.stage_job import MAX_LEG_S, Job, accept, as_message, leg_of
from farflung.node.stage_recipe import stage_recipe
from farflung.node.stage_work import StageWork
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import Refused
from farflung.protocol.messages import Again
from farflung.protocol.pipeline_messages import PlannedLane, StepPlan
from farflung.protocol.roll import Roll
from farflung.protocol.route import DROPPED, OPEN, Leg
from farflung.sims.pipeline_small import recipe, signers
from farflung.training.pipeline_online import TRIP_S, Server, plan_step
from farflung.training.pipeline_plan import Policy
from farflung.training.pipeline_rules import Rules, validate

IDS = [signer.peer_id for signer in signers(5)]
"""0 and 1 are data nodes, 2 and 3 serve stage 1, 4 nothing that anybody knows of."""
HOME, MINE, ME = IDS[0], 1, IDS[2]
RECIPE = stage_recipe(recipe(), 1)
STAGES = {0: IDS[:2], 1: IDS[2:4]}


def roll() -> Roll:
    one = Roll(RECIPE.whole.swarm, HOME, ME, stages=2, heartbeat_s=2.0)
    for stage, peers in STAGES.items():
        for peer in peers:
            if peer != ME:
                one.heard(peer, says(stage, step=7), 0.0)
    return one


def good() -> StepPlan:
    servers = [Server(peer.hex(), stage, 0.0, 0.0) for stage, peers in STAGES.items() for peer in peers]
    forecast = plan_step(
        servers, {}, 2, RECIPE.rules(), microbatches=4, slots=3, nbytes=1000, policy=Policy.BACKWARD, seed=1
    )
    return as_message(forecast.plan, window=b"w" * 32, number=7, leg_s=leg_of(forecast.silence_s))


def taken(message: StepPlan, sender: bytes = HOME) -> Job:
    return accept(message, sender, roll=roll(), recipe=RECIPE, now=0.0)


def test_a_plan_is_understood_as_it_was_meant() -> None:
    message = good()
    job = taken(message)
    assert (job.number, job.place, job.own, job.own_samples) == (7, 2, (), 0)
    assert len(job.step.routes) == 4 and job.step.keys == message.peers
    assert {leg.peer for route in job.step.routes for leg in route} <= {0, 1, 2, 3}
    assert as_message(job.step.plan, window=message.window, number=7, leg_s=message.leg_s) == message
    at_home = accept(
        message,
        HOME,
        roll=replace(roll(), me=HOME, entries={**roll().entries, ME: roll().entries[IDS[3]]}),
        recipe=stage_recipe(recipe(), 0),
        now=0.0,
    )
    assert at_home.own and at_home.own_samples == 2 * len(at_home.own)


def test_what_routes_may_lose_follows_from_the_manifest() -> None:
    assert taken(good()).step.droppable == Droppable()
    skipping = stage_recipe(recipe(stages=4, pipeline={"skip": 0.25}), 1)
    peers = {0: IDS[:1], 1: IDS[2:3], 2: IDS[3:4], 3: IDS[4:]}
    one = Roll(skipping.whole.swarm, HOME, ME, stages=4, heartbeat_s=2.0)
    for stage, (peer,) in peers.items():
        if peer != ME:
            one.heard(peer, says(stage, step=7), 0.0)
    servers = [Server(peer.hex(), stage, 0.0, 0.0) for stage, (peer,) in peers.items()]
    options: dict[str, Any] = {
        "microbatches": 4, "slots": 3, "nbytes": 1000, "policy": Policy.BACKWARD, "seed": 1,
    }  # fmt: skip
    plan = plan_step(servers, {}, 4, skipping.rules(), **options).plan
    message = as_message(plan, window=b"w" * 32, number=7, leg_s=MAX_LEG_S)
    job = accept(message, HOME, roll=one, recipe=skipping, now=0.0)
    assert job.step.droppable == skipping.droppable() == Droppable(fewest=2, max_jump=4)


def swapped(message: StepPlan) -> StepPlan:
    """Two peers in each other's stages."""
    return msgspec.structs.replace(message, stages=((0, 2), (1, 3)))


def routes(*legs: tuple[int, int], microbatches: int = 4) -> dict[str, Any]:
    return {"lanes": (PlannedLane(tuple(Leg(*leg) for leg in legs), microbatches),)}


@pytest.mark.parametrize(
    ("change", "says_so"),
    [
        (routes((0, 0), (1, 2), microbatches=3), "3 microbatches, where the manifest says 4"),
        (routes((0, 0)), "visits 1 stages instead of 2"),
        (routes((0, 0), (1, 2), (1, 3)), "visits 3 stages instead of 2"),
        (routes((1, 2), (0, 0)), "begins at stage 1"),
        (routes((0, 0), (1, 1)), "which that peer does not hold"),
        (routes((0, 0), (1, OPEN)), "leaves open who does a stage"),
        (routes((0, 0), (1, DROPPED)), "leaves out a hop"),
        ({"lanes": ()}, "0 microbatches"),
        ({"stages": ((0, 1), (2, 3), ())}, "it has 3 stages, the manifest 2"),
        ({"stages": ((0, 1), (2, 3, 3))}, "a peer for two stages"),
        ({"stages": ((0, 1), (2, 9))}, "one that it does not list"),
        ({"stages": ((0, 1), (3,))}, "not us for stage 1"),
        ({"stages": ((0, 2), (1, 3))}, "not us for stage 1"),
        ({"stages": ((0, 3), (2, 1))}, "for stage 0, of which we have not heard that"),
        ({"peers": (*IDS[:3], IDS[4])}, "for stage 1, of which we have not heard that"),
        ({"step": 8}, "nobody else is so far, and the next one that we know of is 7"),
        ({"step": 10**9}, "a plan of step 1000000000: nobody else"),
        ({"leg_s": 0.1}, "patience of 0.1 s"),
        ({"leg_s": 2 * MAX_LEG_S}, "a patience of"),
    ],
)
def test_what_is_refused(change: dict[str, Any], says_so: str) -> None:
    with pytest.raises(Refused, match=says_so) as caught:
        taken(msgspec.structs.replace(good(), **change))
    assert caught.value.peer == HOME


def test_a_plan_that_brings_more_data_nodes_to_us_than_there_is_memory_for_is_refused() -> None:
    homes = [IDS[0], IDS[1], IDS[4]]
    crowded = roll()
    crowded.heard(IDS[4], says(0), 0.0)
    peers = (*homes, *STAGES[1])

    def planned(third: int) -> StepPlan:
        lanes = tuple(
            PlannedLane((Leg(0, home), Leg(1, peer)), 1) for home, peer in ((0, 3), (1, 3), (2, third), (2, 4))
        )
        return StepPlan(b"w" * 32, 7, peers, ((0, 1, 2), (3, 4)), lanes, MAX_LEG_S)

    step = accept(planned(4), HOME, roll=crowded, recipe=RECIPE, now=0.0).step
    assert len(step.homes) == 3
    assert [step.takers[home][1] for home in range(3)] == [(3, 4), (3,), (4,)], (
        "nor does whoever takes over sum up for more"
    )
    order = Again(step.window, 1, 1, False, 3, 1, (Leg(0, 1), Leg(1, 4)))
    with pytest.raises(Refused, match="has no room for a sum of its data node's"):
        step.check_order(order, IDS[1], 4)
    with pytest.raises(Refused, match="of 3 data nodes may come to peer 3, which has room for the sums of 2"):
        accept(planned(3), HOME, roll=crowded, recipe=RECIPE, now=0.0)


DYNAMIC = stage_recipe(recipe(pipeline={"routing": "dynamic"}), 1)


def test_a_plan_with_open_hops_where_the_manifest_wants_them() -> None:
    """And how fast the peers are is what we have heard of them: not what the plan says, nor anything of those who do not know."""
    quick = roll()
    quick.heard(IDS[3], says(1, step=7, forward_s=0.5), 1.0)
    message = msgspec.structs.replace(good(), **routes((0, 0), (1, OPEN), microbatches=2))
    message = msgspec.structs.replace(message, lanes=message.lanes * 2)
    job = accept(message, HOME, roll=quick, recipe=DYNAMIC, now=0.0)
    assert job.step.routes == ((Leg(0, 0), Leg(1, OPEN)),) * 4
    assert job.step.visit_s == {3: 0.5}
    assert as_message(job.step.plan, window=message.window, number=7, leg_s=message.leg_s) == message


@pytest.mark.parametrize(
    ("change", "says_so"),
    [
        ({}, "a route says who does a stage"),
        (routes((0, 0), (1, DROPPED)), "leaves out a hop"),
        (routes((0, OPEN), (1, OPEN)), "no data node"),
        (routes((0, 0)), "visits 1 stages"),
        (routes((0, 0), (1, OPEN), microbatches=3), "3 microbatches"),
        ({"lanes": (PlannedLane((Leg(0, 0), Leg(1, OPEN)), 1),) * 4}, "on 4 routes and has 3 slots"),
    ],
)
def test_what_is_refused_where_hops_are_to_be_open(change: dict[str, Any], says_so: str) -> None:
    with pytest.raises(Refused, match=says_so) as caught:
        accept(msgspec.structs.replace(good(), **change), HOME, roll=roll(), recipe=DYNAMIC, now=0.0)
    assert caught.value.peer == HOME


SWAPPED, TWICE = (0, 2, 1, 3, 4), (0, 2, 1, 4, 3)


@pytest.mark.parametrize(
    ("swaps", "way", "refused"),
    [
        (0, SWAPPED, "goes back from stage 2 to stage 1"),
        (1, SWAPPED, None),
        (1, TWICE, "goes back from stage 4 to stage 3"),
        (2, TWICE, None),
        (2, (0, 3, 1, 2, 4), "goes back from stage 3 to stage 1"),
        (2, (0, 2, 3, 1, 4), "goes back from stage 3 to stage 1"),
        (2, (1, 0, 2, 3, 4), "begins at stage 1"),
    ],
)
def test_swaps_are_those_of_the_manifest(swaps: int, way: tuple[int, ...], refused: str | None) -> None:
    """Each of distance 1, and so many in one route."""
    five = stage_recipe(recipe(stages=5, layers=5, pipeline={"swaps": swaps}), 2)
    one = Roll(five.whole.swarm, HOME, ME, stages=5, heartbeat_s=2.0)
    holders = [HOME, IDS[1], ME, IDS[3], IDS[4]]
    for stage, peer in enumerate(holders):
        if peer != ME:
            one.heard(peer, says(stage, step=7), 0.0)
    lanes = (PlannedLane(tuple(Leg(stage, stage) for stage in way), 4),)
    message = StepPlan(b"w" * 32, 7, tuple(holders), ((0,), (1,), (2,), (3,), (4,)), lanes, 10.0)
    if refused is not None:
        with pytest.raises(Refused, match=refused):
            accept(message, HOME, roll=one, recipe=five, now=0.0)
        return
    job = accept(message, HOME, roll=one, recipe=five, now=0.0)
    assert [leg.stage for leg in job.step.routes[0]] == list(way) and not job.step.ascends


@pytest.mark.parametrize("sender", [IDS[3], IDS[4], ME])
def test_only_data_nodes_plan(sender: bytes) -> None:
    with pytest.raises(Refused, match="does not come from a data node"):
        taken(good(), sender)


def test_more_routes_than_slots() -> None:
    lanes = tuple(PlannedLane((Leg(0, place), Leg(1, 2)), 1) for place in (0, 0, 1, 1))
    with pytest.raises(Refused, match="on 4 routes and has 3 slots"):
        taken(msgspec.structs.replace(good(), lanes=lanes))


def test_plans_follow_speed() -> None:
    """Two peers of stage 1, one ten times as fast: it is on more routes; and the same seed makes the same plan."""
    peers = [Server("a", 0, 0.1, 0.0), Server("b", 1, 0.1, 0.0), Server("c", 1, 1.0, 0.0)]
    options: dict[str, Any] = {
        "microbatches": 8, "slots": 8, "nbytes": 1000, "policy": Policy.BACKWARD, "seed": 3,
    }  # fmt: skip
    first = plan_step(peers, {}, 2, RECIPE.rules(), **options)
    again = plan_step(peers, {}, 2, RECIPE.rules(), **options)
    assert first == again
    visits = [lane.route[1].peer for lane in first.plan.lanes for _ in range(lane.microbatches)]
    assert visits.count(1) > 2 * visits.count(2)


@pytest.mark.parametrize("far", [1, 2])
def test_plans_follow_latency(far: int) -> None:
    """Two peers of stage 1 that differ only in how far they are: one microbatch goes to the nearer, and so do two as long as that pays."""
    peers = [Server("a", 0, 0.1, 0.0), Server("b", 1, 0.1, 0.0), Server("c", 1, 0.1, 0.0)]
    trips = {(0, 3 - far): 0.02, (0, far): 1.0}
    for microbatches in (1, 2):
        options: dict[str, Any] = {
            "microbatches": microbatches, "slots": 8, "nbytes": 1000, "policy": Policy.BACKWARD, "seed": 3,
        }  # fmt: skip
        forecast = plan_step(peers, trips, 2, RECIPE.rules(), **options)
        assert {lane.route[1].peer for lane in forecast.plan.lanes} == {3 - far}
        even = plan_step(peers, {pair: 0.02 for pair in trips}, 2, RECIPE.rules(), **options)
        assert even.seconds <= forecast.seconds


def test_ways_that_nobody_has_measured_are_like_the_others() -> None:
    peers = [Server("a", 0, 0.1, 0.0), Server("b", 1, 0.1, 0.0), Server("c", 2, 0.1, 0.0)]

    def seconds(trips: dict[tuple[int, int], float]) -> float:
        options: dict[str, Any] = {
            "microbatches": 1, "slots": 1, "nbytes": 0, "policy": Policy.BACKWARD, "seed": 1,
        }  # fmt: skip
        return plan_step(peers, trips, 3, Rules(visits=3), **options).seconds

    computing = seconds({(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0})
    assert seconds({}) == pytest.approx(computing + 6 * TRIP_S / 2)
    assert seconds({(0, 1): 0.4}) == pytest.approx(computing + 6 * 0.2)
    assert seconds({(0, 1): 0.4, (0, 2): 0.2}) == pytest.approx(computing + 2 * 0.2 + 2 * 0.1 + 2 * 0.15)


def slow_stage_share(least_share: float) -> tuple[float, float]:
    """Of six stages of two peers, the third ten times slower than the others: share of visits that it gets, a third skipped; and the seconds of a step."""
    peers = [Server(f"{stage}.{peer}", stage, 1.0 if stage == 3 else 0.1, 0.0) for stage in range(6) for peer in (0, 1)]
    options: dict[str, Any] = {"microbatches": 20, "slots": 8, "nbytes": 1000, "policy": Policy.BACKWARD}
    rules = Rules(visits=4, max_jump=6, max_swap=0, least_share=least_share)
    forecast = plan_step(peers, {}, 6, rules, seed=1, **options)
    validate(forecast.plan, rules)
    lanes = forecast.plan.lanes
    return sum(lane.microbatches for lane in lanes if any(hop.stage == 3 for hop in lane.route)) / 20, forecast.seconds


def test_a_slow_stage_is_not_starved() -> None:
    """12 of 20 microbatches would be even, and 11 are nine tenths of it."""
    free, free_s = slow_stage_share(0.0)
    bound, bound_s = slow_stage_share(0.9)
    assert free < 0.4 and bound == 0.55 and free_s < bound_s


def test_a_data_node_that_had_been_further_before_a_step_is_not_lost_to_it() -> None:
    """After restarts a plan may have a lower number than one data node knows; who has gone on without us says so after the step began."""
    lost: list[bytes] = []
    heard, job = roll(), taken(good())
    work = cast(StageWork, SimpleNamespace(_roll=heard, server=SimpleNamespace(lost=lost.append)))
    heard.heard(IDS[1], says(0, step=9), 1.0)
    StageWork._watch_home(work, job, 2.0, IDS[1], 2.5)
    assert not lost
    heard.heard(IDS[1], says(0, step=9, window=job.window), 3.0)
    StageWork._watch_home(work, job, 2.0, IDS[1], 3.0)
    assert not lost, "it is at it"
    heard.heard(IDS[1], says(0, step=9), 4.0)
    StageWork._watch_home(work, job, 2.0, IDS[1], 4.0)
    assert lost == [IDS[1]]
