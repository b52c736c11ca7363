"""Pairs that do not reach each other: who remembers them, who owns parts then, and that proposers who do not hear everybody hand on their turn."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.alone import (
    FOLLOWER,
    HEAD,
    IDS,
    INSIDE,
    LEADER,
    NEXT,
    PARENT,
    PLAN_ID,
    THIRD,
    but,
    commit,
    member,
    of,
    plan,
    turn,
)
from tests.protocol.bus import beat, certify, follow, ready

from farflung.protocol import messages
from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import ASK_AFTER, SUSPECT_AFTER, VERDICT_AFTER
from farflung.protocol.messages import Part, Plan, Promise
from farflung.protocol.patience import PASSES, why_next_ballot
from farflung.protocol.reach import FIRST_ROUNDS, MOST_ROUNDS, Lacking, roles

A, B, C, D = (bytes([i]) * 32 for i in range(4))

# ---- who remembers what -----------------------------------------------------------------------------------------


def test_what_came_is_forgotten_and_what_did_not_is_remembered_for_longer_each_time() -> None:
    lacking = Lacking()
    view = (A, B, C, D)
    lacking.note([C, D], [B, A], 10)
    assert lacking.at(10, view) == lacking.at(9 + FIRST_ROUNDS, view) == (A, B)
    assert lacking.at(10 + FIRST_ROUNDS, view) == ()
    lacking.note([B, C], [A], 20)
    assert lacking.at(20, view) == lacking.at(19 + 2 * FIRST_ROUNDS, view) == (A,)
    assert lacking.at(20 + 2 * FIRST_ROUNDS, view) == ()
    for _ in range(10):
        lacking.note([B], [A], 100)
    assert lacking.at(99 + MOST_ROUNDS, view) == (A,) and lacking.at(100 + MOST_ROUNDS, view) == ()
    assert lacking.at(100, (B, C)) == () == lacking.at(100, view), "who is no member any more is forgotten"


def test_an_owner_that_lacks_most_says_nothing() -> None:
    lacking = Lacking()
    lacking.note([C], [A, B], 10)
    assert lacking.at(10, (A, B, C)) == ()


def test_an_owner_says_whose_contributions_did_not_come() -> None:
    one = member()
    parts = (Part(FOLLOWER, 0, 1), Part(LEADER, 1, plan().parts[0].stop))
    ours = plan(parts=tuple(sorted(parts, key=lambda p: p.start)))
    one.set_ready(ready(), 0.1)
    one.attendance.join(PLAN_ID, ours, LEADER, 0.2)
    part = one.attendance.part
    assert part is not None and part.lacked() == (frozenset(), frozenset(IDS))
    for peer in IDS:
        if peer != THIRD:
            part.arrived(0, peer)
    assert part.lacked() == (frozenset(IDS) - {THIRD}, {THIRD})
    one.attendance.conclude(commit(samples=4))  # of another plan: that says nothing
    one.attendance.offer(ready(), HEAD, 1.0)
    assert one.attendance.ready is not None and one.attendance.ready.lacks == ()


def test_with_what_a_member_offers_next_it_says_whom_it_lacked() -> None:
    one = member(me=IDS[0])  # who owns the only part of the plan
    one.set_ready(ready(), 0.1)
    one.attendance.join(PLAN_ID, plan(), LEADER, 0.2)
    for peer in IDS[:-1]:
        one.contribution_arrived(PLAN_ID, 0, peer, 0.3)
    some = commit(samples=4).round
    assert some is not None
    after = follow(HEAD, IDS, result=but(some, plan=PLAN_ID))
    one.receive(LEADER, messages.Committed(certify(after, INSIDE)), 1.0)
    one.set_ready(ready(), 2.0)
    assert one.attendance.ready is not None and one.attendance.ready.lacks == (IDS[-1],)


# ---- who owns parts ---------------------------------------------------------------------------------------------


def test_two_who_lack_each_other_contribute_and_own_nothing() -> None:
    lacks = {A: (B,), B: (A,), C: (), D: ()}
    assert roles(lacks, dict.fromkeys(lacks, 1)) == ([A, B, C, D], [C, D])


def test_one_who_is_lacked_by_others_and_lacks_nobody_is_just_slow() -> None:
    lacks = {A: (), B: (A,), C: (A,), D: ()}
    assert roles(lacks, dict.fromkeys(lacks, 1)) == ([A, B, C, D], [A, B, C, D])


def test_where_nobody_reaches_everybody_those_count_who_bring_most() -> None:
    lacks = {A: (B,), B: (A,), C: (D,), D: (C,)}
    assert roles(lacks, {A: 1, B: 1, C: 1, D: 2}) == ([A, B, D], [D])
    assert roles(lacks, {A: 1, B: 1, C: 3, D: 2}) == ([B, C, D], [B])


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)))))
)
def test_every_contributor_reaches_every_owner(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    num, said = drawn
    peers = [bytes([i]) * 32 for i in range(num)]
    lacks: dict[PeerId, tuple[PeerId, ...]] = {
        p: tuple(q for j, q in enumerate(peers) if (i, j) in said) for i, p in enumerate(peers)
    }
    contributors, owners = roles(lacks, {p: 1 + i for i, p in enumerate(peers)})
    assert owners and set(owners) <= set(contributors) <= set(peers)
    assert contributors == sorted(contributors) and owners == sorted(owners)
    pairs = {(p, q) for p in peers for q in lacks[p] if p in lacks[q]}
    pairs = {(p, q) for p, q in pairs if p != q}  # what somebody says of itself is nothing
    assert not any((p, q) in pairs for p in contributors for q in owners)
    if any(all((p, q) not in pairs for q in peers) for p in peers):
        assert contributors == peers


def planned(lacks: dict[PeerId, tuple[PeerId, ...]], *, last: bool = False) -> Plan:
    """What the leader plans when all are ready and say whom they lack."""
    leader = member(me=LEADER)
    if last:
        leader.settings = leader.consensus.settings = replace(
            leader.settings, rules=replace(leader.settings.rules, total_steps=HEAD.steps + HEAD.lap)
        )
    found: list[Effect] = []
    for peer in IDS:
        offers = Promise(NEXT, 0, PARENT, None, ready(lacks=lacks.get(peer, ())))
        found += leader.receive(peer, offers, 0.3)
    return next(s.message for s in of(found, Send) if isinstance(s.message, Plan))


def test_a_plan_goes_around_a_pair_and_says_so() -> None:
    first, second = (p for p in IDS if p not in (LEADER, THIRD))
    around = planned({first: (second,), second: (first,)})
    assert [c.peer for c in around.contributors] == IDS
    assert {part.owner for part in around.parts} == {LEADER, THIRD}
    assert "do not reach each other" in around.reason
    assert {part.owner for part in planned({first: (second,)}).parts} == set(IDS)


@pytest.mark.parametrize("last", [False, True])
def test_nobody_is_left_out_of_the_last_round(last: bool) -> None:
    """Where nobody reaches everybody: what is not in it is lost."""
    first, second, third, fourth = IDS
    apart = planned({first: (second,), second: (first,), third: (fourth,), fourth: (third,)}, last=last)
    assert len(apart.contributors) == (4 if last else 3)


# ---- who leads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heard_by_others", [True, False])
def test_a_proposer_that_does_not_hear_whom_others_hear_hands_on_its_turn(heard_by_others: bool) -> None:
    leader = member(me=LEADER)
    leader.set_ready(ready(), 0.1)
    every_s = leader.membership.every_s(THIRD)
    reasons, now = [], 0.0
    while now < (SUSPECT_AFTER + ASK_AFTER + VERDICT_AFTER) * every_s:
        now += 0.25
        notes = of(leader.tick(now), Note)
        for peer in IDS:
            if peer not in (LEADER, THIRD):
                leader.receive(peer, beat(height=HEAD.height, version=HEAD.version, digest=leader.standing.digest), now)
                if heard_by_others and peer in (leader.membership.peers[THIRD].asked or ()):
                    leader.receive(peer, messages.Opinion(THIRD, 0.1), now)
        reasons += [n.fields["reason"] for n in notes if n.event == "ballot"]
    assert bool(reasons) == heard_by_others
    if heard_by_others:
        assert "we do not: lets another lead" in reasons[0] and leader.consensus.proposer_now() not in (LEADER, THIRD)
        leader.receive(THIRD, beat(), now)
        assert not leader.membership.unheard(THIRD)


def test_turns_are_handed_on_three_times_in_a_row_at_most() -> None:
    """Perhaps nobody hears everybody."""
    for ballot in range(PASSES + 2):
        leader = member(me=turn(ballot), vote=(NEXT, ballot, None))
        assert leader.consensus.ballot == ballot and leader.consensus.proposer_now() == leader.me
        other = next(p for p in IDS if p != leader.me)
        leader.membership.peers[other].witnessed_at = 1e3
        assert leader.membership.unheard(other)
        assert (why_next_ballot(leader.consensus, 0.5) is not None) == (ballot < PASSES)
