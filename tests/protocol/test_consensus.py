"""One member and the next commit: what it votes for, when it moves to another ballot, and what it believes of promises."""

import pytest
from tests.protocol.alone import (
    BAD_SIGNATURE,
    BY_ID,
    FOLLOWER,
    HEAD,
    IDS,
    INSIDE,
    LEADER,
    NEXT,
    OTHER_VIEW,
    OUTSIDER,
    PARENT,
    PAST,
    RULES,
    THIRD,
    WRONG_LEDGER,
    commit,
    member,
    of,
    pass_time,
    plan,
    sends,
    turn,
)
from tests.protocol.bus import (
    SWARM,
    WINDOW,
    beat,
    certify,
    new_member,
    ready,
    snapshot,
    state_digest,
)

from farflung.protocol import chain, messages
from farflung.protocol.effects import Effect, Forget, Note, RoundOver, SaveVote, Send
from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Promise, Propose, Voted
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import GIVE_UP_S, MAX_BALLOT_STEP, VOTE_S

# ---- two proposals, two ballots -------------------------------------------------------------------------------


def vote_of(effects: list[Effect]) -> Voted | None:
    sent = sends(effects, Voted)
    return sent[0].message if sent else None


def test_a_vote_is_saved_signed_and_repeatable() -> None:
    one = member()
    effects = one.receive(LEADER, Propose(0, commit()), 1.0)
    kinds = [type(e) for e in effects]
    assert kinds.index(SaveVote) < kinds.index(Send)
    vote = vote_of(effects)
    assert vote is not None and vote.digest == chain.commit_hash(SWARM, commit())
    assert vote_of(one.receive(LEADER, Propose(0, commit()), 2.0)) == vote


def test_two_proposals_at_one_ballot() -> None:
    one = member()
    one.receive(LEADER, Propose(0, commit()), 1.0)
    before = snapshot(one)
    with pytest.raises(Refused, match="two proposals at ballot 0"):
        one.receive(LEADER, Propose(0, OTHER_VIEW), 2.0)
    assert snapshot(one) == before


def test_a_higher_ballot_may_decide_otherwise_and_a_lower_one_nothing_more() -> None:
    one = member()
    one.receive(LEADER, Propose(0, commit()), 1.0)
    vote = vote_of(one.receive(turn(1), Propose(1, OTHER_VIEW), 2.0))
    assert vote is not None and (vote.ballot, vote.digest) == (1, chain.commit_hash(SWARM, OTHER_VIEW))
    assert one.consensus.ballot == 1
    before = snapshot(one)
    assert one.receive(LEADER, Propose(0, commit()), 3.0) == []
    assert one.receive(LEADER, plan(), 3.0) == []
    assert snapshot(one) == before


@pytest.mark.parametrize("ballot", [b for b in range(4) if turn(b) != FOLLOWER])
def test_a_restarted_member_never_says_two_things(ballot: int) -> None:
    one = member()
    effects = one.receive(turn(ballot), Propose(ballot, commit()), 1.0)
    saved = of(effects, SaveVote)[-1].vote
    again = member(vote=saved)
    assert again.consensus.acceptor.accepted == one.consensus.acceptor.accepted and again.consensus.ballot == ballot
    with pytest.raises(Refused, match="two proposals"):
        again.receive(turn(ballot), Propose(ballot, OTHER_VIEW), 2.0)
    for lower in range(ballot):
        assert vote_of(again.receive(turn(lower), Propose(lower, OTHER_VIEW), 3.0)) is None
    assert vote_of(again.receive(turn(ballot), Propose(ballot, commit()), 4.0)) == vote_of(effects)
    promised = sends(again.tick(9.0), Promise) or sends(again.set_ready(ready(), 9.0), Promise)
    assert promised[0].message.accepted == saved.accepted, "the next proposer hears of it"


def test_a_vote_of_a_height_that_is_over_is_forgotten() -> None:
    one = member(vote=SavedVote(HEAD.height, 7, messages.Accepted(7, HEAD)))
    assert (one.consensus.ballot, one.consensus.acceptor.accepted) == (0, None)


def test_a_vote_in_another_group_binds_nobody_here() -> None:
    one = member(vote=SavedVote(NEXT, 7, messages.Accepted(7, commit()), group=b"g" * 32))
    assert (one.consensus.ballot, one.consensus.acceptor.accepted) == (0, None)
    assert vote_of(one.receive(LEADER, Propose(0, commit()), 1.0)) is not None


@pytest.mark.parametrize("me", [LEADER, FOLLOWER])
def test_who_has_voted_after_a_height_that_it_has_lost_does_not_decide_that_once_more(me: PeerId) -> None:
    """Its history is gone from the disk, and others tell an older one: it follows, and says nothing until that has caught up."""
    saved = SavedVote(NEXT + 1, 2)
    one = member(me, vote=saved)
    effects = [*one.set_ready(ready(), 1.0), *one.tick(1.0), *one.tick(60.0)]
    for ballot in range(4):
        if turn(ballot) != me:
            effects += one.receive(turn(ballot), Propose(ballot, commit()), 61.0)
            effects += one.receive(turn(ballot), plan(ballot=ballot), 61.0)
    effects += one.receive(THIRD, beat(height=HEAD.height, ballot=3, digest=state_digest(HEAD.version)), 62.0)
    effects += one.receive(THIRD, Promise(NEXT, 4, PARENT, None, None), 62.0)
    said = [
        e for e in effects if isinstance(e, Send) and isinstance(e.message, Promise | Propose | Voted | messages.Plan)
    ]
    assert not said and not of(effects, SaveVote)
    assert "has voted for what follows" in one.consensus.reason()
    effects = one.receive(THIRD, messages.Committed(certify(commit(), INSIDE)), 63.0)
    assert one.consensus.ballot == 2 and one.consensus.has_say
    assert [p.message.ballot for p in sends(effects, Promise)] == [2]


def test_a_restarted_proposer_proposes_what_it_had_voted_for() -> None:
    mine = messages.Accepted(0, commit())
    one = new_member(BY_ID[LEADER], RULES)
    one.recall([SavedVote(NEXT, 0, mine)])
    assert not sends(one.begin(None, PAST, 0.0), Propose), "not before the state is loaded"
    effects = one.applied(HEAD.height, HEAD.version, state_digest(HEAD.version), 0.1)
    proposals = sends(effects, Propose)
    assert proposals and all(p.message.commit == mine.commit for p in proposals)


def test_forged_votes_do_not_count() -> None:
    one = member(LEADER)
    one.recall([SavedVote(NEXT, 0, messages.Accepted(0, commit()))])
    one.begin(None, PAST, 0.0)
    assert one.consensus.proposer is not None and set(one.consensus.proposer.votes) == {LEADER}
    digest = chain.commit_hash(SWARM, commit())
    before = snapshot(one)
    for signature in (BAD_SIGNATURE, BY_ID[THIRD].sign(chain.vote_bytes(SWARM, NEXT, 0, digest))):
        with pytest.raises(BadSignature) as caught:
            one.receive(FOLLOWER, Voted(NEXT, 0, digest, signature), 1.0)
        assert caught.value.peer == FOLLOWER
    assert snapshot(one) == before
    good = BY_ID[FOLLOWER].sign(chain.vote_bytes(SWARM, NEXT, 0, b"o" * 32))
    assert one.receive(FOLLOWER, Voted(NEXT, 0, b"o" * 32, good), 1.0) == [], "a vote for something else"
    assert set(one.consensus.proposer.votes) == {LEADER}


def test_outsiders_do_not_vote() -> None:
    newcomers = member(OUTSIDER.peer_id)
    assert newcomers.receive(LEADER, Propose(0, commit()), 1.0) == []
    assert newcomers.consensus.acceptor.accepted is None


# ---- ballots --------------------------------------------------------------------------------------------------


def test_a_silent_proposer_is_left_when_there_is_something_to_decide() -> None:
    one = member()
    idle = pass_time(one, 0.25, 9.0, {LEADER})
    assert not of(idle, SaveVote) and one.consensus.ballot == 0, "nothing to decide yet"
    one.set_ready(ready(), 9.0)
    moved = pass_time(one, 9.0, 10.0, {LEADER})
    assert one.consensus.ballot == 1
    promise = sends(moved, Promise)[-1]
    assert (promise.to, promise.message.ballot) == (turn(1), 1)
    assert next(n.fields["reason"] for n in of(moved, Note) if n.event == "ballot").endswith("is gone")


def test_without_a_certificate_the_next_ballot_follows() -> None:
    one = member()
    one.receive(LEADER, Propose(0, commit()), 1.0)
    pass_time(one, 1.0, 1.0 + VOTE_S, set())
    assert one.consensus.ballot == 0
    moved = pass_time(one, 1.0 + VOTE_S, 2.0 + VOTE_S, set())
    assert one.consensus.ballot == 1 and one.consensus.acceptor.accepted is not None
    assert sends(moved, Promise)[-1].message.accepted == one.consensus.acceptor.accepted


def test_a_plan_that_comes_to_nothing_ends() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(scatter_s=1.0, gather_s=0.5), 0.2)
    assert one.attendance.part is not None
    end = one.attendance.part.expires_at
    pass_time(one, 0.25, end, set())
    assert one.attendance.part is not None
    effects = pass_time(one, end + 0.01, end + 0.5, set())
    assert one.attendance.part is None and one.consensus.ballot == 1 and of(effects, Forget)


def test_a_plan_is_left_when_its_proposer_has_left_its_ballot() -> None:
    """It was started again, and somebody had missed it and waits at the next ballot; whoever had not would wait for the plan's end."""
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(scatter_s=8.0, gather_s=8.0), 0.2)
    for height, ballot in ((NEXT - 1, 0), (NEXT, 1)):
        one.receive(LEADER, beat(height=height, ballot=ballot), 1.0)
        pass_time(one, 1.0, 2.0, set())
        assert one.consensus.ballot == 0 and one.attendance.part is not None
    one.receive(LEADER, beat(height=NEXT - 1, ballot=1), 2.0)
    moved = pass_time(one, 2.0, 3.0, {LEADER})
    assert one.consensus.ballot == 1 and one.attendance.part is None
    assert (sends(moved, Promise)[-1].to, sends(moved, Promise)[-1].message.ballot) == (turn(1), 1)


def test_a_proposer_from_which_nothing_comes_is_left() -> None:
    """It lives and says so, but perhaps it cannot reach the quorum that the rest of us can."""
    one = member()
    one.set_ready(ready(), 1.0)
    pass_time(one, 1.0, 1.0 + RULES.max_round_s + VOTE_S, set())
    assert one.consensus.ballot == 0
    moved = pass_time(one, 1.0 + RULES.max_round_s + VOTE_S, 2.0 + RULES.max_round_s + VOTE_S, set())
    assert one.consensus.ballot == 1 and "nothing came from" in next(n.fields["reason"] for n in of(moved, Note))


@pytest.mark.parametrize("sender", [THIRD, OUTSIDER.peer_id])
def test_no_single_message_moves_the_ballot_far(sender: PeerId) -> None:
    one = member()
    one.receive(sender, beat(height=HEAD.height, ballot=1 << 62), 1.0)
    assert one.consensus.ballot == (MAX_BALLOT_STEP if sender == THIRD else 0)
    far = next(b for b in range(1000, 1004) if turn(b) == LEADER)
    for message in (plan(ballot=far), Propose(far, commit()), Promise(NEXT, far, PARENT, None, None)):
        with pytest.raises(Refused, match="far above"):
            one.receive(LEADER, message, 2.0)


LIES: dict[str, Promise] = {
    "more samples than it holds": Promise(NEXT, 0, PARENT, None, ready(WINDOW + 1)),
    "no samples": Promise(NEXT, 0, PARENT, None, ready(0)),
    "more tokens than samples": Promise(NEXT, 0, PARENT, None, ready(tokens=1 << 62)),
    "a vote for what cannot follow": Promise(NEXT, 0, PARENT, messages.Accepted(0, WRONG_LEDGER), ready()),
    "a vote above its promise": Promise(NEXT, 0, PARENT, messages.Accepted(1, commit()), ready()),
}


@pytest.mark.parametrize("name", LIES)
def test_a_promise_that_lies_is_refused_and_the_proposer_goes_on(name: str) -> None:
    one = member(LEADER)
    before = snapshot(one)
    with pytest.raises(Refused) as caught:
        one.receive(FOLLOWER, LIES[name], 1.0)
    assert caught.value.peer == FOLLOWER and snapshot(one) == before
    pass_time(one, 1.0, 20.0, set())


def test_whoever_is_asked_to_lead_leads() -> None:
    one = member(turn(1))
    others = [p for p in IDS if p != one.me]
    one.receive(others[0], Promise(NEXT, 1, PARENT, None, ready()), 1.0)
    assert one.consensus.ballot == 1 and one.consensus.proposer is not None
    assert set(one.consensus.proposer.promises) == {one.me, others[0]}


def test_without_a_quorum_a_ready_member_trains_on() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    silent = set(IDS) - {FOLLOWER}
    effects = pass_time(one, 0.25, 12.0 + GIVE_UP_S, silent)
    over = of(effects, RoundOver)
    assert len(over) == 1 and not over[0].contributed
    assert over[0].reason.startswith("no quorum: 1 of 4 members reachable; ")
    assert over[0].reason.endswith(" must come back, 2 of them")
    assert one.attendance.ready is None
