"""Plans from step to step: they go on where the last one ended, and are mended where somebody has come or gone."""

from collections.abc import Sequence
from typing import Any

import pytest

from farflung.training.pipeline_online import Forecast, Server, plan_step
from farflung.training.pipeline_plan import BadPlan, Plan, Policy
from farflung.training.pipeline_rules import Rules, validate

RULES = Rules(visits=3, max_jump=4, max_swap=0)
SERVERS = [
    Server(f"{stage}.{peer}", stage, 0.1 + 0.05 * ((7 * stage + 3 * peer) % 5), 1e6 * (1 + (5 * stage + peer) % 4))
    for stage in range(4)
    for peer in range(3)
]


def planned(servers: Sequence[Server], *, seed: int, before: Plan | None = None, **changes: Any) -> Forecast:
    options: dict[str, Any] = {
        "microbatches": 12, "slots": 3, "nbytes": 100_000, "policy": Policy.BACKWARD, **changes,
    }  # fmt: skip
    forecast = plan_step(servers, {}, 4, RULES, seed=seed, before=before, **options)
    validate(forecast.plan, RULES)
    return forecast


def ways(plan: Plan) -> list[tuple[str, ...]]:
    return sorted(tuple(plan.peers[hop.peer or 0] for hop in lane.route) for lane in plan.lanes)


def test_while_nothing_changes_plans_only_become_better() -> None:
    plan, seconds = None, float("inf")
    first = planned(SERVERS, seed=0).seconds
    for seed in range(8):
        forecast = planned(SERVERS, seed=seed, before=plan)
        assert forecast.seconds <= seconds
        plan, seconds = forecast.plan, forecast.seconds
    assert seconds < first


def test_a_good_plan_outlives_the_loss_of_a_peer() -> None:
    plan = None
    for seed in range(8):
        plan = planned(SERVERS, seed=seed, before=plan).plan
    assert plan is not None
    left = [server for server in SERVERS if server.name != "2.1"]
    mended, anew = planned(left, seed=9, before=plan), planned(left, seed=9)
    assert "2.1" not in {name for way in ways(mended.plan) for name in way}
    assert mended.seconds <= anew.seconds
    back = planned(SERVERS, seed=10, before=mended.plan)
    assert back.seconds <= mended.seconds


@pytest.mark.parametrize("change", ["everybody is another", "the stages are others'", "fewer microbatches"])
def test_a_plan_of_another_swarm_is_of_no_use_and_does_no_harm(change: str) -> None:
    plan = planned(SERVERS, seed=1).plan
    if change == "fewer microbatches":
        assert len(planned(SERVERS, seed=2, before=plan, microbatches=2).plan.lanes) == 2
        return
    servers = [
        Server(f"new {one.name}", one.stage, one.forward_s, one.up_bytes_per_s)
        if change == "everybody is another"
        else Server(one.name, (one.stage + 1) % 4, one.forward_s, one.up_bytes_per_s)
        for one in SERVERS
    ]
    assert planned(servers, seed=2, before=plan) == planned(servers, seed=2)


def test_where_senders_choose_peers_the_plan_says_the_rest() -> None:
    """Lanes, data nodes and stages: those of the search, which keeps floors of visits (`validate`); and what to expect, when peers are bound by speed."""
    bound, forecast = planned(SERVERS, seed=1), planned(SERVERS, seed=1, open_hops=True)
    assert forecast == planned(SERVERS, seed=1, open_hops=True)
    for lane, open_lane in zip(bound.plan.lanes, forecast.plan.lanes, strict=True):
        assert open_lane.route[0] == lane.route[0] and open_lane.microbatches == lane.microbatches
        assert [(hop.stage, hop.peer) for hop in open_lane.route[1:]] == [(hop.stage, None) for hop in lane.route[1:]]
    assert 0.0 < forecast.silence_s <= forecast.seconds < 5 * bound.seconds
    assert planned(SERVERS, seed=2, before=forecast.plan).seconds > 0.0  # which has nothing to go on from


def test_swaps_shorten_a_step() -> None:
    """Two lanes need not wait for each other at two stages of one peer each."""
    servers = [Server("0", 0, 0.1, 1e9), Server("1", 1, 1.0, 1e9), Server("2", 2, 1.0, 1e9)]
    options: dict[str, Any] = {"microbatches": 2, "slots": 2, "nbytes": 10, "policy": Policy.BACKWARD, "seed": 1}
    straight, swapped = (
        plan_step(servers, {}, 3, Rules(visits=3, max_swap=most, max_swaps=most, max_swap_sum=most), **options)
        for most in (0, 1)
    )
    assert swapped.seconds < straight.seconds - 0.5
    orders = [[hop.stage for hop in lane.route] for lane in swapped.plan.lanes]
    assert sorted(orders) == [[0, 1, 2], [0, 2, 1]]
    assert all([hop.stage for hop in lane.route] == [0, 1, 2] for lane in straight.plan.lanes)


def homes(plan: Plan, *, of: int) -> list[set[int | None]]:
    """The data nodes whose microbatches may come to each peer of a stage."""
    return [
        {lane.route[0].peer for lane in plan.lanes for hop in lane.route if hop in ((of, peer), (of, None))}
        for peer in plan.stages[of]
    ]


def crowd(*counts: int) -> list[Server]:
    """So many peers of each stage, all alike."""
    return [Server(f"{stage}.{peer}", stage, 0.1, 2e6) for stage, count in enumerate(counts) for peer in range(count)]


@pytest.mark.parametrize("counts", [(8, 2), (5, 1), (8, 3, 2), (3, 3, 3), (4, 4, 4)])
def test_a_peer_has_microbatches_of_few_data_nodes_and_each_has_its_turn(counts: tuple[int, ...]) -> None:
    """And where the others' peers have places for all of them, none has to wait."""
    limited, free = (Rules(visits=len(counts), max_swap=0, most_homes=most) for most in (2, None))
    options: dict[str, Any] = {"microbatches": 16, "slots": 4, "nbytes": 10**6, "policy": Policy.BACKWARD}
    used, before = set[str](), None
    for step in range(8):
        forecast = plan_step(crowd(*counts), {}, len(counts), limited, seed=step, before=before, **options)
        before = forecast.plan
        validate(before, limited)
        for stage in range(1, len(counts)):
            assert all(len(its) <= 2 for its in homes(before, of=stage))
        now = {before.peers[lane.route[0].peer or 0] for lane in before.lanes}
        assert len(now) <= 2 * min(counts[1:]) and (len(now) == counts[0] or len(set(counts)) > 1)
        used |= now
    assert len(used) == counts[0]
    assert forecast.seconds < 1.2 * plan_step(crowd(*counts), {}, len(counts), free, seed=7, **options).seconds


def test_where_senders_choose_a_step_has_few_data_nodes() -> None:
    rules, used = Rules(visits=3, max_jump=4, max_swap=0, most_homes=2), set[str]()
    options: dict[str, Any] = {"microbatches": 12, "slots": 3, "nbytes": 10**5, "policy": Policy.BACKWARD}
    for step in range(5):
        plan = plan_step(crowd(5, 4, 4), {}, 3, rules, seed=step, open_hops=True, **options).plan
        validate(plan, rules)
        assert all(len(its) == 2 for its in homes(plan, of=1))
        used |= {plan.peers[lane.route[0].peer or 0] for lane in plan.lanes}
    assert len(used) == 5
    bound = plan_step(crowd(3, 1), {}, 2, Rules(visits=2), seed=1, **options).plan
    with pytest.raises(BadPlan, match="of 3 data nodes may come to peer 3, which has room for the sums of 2"):
        validate(bound, Rules(visits=2, most_homes=2))


def test_few_data_nodes_are_planned_as_ever() -> None:
    servers = [one for one in SERVERS if one.stage or one.name != "0.2"]
    options: dict[str, Any] = {"microbatches": 12, "slots": 3, "nbytes": 10**5, "policy": Policy.BACKWARD}
    limited, free = (
        plan_step(servers, {}, 4, Rules(visits=3, max_swap=0, most_homes=most), seed=1, **options) for most in (2, None)
    )
    assert limited == free
