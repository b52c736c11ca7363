"""Lives of stages: what commits may say of them, who believes what, and when a stage is lost."""

from dataclasses import replace

import msgspec
import pytest
from tests.protocol.pipeline_says import LATE, SWARM, A, B, C, D, hear, of_three, roll_of, says

from farflung.protocol import chain
from farflung.protocol.accord import Word
from farflung.protocol.appointment import Appointment
from farflung.protocol.chain import Commit, Rules
from farflung.protocol.errors import Refused
from farflung.protocol.lap import Laps
from farflung.protocol.ledger import Ledger
from farflung.protocol.limits import MAX_LIVES_AHEAD
from farflung.protocol.lives import (
    GONE_AFTER,
    HOME_GONE_AFTER,
    HOME_LOST_AFTER,
    LOST_AFTER,
    QUIET_AFTER,
    STARTING_S,
    Counters,
    Life,
    group_of,
    renewed,
)
from farflung.protocol.roll import SILENT_AFTER, Roll

RULES = Rules(
    ahead=4, lease=3, max_group=8, cuts=(0, 100), laps=Laps.fixed(2), total_steps=40, tokens_per_sample=1, stages=3
)
FIRST_LIFE = Life(1, 1, C, Counters(3, 6, 24))


def begun(parent: Commit, **begins: bytes) -> Commit:
    stages = {int(stage.removeprefix("stage")): founder for stage, founder in begins.items()}
    return chain.successor(SWARM, parent, RULES, view=parent.view, left=(), result=None, begins=stages)


# ---- in the chain of stage 0 ---------------------------------------------------------------------------------------


def test_a_commit_numbers_the_lives_that_it_begins() -> None:
    genesis = chain.genesis(A, RULES)
    first = begun(genesis, stage2=B)
    second = begun(first, stage1=C, stage2=D)
    assert first.lives == (Life(2, 1, B),) and second.lives == (Life(1, 1, C), Life(2, 2, D))
    assert begun(second).lives == second.lives  # they stay
    for parent, commit in ((genesis, first), (first, second)):
        chain.check_successor(SWARM, parent, commit, RULES, peer=A)


def test_a_life_counts_on_from_where_stage_0_was() -> None:
    parent = msgspec.structs.replace(chain.genesis(A, RULES), version=3, steps=6, tokens=24)
    [life] = begun(parent, stage1=C).lives
    assert life == FIRST_LIFE
    genesis = chain.genesis(C, replace(RULES, stages=1, since=life.since))
    assert (genesis.height, genesis.version, genesis.steps, genesis.tokens) == (0, 3, 6, 24)


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        ((Life(1, 2, C),), "lives of stages that do not follow"),
        ((Life(1, 0, C),), "lives of stages that do not follow"),
        ((Life(1, 1, C, Counters(1, 1, 1)),), "lives of stages that do not follow"),
        ((Life(2, 1, C), Life(1, 1, D)), "lives of stages that do not follow"),
        ((Life(0, 1, C),), "begins a stage anew that it may not"),
        ((Life(3, 1, C),), "begins a stage anew that it may not"),
    ],
)
def test_other_lives_are_refused(lives: tuple[Life, ...], reason: str) -> None:
    genesis = chain.genesis(A, RULES)
    commit = msgspec.structs.replace(begun(genesis), lives=lives)
    with pytest.raises(Refused, match=reason):
        chain.check_successor(SWARM, genesis, commit, RULES, peer=A)


def test_a_life_cannot_be_taken_back() -> None:
    first = begun(chain.genesis(A, RULES), stage1=C)
    for lives in ((), (Life(1, 1, D),)):
        with pytest.raises(Refused, match="do not follow"):
            chain.check_successor(SWARM, first, msgspec.structs.replace(begun(first), lives=lives), RULES, peer=A)


def test_the_chain_of_another_stage_acknowledges_and_calls() -> None:
    rules = replace(RULES, stages=1, accord=3)
    genesis = chain.genesis(B, rules)

    def after(parent: Commit, lives: tuple[Life, ...], call: Life | None) -> Commit:
        word = Word(0, lives, call)
        return chain.successor(SWARM, parent, rules, view=parent.view, left=(), result=None, word=word)

    called = after(genesis, (FIRST_LIFE,), Life(0, 1, D))
    chain.check_successor(SWARM, genesis, called, rules, peer=A)
    view_only = chain.successor(SWARM, called, rules, view=called.view, left=(), result=None)
    assert (view_only.lives, view_only.call) == (called.lives, called.call)  # they stay
    chain.check_successor(SWARM, called, view_only, rules, peer=A)
    for wrong in (after(called, (), called.call), after(called, called.lives, Life(0, 1, C)), after(called, (Life(2, 1, C),), called.call)):  # fmt: skip
        with pytest.raises(Refused):
            chain.check_successor(SWARM, called, wrong, rules, peer=A)
    with pytest.raises(Refused):  # where stages do not decide together nobody does either
        chain.check_successor(SWARM, genesis, called, replace(RULES, stages=1), peer=A)


def test_a_life_of_stage_0_begins_with_what_it_inherits() -> None:
    life = Life(0, 2, C, Counters(3, 6, 24, 100))
    rules = replace(RULES, inherits=True, since=life.since)
    inherited = chain.genesis(C, rules, lives=(life, FIRST_LIFE))
    assert inherited.ledger.cursor == 100 + rules.ahead * 2 and inherited.ledger.window(C)[0][0] == 100
    ours = chain.genesis(C, rules, lives=(life,), ledger=Ledger(cursor=80, free=((3, 5),)))
    assert ours.ledger.window(C)[0] == (3, 5)
    assert chain.is_genesis(inherited, C, rules) and chain.is_genesis(ours, C, rules)
    assert not chain.is_genesis(inherited, D, rules) and not chain.is_genesis(ours, C, replace(rules, inherits=False))
    assert begun(inherited, stage1=D).lives == (life, Life(1, 2, D, Counters(3, 6, 24)))


def test_lives_have_groups_of_their_own() -> None:
    all_lives = [Life(stage, number, founder) for stage in (1, 2) for number in (0, 1) for founder in (C, D)]
    assert len({group_of(SWARM, life) for life in all_lives}) == len(all_lives)
    assert group_of(SWARM, FIRST_LIFE) == group_of(SWARM, Life(1, 1, C))
    assert renewed((), {}, Counters()) == ()


# ---- who believes what ---------------------------------------------------------------------------------------------


def test_half_of_the_data_nodes_are_believed_and_others_are_not() -> None:
    roll = roll_of(D, A=says(0), B=says(0), C=says(1))
    roll.heard(C, says(1, lives=(FIRST_LIFE,)), 0.0)  # not a data node
    assert roll.number(1) == 0
    roll.heard(A, says(0, lives=(FIRST_LIFE,)), 0.0)
    assert roll.life(1) == FIRST_LIFE
    assert roll.serving(1, 0.0) == [] and roll.counts(0.0, mine=0) == (3, 0)  # C is of the life before
    roll.heard(C, says(1, life=1), 0.0)
    assert roll.serving(1, 0.0) == [C]
    roll.heard(A, says(0), 0.0)
    assert roll.number(1) == 1  # a number never goes back

    three = roll_of(D, A=says(0, lives=(FIRST_LIFE,)), B=says(0), C=says(0))
    assert three.number(1) == 1  # A was the only one at first
    late = roll_of(D, B=says(0), C=says(0), A=says(0, lives=(FIRST_LIFE,)))
    assert late.number(1) == 0


def test_a_data_node_believes_its_chain_alone() -> None:
    roll = roll_of(A)
    roll.by_chain = True
    roll.heard(B, says(0, lives=(FIRST_LIFE,)), 0.0)
    assert roll.number(1) == 0
    assert roll.renew([FIRST_LIFE], 0.0) == [FIRST_LIFE] and roll.renew([FIRST_LIFE], 1.0) == []


def test_an_impossible_life_changes_nothing() -> None:
    for life in (Life(0, 1, C), Life(2, 1, C), Life(1, 0, C)):
        for said in (says(0, lives=(life,)), says(-1, decided=(life,))):
            roll = roll_of(A)
            with pytest.raises(Refused, match="cannot have been begun"):
                roll.heard(B, said, 0.0)
            assert not roll.known


@pytest.mark.parametrize(
    ("lives", "wrong"),
    [
        ((Life(1, MAX_LIVES_AHEAD + 1, C),), "too high a number"),
        ((Life(2, 1, C), Life(1, 1, C)), "one of each stage"),
        ((Life(1, 1, C), Life(1, 1, C)), "one of each stage"),
    ],
)
def test_lives_that_a_chain_could_not_name_are_not_taken_up(lives: tuple[Life, ...], wrong: str) -> None:
    for said in (says(0, lives=lives), says(-1, decided=lives)):
        roll = Roll(SWARM, A, A, stages=3, heartbeat_s=2.0)
        with pytest.raises(Refused, match=wrong):
            roll.heard(B, said, 0.0)
        assert not roll.known


def test_what_stage_0_names_counts_when_anybody_knows_that_it_does() -> None:
    """Those who had a vote in it may say nothing any more. What nobody names does not count, whoever says so."""
    next_life = Life(1, 2, D)
    for named, decided, number in (((next_life,), (), 1), ((), (next_life,), 1), ((next_life,), (next_life,), 2)):
        roll = of_three(b"n" * 32)
        hear(roll, 1.0, A=says(0, lives=named), B=says(0, lives=named), C=says(-1, decided=decided))
        assert roll.number(1) == number
    assert roll.decided == (next_life, Life(2, 1, D))


# ---- what is lost --------------------------------------------------------------------------------------------------


def test_a_stage_is_lost_when_nobody_who_has_its_state_was_heard_for_long() -> None:
    roll = of_three()
    hear(roll, 1.0, C=says(1, life=1, digest=b"c" * 32), D=says(2, life=1, digest=b"d" * 32))
    assert roll.lost(1.0 + LATE - 0.2, held=0) == () and roll.lost(1.0 + LATE, held=0) == (1, 2)
    assert roll.lost(1.0 + LATE, held=2) == (1,)
    hear(roll, LATE, C=says(1, life=0, digest=b"c" * 32))  # an old life
    hear(roll, LATE, D=says(2, life=1, digest=b""))  # it downloads
    assert roll.lost(1.0 + LATE, held=0) == (1, 2)
    hear(roll, LATE, C=says(-1, wants=1))  # its founder wants the stage, but does not make it: it has lost that
    assert roll.lost(1.0 + LATE, held=0) == (1, 2)
    hear(roll, LATE, C=says(-1, life=1, wants=1))  # its founder is at it
    assert roll.lost(1.0 + LATE, held=0) == (2,)


GONE = GONE_AFTER * 2.0 + 0.1


def test_a_stage_whose_processes_have_ended_is_lost_sooner() -> None:
    roll = of_three()
    roll.by_chain = True
    holds_1, holds_2 = says(1, life=1, digest=b"c" * 32), says(2, life=1, digest=b"d" * 32)
    hear(roll, 1.0, B=holds_1, C=holds_1, D=holds_2)
    assert roll.quiet(1.0 + QUIET_AFTER * 2.0) == []
    assert roll.quiet(1.0 + QUIET_AFTER * 2.0 + 0.1) == [B, C, D]
    roll.entries[C].ended(1.0 + GONE)
    assert roll.lost(1.0 + GONE, held=0) == ()  # B may only be slow
    assert roll.quiet(1.0 + GONE) == [B, D] and not roll.alive(C, 1.0)
    roll.entries[B].ended(1.0 + GONE)
    assert roll.lost(1.0 + GONE - 0.2, held=0) == () and roll.lost(1.0 + GONE, held=0) == (1,)
    before = roll.entries[B]
    hear(roll, 1.0 + GONE, B=holds_1)  # it was started again
    before.ended(1.0 + GONE)  # and this is no news
    assert roll.lost(1.0 + GONE, held=0) == () and roll.alive(B, 1.0 + GONE)
    assert roll.lost(LATE + GONE + 1.0, held=0) == (1, 2)
    assert roll.quiet(LATE + GONE + 1.0) == []  # that they are silent is proof enough


ENDED_S = HOME_GONE_AFTER * 2.0
HOME = says(0, digest=b"a" * 32)


def home_is_lost(roll: Roll, now: float) -> bool:
    return 0 in roll.lost(now, held=1)


def test_stage_0_whose_processes_have_ended_is_lost_sooner() -> None:
    """All others look for that themselves; half a minute after the last was found ended, for a process that is started again comes back."""
    roll = of_three(C)
    hear(roll, 1.0, A=HOME, B=HOME, D=says(2, life=1, digest=b"d" * 32))
    assert roll.quiet(1.0 + QUIET_AFTER * 2.0 + 0.1) == [A, B]  # stage 2 is the data nodes' to look for
    roll.entries[A].ended(6.0)
    assert not home_is_lost(roll, 6.1 + ENDED_S) and roll.quiet(7.0) == [B] and roll.ended == (A,)
    roll.entries[B].ended(8.0)
    roll.entries[A].ended(9.0)  # found again
    assert not home_is_lost(roll, 8.0 + ENDED_S) and home_is_lost(roll, 8.1 + ENDED_S)
    hear(roll, 8.1 + ENDED_S, B=HOME)
    assert not home_is_lost(roll, 8.1 + ENDED_S) and roll.ended == (A,)


def test_a_data_nodes_machine_that_comes_back_says_first_that_nobody_listens() -> None:
    """Its node is waited for, but not for longer than without a word."""
    for at in (100.0, HOME_LOST_AFTER * 2.0 - 10.0):
        roll = of_three(C)
        hear(roll, 1.0, A=HOME)
        roll.entries[A].ended(at)
        lost = min(at + ENDED_S, 1.0 + HOME_LOST_AFTER * 2.0)
        assert not home_is_lost(roll, lost) and home_is_lost(roll, lost + 0.1)


@pytest.mark.parametrize(("told", "lost"), [("", False), ("D", True), ("E", False), ("EF", True), ("DEFGH", True)])
def test_that_a_data_node_has_ended_is_believed_of_half_of_the_peers_of_another_stage(told: str, lost: bool) -> None:
    """Only some are next to it, and have dialled it before."""
    roll = of_three(C)
    hear(roll, 1.0, A=HOME, B=HOME)
    roll.entries[B].ended(6.0)  # we have found one ourselves
    told_at = 10.0
    for name, stage in {"D": 1, "E": 2, "F": 2, "G": 2, "H": 2}.items():
        roll.heard(
            name.encode() * 32, says(stage, life=1, digest=b"d" * 32, ended=(A,) if name in told else ()), told_at
        )
    roll.tick(told_at)
    roll.tick(told_at + 1.0)
    assert not home_is_lost(roll, told_at + ENDED_S) and home_is_lost(roll, told_at + ENDED_S + 0.1) is lost
    assert roll.ended == (B,)  # what others tell is theirs to tell


def test_whoever_says_only_that_stage_0_is_silent_is_not_told_of_its_end() -> None:
    roll = of_three(C)
    hear(roll, 1.0, A=HOME)
    hear(roll, 10.0, B=says(1, life=1, lost=(0,)), D=says(2, life=1, lost=(0,)))
    roll.tick(10.0)
    assert not home_is_lost(roll, LATE + ENDED_S)


def test_a_data_node_that_is_heard_has_not_ended_whoever_says_so() -> None:
    roll = of_three(C)
    hear(roll, 1.0, A=HOME, D=says(2, life=1, ended=(A,)))
    for second in range(2, 60):
        hear(roll, float(second), A=HOME)
        roll.tick(float(second))
    assert not home_is_lost(roll, 59.0 + QUIET_AFTER * 2.0)


def test_whoever_waits_or_has_left_a_stage_is_not_looked_for() -> None:
    roll = of_three()
    roll.by_chain = True
    hear(roll, 1.0, C=says(1, life=1, digest=b"c" * 32))
    hear(roll, 2.0, C=says(-1), D=says(2, life=1))
    assert roll.quiet(1.0 + GONE) == [] and roll.lost(1.0 + GONE, held=0) == ()


def test_others_believe_that_a_stage_has_ended_where_half_of_the_data_nodes_say_so_and_they_hear_it_no_more() -> None:
    newcomer = b"n" * 32
    for told, lost in (((), ()), ((A,), (1,)), ((A, B), (1,))):
        roll = of_three(newcomer)
        hear(roll, 1.0, C=says(1, life=1, digest=b"c" * 32), D=says(2, life=1, digest=b"d" * 32))
        for home in (A, B):
            roll.heard(home, says(0, lost=(1,) if home in told else ()), 2.0)
        assert roll.lost(1.0 + GONE, held=2) == lost
        hear(roll, 1.0 + GONE, C=says(1, life=1, digest=b"c" * 32))
        assert roll.lost(1.0 + GONE, held=2) == ()
    third = b"t" * 32
    roll = of_three(newcomer)
    hear(roll, 1.0, C=says(1, life=1, digest=b"c" * 32))
    for home in (A, B, third):
        roll.heard(home, says(0, lost=(1,) if home == A else ()), 2.0)
    assert roll.lost(1.0 + GONE, held=2) == ()  # one of three


def test_a_data_node_takes_nobody_elses_word_that_a_stage_has_ended() -> None:
    roll = of_three()
    roll.by_chain = True
    hear(roll, 1.0, C=says(1, life=1, digest=b"c" * 32), B=says(0, lost=(1,)))
    assert roll.lost(1.0 + GONE, held=0) == ()


def test_a_stage_that_nobody_has_heard_yet_may_just_be_starting() -> None:
    roll = roll_of(A)
    roll.appointments[1] = Appointment(1, C, bytes(64))
    roll.tick(0.0)
    assert roll.lost(STARTING_S, held=0) == () and roll.lost(STARTING_S + 0.1, held=0) == (1,)
    roll.heard(B, says(0, lost=(1,)), LATE)  # it was here before us
    assert roll.lost(LATE - 0.2, held=0) == () and roll.lost(LATE, held=0) == (1,)


def test_the_only_data_node_was_started_again_and_half_of_the_others_know_that_a_stage_is_lost() -> None:
    """They went on meanwhile: it does not wait as if all of the swarm were starting."""
    roll = roll_of(A)
    roll.appointments[1] = Appointment(1, C, bytes(64))
    roll.tick(0.0)
    roll.heard(B, says(2, lost=(1,)), LATE)
    roll.heard(C, says(2), LATE)
    roll.heard(D, says(2), LATE)
    assert roll.lost(LATE, held=0) == ()  # one of three
    roll.heard(C, says(2, lost=(1,)), LATE)
    assert roll.lost(LATE - 0.2, held=0) == () and roll.lost(LATE, held=0) == (1,)


def test_the_swarm_runs_for_as_long_as_half_of_the_data_nodes_have() -> None:
    roll = roll_of(D)
    assert roll.swarm_s(0.0) == 0.0
    roll.heard(C, says(1, beat=1000), 0.0)  # not a data node
    roll.heard(A, says(0, beat=300), 0.0)
    roll.heard(A, says(0), 0.0)  # a word without a number takes nothing back
    assert roll.swarm_s(0.0) == 300 * roll.heartbeat_s
    roll.heard(B, says(0, beat=2), 0.0)
    assert roll.swarm_s(0.0) == 300 * roll.heartbeat_s
    roll.heard(C, says(0, beat=2), 0.0)
    assert roll.swarm_s(0.0) == 2 * roll.heartbeat_s
    assert roll.swarm_s(SILENT_AFTER * roll.heartbeat_s + 0.1) == 0.0


# ---- where stages decide together ----------------------------------------------------------------------------------


def test_stage_0_is_lost_later_than_others() -> None:
    roll = of_three(C)
    hear(roll, 1.0, A=says(0, digest=b"a" * 32), D=says(2, life=1, digest=b"d" * 32))
    later = 1.0 + HOME_LOST_AFTER * 2.0
    hear(roll, later, D=says(2, life=1, digest=b"d" * 32))
    assert roll.lost(later, held=1) == () and roll.lost(later + 0.1, held=1) == (0,)
    hear(roll, later, A=says(0, digest=b"a" * 32, lost=(0,)))  # it holds the state, and has no quorum
    assert roll.lost(later + 0.1, held=1) == (0,)
    assert roll_of(C, A=says(0, digest=b"a" * 32)).lost(later + 0.1, held=1) == ()  # of two stages it never is


def test_what_stage_0_names_counts_when_enough_have_acknowledged_it() -> None:
    life = Life(1, 2, D)
    roll = of_three(b"n" * 32)
    hear(roll, 1.0, A=says(0, lives=(life,)), D=says(2, life=1))
    assert roll.number(1) == 1
    hear(roll, 1.0, D=says(2, life=1, lives=(life,)))
    assert roll.life(1) == life


def test_lives_that_count_together_are_taken_up_in_the_order_of_their_stages() -> None:
    """Whatever their founders' keys: their hashes differ from process to process, and all that follows goes by this order."""
    for number in range(20):
        roll = Roll(SWARM, A, b"m" * 32, stages=4, heartbeat_s=2.0)
        lives = tuple(Life(stage, 1, bytes([10 * stage + number]) * 32) for stage in (1, 2))
        roll.heard(D, says(3, lives=lives), 0.0)
        roll.heard(A, says(0, lives=lives), 0.0)
        assert list(roll.renewed) == [1, 2]


def test_a_newcomer_knows_of_a_life_of_stage_0_by_those_who_call_or_have_acknowledged_it() -> None:
    call = Life(0, 1, b"n" * 32)
    for said in ({"call": call}, {"lives": (call,)}):
        roll = of_three(b"n" * 32)
        hear(roll, 1.0, C=says(1, life=1, **said))
        assert roll.number(0) == (0 if "call" in said else 1)
        hear(roll, 1.0, D=says(2, life=1, **said))
        assert roll.life(0) == call
        assert roll.inherits(call, 1.0) == ((call,) if "call" in said else None)
        assert roll.serving(0, 1.0) == []  # the old data nodes do not count


def test_who_serves_a_later_life_proves_it_where_no_data_node_is_heard() -> None:
    life = Life(1, 2, D)
    roll = of_three(b"n" * 32)
    hear(roll, 1.0, C=says(1, life=2, lives=(life,)))
    assert roll.life(1) == life and roll.words(1.0)[1] == Word(2, (life,))
    roll = of_three(b"n" * 32)
    hear(roll, 1.0, A=says(0), C=says(1, life=2, lives=(life,)))
    assert roll.number(1) == 1


def test_a_data_node_is_in_touch_with_enough_stages_that_have_a_quorum() -> None:
    roll = of_three()
    roll.speak(0, Word(0), 0.0)
    assert not roll.in_touch(0.0) and roll_of(A).in_touch(0.0)
    hear(roll, 1.0, C=says(1, life=1, apart=True))
    assert not roll.in_touch(1.0)
    hear(roll, 1.0, D=says(2, life=1))
    late = 1.0 + LOST_AFTER * 2.0
    assert roll.in_touch(late) and not roll.in_touch(late + 0.1)


def test_a_call_that_comes_to_nothing_is_overdue() -> None:
    roll = of_three()
    hear(roll, 1.0, C=says(1, life=1, call=Life(0, 1, D)))
    assert not roll.overdue(LATE) and roll.overdue(1.0 + LATE)
    hear(roll, 1.0 + LATE, C=says(1, life=1, call=Life(0, 2, D)))
    assert not roll.overdue(1.0 + LATE) and roll.unsettled(1.0 + LATE)
    hear(roll, 1.0 + LATE, D=says(2, life=1, call=Life(0, 2, D)))
    assert roll.number(0) == 2 and not roll.overdue(9 * LATE)


def test_what_stage_0_has_counted_half_of_its_peers_say_and_without_them_half_of_the_others() -> None:
    """A single peer that says more makes nobody skip what was not trained."""
    right, more = Counters(3, 6, 24, 24), Counters(1 << 40, 1 << 40, 1 << 40, 1 << 40)
    roll = Roll(SWARM, A, b"m" * 32, stages=3, heartbeat_s=2.0)
    hear(roll, 1.0, A=says(0, counted=right), C=says(1, counted=more), D=says(-1, counted=more))
    roll.tick(1.0)
    assert roll.hearsay.counted == right
    roll.forget(A)
    hear(roll, 2.0, B=says(1, counted=right), D=says(2, counted=right))
    roll.tick(2.0)
    assert roll.hearsay.counted == right
    newcomer = Roll(SWARM, A, b"m" * 32, stages=3, heartbeat_s=2.0)
    hear(newcomer, 2.0, B=says(1, counted=right), C=says(1, counted=more), D=says(2, counted=right))
    newcomer.tick(2.0)
    assert newcomer.hearsay.counted == right
    among = Roll(SWARM, A, b"m" * 32, stages=3, heartbeat_s=2.0)
    hear(among, 2.0, B=says(1, counted=right), C=says(1), D=says(2))  # who has heard of nothing has no say
    among.tick(2.0)
    assert among.hearsay.counted == right


def test_what_stage_0_has_counted_is_passed_on() -> None:
    roll = of_three()
    hear(roll, 1.0, C=says(1, life=1, counted=Counters(3, 12, 96, 40)))
    hear(roll, 2.0, D=says(2, life=1, counted=Counters(2, 12, 96, 90)))
    roll.tick(2.0)
    assert roll.hearsay.counted == Counters(3, 12, 96, 40)


def test_a_call_for_another_stage_is_refused() -> None:
    for stages, call in ((3, Life(1, 1, D)), (2, Life(0, 1, D))):
        roll = Roll(SWARM, A, A, stages=stages, heartbeat_s=2.0)
        with pytest.raises(Refused):
            roll.heard(C, says(1, call=call), 0.0)
        assert not roll.known


def test_a_stage_that_was_never_begun_is_not_lost() -> None:
    roll = roll_of(A)
    roll.tick(0.0)
    assert roll.lost(1e6, held=0) == () and not roll.deserted(1, 1e6)


def test_routes_do_not_wait_for_a_stage_that_is_gone() -> None:
    roll = roll_of(A, C=says(1, digest=b"c" * 32))
    roll.appointments[1] = Appointment(1, C, bytes(64))
    roll.heard(C, says(1, digest=b"c" * 32), 1.0)
    silent = 1.0 + SILENT_AFTER * 2.0
    assert not roll.deserted(1, silent) and roll.deserted(1, silent + 0.1)
    roll.heard(C, says(1, digest=b"c" * 32), silent)
    roll.renew([Life(1, 1, D)], silent)
    assert roll.deserted(1, silent)  # until the new life's founder serves it
    roll.heard(D, says(1, life=1), silent)
    assert not roll.deserted(1, silent)
