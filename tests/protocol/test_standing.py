"""A vote says: I hold what this builds on. Who holds a state, who may vote, and what to download."""

import math

import pytest
from tests.protocol.bus import beat, certify, follow, history_of, new_member, ready, rules, signers, state_digest
from tests.protocol.test_participation import plan

from farflung.protocol import chain, standing
from farflung.protocol.chain import Certified, Contribution, RoundResult
from farflung.protocol.effects import Effect, Note, SaveVote, Send
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.member import Member
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Accepted, Heartbeat, Plan, Promise, Propose, Voted
from farflung.protocol.participation import Participation
from farflung.protocol.patience import STATE_BEATS
from farflung.protocol.quorum import proposer
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import HOLD_S
from farflung.protocol.standing import NEAR

WHO = signers(5)
IDS = [s.peer_id for s in WHO]
BY_ID = {s.peer_id: s for s in WHO}
RULES = rules(IDS[0])
PAST = history_of(WHO)
D = state_digest(1)


def round_after(parent: Certified, *view: PeerId) -> Certified:
    """A certified round in which everybody of the last view contributed, and these hold its means."""
    result = RoundResult(
        plan=bytes([parent.commit.height]) * 32,
        contributors=tuple(Contribution(p, 100, 1, 1000) for p in parent.commit.view),
        parts=(chain.PartResult(IDS[0], 0, RULES.rules.numel, b"d" * 32),),
        seconds_ms=100,
    )
    return certify(follow(parent.commit, view, result=result), WHO)


FIRST = round_after(PAST[-1], *IDS)
SECOND = round_after(FIRST, *IDS[:4])
"""The last one did not get all means."""
THIRD = certify(follow(SECOND.commit, IDS), WHO)
"""It caught up and came back."""
HEAD = THIRD.commit
NEXT = HEAD.height + 1


def turn(ballot: int) -> PeerId:
    return proposer(RULES.swarm, HEAD.view, NEXT, ballot)


# ---- who reaches the head by itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "version", "expected"),
    [
        (0, 2, True),
        (0, 1, True),
        (0, 0, True),
        (0, -1, False),
        (4, 2, True),
        (4, 1, False),
        (4, 0, False),
    ],
)
def test_means_of_rounds_in_whose_view_a_peer_was_are_on_its_disk(peer: int, version: int, expected: bool) -> None:
    history = History()
    history.replace(PAST[0].commit, [PAST[1], FIRST, SECOND, THIRD])
    assert history.reaches(IDS[peer], version) is expected


def test_what_is_older_than_the_history_is_not_believed() -> None:
    history = History()
    history.replace(FIRST.commit, [SECOND, THIRD])
    assert history.reaches(IDS[0], 1) and not history.reaches(IDS[0], 0)
    history.replace(None, PAST)
    assert history.reaches(IDS[1], 0)


# ---- who votes ------------------------------------------------------------------------------------------------


def member(me: PeerId, *, version: int | None = 2, others: dict[PeerId, Heartbeat] | None = None) -> Member:
    """A member at HEAD, with the outer state of `version` or none; the others hold the newest unless said otherwise."""
    made = new_member(BY_ID[me], RULES)
    made.membership.state = "training"
    made.begin(PAST[0].commit, [PAST[1], FIRST, SECOND, THIRD], 0.0)
    if version is not None:
        made.applied(HEAD.height if version == 2 else version + 1, version, state_digest(version), 0.0)
    for peer in IDS:
        if peer != me:
            made.receive(peer, (others or {}).get(peer, HOLDS), 0.0)
    return made


HOLDS = beat(height=HEAD.height, version=2, digest=state_digest(2))
LACKS = beat(height=HEAD.height, version=0, digest=b"")
LEADER = turn(0)
FOLLOWER = next(p for p in IDS[:4] if p not in (LEADER, turn(1)))


def votes(effects: list[Effect]) -> bool:
    saved = [e for e in effects if isinstance(e, SaveVote) and e.vote.accepted is not None]
    sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Voted)]
    assert bool(saved) == bool(sent)
    return bool(sent)


def test_who_holds_the_state_or_only_has_to_apply_what_it_holds_votes() -> None:
    for version in (2, 1, 0):
        assert votes(member(FOLLOWER, version=version).receive(LEADER, Propose(0, follow(HEAD, IDS)), 0.1))


def test_who_has_no_state_promises_and_does_not_vote() -> None:
    one = member(FOLLOWER, version=None)
    proposal = Propose(1, follow(HEAD, IDS))
    effects = one.receive(turn(1), proposal, 0.1)
    assert not votes(effects) and one.consensus.ballot == 1 and one.consensus.acceptor.accepted is None
    promised = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Promise)]
    assert [p.ballot for p in promised] == [1]
    one.applied(HEAD.height, 2, state_digest(2), 0.2)
    assert votes(one.receive(turn(1), proposal, 0.3)), "the same proposal, repeated"


def test_a_checkpoint_from_before_an_absence_is_no_state() -> None:
    others = {p: HOLDS for p in IDS}
    one = member(IDS[4], version=1, others=others)
    assert not one.standing.holds(IDS[4])
    assert one.standing.holds(IDS[0])


def test_a_state_that_turns_out_lost_takes_the_vote_with_it() -> None:
    one = member(FOLLOWER)
    effects = one.lost_state(0.1)
    said = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Heartbeat)]
    assert said and not any(b.digest for b in said)
    assert not votes(one.receive(LEADER, Propose(0, follow(HEAD, IDS)), 0.2))
    assert one.lost_state(0.3) == []


def test_what_was_voted_for_is_still_said_without_the_state() -> None:
    mine = Accepted(0, follow(HEAD, IDS))
    one = new_member(BY_ID[FOLLOWER], RULES)
    one.recall([SavedVote(NEXT, 3, mine)])
    effects = one.begin(PAST[0].commit, [PAST[1], FIRST, SECOND, THIRD], 0.0)
    promised = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Promise)]
    assert [(p.ballot, p.accepted) for p in promised] == [(3, mine)]


def test_nobody_votes_for_a_view_in_which_nobody_holds_the_state() -> None:
    lacking = IDS[0] if FOLLOWER != IDS[0] else IDS[1]
    leaving = [p for p in IDS if p != lacking]
    last = follow(HEAD, [lacking], left=leaving)
    assert not votes(member(FOLLOWER, others={lacking: LACKS}).receive(LEADER, Propose(0, last), 0.1))
    assert votes(member(FOLLOWER).receive(LEADER, Propose(0, last), 0.1))


# ---- who leads ------------------------------------------------------------------------------------------------


def test_a_leader_leads_once_it_holds_the_state() -> None:
    one = member(LEADER, version=None)
    one.tick(1.0)
    assert one.consensus.proposer is None and "downloading" in one.reason
    one.applied(HEAD.height, 2, state_digest(2), 2.0)
    assert one.consensus.proposer is not None and one.consensus.ballot == 0
    one.lost_state(3.0)
    assert one.consensus.proposer is None


def test_the_turn_of_who_cannot_vote_is_passed_on_when_there_is_something_to_decide() -> None:
    one = member(FOLLOWER, others={LEADER: LACKS})
    one.tick(0.1)
    assert one.consensus.ballot == 0
    one.set_ready(ready(), 0.2)
    late = STATE_BEATS * one.settings.heartbeat_s
    one.tick(late - 0.1)
    assert one.consensus.ballot == 0, "its last heartbeat may be older than its state"
    one.attendance.part = Participation(b"p" * 32, plan(), late, contributing=False)
    one.tick(late + 0.1)
    assert one.consensus.ballot == 0, "it plans, so it says that it holds it"
    one.attendance.part = None
    moved = [e.fields["reason"] for e in one.tick(late + 0.2) if isinstance(e, Note) and e.event == "ballot"]
    assert one.consensus.ballot == 1 and len(moved) == 1 and "does not hold the outer state yet" in str(moved[0])


def test_without_a_quorum_of_holders_ballots_stand_and_training_goes_on() -> None:
    alone = member(FOLLOWER, others={p: LACKS for p in IDS if p != FOLLOWER})
    alone.set_ready(ready(), 0.1)
    over: list[Effect] = []
    for quarter in range(1, 60):
        for peer in IDS:
            if peer != FOLLOWER:
                alone.receive(peer, LACKS, quarter / 4)
        over += alone.tick(quarter / 4)
    assert alone.consensus.ballot == 0
    reasons = [e.reason for e in over if hasattr(e, "contributed")]
    assert reasons == ["no quorum: 1 of 5 members hold the outer state, the others download it"]


def test_a_leader_without_a_quorum_of_holders_plans_nothing() -> None:
    one = member(LEADER, others={p: LACKS for p in IDS[1:]})
    effects = one.set_ready(ready(), 0.1) + one.tick(0.5)
    assert not [e for e in effects if isinstance(e, Send) and isinstance(e.message, Plan | Propose)]
    assert "download" in one.reason


# ---- who is waited for ----------------------------------------------------------------------------------------


def waited_s(heartbeat: Heartbeat) -> float:
    """How long rounds wait for a newcomer that says so now."""
    one = member(LEADER)
    one.receive(NEW, heartbeat, 1.0)
    return max(0.0, one.standing.waits_until(1.0, 10.0) - 1.0)


NEW = next(s.peer_id for s in signers(6) if s.peer_id not in IDS)
AT_HEAD = beat(height=HEAD.height, version=2, digest=state_digest(2))
BEHIND = beat(height=HEAD.height, version=1, digest=state_digest(1))
"""It knows the newest commit, and lacks the means."""


def test_rounds_wait_for_whose_state_is_behind_whatever_it_knows_of_the_history() -> None:
    assert waited_s(BEHIND) == 10.0
    assert waited_s(beat(height=0, version=0, digest=state_digest(0))) == 10.0
    assert waited_s(AT_HEAD) == 0.0, "it may become a member"
    assert waited_s(beat(height=HEAD.height, version=0, digest=b"")) == 0.0, "it downloads"
    assert waited_s(beat(height=HEAD.height, version=1, digest=state_digest(1), state="leaving")) == 0.0


def test_nobody_is_waited_for_whose_means_may_be_gone() -> None:
    one = member(LEADER)
    head = one.head
    for _ in range(NEAR):
        head = round_after(head, *IDS)
        one.history.append(head)
    one.receive(NEW, AT_HEAD, 1.0)
    assert one.standing.waits_until(1.0, 10.0) == 11.0
    one.history.append(round_after(head, *IDS))
    assert one.standing.waits_until(2.0, 10.0) == -math.inf


def test_however_many_come_one_after_another_no_round_waits_longer_than_for_one() -> None:
    one, strangers = member(LEADER), iter([s.peer_id for s in signers(12) if s.peer_id not in IDS])
    one.set_ready(ready(), 0.1)
    now, longest_s, sent = 0.0, min(HOLD_S, RULES.max_round_s), list[Effect]()
    while not any(isinstance(e, Send) and isinstance(e.message, Plan) for e in sent):
        now += 1.0
        assert now < 3 * longest_s
        if now % 5.0 == 1.0:
            stranger = next(strangers)
        one.receive(stranger, BEHIND, now)
        for peer in set(IDS) - {LEADER}:
            one.receive(peer, HOLDS, now)
        sent = one.tick(now)
    assert longest_s <= now <= longest_s + 1.0


def test_who_falls_behind_again_is_not_waited_for_anew_until_it_has_been_at_the_head() -> None:
    one = member(LEADER)
    one.receive(NEW, BEHIND, 1.0)
    assert one.standing.waits_until(1.0, 10.0) == 11.0
    one.receive(NEW, beat(height=HEAD.height, version=0, digest=b"", state="joining"), 5.0)
    assert one.standing.waits_until(5.0, 10.0) == -math.inf
    one.receive(NEW, beat(height=HEAD.height, version=2, digest=b"o" * 32), 6.0)
    assert one.standing.waits_until(6.0, 10.0) == 11.0, "who only says that it is there"
    one.receive(NEW, AT_HEAD, 7.0)
    assert one.standing.waits_until(7.0, 10.0) == -math.inf
    one.receive(NEW, BEHIND, 8.0)
    assert one.standing.waits_until(8.0, 10.0) == 18.0


# ---- what to download -----------------------------------------------------------------------------------------


def agreed(**said: Heartbeat) -> tuple[int, bytes, tuple[PeerId, ...]] | None:
    """Of a view of five in which we are the last; `p0` to `p3` said what they hold, who is not named is silent."""
    membership = Membership(IDS[4], 1.0)
    for name, heartbeat in said.items():
        membership.heard(IDS[int(name[1:])], 0.0, heartbeat)
    return standing.agreed(membership, tuple(IDS), IDS[4], 1)


ONE, TWO, OTHER, NONE = (
    beat(version=1, digest=D),
    beat(version=2, digest=state_digest(2)),
    beat(version=2, digest=b"o" * 32),
    beat(digest=b""),
)


def test_what_a_quorum_holds_is_downloaded() -> None:
    assert agreed(p0=ONE, p1=ONE) == (1, D, (IDS[0], IDS[1]))
    assert agreed(p0=ONE) is None, "two of five could be wrong"
    assert agreed(p0=beat(version=0, digest=D), p1=beat(version=0, digest=D)) is None, "too old"


def test_who_holds_nothing_does_not_stand_in_the_way_of_the_last_holder() -> None:
    assert agreed(p0=ONE, p1=NONE) == (1, D, (IDS[0],))
    assert agreed(p1=NONE, p2=NONE, p3=NONE) is None


def test_newcomers_count_only_where_a_quorum_of_members_holds_nothing() -> None:
    """They had it from members before these lost it."""
    new, other = b"n" * 32, b"m" * 32

    def with_newcomers(**said: Heartbeat) -> tuple[int, bytes, tuple[PeerId, ...]] | None:
        membership = Membership(IDS[4], 1.0)
        for name, heartbeat in said.items():
            membership.heard(IDS[int(name[1:])], 0.0, heartbeat)
        for peer, heartbeat in ((new, ONE), (other, NONE)):
            membership.heard(peer, 0.0, heartbeat)
        return standing.agreed(membership, tuple(IDS), IDS[4], 1)

    assert with_newcomers(p1=NONE, p2=NONE) == (1, D, (new,))
    assert with_newcomers(p1=NONE) is None, "the others may hold it"
    assert with_newcomers(p1=NONE, p2=NONE, p3=TWO) == (2, state_digest(2), (IDS[3],)), "a member has it"


def test_most_decide_then_the_newest() -> None:
    assert agreed(p0=ONE, p1=ONE, p2=TWO, p3=NONE) == (1, D, (IDS[0], IDS[1]))
    assert agreed(p0=ONE, p1=TWO, p2=NONE, p3=NONE) == (2, state_digest(2), (IDS[1],))
    assert agreed(p0=OTHER, p1=TWO, p2=TWO) == (2, state_digest(2), (IDS[1], IDS[2]))
