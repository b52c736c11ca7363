"""One member against messages that are false, late, early or from the wrong peer; and what a restart and a long absence do to it."""

from dataclasses import replace

import pytest
from tests.protocol.alone import (
    BAD_SIGNATURE,
    BY_ID,
    FOLLOWER,
    FORGED,
    HEAD,
    IDS,
    INSIDE,
    LEADER,
    NEXT,
    OTHER_VIEW,
    OUTSIDER,
    PARENT,
    PAST,
    PLAN_ID,
    RULES,
    THIRD,
    WRONG_LEDGER,
    but,
    commit,
    grown,
    member,
    of,
    plan,
    sends,
)
from tests.protocol.bus import (
    WINDOW,
    beat,
    certify,
    new_member,
    ready,
    snapshot,
    state_digest,
)

from farflung.protocol import chain, messages
from farflung.protocol.chain import Contribution
from farflung.protocol.effects import Effect, Note, Repair, Send
from farflung.protocol.errors import BadSignature, Refused, RemoteError
from farflung.protocol.keys import Ed25519Signer, PeerId
from farflung.protocol.limits import MAX_PIPELINE_PEERS
from farflung.protocol.member import Member
from farflung.protocol.membership import FULL_PACE
from farflung.protocol.messages import Contributor, Heartbeat, Message, Part, Promise, Propose, Voted
from farflung.protocol.settings import RESEND_S

# ---- what is refused, and changes nothing ---------------------------------------------------------------------

TOO_MANY_SAMPLES = but(
    commit(samples=4),
    round=but(commit(samples=4).round, contributors=(Contribution(IDS[0], 100 * WINDOW + 100, WINDOW + 1, 1),)),
)


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
        assert one.attendance.part is not None
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


# ---- after a commit -------------------------------------------------------------------------------------------


def test_who_is_dropped_from_the_view_notices() -> None:
    one = member(IDS[3])
    effects = one.receive(LEADER, messages.Committed(certify(OTHER_VIEW, INSIDE)), 1.0)
    assert not one.in_view and [n.event for n in of(effects, Note)] == ["view.dropped"]
    assert one.consensus.proposer is None and not sends(one.tick(2.0), Promise)


def test_who_waits_for_a_place_says_why() -> None:
    one = member(IDS[3])
    one.receive(LEADER, messages.Committed(certify(OTHER_VIEW, INSIDE)), 1.0)
    one.tick(2.0)
    assert one.reason == "not a member yet"
    few = replace(one.consensus.settings, rules=replace(one.consensus.settings.rules, max_group=3))
    one.consensus.settings = few
    one.tick(3.0)
    assert one.reason == "all 3 places of members are taken: this node takes the next free one"
    for now in range(4, 60):
        one.tick(float(now))
    assert (
        one.reason.startswith("not a member yet; no quorum: 0 of 3 members reachable; ") and "come back" in one.reason
    )


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
    one.membership.leave(1.0)
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


# ---- when it has to be looked at ------------------------------------------------------------------------------------


def test_at_rest_nothing_happens_before_the_moment_it_names() -> None:
    one = member()
    one.tick(0.0)
    assert not one.busy
    at = one.look_at()
    assert 0.0 < at <= one.membership.heartbeat_s
    assert one.tick(at - 0.01) == []
    assert {effect.to for effect in one.tick(at) if isinstance(effect, Send)} >= set(IDS) - {FOLLOWER}


def test_a_heartbeat_comes_when_the_last_one_said_whoever_has_come_since() -> None:
    def said(effects: list[Effect]) -> set[float]:
        beats = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Heartbeat)]
        return {b.every_s for b in beats if not b.reply}

    one = member()  # it has just greeted everybody
    usual = one.membership.heartbeat_s
    for number in range(2 * FULL_PACE):
        one.receive(number.to_bytes(32), beat(admission=b""), 0.1)
    more = one.membership.beat_s
    assert more > usual
    assert not said(one.tick(usual - 0.01)) and said(one.tick(usual)) == {more}
    assert not said(one.tick(usual + more - 0.01)) and said(one.tick(usual + more)) == {more}
    one.membership.state = "ready"
    at = 2 * usual + more
    assert one.look_at() <= at and not said(one.tick(at - 0.01)) and said(one.tick(at)) == {more}, "that is news"


def test_a_member_that_was_started_again_hears_at_once_who_greets_rarely() -> None:
    """As in groups of many. Nobody had noticed that it was away, so it is no news."""

    def replies(one: Member, state: str, sender: PeerId = THIRD) -> int:
        effects = one.receive(sender, beat(state=state, admission=b"invited"), 11.0)
        return sum(isinstance(e, Send) and isinstance(e.message, Heartbeat) and e.message.reply for e in effects)

    one = member()
    assert replies(one, "joining") == 0, "it will hear us in a moment"
    for number in range(2 * FULL_PACE):
        one.receive(number.to_bytes(32), beat(admission=b""), 9.0)
    one.tick(10.0)
    assert replies(one, "joining") == 1 and replies(one, "training") == 0
    assert replies(one, "joining", OUTSIDER.peer_id) == 0, "a crowd of newcomers hears us all the same"


def test_whoever_waits_for_a_round_repeats_itself_in_time_and_a_round_makes_busy() -> None:
    one = member()
    one.set_ready(ready(), 0.0)
    assert not one.busy and one.look_at() <= RESEND_S
    assert Promise in {type(effect.message) for effect in one.tick(RESEND_S) if isinstance(effect, Send)}
    one.receive(LEADER, plan(), RESEND_S)
    assert one.busy


def test_a_newcomer_without_a_history_is_busy() -> None:
    assert member(history=[]).busy


def test_whoever_can_make_keys_cannot_make_us_greet_them_all() -> None:
    one = member()
    crowd = [number.to_bytes(32, "big") for number in range(1, MAX_PIPELINE_PEERS + 1)]
    with pytest.raises(Refused, match="more than 1024 peers"):
        for stranger in crowd:
            one.receive(stranger, beat(), 0.5)
    assert len(one.membership.peers) == MAX_PIPELINE_PEERS and not one.admitted(crowd[-1])
    assert not one.discovered([crowd[-1]], 0.5) and crowd[-1] not in one.membership.peers
    one.receive(LEADER, beat(), 0.6)  # who is a member is heard all the same
    for now in (10.0, 20.0, 30.0, 700.0):  # suspected, asked about, called dead, and forgotten
        one.tick(now)
    assert one.membership.peers.keys() == set(IDS) - {one.me} and not one.admitted(crowd[0])
    one.receive(crowd[-1], beat(), 711.0)
    assert one.admitted(crowd[-1])
