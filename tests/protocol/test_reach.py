"""Pairs that do not reach each other: who remembers them, who owns parts then, and what takes a detour."""

from collections.abc import Sequence
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
)
from tests.protocol.bus import LATENCY_S, Bus, beat, certify, follow, ready, settled, snapshot

from farflung.protocol import messages, reach
from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.errors import Refused
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, short
from farflung.protocol.limits import MAX_GROUP_PEERS, MAX_TEXT
from farflung.protocol.member import Member
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Committed, Forward, Heartbeat, Part, Plan, Promise
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
    one.attendance.offer(ready(), HEAD, [], 1.0)
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
    one.receive(LEADER, Committed(certify(after, INSIDE)), 1.0)
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
        found += leader._settle(leader._receive(peer, offers, 0.3), 0.3)  # its own as well
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


# ---- what takes a detour ----------------------------------------------------------------------------------------


def unhearing(peer: PeerId, others: Sequence[PeerId]) -> Member:
    """A member that hears some at 10 s, and one only by their word."""
    one = member()
    one.tick(9.0)  # has heard from nobody for long
    for other in others:
        one.receive(other, beat(), 10.0)
    one.receive(peer, beat(), 10.0, via=others[0])
    assert one.membership.unheard(peer) and not one.membership.direct(peer)
    return one


def test_what_is_for_a_member_that_only_others_hear_goes_by_way_of_one_who_does() -> None:
    one = unhearing(LEADER, [THIRD])
    [offer] = of(one.set_ready(ready(), 10.1), Send)
    assert (offer.to, offer.via) == (LEADER, THIRD)
    assert isinstance(offer.message, Promise) and offer.message.ready is not None
    assert offer.message.ready.lacks == (LEADER,), "whoever reduces need not wait for its contribution"
    greetings = [s for s in of(one.tick(11.5), Send) if isinstance(s.message, Heartbeat)]
    assert [s.via for s in greetings if s.to == LEADER][:2] == [None, THIRD], "there may be a way again"
    assert {s.via for s in greetings if s.to == THIRD} == {None}
    assert {s.message.deaf_to for s in greetings if isinstance(s.message, Heartbeat)} == {(LEADER,)}
    one.receive(LEADER, beat(), 11.6)
    assert one.membership.way_to(LEADER) is None
    assert [s.via for s in of(one.leave("asked to"), Send) if s.to == LEADER] == [None]


def test_who_does_not_hear_us_is_spoken_to_by_way_of_others_whom_it_hears() -> None:
    others = [p for p in IDS if p not in (LEADER, member().me)]
    one = unhearing(LEADER, others)
    one.receive(LEADER, beat(deaf_to=(one.me, others[0])), 10.1)
    assert one.membership.direct(LEADER), "we hear it"
    assert {one.membership.way_to(LEADER) for _ in range(32)} == set(others[1:])
    one.receive(LEADER, beat(), 10.2)
    assert one.membership.way_to(LEADER) is None


def test_where_nobody_is_heard_nothing_takes_a_detour() -> None:
    one = unhearing(LEADER, [THIRD])
    one.tick(20.0)
    assert one.membership.way_to(LEADER) is None


def test_what_somebody_passes_on_tells_that_its_author_lives_and_not_that_we_hear_it() -> None:
    one = unhearing(LEADER, [THIRD])
    told = one.receive(LEADER, beat(tokens_per_s=7.0), 11.0, via=THIRD)
    assert [n.event for n in of(told, Note)] == []
    heartbeat = one.membership.heartbeat(LEADER)
    assert heartbeat is not None and heartbeat.tokens_per_s == 7.0
    assert one.membership.peers[LEADER].witnessed_at == 11.0 and one.membership.peers[LEADER].heard_at == 0.0
    for now in range(11, 60):
        one.receive(THIRD, beat(), now)
        one.receive(LEADER, beat(), now, via=THIRD)
        one.unreachable(LEADER, "no stream", now + 0.2)
        assert not [n for n in of(one.tick(now + 0.5), Note) if n.fields.get("of") == LEADER.hex()]


def test_a_greeting_by_way_of_another_is_no_news_of_whom_we_hear() -> None:
    one = member()
    before = snapshot(one.membership)
    assert one.receive(LEADER, beat(tokens_per_s=7.0), 0.1, via=THIRD) == []
    assert snapshot(one.membership) == before


def test_a_member_passes_on_to_who_hears_it() -> None:
    one = unhearing(LEADER, [THIRD])
    sealed = bytes(SIGNATURE_BYTES + 1)
    assert one.passes_on(Forward(LEADER, sealed)), "perhaps"
    one.receive(LEADER, beat(deaf_to=(one.me,)), 10.0, via=THIRD)
    assert not one.passes_on(Forward(LEADER, sealed)), "it does not reach it"
    assert not one.passes_on(Forward(one.me, sealed))
    assert not one.passes_on(Forward(bytes(32), sealed)), "nobody known"
    one.receive(LEADER, beat(), 10.2)
    assert one.passes_on(Forward(LEADER, sealed))


def test_passing_on_is_for_who_is_in_and_goes_no_further() -> None:
    one = member()
    sealed = bytes(SIGNATURE_BYTES + 1)
    with pytest.raises(Refused, match="before being admitted"):
        one.receive(bytes([7]) * 32, Forward(LEADER, sealed), 0.1)
    with pytest.raises(Refused, match="for itself") as refused:
        one.receive(THIRD, Forward(LEADER, sealed), 0.1, via=LEADER)
    assert refused.value.peer == LEADER


def test_ways_do_not_keep_step_with_what_is_sent_to_others() -> None:
    """Two that are deaf to us, and two between: with turns each would always be spoken to by way of the same one, which may pass on nothing."""
    me = bytes([9]) * 32
    of_us = Membership(me, heartbeat_s=1.0)
    for peer, deaf_to in ((A, ()), (B, ()), (C, (me,)), (D, (me,))):
        of_us.heard(peer, 10.0, beat(deaf_to=deaf_to))
    ways = [(of_us.way_to(C), of_us.way_to(D)) for _ in range(16)]
    assert {way for way, _ in ways} == {way for _, way in ways} == {A, B}


def test_who_leaves_is_asked_only_where_nobody_else_can_be() -> None:
    others = [p for p in IDS if p not in (LEADER, member().me)]
    one = unhearing(LEADER, others)
    one.receive(others[0], messages.Goodbye("asked to"), 10.1)
    assert {one.membership.way_to(LEADER) for _ in range(16)} == set(others[1:] or others)


@pytest.mark.parametrize("message", [beat(), messages.Goodbye("asked to")])
def test_what_we_have_said_ourselves_is_refused(message: messages.Message) -> None:
    one = member()
    with pytest.raises(Refused, match="in our own name") as refused:
        one.receive(one.me, message, 0.1, via=THIRD)
    assert refused.value.peer == THIRD


@pytest.mark.parametrize(
    "lost", [{(0, 1), (1, 0)}, {(0, 1)}, {(0, 1), (1, 0), (2, 3), (3, 2)}, {(0, 1), (2, 3), (1, 2)}]
)
def test_who_does_not_reach_somebody_takes_part_in_what_all_decide(lost: set[tuple[int, int]]) -> None:
    """Both ways, or one of them."""
    bus = settled(Bus(4))
    bus.policy = lambda letter: () if (letter.carrier, letter.receiver) in lost else (LATENCY_S,)
    bus.run(15.0)
    top = max(bus.commits)
    assert bus.reach(top + 6)
    for height in range(top + 1, top + 7):
        assert len(bus.commits[height].view) == 4 and bus.commits[height].round is not None
    assert not bus.refused


def test_it_can_be_told_in_a_plan_whoever_is_apart() -> None:
    peers = [bytes([number]) * 32 for number in range(MAX_GROUP_PEERS)]
    said = reach.told(peers, peers[:20], peers[:10])
    assert said.startswith(short(peers[10])) and said.endswith("and 40 more") and len(said) < MAX_TEXT
