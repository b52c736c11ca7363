"""Whose turn it is to plan: the first data node's, and the next one's where nothing comes of it."""

from tests.protocol.pipeline_says import says
from tests.protocol.test_coordination import FIRST, SECOND, SWARM, A, B, C, D, everybody, plan_of

from farflung.protocol.coordination import Coordinator
from farflung.protocol.roll import in_order
from farflung.protocol.turns import MOST_BETWEEN_S, PASSED_S, TURN_S, Turns

TICK_S = 0.5


def wait(turns: Turns, seconds: float, start: float = 0.0, *, possible: bool = True, under_way: bool = False) -> float:
    """Look at it in every tick; returns the time then."""
    steps = round(seconds / TICK_S)
    for number in range(steps + 1):
        now = start + number * TICK_S
        for peer in turns.roll.known:  # they live
            said = turns.roll.present(peer)
            assert said is not None
            turns.roll.heard(peer, said, now)
        turns.look(now, possible=possible, under_way=under_way)
    return start + steps * TICK_S


def test_a_turn_goes_by_where_a_step_could_begin_and_none_does() -> None:
    for me in (FIRST, SECOND):
        turns = Turns(everybody(me))
        assert turns.holder(0.0) == FIRST
        now = wait(turns, TURN_S - TICK_S)
        assert turns.holder(now) == FIRST
        now = wait(turns, 2 * TICK_S, now)
        assert turns.holder(now) == SECOND
        now = wait(turns, TURN_S, now)
        assert turns.holder(now) == FIRST, "and so on round"


def test_time_in_which_no_step_could_begin_is_nobodys_turn() -> None:
    turns = Turns(everybody(SECOND))
    now = wait(turns, 3 * TURN_S, under_way=True)
    assert turns.holder(now) == FIRST
    now = wait(turns, TURN_S - 2 * TICK_S, now)
    now = wait(turns, TICK_S, now, possible=False)
    now = wait(turns, TURN_S - 2 * TICK_S, now)
    assert turns.holder(now) == FIRST, "it begins anew when one can begin again"
    turns.look(now + 100 * TURN_S, possible=True, under_way=False)
    assert turns._waited_s <= TURN_S - TICK_S + MOST_BETWEEN_S, "whoever stood still has seen nothing"


def test_a_newer_step_ends_a_turn() -> None:
    turns = Turns(everybody(SECOND))
    now = wait(turns, TURN_S - TICK_S)
    for peer in (C, D):
        turns.roll.heard(peer, says(1, step=9), now)
    now = wait(turns, TURN_S - TICK_S, now)
    assert turns.holder(now) == FIRST


def test_who_let_a_turn_go_by_comes_last_for_a_while() -> None:
    turns = Turns(everybody(SECOND))
    assert turns.began(FIRST, [FIRST, SECOND, C], 0.0) == []
    now = wait(turns, TURN_S + TICK_S)
    assert turns.began(SECOND, [SECOND, C], now) == [FIRST]
    assert turns.holder(now) == SECOND
    late = wait(turns, TURN_S - TICK_S, now)
    assert turns.holder(late) == SECOND
    assert turns.began(SECOND, [SECOND, C], late) == [], "it was its turn"
    for peer in (A, B, C, D):
        if peer != SECOND:
            turns.roll.heard(peer, says(0 if peer in (A, B) else 1), now + PASSED_S)
    assert turns.holder(now + PASSED_S - 0.1) == SECOND and turns.holder(now + PASSED_S) == FIRST


def test_a_step_of_somebody_whose_turn_it_is_not_passes_nobody_over() -> None:
    """Peers disagree for a while about who lives."""
    turns = Turns(everybody(SECOND))
    assert turns.began(SECOND, [SECOND, C], 0.0) == [] and turns.holder(0.0) == FIRST


def test_who_lets_its_own_turn_go_by_knows_it_when_a_step_has_begun_without_it() -> None:
    turns = Turns(everybody(FIRST))
    now = wait(turns, TURN_S + TICK_S)
    for peer in (C, D):
        turns.roll.heard(peer, says(1, step=9), now)
    now = wait(turns, 2 * TICK_S, now)
    assert turns.holder(now) == SECOND
    others = Turns(everybody(SECOND))
    now = wait(others, TURN_S + TICK_S)
    for peer in (C, D):
        others.roll.heard(peer, says(1, step=9), now)
    now = wait(others, 2 * TICK_S, now)
    assert others.holder(now) == FIRST, "who is not among them knows less than those who are in the step"


def test_the_next_step_settles_for_all_in_it_who_was_passed_over() -> None:
    """Where one was passed over and does not know it, as after a restart."""
    passed, unaware = Turns(everybody(SECOND)), Turns(everybody(FIRST))
    now = wait(passed, TURN_S + TICK_S)
    wait(unaware, TICK_S, now)
    passed.began(SECOND, [SECOND, C], now)
    assert (passed.holder(now), unaware.holder(now)) == (SECOND, FIRST), "both plan, and refuse each other"
    for planner, fresh in ((SECOND, [FIRST]), (FIRST, [])):
        assert passed.began(planner, [FIRST, SECOND, C], now) == []
        assert unaware.began(planner, [FIRST, SECOND, C], now) == fresh
        assert passed.holder(now) == unaware.holder(now) == planner


def test_who_was_passed_over_waits_as_long_as_it_is_in_the_steps_of_others() -> None:
    """Else both would take it back by different clocks, and meanwhile two would plan, or none."""
    both = Turns(everybody(SECOND)), Turns(everybody(FIRST))
    for turns in both:
        now = wait(turns, TICK_S)
        turns.began(SECOND, [FIRST, SECOND, C], now)
        now = wait(turns, TICK_S, now + PASSED_S - 1.0)
        turns.began(SECOND, [FIRST, SECOND, C], now)
        now = wait(turns, TICK_S, now + PASSED_S - 1.0)
        assert turns.holder(now) == SECOND
        now = wait(turns, TICK_S, now + 1.0)
        assert turns.holder(now) == FIRST


def test_the_coordinator_plans_in_its_turn_only() -> None:
    roll = everybody(SECOND)
    machine = Coordinator(roll)
    now = 0.0
    while now < TURN_S:
        for peer in (FIRST, C, D):
            roll.heard(peer, says(0 if peer == FIRST else 1), now)
        assert machine.participants(now, free=True) is None
        now += TICK_S
    roll.heard(FIRST, says(0), now)
    stages = machine.participants(now, free=True)
    assert stages == [sorted([FIRST, SECOND]), sorted([C, D])]
    machine.propose(plan_of(stages), now)
    assert machine.begins(SECOND, [SECOND], now) == [FIRST] and machine.leads(now)
    assert in_order(SWARM, [A, B]) == [FIRST, SECOND]


def test_one_alone_that_says_to_be_in_a_step_holds_nobody_up() -> None:
    for window, others, expected in ((b"w" * 32, {}, SECOND), (b"w" * 32, {C}, FIRST)):
        roll = everybody(SECOND)
        machine, now = Coordinator(roll), 0.0
        while now <= TURN_S + TICK_S:
            for peer in (FIRST, C, D):
                stage = 0 if peer == FIRST else 1
                roll.heard(peer, says(stage, window=window if peer == FIRST or peer in others else b""), now)
            machine.participants(now, free=False)
            now += TICK_S
        assert (SECOND if machine.leads(now) else FIRST) == expected
