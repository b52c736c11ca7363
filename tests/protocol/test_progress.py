"""Which step is the next one, and when there is none any more, by what others say: one of three or more decides nothing."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.protocol.pipeline_says import FOUNDER, SWARM, says

from farflung.protocol.limits import MAX_STEPS
from farflung.protocol.lives import Counters, Life
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.progress import finished, may_plan, newest_step, shared_step
from farflung.protocol.roll import SILENT_AFTER, Roll

ME, LIE = b"m" * 32, 10**9
TOTAL = 300


def peer(number: int) -> bytes:
    return bytes([number]) * 32


def of(*steps: tuple[int, ...], own: tuple[int, int] = (-1, 0)) -> Roll:
    """A roll with what peers of each stage say; `own`: our stage and step."""
    roll = Roll(SWARM, FOUNDER.peer_id, ME, stages=len(steps), heartbeat_s=2.0, own_step=own)
    said = [(stage, step) for stage, its in enumerate(steps) for step in its]
    for number, (stage, step) in enumerate(said):
        roll.heard(peer(number), says(stage, step=step), 0.0)
    return roll


@pytest.mark.parametrize(
    "stages", [((97, 97, 97), (97,)), ((97, 97), (97,)), ((97,), (97,), (97,)), ((97, 97, 97), (97, 97, 97))]
)
def test_one_of_three_or_more_does_not_say_what_the_next_step_is(stages: tuple[tuple[int, ...], ...]) -> None:
    """Of whatever stage it is, unless it is one of two data nodes at most: these decide."""
    for liar in range(len(stages)):
        if liar == 0 and len(stages[0]) < 3:
            continue
        told = [(LIE, *its[1:]) if stage == liar else its for stage, its in enumerate(stages)]
        assert newest_step(of(*told), 0.0) == 97
        for ours, its in enumerate(told):  # as one of the honest ones sees it
            if 97 in its:
                others = [tuple(sorted(one)[::-1][:-1]) if stage == ours else one for stage, one in enumerate(told)]
                assert newest_step(of(*others, own=(ours, 97)), 0.0) == 97


@pytest.mark.parametrize(
    ("stages", "own", "newest"),
    [
        (((), (97,)), (0, 90), 97),
        (((), (97, 97)), (0, 90), 97),
        (((), (97,), (97,)), (0, 90), 97),
        (((97,), (90, 90, 90), (90,)), (1, 90), 97),
        (((97, 90), (90,), (90,)), (1, 90), 97),
        (((90, 90, 90), (97, 97)), (-1, 0), 97),
        (((97, 97, 90), (90, 90)), (-1, 0), 97),
        (((93, 90, 97), (95, 96)), (-1, 0), 96),
        (((90,), (90,)), (1, 97), 97),
        (((), ()), (1, 97), 97),
        (((98, 97), (98, 97, 97, 97)), (1, 97), 98),
    ],
)
def test_honest_peers_go_on_where_the_run_is(
    stages: tuple[tuple[int, ...], ...], own: tuple[int, int], newest: int
) -> None:
    """After some were started again, or with many that are busy."""
    assert newest_step(of(*stages, own=own), 0.0) == newest


@pytest.mark.parametrize(
    "changes",
    [{"trains": False}, {"life": 7}, {"step": MAX_STEPS}, {"stage": 40}, {"stage": -1, "wants": 1}],
)
def test_who_does_not_train_or_is_of_another_life_has_no_say(changes: Mapping[str, Any]) -> None:
    roll = of((90,), ())
    roll.heard(peer(9), says(**{"stage": 1, "step": LIE, **changes}), 0.0)
    assert newest_step(roll, 0.0) == 90 and not may_plan(91, peer(0), roll, 0.0)
    roll.heard(peer(9), says(1, step=97), 0.0)
    assert newest_step(roll, 0.0) == 97


def test_the_dead_have_no_say_and_a_lie_does_not_last() -> None:
    roll = of((90, LIE), (90,))
    assert newest_step(roll, 0.0) == LIE, "one of two"
    late = SILENT_AFTER * 2.0 + 0.1
    for number in (0, 2):
        roll.heard(peer(number), says(number // 2, step=91), late)
    assert newest_step(roll, late) == 91


def test_who_plans_may_not_say_more_than_anybody_else() -> None:
    """Where most have been busy for long it takes one who was in the last step."""
    roll = of((98, 90, 90), (90, 90, 98), own=(1, 90))
    assert newest_step(roll, 0.0) == 90
    assert may_plan(90, peer(0), roll, 0.0) and may_plan(98, peer(0), roll, 0.0)
    assert not may_plan(99, peer(0), roll, 0.0)
    roll.heard(peer(0), says(0, step=LIE), 0.0)
    assert not may_plan(LIE, peer(0), roll, 0.0)


@pytest.mark.parametrize(
    ("stages", "shared"),
    [
        (((90, 90), (90, 90)), 90),  # all others were started again
        (((90, 90), (90, 95)), 95),  # but one
        (((90, 97), (90, 90)), 97),
        (((90, 90), (97, 99)), 97),  # not more than we know
        (((90,), (90, 90)), 97),  # of two data nodes one is believed
        (((), ()), 97),
    ],
)
def test_what_only_we_know_nobody_shares(stages: tuple[tuple[int, ...], ...], shared: int) -> None:
    """It is what all others let us plan."""
    roll = of(*stages, own=(0, 97))
    assert newest_step(roll, 0.0) == 97 and shared_step(roll, 0.0) == shared
    told = [(stage, step) for stage, its in enumerate(stages) for step in its]
    for ours in told:
        others = [[97] if stage == 0 else [] for stage in range(len(stages))]  # the planner is peer 0
        for stage, step in told[: told.index(ours)] + told[told.index(ours) + 1 :]:
            others[stage].append(step)
        assert may_plan(shared, peer(0), of(*map(tuple, others), own=ours), 0.0)


def homes(*said: Present, own: bool | None = None) -> bool:
    roll = Roll(SWARM, FOUNDER.peer_id, ME, stages=2, heartbeat_s=2.0)
    for number, one in enumerate(said):
        roll.heard(peer(number), one, 0.0)
    roll.tick(0.0)
    return finished(roll, 0.0, own=own, complete=lambda steps: steps >= TOTAL)


DONE, TRAINS, COMES = says(0, finished=True, trains=False), says(0), says(0, trains=False)


@pytest.mark.parametrize(
    ("said", "own", "over"),
    [
        ((), None, False),
        ((DONE,), None, True),
        ((DONE, TRAINS), None, True),
        ((DONE, TRAINS, TRAINS), None, False),
        ((DONE, DONE, TRAINS), None, True),
        ((DONE, TRAINS), False, False),
        ((DONE,), False, True),
        ((), False, False),
        ((), True, True),
        ((DONE, COMES, COMES), None, True),
        ((TRAINS, says(1, finished=True)), None, False),
        ((TRAINS, says(0, finished=True, life=7)), None, False),
    ],
)
def test_a_run_is_over_when_half_of_the_data_nodes_say_so(
    said: tuple[Present, ...], own: bool | None, over: bool
) -> None:
    assert homes(*said, own=own) is over


def test_when_the_data_nodes_have_gone_what_they_had_counted_is_known_still() -> None:
    late = SILENT_AFTER * 2.0 + 0.1
    for steps, over in ((TOTAL - 3, False), (TOTAL, True)):
        roll = Roll(SWARM, FOUNDER.peer_id, ME, stages=2, heartbeat_s=2.0)
        roll.heard(peer(0), says(0, finished=over, trains=not over, counted=Counters(9, steps, 8, 8)), 0.0)
        roll.tick(0.0)
        assert finished(roll, late, own=None, complete=lambda steps: steps >= TOTAL) is over


def test_the_next_life_of_a_stage_has_a_say() -> None:
    roll = of((90,), (LIE, LIE))
    roll.renew([Life(1, 1, peer(3))], 0.0)
    roll.heard(peer(3), says(1, life=1, step=88), 0.0)
    assert newest_step(roll, 0.0) == 90
