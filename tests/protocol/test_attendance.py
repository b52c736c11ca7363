"""One member and the rounds of a height: what becomes of what it offers, and of plans that come late."""

import pytest
from tests.protocol.alone import (
    FOLLOWER,
    HEAD,
    IDS,
    INSIDE,
    LEADER,
    OTHER_VIEW,
    PLAN_ID,
    but,
    commit,
    member,
    of,
    plan,
)
from tests.protocol.bus import (
    certify,
    follow,
    ready,
)

from farflung.protocol import messages
from farflung.protocol.effects import Contribute, RoundOver
from farflung.protocol.errors import Refused


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
        assert one.attendance.ready is None


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


def test_who_takes_back_what_it_had_sent_hears_so_after_a_change_of_view_too() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    assert of(one.receive(LEADER, plan(), 0.5), Contribute)
    one.withdraw(0.6)
    let_go = follow(HEAD, tuple(peer for peer in IDS if peer != FOLLOWER))
    assert not of(one.receive(LEADER, messages.Committed(certify(let_go, INSIDE)), 1.0), RoundOver)
    result = commit(samples=4).round
    assert result is not None
    less = tuple(c for c in result.contributors if c.peer != FOLLOWER)
    after = follow(let_go, let_go.view, result=but(result, contributors=less))
    left = [signer for signer in INSIDE if signer.peer_id in let_go.view]
    over = of(one.receive(LEADER, messages.Committed(certify(after, left)), 2.0), RoundOver)
    assert [(o.contributed, "given up by us" in o.reason) for o in over] == [(False, True)]


def test_who_takes_back_what_it_had_sent_and_then_jumps_says_so_once() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    assert of(one.receive(LEADER, plan(), 0.5), Contribute)
    one.withdraw(0.6)
    later = certify(commit(samples=4), INSIDE)
    over = of(one.begin(None, [later], 1.0), RoundOver)
    assert [(o.contributed, o.reason) for o in over] == [(False, "the history went on without us")]
    assert later.commit.round is not None
    again = follow(later.commit, IDS, result=but(later.commit.round, plan=b"q" * 32))
    assert not of(one.receive(LEADER, messages.Committed(certify(again, INSIDE)), 2.0), RoundOver)


def test_a_change_of_view_does_not_end_readiness() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    effects = one.receive(LEADER, messages.Committed(certify(OTHER_VIEW, INSIDE)), 1.0)
    assert not of(effects, RoundOver) and one.attendance.ready is not None


def test_a_late_copy_of_a_plan_that_was_given_up_does_not_bring_it_back() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(attempt=1), 0.2)
    one.receive(LEADER, plan(attempt=2), 0.3)
    one.receive(LEADER, plan(attempt=1), 0.4)
    assert one.attendance.part is not None and one.attendance.part.plan.attempt == 2


def test_a_cut_with_contributors_who_were_not_planned_is_refused() -> None:
    one = member()
    one.set_ready(ready(), 0.1)
    one.receive(LEADER, plan(), 0.2)
    with pytest.raises(Refused):
        one.receive(LEADER, messages.Cut(PLAN_ID, (b"x" * 32,)), 0.3)
    assert one.attendance.part is not None and one.attendance.part.cut is None
