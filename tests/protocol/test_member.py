"""One member against messages that are false, late, early or from the wrong peer; and what a restart and a long absence do to it."""

import pytest
from tests.protocol.alone import (
    BY_ID,
    FOLLOWER,
    FORGED,
    HEAD,
    IDS,
    INSIDE,
    LEADER,
    NEXT,
    OUTSIDER,
    PARENT,
    PAST,
    PLAN_ID,
    RULES,
    THIRD,
    but,
    commit,
    grown,
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
    follow,
    new_member,
    ready,
    snapshot,
    state_digest,
)

from farflung.protocol import chain, messages
from farflung.protocol.chain import Contribution
from farflung.protocol.effects import Contribute, Effect, Forget, Note, Repair, RoundOver, SaveVote, Send
from farflung.protocol.errors import BadSignature, Refused, RemoteError
from farflung.protocol.keys import Ed25519Signer, PeerId
from farflung.protocol.messages import Contributor, Message, Part, Promise, Propose, Voted
from farflung.protocol.settings import GIVE_UP_S, MAX_BALLOT_STEP, RESEND_S, VOTE_S

# ---- what is refused, and changes nothing ---------------------------------------------------------------------

OTHER_VIEW = commit(view=tuple(IDS[:3]))
WRONG_LEDGER = but(commit(), ledger=HEAD.ledger, tokens=5)
TOO_MANY_SAMPLES = but(
    commit(samples=4),
    round=but(commit(samples=4).round, contributors=(Contribution(IDS[0], 100 * WINDOW + 100, WINDOW + 1, 1),)),
)
BAD_SIGNATURE = b"s" * 64


RULE_BREAKERS: dict[str, tuple[PeerId, Message, type[RemoteError]]] = {
    "a plan out of turn": (THIRD, plan(), Refused),
    "a plan of an outsider": (OUTSIDER.peer_id, plan(), Refused),
    "a plan with other codecs": (LEADER, plan(uplink="fp32"), Refused),
    "a plan that misses a part": (LEADER, plan(parts=(Part(IDS[0], 0, 512),)), Refused),
    "a plan with a foreign contributor": (
        LEADER,
        plan(members=tuple(sorted([*IDS, OUTSIDER.peer_id])), contributors=(Contributor(OUTSIDER.peer_id, ready()),)),
        Refused,
    ),
    "a plan that forgets us": (
        LEADER,
        plan(members=tuple(p for p in IDS if p != FOLLOWER), contributors=(Contributor(IDS[0], ready()),)),
        Refused,
    ),
    "a plan that misstates us": (
        LEADER,
        plan(contributors=tuple(Contributor(p, ready(tokens=1)) for p in IDS)),
        Refused,
    ),
    "a proposal out of turn": (THIRD, Propose(0, commit()), Refused),
    "a proposal with a wrong ledger": (LEADER, Propose(0, WRONG_LEDGER), Refused),
    "a proposal that counts too much": (LEADER, Propose(0, TOO_MANY_SAMPLES), Refused),
    "a proposal without a quorum": (LEADER, Propose(0, commit(view=(IDS[1],))), Refused),
    "a promise of an outsider": (OUTSIDER.peer_id, Promise(NEXT, 0, PARENT, None, None), Refused),
    "a commit without votes": (THIRD, messages.Committed(certify(commit(), [])), Refused),
    "a commit of a minority": (THIRD, messages.Committed(certify(commit(), INSIDE[1:2])), Refused),
    "a commit with forged votes": (THIRD, messages.Committed(FORGED), BadSignature),
    "a certified commit that breaks the rules": (THIRD, messages.Committed(certify(WRONG_LEDGER, INSIDE)), Refused),
    "a history that nobody asked for": (
        THIRD,
        messages.Commits(grown(3)[1].commit, (grown(3)[2],)),
        Refused,
    ),
}  # fmt: skip


@pytest.mark.parametrize("in_round", [False, True])
@pytest.mark.parametrize("name", RULE_BREAKERS)
def test_rule_breakers_are_named_and_change_nothing(name: str, in_round: bool) -> None:
    sender, message, kind = RULE_BREAKERS[name]
    one = member()
    one.set_ready(ready(), 0.1)
    if in_round:
        one.receive(LEADER, plan(reason="the one we are in"), 0.2)
        assert one.part is not None
    before = snapshot(one)
    with pytest.raises(kind) as caught:
        one.receive(sender, message, 0.3)
    assert caught.value.peer == sender
    assert snapshot(one) == before


IGNORED: dict[str, tuple[PeerId, Message]] = {
    "a cut by somebody else": (THIRD, messages.Cut(PLAN_ID, tuple(IDS))),
    "a cut of another plan": (LEADER, messages.Cut(b"q" * 32, tuple(IDS))),
    "an abort by somebody else": (THIRD, messages.Abort(PLAN_ID, "no")),
    "an abort of another plan": (LEADER, messages.Abort(b"q" * 32, "no")),
    "directions by somebody else": (THIRD, messages.Fetch(PLAN_ID, 0, b"d" * 32, (THIRD,))),
    "directions to no part": (LEADER, messages.Fetch(PLAN_ID, 9, b"d" * 32, (THIRD,))),
    "a report to somebody who does not lead": (THIRD, messages.Collected(PLAN_ID, tuple(IDS))),
    "holdings to somebody who does not lead": (THIRD, messages.Held(PLAN_ID, (b"d" * 32,))),
    "a vote to somebody who does not lead": (THIRD, Voted(NEXT, 0, b"d" * 32, BAD_SIGNATURE)),
    "the same plan again": (LEADER, plan()),
    "no commits": (THIRD, messages.Commits(HEAD, ())),
    "old commits": (THIRD, messages.Commits(None, tuple(PAST))),
    "an old commit": (THIRD, messages.Committed(PAST[1])),
    "a question about somebody unknown": (THIRD, messages.Probe(b"x" * 32)),
    "an opinion about somebody unknown": (THIRD, messages.Opinion(b"x" * 32, 1.0)),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_does_not_concern_us_changes_nothing(name: str) -> None:
    sender, message = IGNORED[name]
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(), 0.2)
    before = snapshot(one)
    assert one.receive(sender, message, 0.3) == []
    assert snapshot(one) == before


@pytest.mark.parametrize("height", [0, 1, NEXT + 1, NEXT + 50])
def test_stale_and_future_heights_change_nothing(height: int) -> None:
    one = member()
    before = snapshot(one)
    parent = b"q" * 32
    for message in (
        Promise(height, 0, parent, None, None),
        plan(height=height, parent=parent),
        Propose(0, but(commit(), height=height, parent=parent)),
        Voted(height, 0, b"d" * 32, BAD_SIGNATURE),
    ):
        effects = one.receive(LEADER, message, 5.0)
        after = snapshot(one)
        for holder in (after, after["consensus"]):
            holder["follower"].update({k: before["follower"][k] for k in ("_asked_at", "_asked")})
        assert after == before
        answers = {type(e.message) for e in of(effects, Send)}
        assert answers <= ({messages.GetCommits} if height > NEXT else {messages.Commits})


def test_strangers_are_not_listened_to() -> None:
    one = member()
    stranger = b"\x99" * 32
    before = snapshot(one)
    for message in (
        messages.Goodbye("x"),
        messages.Probe(IDS[0]),
        messages.GetCommits(-1),
        plan(),
        messages.Commits(None, tuple(PAST)),
    ):
        with pytest.raises(Refused, match="before being admitted") as caught:
            one.receive(stranger, message, 0.5)
        assert caught.value.peer == stranger
    with pytest.raises(Refused, match="no invitation"):
        one.receive(stranger, beat(admission=b"uninvited"), 0.5)
    assert snapshot(one) == before and stranger not in one.membership.peers
    one.receive(stranger, beat(admission=b"invited"), 0.5)
    assert one.admitted(stranger)
    assert one.receive(stranger, messages.GetCommits(0), 0.6)


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
    saved = of(effects, SaveVote)[-1]
    again = member(vote=(saved.height, saved.ballot, saved.accepted))
    assert again.consensus.acceptor.accepted == one.consensus.acceptor.accepted and again.consensus.ballot == ballot
    with pytest.raises(Refused, match="two proposals"):
        again.receive(turn(ballot), Propose(ballot, OTHER_VIEW), 2.0)
    for lower in range(ballot):
        assert vote_of(again.receive(turn(lower), Propose(lower, OTHER_VIEW), 3.0)) is None
    assert vote_of(again.receive(turn(ballot), Propose(ballot, commit()), 4.0)) == vote_of(effects)
    promised = sends(again.tick(9.0), Promise) or sends(again.set_ready(ready(), 9.0), Promise)
    assert promised[0].message.accepted == saved.accepted, "the next proposer hears of it"


def test_a_vote_of_a_height_that_is_over_is_forgotten() -> None:
    one = member(vote=(HEAD.height, 7, messages.Accepted(7, HEAD)))
    assert (one.consensus.ballot, one.consensus.acceptor.accepted) == (0, None)


def test_a_restarted_proposer_proposes_what_it_had_voted_for() -> None:
    mine = messages.Accepted(0, commit())
    one = new_member(BY_ID[LEADER], RULES)
    assert not sends(one.begin(None, PAST, 0.0, vote=(NEXT, 0, mine)), Propose), "not before the state is loaded"
    effects = one.applied(HEAD.height, HEAD.version, state_digest(HEAD.version), 0.1)
    proposals = sends(effects, Propose)
    assert proposals and all(p.message.commit == mine.commit for p in proposals)


def test_forged_votes_do_not_count() -> None:
    one = member(LEADER)
    one.begin(None, PAST, 0.0, vote=(NEXT, 0, messages.Accepted(0, commit())))
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
    assert one.part is not None
    end = one.part.expires_at
    pass_time(one, 0.25, end, set())
    assert one.part is not None
    effects = pass_time(one, end + 0.01, end + 0.5, set())
    assert one.part is None and one.consensus.ballot == 1 and of(effects, Forget)


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
    assert one.ready is None


# ---- after a commit -------------------------------------------------------------------------------------------


def test_a_round_is_over_with_a_reason() -> None:
    for contributes, reason in ((True, "committed"), (False, "the plan of the round did not reach us in time")):
        one = member()
        one.set_ready(ready(), 0.1)
        after = commit(samples=4)
        if not contributes:
            assert after.round is not None
            less = tuple(c for c in after.round.contributors if c.peer != FOLLOWER)
            after = follow(HEAD, IDS, result=but(after.round, contributors=less))
        over = of(one.receive(LEADER, messages.Committed(certify(after, INSIDE)), 1.0), RoundOver)
        assert [(o.contributed, o.reason) for o in over] == [(contributes, reason)]
        assert one.ready is None


def test_who_takes_back_what_it_had_sent_hears_that_the_round_missed_it() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    assert of(one.receive(LEADER, plan(), 0.5), Contribute)
    one.withdraw(0.6)
    after = commit(samples=4)
    assert after.round is not None
    less = tuple(c for c in after.round.contributors if c.peer != FOLLOWER)
    after = follow(HEAD, IDS, result=but(after.round, contributors=less))
    over = of(one.receive(LEADER, messages.Committed(certify(after, INSIDE)), 1.0), RoundOver)
    assert [(o.contributed, "given up by us" in o.reason) for o in over] == [(False, True)]
    again = follow(after, IDS, result=but(after.round, plan=b"q" * 32))
    assert not of(one.receive(LEADER, messages.Committed(certify(again, INSIDE)), 2.0), RoundOver), "only once"


def test_a_change_of_view_does_not_end_readiness() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    effects = one.receive(LEADER, messages.Committed(certify(OTHER_VIEW, INSIDE)), 1.0)
    assert not of(effects, RoundOver) and one.ready is not None


def test_who_is_dropped_from_the_view_notices() -> None:
    one = member(IDS[3])
    effects = one.receive(LEADER, messages.Committed(certify(OTHER_VIEW, INSIDE)), 1.0)
    assert not one.in_view and [n.event for n in of(effects, Note)] == ["view.dropped"]
    assert one.consensus.proposer is None and not sends(one.tick(2.0), Promise)


def test_a_minority_repairs_itself_once() -> None:
    one = member()
    effects: list[Effect] = []
    for peer in IDS:
        if peer != FOLLOWER:
            effects += one.receive(peer, beat(height=HEAD.height, version=HEAD.version, digest=b"m" * 32), 1.0)
    (repair,) = of(effects, Repair)
    assert repair.digest == b"m" * 32 and set(repair.donors) <= set(IDS) - {FOLLOWER}
    assert not of(one.receive(THIRD, beat(height=HEAD.height, version=HEAD.version, digest=b"m" * 32), 2.0), Repair)


def test_a_minority_of_liars_does_not_make_us_repair() -> None:
    one = member()
    for peer in (THIRD, OUTSIDER.peer_id):
        assert not of(one.receive(peer, beat(height=HEAD.height, version=0, digest=b"m" * 32), 1.0), Repair)


def test_leaving_tells_everybody() -> None:
    goodbyes = member().leave("asked to")
    assert {e.to for e in goodbyes} == {*IDS, OUTSIDER.peer_id} - {FOLLOWER}  # type: ignore[union-attr]
    one = member()
    one.receive(THIRD, messages.Goodbye("asked to"), 1.0)
    assert one.membership.leaves(THIRD) and one.membership.alive(THIRD), "it votes until it is let go"
    one.state = "leaving"
    assert one.membership.leaves(FOLLOWER)


def test_joiners_are_admitted_hold_our_state_and_live() -> None:
    one = member()
    who = OUTSIDER.peer_id
    assert one.standing.joiners() == ()
    one.receive(who, beat(height=HEAD.height, digest=state_digest(HEAD.version)), 1.0)
    assert one.standing.joiners() == (who,)
    one.receive(who, beat(height=HEAD.height, digest=b"o" * 32), 1.0)
    assert one.standing.joiners() == ()


def test_news_is_answered_once() -> None:
    one = new_member(BY_ID[FOLLOWER], RULES)
    one.begin(None, PAST, 0.0)
    replies = sends(one.receive(THIRD, beat(), 1.0), messages.Heartbeat)
    assert [s.message.reply for s in replies] == [True]
    assert not one.receive(THIRD, beat(), 1.1)
    assert not sends(one.receive(LEADER, beat(reply=True), 1.2), messages.Heartbeat), "an answer wants no answer"


def test_nothing_is_done_before_there_is_a_history() -> None:
    one = member(OUTSIDER.peer_id, history=[])
    for message in (
        plan(),
        Propose(0, commit()),
        Promise(NEXT, 0, PARENT, None, None),
        Voted(NEXT, 0, b"d" * 32, BAD_SIGNATURE),
    ):
        assert one.receive(IDS[0], message, 1.0) == []  # the founder is known from the manifest
    one.receive(IDS[0], beat(height=1, digest=b"d" * 32), 1.0)
    asked = sends(one.tick(3.0), messages.GetCommits)
    assert asked and {s.message.after for s in asked} == {-1}
    assert "history" in one.reason


@pytest.mark.parametrize("signer", [Ed25519Signer(b"z" * 32)])
def test_a_history_names_its_swarm(signer: Ed25519Signer) -> None:
    """The founder of another swarm cannot make us take its chain."""
    other = [certify(chain.genesis(signer.peer_id, RULES.rules), [signer])]
    one = member(OUTSIDER.peer_id, history=[])
    one.receive(IDS[0], beat(height=1, digest=b"d" * 32), 0.5)
    with pytest.raises(Refused, match="not the founder's"):
        one.receive(IDS[0], messages.Commits(None, tuple(other)), 1.0)


def test_a_late_copy_of_a_plan_that_was_given_up_does_not_bring_it_back() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(attempt=1), 0.2)
    one.receive(LEADER, plan(attempt=2), 0.3)
    one.receive(LEADER, plan(attempt=1), 0.4)
    assert one.part is not None and one.part.plan.attempt == 2


def test_a_cut_with_contributors_who_were_not_planned_is_refused() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(), 0.2)
    with pytest.raises(Refused):
        one.receive(LEADER, messages.Cut(PLAN_ID, (b"x" * 32,)), 0.3)
    assert one.part is not None and one.part.cut is None


# ---- when it has to be looked at ------------------------------------------------------------------------------------


def test_at_rest_nothing_happens_before_the_moment_it_names() -> None:
    one = member()
    one.tick(0.0)
    assert not one.busy
    at = one.look_at()
    assert 0.0 < at <= one.membership.heartbeat_s
    assert one.tick(at - 0.01) == []
    assert {effect.to for effect in one.tick(at) if isinstance(effect, Send)} >= set(IDS) - {FOLLOWER}


def test_whoever_waits_for_a_round_repeats_itself_in_time_and_a_round_makes_busy() -> None:
    one = member()
    one.set_ready(ready(), 0.0)
    assert not one.busy and one.look_at() <= RESEND_S
    assert Promise in {type(effect.message) for effect in one.tick(RESEND_S) if isinstance(effect, Send)}
    one.receive(LEADER, plan(), RESEND_S)
    assert one.busy


def test_a_newcomer_without_a_history_is_busy() -> None:
    assert member(history=[]).busy
