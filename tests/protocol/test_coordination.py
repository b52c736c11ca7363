"""Who plans the steps of a pipeline, with whom, and when a step begins: in the machines' own time."""

import msgspec
import pytest
from tests.protocol.pipeline_says import FIRST, FOUNDER, SECOND, SWARM, A, B, C, D, everybody, plan_of, roll_of, says

from farflung.protocol.appointment import appoint
from farflung.protocol.coordination import ANSWER_S, ASIDE_S, PAUSE_S, RESEND_S, STRAGGLER_S, Coordinator
from farflung.protocol.errors import BadSignature
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import Life
from farflung.protocol.pipeline_messages import StepAnswer, StepGo
from farflung.protocol.roll import SILENT_AFTER, Roll

# ---- the roll ------------------------------------------------------------------------------------------------------


def test_silence_and_broken_streams() -> None:
    roll = roll_of(A, B=says(0), C=says(1))
    late = SILENT_AFTER * 2.0
    assert roll.training(0, late) == [B] and roll.training(0, late + 0.1) == []
    roll.heard(C, says(1), late)
    roll.lose(C)
    assert roll.serving(1, late) == []
    roll.heard(C, says(1, trains=False), late)
    assert roll.serving(1, late) == [C] and roll.training(1, late) == []
    roll.tick(1e4)
    assert roll.known == []


def test_newcomers_count_for_the_stage_that_they_want() -> None:
    roll = roll_of(A, C=says(1), D=says(-1, wants=1))
    assert roll.counts(0.0, mine=0) == (1, 2)
    roll.heard(B, says(-1), 0.0)
    assert roll.counts(0.0, mine=0) == (1, 2)


def test_only_genuine_appointments_are_remembered_and_the_first_stays() -> None:
    roll = roll_of(A)
    genuine = appoint(FOUNDER, SWARM, 1, C)
    roll.heard(C, says(1, appointments=(genuine,)), 0.0)
    for forged in (appoint(Ed25519Signer(b"x" * 32), SWARM, 1, D), appoint(FOUNDER, SWARM, 2, D)):
        with pytest.raises(BadSignature):
            roll.heard(D, says(1, appointments=(forged,)), 0.0)
    assert roll.known == [C]  # bad input changes nothing
    roll.heard(D, says(1, appointments=(appoint(FOUNDER, SWARM, 1, D),)), 0.0)
    assert (roll.life(0), roll.life(1)) == (Life(0, 0, FOUNDER.peer_id), Life(1, 0, C))


def test_a_state_is_what_most_of_a_stage_announce() -> None:
    roll = roll_of(A, B=says(0, version=3, digest=b"b" * 32), C=says(1), D=says(1, version=2, digest=b"d" * 32))
    assert roll.holders(1, 0.0) == (2, b"d" * 32, [D])
    roll.heard(C, says(1, version=3, digest=b"c" * 32), 0.0)
    assert roll.holders(1, 0.0) == (3, b"c" * 32, [C])  # as many, and newer
    roll.heard(A, says(1, version=2, digest=b"d" * 32), 0.0)
    assert roll.holders(1, 0.0) == (2, b"d" * 32, [A, D])
    assert roll_of(A, C=says(1)).holders(1, 0.0) is None


# ---- who plans, and with whom --------------------------------------------------------------------------------------


def test_the_first_living_data_node_plans() -> None:
    first, second = Coordinator(everybody(FIRST)), Coordinator(everybody(SECOND))
    assert first.participants(0.0, free=True) == [sorted([A, B]), [C, D]]
    assert second.participants(0.0, free=True) is None
    second.roll.lose(FIRST)
    assert second.participants(0.0, free=True) == [[SECOND], [C, D]]


def test_nothing_is_planned_without_a_stage_or_without_ourselves() -> None:
    one = Coordinator(everybody(FIRST, C=says(1, free=False), D=says(1, free=False)))
    assert one.participants(0.0, free=True) is None and one.reason == "stage 1 has 2 peers, none of them free"
    one.roll.lose(C)
    one.roll.lose(D)
    assert one.participants(0.0, free=True) is None and one.reason == "nobody serves stage 1"
    whole = Coordinator(everybody(FIRST))
    assert whole.participants(0.0, free=False) is None


def test_a_busy_peer_is_waited_for_but_not_for_ever() -> None:
    one = Coordinator(everybody(FIRST, D=says(1, free=False)))
    assert one.participants(0.0, free=True) is None and one.reason == "waits for 1 busy peers"
    for peer, stage in ((SECOND, 0), (C, 1)):
        one.roll.heard(peer, says(stage), STRAGGLER_S)
    one.roll.heard(D, says(1, free=False), STRAGGLER_S)
    assert one.participants(STRAGGLER_S - 0.1, free=True) is None
    assert one.participants(STRAGGLER_S, free=True) == [sorted([A, B]), [C]]
    now = 2 * STRAGGLER_S  # after that step it is busy still
    assert one.participants(now, free=False) is None
    for peer, stage in ((SECOND, 0), (C, 1)):
        one.roll.heard(peer, says(stage), now)
    one.roll.heard(D, says(1, free=False), now)
    assert one.participants(now, free=True) == [sorted([A, B]), [C]], "it is not waited for in every step"
    one.roll.heard(D, says(1), now + 1.0)
    assert one.participants(now + 1.0, free=True) == [sorted([A, B]), sorted([C, D])]
    one.roll.heard(D, says(1, free=False), now + 2.0)
    assert one.participants(now + 2.0, free=False) is None
    assert one.participants(now + 3.0, free=True) == [sorted([A, B]), [C]], (
        "it may say that it is free when it tries again"
    )
    assert not one.begins(FIRST, [A, B, C, D], now + 4.0)
    assert one.participants(now + 5.0, free=True) is None and one.reason == "waits for 1 busy peers"


# ---- from a plan to a step -----------------------------------------------------------------------------------------


def test_a_step_begins_when_all_are_ready() -> None:
    one = Coordinator(everybody(FIRST))
    plan = plan_of([[FIRST], [C, D]])
    assert one.propose(plan, 0.0) == [(FIRST, plan), (C, plan), (D, plan)]
    assert one.participants(0.0, free=True) is None  # one at a time
    ready = StepAnswer(plan.window, True, "ready")
    assert one.answered(FIRST, ready, 0.1) == one.answered(C, ready, 0.1) == []
    assert one.answered(SECOND, ready, 0.1) == []  # who was not asked
    assert one.tick(RESEND_S) == [(D, plan)]  # it may not have heard
    go = StepGo(plan.window, True, "all are ready")
    assert one.answered(D, ready, 2.0) == [(peer, go) for peer in (FIRST, C, D)]
    assert one.answered(D, ready, 2.1) == []
    assert one.tick(2.0 + RESEND_S) == [(peer, go) for peer in (FIRST, C, D)]
    one.over(bytes(32))
    assert one.attempt is not None
    one.over(plan.window)
    assert one.attempt is None


def test_a_plan_that_is_refused_is_void_and_the_next_is_without_whoever_refused() -> None:
    one = Coordinator(everybody(FIRST))
    plan = plan_of([[FIRST], [C, D]])
    one.propose(plan, 0.0)
    posts = one.answered(D, StepAnswer(plan.window, False, "busy"), 0.5)
    assert {to for to, _ in posts} == {FIRST, C, D} and all(not message.go for _, message in posts)  # type: ignore[union-attr]
    assert "refuses: busy" in one.reason
    assert one.participants(0.5 + PAUSE_S / 2, free=True) is None
    assert one.participants(0.5 + PAUSE_S, free=True) == [sorted([A, B]), [C]], "nobody waits for it"
    one.roll.heard(D, says(1, free=False), 0.6 + PAUSE_S)
    assert one.participants(0.6 + PAUSE_S, free=True) is None and "waits for 1 busy peers" in one.reason
    one.roll.heard(D, says(1), 0.7 + PAUSE_S)
    assert one.participants(0.7 + PAUSE_S, free=True) == [sorted([A, B]), [C, D]], "it is free, it says"


def test_what_nobody_else_knows_of_is_not_planned_again_once_it_was_refused() -> None:
    third = b"t" * 32
    one = Coordinator(everybody(FIRST))
    one.roll.own_step = (0, 98)
    for peer, stage in ((SECOND, 0), (third, 0), (C, 1), (D, 1)):
        one.roll.heard(peer, says(stage, step=92), 0.0)
    assert one.number(0.0) == 98, "they may have been in the last step as well, and not have said so yet"
    plan = msgspec.structs.replace(plan_of([[FIRST], [C, D]]), step=98)
    one.propose(plan, 0.0)
    one.answered(D, StepAnswer(plan.window, False, "nobody else is so far"), 0.5)
    assert one.number(0.5) == 92
    one.roll.heard(D, says(1, step=97), 1.0)
    assert one.number(1.0) == 97, "no more is given up than has to be"
    one.roll.heard(D, says(1, step=99), 2.0)
    assert one.number(2.0) == 98
    one.roll.own_step = (0, 99)
    assert one.number(2.0) == 99


def test_whoever_plans_and_cannot_take_part_tells_the_others_at_once() -> None:
    one = Coordinator(everybody(FIRST))
    plan = plan_of([[FIRST], [C, D]])
    one.propose(plan, 0.0)
    one.over(plan.window, began=False)
    posts = one.answered(FIRST, StepAnswer(plan.window, False, "the data cannot be read"), 0.1)
    assert {to for to, _ in posts} == {FIRST, C, D} and not any(message.go for _, message in posts)  # type: ignore[union-attr]
    assert one.attempt is None and "the data cannot be read" in one.reason
    one.propose(plan, 1.0)
    for peer in plan.peers:
        one.answered(peer, StepAnswer(plan.window, True, "ready"), 1.1)
    one.over(plan.window, began=False)
    assert one.attempt is None, "the word was given: there is nothing to take back"


def test_who_refuses_again_and_again_is_left_out_for_longer() -> None:
    one = Coordinator(everybody(FIRST))
    plan = plan_of([[FIRST], [C, D]])

    def refuse(at: float) -> None:
        one.propose(plan, at)
        one.answered(D, StepAnswer(plan.window, False, "busy"), at)

    def planned(at: float) -> bool:
        for peer, stage in ((SECOND, 0), (C, 1), (D, 1)):
            one.roll.heard(peer, says(stage), at)
        return one.participants(at, free=True) == [sorted([A, B]), [C, D]]

    refuse(0.0)
    assert planned(PAUSE_S)
    refuse(2.0)
    assert not planned(2.0 + PAUSE_S) and not planned(1.9 + ASIDE_S) and planned(2.0 + ASIDE_S)
    one.propose(plan, 13.0)
    one.answered(D, StepAnswer(plan.window, True, "ready"), 13.0)
    one.attempt = None
    refuse(14.0)
    assert planned(14.0 + PAUSE_S), "it has been ready meanwhile"


def test_whoever_does_not_answer_is_lost_until_it_is_heard() -> None:
    one = Coordinator(everybody(FIRST))
    plan = plan_of([[FIRST], [C, D]])
    one.propose(plan, 0.0)
    for peer in (FIRST, C):
        one.answered(peer, StepAnswer(plan.window, True, "ready"), 0.1)
    posts = one.tick(ANSWER_S)
    assert posts and one.attempt is None and "1 of 3 peers did not answer" in one.reason
    assert one.participants(ANSWER_S + PAUSE_S, free=True) == [sorted([A, B]), [C]]


def test_routes_go_around_stages_that_are_gone_as_far_as_they_may() -> None:
    roll = Roll(SWARM, FOUNDER.peer_id, A, stages=3, heartbeat_s=2.0)
    roll.heard(C, says(1), 0.0)
    roll.renew([Life(2, 1, D)], 0.0)
    assert Coordinator(roll).participants(0.0, free=True) is None
    assert Coordinator(roll, may_miss=1).participants(0.0, free=True) == [[A], [C], []]
    roll.heard(D, says(2, life=1, free=False), 0.0)
    assert Coordinator(roll, may_miss=1).participants(0.0, free=True) is None  # it is there, and busy
    roll.heard(D, says(2, life=0), 0.0)
    assert Coordinator(roll, may_miss=1).participants(0.0, free=True) == [[A], [C], []]  # of an old life


def test_a_data_node_that_hears_too_few_stages_plans_no_step() -> None:
    roll = Roll(SWARM, A, A, stages=5, heartbeat_s=2.0)
    for number, peer in enumerate((B, C, D), start=1):
        roll.heard(peer, says(number, apart=number > 1), 0.0)
    machine = Coordinator(roll, may_miss=1)
    roll.heard(b"e" * 32, says(4, apart=True), 0.0)
    assert machine.participants(0.0, free=True) is None and machine.reason.startswith("hears stage 1 only")
    roll.heard(C, says(2), 0.0)
    assert machine.participants(0.0, free=True) is not None
