"""Groups of a swarm: a full one becomes two, and who is of another is no business of ours, but to meet."""

from collections import Counter
from dataclasses import replace
from hashlib import sha256

import msgspec
import pytest
from tests.protocol.alone import BY_ID, FOLLOWER, HEAD, IDS, INSIDE, LEADER, PAST, RULES, WHO, of, sends
from tests.protocol.bus import SWARM, beat, certify, new_member, signers, snapshot, state_digest

from farflung.protocol import chain, messages
from farflung.protocol.chain import Commit
from farflung.protocol.effects import Apply, Note, Send
from farflung.protocol.errors import Refused
from farflung.protocol.limits import MAX_DIVISIONS, MAX_NEIGHBOURS, MAX_OWN_WORDS
from farflung.protocol.member import Member
from farflung.protocol.messages import Heartbeat
from farflung.protocol.neighbours import Neighbours
from farflung.protocol.planning import Divide, Situation, StartRound, Wait, decide
from farflung.protocol.quorum import proposer
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.waiting import MEMBERS_WAIT

FULL = replace(RULES, rules=replace(RULES.rules, max_group=4, divides=True))
STRANGER = WHO[4].peer_id


def member(me: bytes) -> Member:
    """Of a full group, all of which it has heard."""
    made = new_member(BY_ID[me], FULL)
    made.membership.state = "training"
    made.begin(None, PAST, 0.0)
    made.applied(HEAD.height, HEAD.version, state_digest(HEAD.version), 0.0)
    for peer in IDS:
        if peer != me:
            made.receive(peer, said(HEAD), 0.0)
    return made


def said(commit: Commit, **changes: object) -> Heartbeat:
    """By somebody who is there."""
    values: dict[str, object] = dict(
        height=commit.height, version=commit.version, digest=state_digest(commit.version), group=commit.group
    )
    return beat(**{**values, **changes})


STAYS, GOES = (IDS[0], IDS[2]), (IDS[1], IDS[3])
SPLIT = chain.successor(SWARM, HEAD, FULL.rules, view=STAYS, left=(), result=None, goes=GOES)
OTHER = chain.turned(SWARM, SPLIT)
CERTIFIED = certify(SPLIT, INSIDE[:3])
TURNED = certify(OTHER, INSIDE[:3])


@pytest.mark.parametrize("told", [CERTIFIED, TURNED], ids=["as decided", "as those who go see it"])
@pytest.mark.parametrize("me", IDS)
def test_everybody_goes_on_in_its_own_half_whoever_tells_it(me: bytes, told: chain.Certified) -> None:
    one = member(me)
    effects = one.receive(IDS[0] if me != IDS[0] else IDS[1], messages.Committed(told), 1.0)
    mine, others = (STAYS, GOES) if me in STAYS else (GOES, STAYS)
    assert one.head.commit.view == mine and one.in_view
    assert one.group == (b"" if me in STAYS else OTHER.group)
    assert set(one.membership.peers) & set(others) == set() and set(one.neighbours.groups) == set(others)
    (note,) = (n for n in of(effects, Note) if n.event == "group.divided")
    assert note.fields["view"] == [p.hex() for p in mine] and note.fields["others"] == [p.hex() for p in others]
    assert {s.to for s in sends(one.tick(20.0), Heartbeat)} <= {*mine, STRANGER}


def test_of_those_who_wait_each_half_wins_its_share_each_time() -> None:
    again = msgspec.structs.replace(SPLIT, ledger=msgspec.structs.replace(SPLIT.ledger, shares=2 * SPLIT.ledger.shares))
    waiting = [sha256(bytes([i])).digest() for i in range(200)]
    sides = Counter((chain.goes(SPLIT, peer), chain.goes(again, peer)) for peer in waiting)
    assert len(sides) == 4 and min(sides.values()) > 30
    assert all(chain.goes(OTHER, peer) == chain.goes(SPLIT, peer) for peer in (*waiting, *IDS))
    assert [p for p in IDS if chain.goes(SPLIT, p)] == sorted(GOES) and not chain.goes(HEAD, IDS[0])


@pytest.mark.parametrize("told", [CERTIFIED, TURNED], ids=["as decided", "as those who go see it"])
@pytest.mark.parametrize("goes", [False, True])
def test_who_waits_for_a_place_follows_its_half_whoever_tells_it(goes: bool, told: chain.Certified) -> None:
    waits = next(s for s in signers(40) if s.peer_id not in IDS and chain.goes(SPLIT, s.peer_id) == goes)
    one = new_member(waits, FULL)
    one.begin(None, PAST, 0.0)
    one.receive(IDS[0], said(HEAD), 0.0)
    one.receive(IDS[0], messages.Committed(told), 1.0)
    mine, others = (GOES, STAYS) if goes else (STAYS, GOES)
    assert one.head.commit.view == mine and not one.in_view and one.group == (OTHER.group if goes else b"")
    assert set(one.neighbours.groups) == set(others)


@pytest.mark.parametrize("told", [CERTIFIED, TURNED], ids=["as decided", "as those who go see it"])
@pytest.mark.parametrize("me", IDS)
def test_who_comes_in_at_a_division_takes_its_own_half_whoever_tells_it(me: bytes, told: chain.Certified) -> None:
    one = new_member(BY_ID[me], FULL)
    donor = next(p for p in IDS if p != me and (p in STAYS) == (told is CERTIFIED))
    one.receive(donor, said(told.commit), 0.0)
    effects = one.receive(donor, messages.Commits(None, (*PAST, told)), 1.0)
    ours = SPLIT if me in STAYS else OTHER
    assert one.head.commit == ours and [a.certified.commit for a in of(effects, Apply)][-1] == ours
    others = GOES if me in STAYS else STAYS
    assert one.neighbours.groups == dict.fromkeys(others, OTHER.group if me in STAYS else b"")
    assert not set(one.membership.peers) & set(others)


def test_a_history_in_which_a_group_has_a_name_of_somebodys_own_is_refused() -> None:
    forged = msgspec.structs.replace(TURNED, commit=msgspec.structs.replace(OTHER, group=b"f" * 32))
    one = new_member(WHO[4], FULL)
    one.receive(IDS[1], said(forged.commit), 0.0)
    with pytest.raises(Refused, match="by a name that is not its own"):
        one.receive(IDS[1], messages.Commits(None, (*PAST, forged)), 1.0)
    assert not one.started


def test_who_is_of_another_group_is_not_greeted_counted_on_or_let_in() -> None:
    one = member(IDS[0])
    one.receive(IDS[2], messages.Committed(CERTIFIED), 1.0)
    for peer in (IDS[1], STRANGER):
        (told,) = one.receive(peer, said(OTHER), 2.0)
        assert isinstance(told, Send) and isinstance(told.message, Heartbeat), "it may take us for one of its own"
        assert told.to == peer and told.message.reply and one.receive(peer, said(OTHER, reply=True), 2.1) == []
        assert peer not in one.membership.peers and one.neighbours.groups[peer] == OTHER.group
    assert one.standing.joiners() == ()
    one.receive(STRANGER, said(OTHER, digest=b""), 3.0)
    assert STRANGER in one.membership.peers, "it has lost its state, and may come in anywhere"


def test_a_newcomer_that_has_chosen_a_group_parts_with_those_of_others() -> None:
    """Their state is not its own, nor are they to be greeted; whoever has none yet may still become one of us."""
    one = new_member(WHO[4], FULL)
    third = next(s.peer_id for s in signers(6) if s.peer_id not in (*IDS, STRANGER))
    for peer, words in ((IDS[1], said(OTHER)), (IDS[0], said(SPLIT)), (third, said(OTHER, digest=b""))):
        one.receive(peer, words, 0.0)
    one.receive(IDS[1], messages.Commits(None, (*PAST, TURNED)), 1.0)
    assert one.group == OTHER.group and set(one.membership.peers) == {*GOES, third}
    assert one.neighbours.groups == dict.fromkeys(STAYS, b"") and one.standing.donors() == [IDS[1]]


def test_a_member_that_has_not_heard_of_the_division_is_one_all_the_same() -> None:
    one = member(IDS[1])
    one.receive(IDS[0], messages.Committed(CERTIFIED), 1.0)
    late = one.receive(IDS[3], said(HEAD), 2.0)
    assert one.membership.alive(IDS[3]) and one.membership.heartbeat(IDS[3]) is not None
    assert not [e for e in late if isinstance(e, Note)]
    one.receive(IDS[3], said(SPLIT, height=SPLIT.height + 1), 3.0)
    assert one.membership.heartbeat(IDS[3]).height == HEAD.height, "it has gone over to the others, and is silent to us"  # type: ignore[union-attr]


def test_one_that_was_away_asks_whoever_is_ahead_of_it_in_another_group() -> None:
    one = member(IDS[1])
    asked = sends(one.receive(IDS[3], said(OTHER), 10.0), messages.GetCommits)
    assert [send.to for send in asked] == [IDS[3]]
    after = chain.successor(SWARM, OTHER, FULL.rules, view=GOES, left=(), result=None)
    answer = messages.Commits(HEAD, (TURNED, certify(after, [w for w in INSIDE if w.peer_id in GOES])))
    one.receive(IDS[3], answer, 10.5)
    assert one.head.commit == after and one.group == OTHER.group
    other = member(IDS[0])
    other.receive(IDS[3], answer, 10.5)
    assert other.head.commit == SPLIT, "what follows is not of its group"


def test_who_does_not_know_yet_that_it_is_of_another_group_may_ask_all_the_same() -> None:
    """For commits, and after others: it had shown its invitation, or was a member."""
    one = member(IDS[0])
    one.receive(IDS[2], messages.Committed(CERTIFIED), 1.0)
    one.receive(STRANGER, said(OTHER), 2.0)
    one.tick(3.0)
    unknown = next(s.peer_id for s in signers(6) if s.peer_id not in (*IDS, STRANGER))
    one.found({unknown: OTHER.group}, 3.0)
    for peer in (IDS[1], STRANGER):
        assert [s.to for s in sends(one.receive(peer, messages.GetCommits(0), 4.0), messages.Commits)] == [peer]
        assert [s.to for s in sends(one.receive(peer, messages.Probe(IDS[2]), 4.0), messages.Opinion)] == [peer]
        with pytest.raises(Refused, match="Committed before being admitted"):
            one.receive(peer, messages.Committed(CERTIFIED), 4.0)
    for question in (messages.GetCommits(0), messages.Probe(IDS[2])):
        with pytest.raises(Refused, match="before being admitted"):
            one.receive(unknown, question, 4.0)


def situation(**changes: object) -> Situation:
    values: dict[str, object] = dict(
        view=tuple(IDS), live=frozenset(IDS), holders=frozenset(IDS), left=frozenset(), gone=frozenset(), sure=frozenset(IDS), dead=frozenset(), readies={},
        awaited=frozenset(IDS), joiners=(STRANGER,), hold_s=0.0, min_contributors=1, max_group=4, divides=True,
        patience_left_s=5.0, finished=False,
    )  # fmt: skip
    return Situation(**{**values, **changes})  # type: ignore[arg-type]


def test_a_full_group_divides_when_somebody_waits() -> None:
    found = decide(situation())
    assert isinstance(found, Divide) and len(found.stays) == len(found.goes) == 2
    assert "all 4 places are taken" in found.reason
    for changes in (
        {"joiners": ()},
        {"divides": False},
        {"max_group": 5, "joiners": ()},
        {"min_contributors": 3},
        {"finished": True},
    ):
        assert isinstance(decide(situation(**changes)), Wait), changes


def test_a_group_that_comes_of_too_many_divisions_stays_one_and_goes_on() -> None:
    links, head = list(PAST), HEAD
    for _ in range(MAX_DIVISIONS):
        split = chain.successor(SWARM, head, FULL.rules, view=STAYS, left=(), result=None, goes=GOES)
        filled = chain.successor(SWARM, split, FULL.rules, view=tuple(IDS), left=(), result=None)
        links += [certify(split, INSIDE[:3]), certify(filled, [w for w in INSIDE if w.peer_id in STAYS])]
        head = filled
    leader = proposer(SWARM, head.view, head.height + 1, 0)
    one = new_member(BY_ID[leader], FULL)
    one.membership.state = "training"
    one.begin(None, links, 0.0)
    one.applied(head.height, head.version, state_digest(head.version), 0.0)
    effects = [e for p in (*IDS, STRANGER) if p != leader for e in one.receive(p, said(head), 0.0)]
    assert one.standing.joiners() == (STRANGER,)
    assert not sends(effects + one.tick(1.0), messages.Propose)
    assert one.reason == "all train for the next round"


def test_halves_have_their_share_of_who_can_vote() -> None:
    live = frozenset(IDS[:3])
    found = decide(situation(live=live, holders=live))
    assert isinstance(found, Divide) and len(live & {*found.stays}) == 2 and len(live & {*found.goes}) == 1
    ready = {p: messages.Ready(100, 1, 0.0, 0.0, 10) for p in IDS}
    assert isinstance(decide(situation(readies=ready, awaited=frozenset())), StartRound), "rounds come first"
    three = tuple(sorted([*IDS, STRANGER, b"x" * 32]))
    found = decide(situation(view=three, max_group=6, live=frozenset(three), holders=frozenset(three[:4])))
    assert isinstance(found, Divide) and all(len({*half} & {*three[:4]}) == 2 for half in (found.stays, found.goes))


@pytest.mark.parametrize("lack", [0, 1, 2], ids=["nobody lacks it", "those who go", "those who stay"])
def test_nobody_votes_for_a_half_in_which_the_state_would_be_lost(lack: int) -> None:
    one = member(FOLLOWER)
    lacking = tuple(p for p in IDS if p not in (FOLLOWER, LEADER))
    mine = tuple(sorted((FOLLOWER, LEADER)))
    for peer in lacking if lack else ():
        one.receive(peer, said(HEAD, version=0, digest=b""), 1.0)
    stays, goes = (mine, lacking) if lack < 2 else (lacking, mine)
    split = chain.successor(SWARM, HEAD, FULL.rules, view=stays, left=(), result=None, goes=goes)
    voted = sends(one.receive(LEADER, messages.Propose(0, split), 2.0), messages.Voted)
    assert bool(voted) == (lack == 0)


def test_neighbours_are_met_group_by_group() -> None:
    known = Neighbours()
    assert known.choose(3) is None
    for number in range(6):
        known.note(bytes([number]) * 32, b"one" if number < 4 else b"two")
    met = [known.choose(turn) for turn in range(8)]
    assert [known.groups[peer] for peer in met if peer] == [b"one", b"two"] * 4
    assert len(set(met)) == 6, "all of the larger group, and both of the smaller"
    known.forget(met[0] or b"")
    assert met[0] not in known.groups
    for number in range(2 * MAX_NEIGHBOURS):
        known.note(number.to_bytes(32, "big"), b"many")
    assert len(known.groups) == MAX_NEIGHBOURS


def test_neighbours_are_asked_in_an_order_that_no_hash_seed_decides() -> None:
    """Who is greeted first hears it first: with sets, the logs of two processes differed (brisk seed 230)."""
    known, turns = Neighbours(), Neighbours()
    for number in range(7):
        for one in (known, turns):
            one.note(bytes([97 * number % 256]) * 32, b"one" if number < 4 else b"two")
    for first in (0, 5, 10, 15):
        met = [turns.choose(turn) for turn in range(first, first + 5)]
        assert known.some(5) == list(dict.fromkeys(met))
    assert len(known.some(99)) == 7 and Neighbours().some(3) == []


def test_invented_groups_do_not_push_real_ones_out() -> None:
    """A quarter of the places and of the meetings is what all can have of whom nobody else tells."""
    one = member(IDS[0])
    one.receive(IDS[2], messages.Committed(CERTIFIED), 1.0)
    real = [number.to_bytes(32, "big") for number in range(1, 41)]
    one.found(dict.fromkeys(real, b"r" * 32), 2.0)
    many = signers(MAX_NEIGHBOURS)
    for number, signer in enumerate(many):
        if signer.peer_id not in IDS:
            one.receive(signer.peer_id, said(OTHER, group=number.to_bytes(32, "big")), 3.0)
    known = one.neighbours
    assert {*real, *GOES} <= set(known.groups) and len(known.own_words) == MAX_OWN_WORDS
    assert known.own_words < known.shown and not set(real) & known.shown
    met = [known.choose(turn) for turn in range(400)]
    assert sum(peer in known.own_words for peer in met) == 100
    assert {*real, *GOES} <= set(met), "all of those who are there have their turn"
    claimed = next(peer for peer in known.groups if peer in known.own_words)
    one.found({claimed: known.groups[claimed]}, 4.0)
    assert claimed not in known.own_words, "records tell of it now"
    known.forget(claimed)
    alone = Neighbours()
    alone.note(STRANGER, b"one", own_word=True)
    assert [alone.choose(turn) for turn in range(4)] == [STRANGER] * 4


def test_a_newcomer_begins_with_the_smallest_group_and_then_with_any() -> None:
    one = new_member(WHO[4], FULL)
    records: dict[bytes, bytes | None] = {IDS[0]: b"", IDS[1]: OTHER.group, IDS[2]: b"", IDS[3]: None}
    assert {s.to for s in sends(one.found({IDS[3]: None}, 0.0), Heartbeat)} == {IDS[3]}
    assert {s.to for s in sends(one.found(records, 1.0), Heartbeat)} == {IDS[1]}, "the other one is known by now"
    assert set(one.membership.peers) == {IDS[1], IDS[3]} and not one.neighbours.groups
    assert {s.to for s in sends(one.found(records, 2.0), Heartbeat)} == {IDS[0], IDS[2]}, "nobody has answered"


def test_records_tell_a_member_whom_to_greet_and_whom_to_meet() -> None:
    one = member(IDS[0])
    one.receive(IDS[2], messages.Committed(CERTIFIED), 1.0)
    third, fourth = (s.peer_id for s in signers(7) if s.peer_id not in (*IDS, STRANGER))
    greeted = sends(one.found({STRANGER: OTHER.group, third: None, fourth: b""}, 2.0), Heartbeat)
    assert {s.to for s in greeted} == {third, fourth}
    assert one.neighbours.groups == dict.fromkeys((*GOES, STRANGER), OTHER.group)


def test_one_that_was_away_for_too_long_follows_whoever_of_its_view_is_elsewhere() -> None:
    """Its half had divided once more since: nobody follows its history any more, and nobody has what lies between. What one alone says is not enough."""
    one, history = member(IDS[1]), [OTHER]
    for _ in range(3):
        history.append(chain.successor(SWARM, history[-1], FULL.rules, view=GOES, left=(), result=None))
    inside = [w for w in INSIDE if w.peer_id in GOES]
    newest, answer = history[-1], messages.Commits(history[-2], (certify(history[-1], inside),))
    assert sends(one.receive(IDS[3], said(newest), 10.0), messages.GetCommits)
    one.receive(IDS[3], answer, 10.1)
    assert one.head.commit == HEAD, "one of four"
    for at, peer in ((20.0, IDS[0]), (30.0, IDS[2])):
        one.receive(peer, said(newest, group=bytes(32)), at)
    asked = sends(one.receive(IDS[3], said(newest), 40.0), messages.GetCommits)
    assert [send.to for send in asked] == [IDS[3]]
    one.receive(IDS[3], answer, 40.1)
    assert one.head.commit == newest and not one.follower.elsewhere


AFAR = next(signer.peer_id for signer in signers(7) if signer.peer_id not in (*IDS, STRANGER))


def answers(one: Member, height: int, now: float) -> None:
    """Somebody of another group says how far that is."""
    one.receive(AFAR, said(HEAD, group=b"g" * 32, height=height, reply=True, admission=b"invited"), now)


def newcomer_of_a_half() -> Member:
    """One that follows a group which came of a division, and has no place in it."""
    one = new_member(WHO[4], replace(FULL, vain_s=30.0))
    one.begin(None, [*PAST, CERTIFIED], 0.0)
    return one


def test_a_newcomer_waits_in_vain_where_its_group_has_no_quorum_and_there_are_others() -> None:
    one = newcomer_of_a_half()
    one.found({AFAR: b"g" * 32}, 1.0)
    asked = set()
    for now in range(1, 91):
        asked |= {send.to for send in sends(one.tick(float(now)), Heartbeat)}
    assert AFAR in asked and not one.waits_in_vain(90.0), "records tell of another group, and nobody of it answers"
    one.waiting.avoids = frozenset({b"g" * 32})
    answers(one, 1, 90.0)
    assert not one.waits_in_vain(90.0), "where it was already"
    one.waiting.avoids = frozenset()
    answers(one, 1, 90.0)
    assert one.waits_in_vain(90.0) and not one.waits_in_vain(20.0) and not one.waits_in_vain(200.0)


def test_a_quorum_ends_the_waiting() -> None:
    one = newcomer_of_a_half()
    for now in range(1, 91):
        for peer in HEAD.view:
            one.receive(peer, said(HEAD), float(now))
        one.tick(float(now))
        answers(one, now, float(now))
    assert not one.waits_in_vain(90.0)


@pytest.mark.parametrize("vote", [None, SavedVote(SPLIT.height + 1, 1, group=SPLIT.group)])
def test_who_had_a_place_waits_for_longer(vote: SavedVote | None) -> None:
    """Whether it is in the view now, or a vote on its disk says that it was."""
    one = new_member(BY_ID[IDS[2]] if vote is None else WHO[4], replace(FULL, vain_s=30.0))
    one.recall([] if vote is None else [vote])
    one.begin(None, [*PAST, CERTIFIED], 0.0)
    for now in range(1, 200):
        one.tick(float(now))
        answers(one, now // 10, float(now))
        assert one.waits_in_vain(float(now)) == (now > 30.0 * MEMBERS_WAIT)
        goes = "; after 2 minutes of this the node goes to another group, which goes on"
        assert one.reason.endswith(goes) == (now > 10), (
            "the first answers say where the other group is, those from 10 s on that it goes on"
        )


def test_who_comes_back_after_it_was_let_go_waits_as_a_newcomer() -> None:
    """Brisk seeds 3884 and 7111: the last member of a group left, and one that had left before came back to find nobody."""
    one = new_member(WHO[4], replace(FULL, vain_s=30.0))
    one.recall([SavedVote(SPLIT.height, 1, group=SPLIT.group)])
    one.begin(None, [*PAST, CERTIFIED], 0.0)
    for now in range(1, 60):
        one.tick(float(now))
        answers(one, now // 10, float(now))
        assert one.waits_in_vain(float(now)) == (now > 30.0)


def test_a_member_gives_up_its_state_for_nothing_but_a_group_that_goes_on() -> None:
    """Where a network fails nobody hears anybody, and groups that lose their members at once all stand: if each went to the other, no state would be left."""
    one = new_member(BY_ID[IDS[2]], replace(FULL, vain_s=30.0))
    one.begin(None, [*PAST, CERTIFIED], 0.0)
    one.found({AFAR: b"g" * 32}, 1.0)
    for now in range(1, 400):
        one.tick(float(now))
        if now < 200:
            answers(one, 7, float(now))
        assert not one.waits_in_vain(float(now)) and "another group" not in one.reason
    answers(one, 6, 400.0)
    assert not one.waits_in_vain(400.0), "one that lags"
    answers(one, 8, 401.0)
    assert one.waits_in_vain(401.0) and one.waits_in_vain(430.0) and not one.waits_in_vain(432.0)


def test_groups_that_were_left_are_as_good_as_others_once_all_is_well() -> None:
    one = member(IDS[0])
    one.waiting.avoids = frozenset({b"g" * 32})
    one.tick(1.0)
    assert one.waiting.avoids == frozenset()


def test_a_member_whose_quorum_cannot_speak_waits_in_vain() -> None:
    """All are here, but what it has voted on is lost with everybody's history."""
    one = new_member(BY_ID[IDS[0]], replace(FULL, vain_s=30.0))
    one.recall([SavedVote(SPLIT.height + 3, 0)])
    one.begin(None, [*PAST, CERTIFIED], 0.0)
    one.applied(SPLIT.height, SPLIT.version, state_digest(SPLIT.version), 0.0)
    for now in range(1, 200):
        one.receive(IDS[2], said(SPLIT), float(now))
        one.tick(float(now))
        answers(one, now, float(now))
        assert one.waits_in_vain(float(now)) == (now > 30.0 * MEMBERS_WAIT)


def test_nobody_follows_fellows_to_a_group_that_has_not_come_of_theirs() -> None:
    """There versions are other bytes. It waits for its own group, and begins anew with another one when that is in vain."""
    one = member(IDS[0])
    one.receive(IDS[2], messages.Committed(CERTIFIED), 1.0)
    theirs = [TURNED.commit]
    for _ in range(3):
        theirs.append(chain.successor(SWARM, theirs[-1], FULL.rules, view=(*GOES, IDS[2]), left=(), result=None))
    newest = theirs[-1]
    asked = sends(one.receive(IDS[2], said(newest), 10.0), messages.GetCommits)
    assert [send.to for send in asked] == [IDS[2]] and one.follower.elsewhere == {IDS[2]}, "it was all that we had"
    inside = [w for w in INSIDE if w.peer_id in theirs[-2].view]
    before = snapshot(one)
    assert one.receive(IDS[2], messages.Commits(theirs[-2], (certify(newest, inside),)), 10.1) == []
    assert snapshot(one) == before and one.head.commit == SPLIT


def test_who_comes_back_to_a_group_keeps_the_word_that_it_gave_there() -> None:
    """It has promised and voted in the one and in the other, and each history is told to it as to somebody who has none."""
    one = member(IDS[0])
    mine = chain.successor(SWARM, HEAD, FULL.rules, view=IDS[:3], left=(), result=None)
    ballot = next(b for b in range(1, 5) if proposer(SWARM, HEAD.view, HEAD.height + 1, b) != IDS[0])
    lead = proposer(SWARM, HEAD.view, HEAD.height + 1, ballot)
    assert sends(one.receive(lead, messages.Propose(ballot, mine), 1.0), messages.Voted)
    elsewhere = msgspec.structs.replace(HEAD, group=b"g" * 32)
    one.begin(None, [certify(elsewhere, INSIDE[:3])], 2.0)
    assert one.group == b"g" * 32 and (one.consensus.ballot, one.consensus.acceptor.accepted) == (0, None)
    one.begin(None, PAST, 3.0)
    assert (one.consensus.ballot, one.consensus.acceptor.accepted) == (ballot, messages.Accepted(ballot, mine))


@pytest.mark.parametrize("divisions", [MAX_DIVISIONS - 1, MAX_DIVISIONS])
def test_a_newcomer_waits_in_vain_where_its_group_is_full_and_may_not_divide_any_more(divisions: int) -> None:
    one = new_member(WHO[4], replace(FULL, vain_s=30.0))
    ledger = msgspec.structs.replace(HEAD.ledger, shares=divisions * SPLIT.ledger.shares)
    full = msgspec.structs.replace(HEAD, ledger=ledger)
    one.begin(None, [certify(full, INSIDE[:3])], 0.0)
    for now in range(1, 91):
        for peer in full.view:
            one.receive(peer, said(full), float(now))
        one.tick(float(now))
        answers(one, now, float(now))
    assert one.waits_in_vain(90.0) == (divisions == MAX_DIVISIONS)


def test_nobody_waits_in_vain_in_a_swarm_that_has_never_divided() -> None:
    """Whatever somebody says of other groups."""
    one = new_member(WHO[4], replace(FULL, vain_s=30.0))
    one.begin(None, PAST, 0.0)
    for now in range(1, 200):
        one.tick(float(now))
        answers(one, now, float(now))
    assert one.neighbours.groups and not one.waits_in_vain(199.0)


def test_one_that_has_waited_in_vain_does_not_begin_with_that_group_again_as_long_as_there_is_another() -> None:
    one = new_member(WHO[4], FULL)
    one.waiting.avoids = frozenset({b""})
    records: dict[bytes, bytes | None] = {IDS[0]: b"", IDS[1]: OTHER.group, IDS[3]: OTHER.group}
    assert not sends(one.receive(IDS[0], said(SPLIT), 0.5), messages.GetCommits)
    assert not sends(one.tick(0.7), messages.GetCommits)
    assert {s.to for s in sends(one.found(records, 1.0), Heartbeat)} == {IDS[1], IDS[3]}
    assert sends(one.receive(IDS[0], said(SPLIT), 20.0), messages.GetCommits), "nobody else has answered"
    other = new_member(WHO[4], FULL)
    other.waiting.avoids = frozenset({b""})
    assert {s.to for s in sends(other.found({IDS[0]: b""}, 1.0), Heartbeat)} == {IDS[0]}, "there is no other"
