"""Keeping up with the history: in order, in bounded batches, over a long absence, and never on one peer's word."""

from dataclasses import replace
from typing import Any

import msgspec
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
    RULES,
    THIRD,
    but,
    grown,
    member,
    of,
    pass_time,
    sends,
)
from tests.protocol.bus import (
    beat,
    certify,
    follow,
    history_of,
    new_member,
    ready,
    snapshot,
    state_digest,
)

from farflung.protocol import chain, messages
from farflung.protocol.chain import Certified
from farflung.protocol.effects import Apply, Effect, Note, Refusal, RoundOver
from farflung.protocol.errors import BadSignature, Refused, RemoteError
from farflung.protocol.history import check_chain
from farflung.protocol.ledger import Holding, Ledger, Share
from farflung.protocol.limits import MAX_COMMITS_PER_REPLY
from farflung.protocol.member import Member
from farflung.protocol.messages import Promise
from farflung.protocol.settings import HISTORY

# ---- catching up ----------------------------------------------------------------------------------------------


def deliver(one: Member, donor: Member, request: messages.GetCommits, now: float = 1.0) -> list[Effect]:
    """Ask a donor and hand its answer on."""
    one.receive(donor.me, beat(height=donor.head.commit.height, digest=b"d" * 32), now)
    assert donor.me in one.follower._asked
    effects: list[Effect] = []
    for answer in sends(donor.receive(one.me, request, now), messages.Commits):
        effects += one.receive(donor.me, answer.message, now)
    return effects


def test_commits_are_applied_in_order_and_batches_are_bounded() -> None:
    rounds = grown(100)
    donor, one = member(THIRD, history=[*PAST, *rounds]), member()
    effects = deliver(one, donor, messages.GetCommits(HEAD.height))
    assert [e.certified.commit.height for e in of(effects, Apply)] == list(range(NEXT, NEXT + MAX_COMMITS_PER_REPLY))
    effects = deliver(one, donor, messages.GetCommits(one.head.commit.height), 2.0)
    assert one.head == rounds[-1] and len(of(effects, Apply)) == 100 - MAX_COMMITS_PER_REPLY


def test_commits_out_of_order_wait_for_those_before() -> None:
    rounds = grown(3)
    one = member()
    effects = one.receive(THIRD, messages.Committed(rounds[1]), 1.0)
    assert one.head.commit == HEAD and sends(effects, messages.GetCommits)[0].message.after == HEAD.height
    one.receive(THIRD, messages.Committed(rounds[0]), 2.0)
    one.receive(THIRD, messages.Committed(rounds[0]), 2.0)
    assert of(one.receive(THIRD, messages.Committed(rounds[1]), 3.0), Apply) == [Apply(rounds[1])]


def test_a_newcomer_takes_the_newest_with_its_parent() -> None:
    rounds = grown(5)
    donor, one = member(THIRD, history=[*PAST, *rounds]), member(OUTSIDER.peer_id, history=[])
    assert not one.started
    effects = deliver(one, donor, messages.GetCommits(-1))
    assert of(effects, Apply) == [Apply(rounds[-1], rounds[-2].commit)]
    assert one.history.anchor == rounds[-2].commit and not one.in_view


def absence() -> tuple[Member, list[Certified]]:
    """A donor that has forgotten what comes after `HEAD`, and the whole story."""
    rounds = grown(HISTORY + 20)
    donor = member(THIRD, history=PAST)
    for certified in rounds:
        donor.receive(LEADER, messages.Committed(certified), 1.0)
    return donor, rounds


def test_a_long_absence_is_jumped_over() -> None:
    donor, rounds = absence()
    assert len(donor.history) == HISTORY and donor.history.anchor is not None
    assert donor.history.anchor.height == next(iter(donor.history)).commit.height - 1
    one = member()
    one.set_ready(ready(), 0.5)
    for peer in IDS:
        if peer not in (FOLLOWER, THIRD):
            one.receive(peer, beat(height=rounds[-1].commit.height), 0.6)
    effects = deliver(one, donor, messages.GetCommits(one.head.commit.height))
    assert one.head == rounds[-1] and one.history.anchor == rounds[-2].commit and len(one.history) == 1
    assert [n.event for n in of(effects, Note)] == ["history.jump"]
    assert of(effects, Apply) == [Apply(rounds[-1], rounds[-2].commit)]  # on disk it does not follow what is there
    assert [o.contributed for o in of(effects, RoundOver)] == [False] and one.attendance.ready is None
    assert deliver(one, donor, messages.GetCommits(one.head.commit.height), 2.0) == []


def test_one_peers_word_is_not_enough_to_leave_our_own_history() -> None:
    donor, _ = absence()
    one = member()
    assert not of(deliver(one, donor, messages.GetCommits(one.head.commit.height)), Apply)
    assert one.head.commit == HEAD


def test_who_was_just_started_does_not_take_an_outsiders_word_for_it() -> None:
    """It has heard nobody yet, and nobody has been silent: a history that somebody else made up must not make it forget what it voted for."""
    one = new_member(BY_ID[IDS[1]], RULES)
    one.begin(None, PAST, 0.0)
    one.applied(HEAD.height, HEAD.version, state_digest(HEAD.version), 0.0)
    for alone in (False, True):
        if alone:  # and nobody else could have gone on
            one.begin(None, history_of([BY_ID[one.me]]), 1.0)
        head = one.head
        one.receive(OUTSIDER.peer_id, beat(height=1000, version=999, digest=bytes(32)), 0.5 + alone)
        anchor = msgspec.structs.replace(HEAD, height=999, view=(OUTSIDER.peer_id,), version=999)
        forged = certify(follow(anchor, tuple(sorted((OUTSIDER.peer_id, one.me)))), [OUTSIDER])
        assert not of(one.receive(OUTSIDER.peer_id, messages.Commits(anchor, (forged,)), 0.6 + alone), Apply)
        assert one.head == head


def test_one_of_those_we_knew_is_enough_where_the_others_are_gone() -> None:
    """After a long absence it may be all that is left of our view, and no quorum of it."""
    _donor, rounds = absence()
    one = member()
    pass_time(one, 0.25, 12.0, set(IDS) - {LEADER})
    outsider = member(OUTSIDER.peer_id, history=[*PAST[:1], *PAST[1:]])
    for certified in rounds:
        outsider.receive(LEADER, messages.Committed(certified), 1.0)
    deliver(one, outsider, messages.GetCommits(one.head.commit.height), 12.5)
    assert one.head.commit == HEAD  # the one that is there has not gone on
    one.receive(LEADER, beat(height=rounds[-1].commit.height, version=9, digest=bytes(32)), 13.0)
    deliver(one, outsider, messages.GetCommits(one.head.commit.height), 13.5)
    assert one.head == rounds[-1]


def test_when_nobody_we_knew_is_left_any_history_that_holds_together_will_do() -> None:
    _donor, rounds = absence()
    one = member()
    pass_time(one, 0.25, 12.0, set(IDS))
    outsider = member(OUTSIDER.peer_id, history=[*PAST[:1], *PAST[1:]])
    for certified in rounds:
        outsider.receive(LEADER, messages.Committed(certified), 1.0)
    deliver(one, outsider, messages.GetCommits(one.head.commit.height), 12.5)
    assert one.head == rounds[-1]


@pytest.mark.parametrize("kind", [Refused, BadSignature])
def test_a_future_that_does_not_hold_together_is_refused(kind: type[RemoteError]) -> None:
    rounds = grown(3)
    bad = but(rounds[2], votes=FORGED.votes) if kind is BadSignature else rounds[2]
    anchor = rounds[1].commit if kind is BadSignature else HEAD
    one = member(OUTSIDER.peer_id, history=[])
    one.receive(THIRD, beat(height=9, digest=b"d" * 32), 0.5)
    before = snapshot(one)
    with pytest.raises(kind) as caught:
        one.receive(THIRD, messages.Commits(anchor, (bad,)), 1.0)
    assert caught.value.peer == THIRD and snapshot(one) == before


def test_what_came_before_a_bad_commit_in_the_same_message_stands() -> None:
    good, bad = grown(2)
    one = member()
    one.set_ready(ready(4), 0.5)
    effects = one.receive(THIRD, messages.Commits(HEAD, (good, but(bad, votes=FORGED.votes))), 1.0)
    assert one.head == good
    assert [e.certified for e in of(effects, Apply)] == [good] and len(of(effects, RoundOver)) == 1
    assert [(type(r.error), r.error.peer) for r in of(effects, Refusal)] == [(BadSignature, THIRD)]


def test_whoever_is_behind_is_helped() -> None:
    ahead = member(THIRD, history=[*PAST, *grown(2)])
    effects = ahead.receive(FOLLOWER, Promise(NEXT, 0, PARENT, None, None), 1.0)
    assert [len(s.message.chain) for s in sends(effects, messages.Commits)] == [2]
    behind = member()
    effects = behind.receive(THIRD, beat(height=9, digest=b"d" * 32), 1.0)
    assert [s.to for s in sends(effects, messages.GetCommits)] == [THIRD]
    assert not sends(behind.receive(THIRD, beat(height=9, digest=b"d" * 32), 1.1), messages.GetCommits), (
        "not at once again"
    )


@pytest.mark.parametrize("spoil", ["another founder", "another swarm", "another window"])
def test_a_first_commit_must_be_the_founders(spoil: str) -> None:
    first = PAST[0]
    if spoil == "another founder":
        first = certify(chain.genesis(OUTSIDER.peer_id, RULES.rules), [OUTSIDER])
    elif spoil == "another window":
        first = certify(chain.genesis(IDS[0], replace(RULES.rules, ahead=RULES.rules.ahead + 1)), INSIDE[:1])
    else:
        first = but(first, votes=(chain.Vote(IDS[0], BY_ID[IDS[0]].sign(b"something else")),))
    with pytest.raises(RemoteError) as caught:
        check_chain(RULES, messages.Commits(None, (first,)), THIRD)
    assert caught.value.peer == THIRD
    one = member(OUTSIDER.peer_id, history=[])
    one.receive(THIRD, beat(height=9, digest=b"d" * 32), 0.5)
    with pytest.raises(RemoteError):
        one.receive(THIRD, messages.Commits(None, (first,)), 1.0)
    assert not one.started


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"width": 2}, "moves 2 fragments"),
        ({"width": 64}, "moves 64 fragments"),
        ({"lap": 1 << 62, "ledger": Ledger(shares=(Share(0, 2, 0),))}, f"in {1 << 62} steps"),
        ({"steps": (1 << 40) - 1}, "with 1 left"),
        ({"ledger": Ledger(held=(Holding(OUTSIDER.peer_id, ((1 << 62, 0),)),))}, "a ledger that cannot be"),
        ({"ledger": Ledger(free=((0, 1),))}, "a ledger that cannot be"),
    ],
)
def test_an_anchor_that_no_chain_has_is_refused(wrong: dict[str, Any], said: str) -> None:
    """Nobody has checked it, and what follows it would be reckoned from it: how much the next round moves, and who gets which samples, block by block."""
    message = messages.Commits(msgspec.structs.replace(HEAD, **wrong), (grown(1)[0],))
    with pytest.raises(Refused, match=said) as caught:
        check_chain(RULES, message, THIRD)
    assert caught.value.peer == THIRD
    one = member(OUTSIDER.peer_id, history=[])
    one.receive(THIRD, beat(height=9, digest=b"d" * 32), 0.5)
    with pytest.raises(Refused):
        one.receive(THIRD, message, 1.0)
    assert not one.started
