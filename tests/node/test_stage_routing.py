"""Stage servers under virtual time where routes are not just columns: peers bound on the way, and stages in swapped order."""

from collections import Counter

import pytest
from tests.node.stage_lab import StageLab, in_stages, names, two_columns, whole
from tests.node.test_stage_deaths import MOMENTS, planned
from tests.protocol.pipeline_says import says

from farflung.node.pipeline_driver import Outcome
from farflung.node.stage_job import accept
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.protocol.errors import Refused
from farflung.protocol.pipeline_messages import PlannedLane, StepPlan
from farflung.protocol.roll import Roll
from farflung.protocol.route import Leg
from farflung.sims.pipeline_small import recipe
from farflung.training.pipeline_plan import Hop, Kind, Lane, Op, Plan, Policy
from farflung.training.pipeline_schedules import opened

SLOW = {3: 4.0}
"""Peer 3 of `two_columns` computes four times as long as all others, and they know."""


def visits(outcome: Outcome) -> Counter[int]:
    """Microbatches that went through each peer in the end."""
    return Counter(leg.peer for route in outcome.routes.values() for leg in route)


def test_a_slow_peer_gets_fewer() -> None:
    outcome = in_stages(whole, opened(two_columns(10)), slow=SLOW)
    assert len(outcome.losses) == 10 and not outcome.notes
    seen = visits(outcome)
    assert (seen[1], seen[2], seen[5], seen[6]) == (5, 5, 5, 5)
    assert seen[3] == 2 and seen[4] == 8


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_peer_of_open_routes_dies(moment: str, reset: bool) -> None:
    """At any moment: the step is whole without it, gradients are those of one process and nothing counts twice (`whole`), and the slow one still gets fewer."""
    when, what = MOMENTS[moment]
    for seed, drop in enumerate((0.0, 0.02)):

        def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
            if (op, now) == (when, what):
                lab.kill(2, reset=reset)

        outcome = in_stages(
            whole, opened(two_columns(8)), seed=seed, happens=happens, slow=SLOW, patience=planned(), jitter_s=0.3, drop=drop
        )  # fmt: skip
        assert len(outcome.losses) == 8 and outcome.lost == {2}
        seen = visits(outcome)
        # Before the end one had gone through it, forth and back: its part of that gradient is lost with it, as all that a peer has not brought into a round.
        assert seen[1] + seen[2] == 8 and seen[2] <= (moment == "before the end") and seen[3] < seen[4]


@pytest.mark.parametrize("told", [True, False])
def test_who_is_known_to_be_away_is_passed_by(told: bool) -> None:
    """Its machine is off: where heartbeats have told senders, nothing is sent to it, and nobody has to be asked for another."""

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.F, 0, 0), "started"):
            lab.kill(3, reset=False)
            for server in lab.servers if told else ():
                server.avoid(lab.step.window, 3)

    outcome = in_stages(whole, opened(two_columns()), happens=happens)
    assert len(outcome.losses) == 4 and visits(outcome)[4] == 4
    assert any(note.what == "rebound" for note in outcome.notes) != told


# ---- swaps ------------------------------------------------------------------------------------------------------------

ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))


def of_orders(swaps: int) -> tuple[StepPlan, Roll, StageRecipe]:
    """A step of two microbatches in each of these orders, for whoever serves stage 2."""
    own = stage_recipe(recipe(stages=4, batch_tokens=8 * 12, pipeline={"microbatches": 6, "swaps": swaps}), 2)
    peers = tuple(bytes.fromhex(name) for name in names(4))
    roll = Roll(own.whole.swarm, peers[0], peers[2], stages=4, heartbeat_s=2.0)
    for stage in (0, 1, 3):
        roll.heard(peers[stage], says(stage, step=7), 0.0)
    lanes = tuple(PlannedLane(tuple(Leg(stage, stage) for stage in order), 2) for order in ORDERS)
    return StepPlan(b"w" * 32, 7, peers, ((0,), (1,), (2,), (3,)), lanes, 20.0), roll, own


def test_gradients_of_swapped_routes() -> None:
    """Of a plan that the manifest's rules let pass: those of one process that visits stages in that order, microbatch by microbatch."""
    message, roll, own = of_orders(1)
    plan = accept(message, message.peers[0], roll=roll, recipe=own, now=0.0).step.plan

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 6 and not outcome.notes and not lab.errors
        assert Counter(tuple(leg.stage for leg in route) for route in outcome.routes.values()) == dict.fromkeys(
            ORDERS, 2
        )

    in_stages(main, plan)
    with pytest.raises(Refused, match="goes back from stage 2 to stage 1"):
        without, roll, own = of_orders(0)
        accept(without, without.peers[0], roll=roll, recipe=own, now=0.0)


def test_takeovers_of_swapped_routes_do_not_lock_each_other() -> None:
    """One route meets peers 1 and 4 in this order, another in the other, once both have lost what lay between; each has one slot."""
    first = (Hop(0, 0), Hop(1, 1), Hop(2, 3), Hop(3, 5))
    second = (Hop(0, 0), Hop(2, 4), Hop(1, 2), Hop(3, 5))
    plan = Plan(
        peers=tuple(names(6)),
        stages=((0,), (1, 2), (3, 4), (5,)),
        lanes=(Lane(route=first), Lane(route=second)),
        slots=(2, 1, 1, 1, 1, 2),
        policy=Policy.BACKWARD,
    )

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.F, 0, 1), "started"):
            lab.kill(2)
            lab.kill(3)

    outcome = in_stages(whole, plan, happens=happens)
    assert len(outcome.losses) == 2 and not outcome.cut and outcome.lost == {2, 3}
    assert [leg.peer for leg in outcome.routes[0]] == [0, 1, 4, 5]
    assert [leg.peer for leg in outcome.routes[1]] == [0, 4, 1, 5]
