"""One member in one round: which plans it takes, what it owes to whom, and what it tells the proposer."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.protocol.bus import beat, follow, ready, rules

from farflung.protocol import chain
from farflung.protocol.chain import Commit, Contribution, PartResult, RoundResult
from farflung.protocol.effects import Confirm, Contribute, FetchMean, Note, Reduce, Secure, Send
from farflung.protocol.errors import Refused
from farflung.protocol.ledger import Ledger
from farflung.protocol.limits import MAX_WAVES
from farflung.protocol.membership import SUSPECT_AFTER, VERDICT_AFTER, Membership
from farflung.protocol.messages import Collected, Contributor, Fetch, Held, Part, Plan
from farflung.protocol.participation import Participation, check_plan, check_ready
from farflung.protocol.settings import RESEND_S, VOTE_S

A, B, C, D = (bytes([i]) * 32 for i in range(1, 5))
RULES = rules(A)
HEAD = follow(chain.genesis(A, RULES.rules), (A, B, C))
PROPOSER = C
PLAN_ID, DIGEST = b"p" * 32, b"d" * 32


def plan(**changes: Any) -> Plan:
    """A, B and C contribute and own a part each; D receives."""
    values: dict[str, Any] = dict(
        height=2, ballot=0, attempt=1, parent=b"h" * 32, members=(A, B, C, D),
        contributors=tuple(Contributor(p, ready()) for p in (A, B, C)),
        parts=(Part(A, 0, 320), Part(B, 320, 640), Part(C, 640, 1000)),
        uplink=RULES.uplink, downlink=RULES.downlink, scatter_s=4.0, gather_s=4.0, reason="3 of 3",
    )  # fmt: skip
    return Plan(**{**values, **changes})


def contributors(*peers: bytes) -> tuple[Contributor, ...]:
    return tuple(Contributor(p, ready()) for p in peers)


def check(plan: Plan, me: bytes = A, mine: Any = None) -> None:
    check_plan(plan, HEAD, RULES, me, mine, PROPOSER)


def test_a_good_plan() -> None:
    for me in (A, B, C, D):
        check(plan(), me)
    check(plan(), A, ready())
    check(plan(contributors=contributors(B), parts=(Part(B, 0, 1000),)), A, ready())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(members=(B, A, C, D)), "unsorted or repeated members"),
        (dict(members=(A, A, B, C, D)), "unsorted or repeated members"),
        (dict(contributors=contributors(B, A, C)), "unsorted or repeated contributors"),
        (dict(contributors=contributors(A, A, B, C)), "unsorted or repeated contributors"),
        (dict(contributors=contributors(A, B, C, D)), "from outside the view"),
        (dict(members=(A, B, D)), "from outside the view"),
        (dict(contributors=()), "without contributors"),
        (dict(members=(B, C, D), contributors=contributors(B, C)), "sent to an outsider"),
        (dict(members=tuple(sorted({A, B, C, *(bytes([i]) * 32 for i in range(9, 30))}))), "with 24 members"),
        (dict(contributors=(Contributor(A, ready(25)),), parts=(Part(A, 0, 1000),)), "does not hold its samples"),
        (dict(contributors=(Contributor(A, ready(0)),), parts=(Part(A, 0, 1000),)), "does not hold its samples"),
        (dict(uplink="fp32"), "codecs"),
        (dict(downlink="int4"), "codecs"),
        (dict(scatter_s=0.0), "deadlines"),
        (dict(gather_s=RULES.max_round_s + 0.1), "deadlines"),
        (dict(parts=(Part(D, 0, 1000),)), "does not contribute"),
        (dict(parts=(Part(A, 0, 320), Part(B, 336, 1000))), "gaps or overlap"),
        (dict(parts=(Part(A, 0, 320), Part(B, 304, 1000))), "gaps or overlap"),
        (dict(parts=(Part(A, 0, 0), Part(B, 0, 1000))), "gaps or overlap"),
        (dict(parts=(Part(A, 16, 1000),)), "gaps or overlap"),
        (dict(parts=(Part(A, 0, 321), Part(B, 321, 1000))), "multiple of 16"),
        (dict(parts=(Part(A, 0, 320), Part(B, 320, 640))), "ends at element 640, not at 1000"),
        (dict(parts=(Part(A, 0, 1001),)), "ends at element 1001, not at 1000"),
        (dict(parts=()), "ends at element 0, not at 1000"),
        (dict(parts=(*(Part(A, 16 * i, 16 * (i + 1)) for i in range(MAX_WAVES)), Part(A, 16 * MAX_WAVES, 1000))), f"{MAX_WAVES + 1} parts of one owner"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        check(plan(**changes))
    assert caught.value.peer == PROPOSER


def test_a_plan_whose_tokens_are_not_its_samples_is_refused() -> None:
    """Nothing could be divided by none."""
    good = plan()
    bad = tuple(Contributor(c.peer, msgspec.structs.replace(c.ready, tokens=0)) for c in good.contributors)
    with pytest.raises(Refused, match="tokens that are not its samples"):
        check(plan(contributors=bad), me=D)


def test_a_plan_moves_the_fragment_whose_turn_it_is() -> None:
    rules = replace(RULES, rules=replace(RULES.rules, cuts=(0, 320, 1000)))
    check_plan(plan(parts=(Part(A, 320, 640), Part(B, 640, 1000))), HEAD, rules, C, None, PROPOSER)
    for parts in ((Part(A, 0, 320),), (Part(A, 0, 1000),), (Part(A, 320, 640),)):
        with pytest.raises(Refused, match=r"gaps or overlap|not at 1000"):
            check_plan(plan(parts=parts), HEAD, rules, C, None, PROPOSER)


def test_a_plan_may_not_misstate_us() -> None:
    for mine in (ready(tokens=801), ready(samples=4), ready(ready_ms=1)):
        with pytest.raises(Refused, match="misstates our contribution"):
            check(plan(), A, mine)
        check(plan(), B, ready())


def test_what_a_member_may_say_it_has() -> None:
    check_ready(ready(24), HEAD, RULES, A)
    for mine in (ready(25), ready(0), ready(8, tokens=801), ready(8, tokens=1 << 62)):
        with pytest.raises(Refused, match="ready with") as caught:
            check_ready(mine, HEAD, RULES, A)
        assert caught.value.peer == A
    with pytest.raises(Refused):
        check_ready(ready(), HEAD, RULES, D)


# ---- taking part ----------------------------------------------------------------------------------------------


def take_part(me: bytes = A, *, contributing: bool = True, now: float = 100.0, **changes: Any) -> Participation:
    made = Participation(PLAN_ID, plan(**changes), now, contributing=contributing)
    made.begin(me)
    return made


def others(me: bytes = A, now: float = 100.0) -> Membership:
    members = Membership(me, 1.0)
    for peer in (A, B, C, D):
        if peer != me:
            members.heard(peer, now, beat())
    return members


def dead(members: Membership, peer: bytes, now: float) -> None:
    members.unreachable(peer, now, "reset")
    for seconds in range(1, int(SUSPECT_AFTER + VERDICT_AFTER) + 2):
        members.tick(now + seconds)
    assert not members.alive(peer)


def test_who_contributes() -> None:
    assert Participation(PLAN_ID, plan(), 0.0, contributing=True).begin(A) == [Contribute(PLAN_ID, plan())]
    assert Participation(PLAN_ID, plan(), 0.0, contributing=True).begin(D) == [], "D is a receiver"
    assert Participation(PLAN_ID, plan(), 0.0, contributing=False).begin(A) == [], "A was not ready"


def test_an_owner_reports_once_everything_has_arrived() -> None:
    part, members = take_part(), others()
    for peer in (A, B):
        part.arrived(0, peer)
        assert part.report(members, PROPOSER, 101.0) == []
    part.arrived(1, C)  # not our part
    part.arrived(7, C)
    part.arrived(0, D)  # not a contributor
    assert part.report(members, PROPOSER, 101.0) == []
    part.arrived(0, C)
    assert part.report(members, PROPOSER, 101.0) == [Send(PROPOSER, Collected(PLAN_ID, (A, B, C)))]
    assert part.report(members, PROPOSER, 101.1) == [], "once"
    assert part.report(members, PROPOSER, 101.0 + RESEND_S) != [], "and again, for it may be lost"


def test_an_owner_does_not_wait_for_the_dead_nor_forever() -> None:
    part, members = take_part(), others()
    part.arrived(0, A)
    part.arrived(0, B)
    assert part.report(members, PROPOSER, 103.9) == []
    assert part.report(members, PROPOSER, 104.0) == [Send(PROPOSER, Collected(PLAN_ID, (A, B)))]
    part, members = take_part(), others()
    part.arrived(0, A)
    part.arrived(0, B)
    dead(members, C, 100.0)
    members.heard(B, 101.0)
    assert part.report(members, PROPOSER, 101.0) == [Send(PROPOSER, Collected(PLAN_ID, (A, B)))]
    part.arrived(0, C)  # all the same, and a cut by that report would throw it away
    assert part.report(members, PROPOSER, 101.1) == [Send(PROPOSER, Collected(PLAN_ID, (A, B, C)))]
    assert part.report(members, PROPOSER, 101.2) == []


def test_an_owner_waits_a_while_for_whom_only_the_proposer_has_heard() -> None:
    part, members = take_part(scatter_s=60.0), others()
    members.peers.pop(C)
    members.discover(C, 50.0)
    part.arrived(0, A)
    part.arrived(0, B)
    assert part.report(members, PROPOSER, 99.9 + members.verdict_s) == []
    assert part.report(members, PROPOSER, 100.0 + members.verdict_s) == [Send(PROPOSER, Collected(PLAN_ID, (A, B)))]


def test_who_owns_nothing_reports_nothing() -> None:
    assert take_part(D).report(others(D), PROPOSER, 200.0) == []


def test_the_cut_starts_the_reduction_with_weights_that_sum_to_one() -> None:
    shares = (Contributor(A, ready(8)), Contributor(B, ready(4)), Contributor(C, ready(4)))
    part = take_part(contributors=shares)
    for peer in (A, B, C):
        part.arrived(0, peer)
    reduce = [e for e in part.on_cut(A, (A, B)) if isinstance(e, Reduce)]
    assert [(r.part, r.weights, r.early) for r in reduce] == [(0, ((A, 8 / 12), (B, 4 / 12)), False)]
    assert part.on_cut(A, (A, B, C)) == [], "there is one cut in a round"
    assert part.report(others(), PROPOSER, 999.0) == [], "and after it nothing is collected"


def test_an_owner_that_has_everything_reduces_before_the_cut_and_not_again() -> None:
    part = take_part(parts=(Part(A, 0, 160), Part(B, 160, 320), Part(A, 320, 1000)))
    thirds = tuple((p, 1 / 3) for p in (A, B, C))
    assert [part.arrived(2, p) for p in (A, B, C)] == [[], [], [Reduce(PLAN_ID, part.plan, 2, thirds, early=True)]]
    assert part.arrived(2, C) == [] and part.report(others(), PROPOSER, 101.0) == [], "the other part is not complete"
    assert [part.arrived(0, p) for p in (A, B, C)] == [[], [], [Reduce(PLAN_ID, part.plan, 0, thirds, early=True)]]
    assert [type(e) for e in part.on_cut(A, (A, B, C))] == [Note, Confirm]


def test_early_means_are_told_of_when_the_cut_is_known_and_void_if_it_leaves_somebody_out() -> None:
    for cut, left in (((A, B, C), (DIGEST,) * 3), ((A, B), (b"", DIGEST, b""))):
        part = take_part()
        for peer in (A, B, C):
            part.arrived(0, peer)
        part.hold(0, DIGEST, early=True)
        part.hold(1, DIGEST)  # its owner knows the cut already
        part.hold(2, DIGEST, early=True)
        part.hold(1, b"e" * 32, early=True)
        assert part.complete and part.show(PROPOSER, 102.0) == []
        effects = part.on_cut(A, cut)
        assert [e.part for e in effects if isinstance(e, Reduce)] == ([] if cut == (A, B, C) else [0])
        assert (Confirm(PLAN_ID) in effects) == (cut == (A, B, C))
        assert Send(PROPOSER, Held(PLAN_ID, left)) in part.show(PROPOSER, 102.0)
        part.hold(2, b"l" * 32, early=True)
        assert tuple(part.digests) == (left if cut != (A, B, C) else (DIGEST, DIGEST, b"l" * 32)), "late, as it was"
        part.hold(0, b"f" * 32)
        assert part.digests[0] == b"f" * 32


def test_an_owner_that_lacks_a_counted_contribution_does_not_reduce() -> None:
    part = take_part()
    part.arrived(0, A)
    effects = part.on_cut(A, (A, B))
    assert [type(e) for e in effects] == [Note]


def test_what_is_held_is_shown_at_once_when_complete_and_now_and_then_before() -> None:
    part = take_part()
    part.on_cut(A, (A, B, C))
    part.hold(0, DIGEST)
    assert part.show(PROPOSER, 101.0) == [], "the round has only begun"
    some = Send(PROPOSER, Held(PLAN_ID, (DIGEST, b"", b"")))
    assert part.show(PROPOSER, 102.0) == [Secure(PLAN_ID), some], "the others may be given up, and this one count"
    part.hold(1, DIGEST)
    assert part.show(PROPOSER, 102.1) == []
    part.hold(2, DIGEST)
    part.hold(3, DIGEST)
    part.hold(-1, DIGEST)
    complete = Send(PROPOSER, Held(PLAN_ID, (DIGEST,) * 3))
    noted = Note("round.held", {"round": part.plan.height})
    assert part.complete and part.show(PROPOSER, 102.2) == [Secure(PLAN_ID), complete, noted]
    assert part.tick(others(), PROPOSER, 102.3) == []
    assert part.tick(others(), PROPOSER, 102.2 + RESEND_S) == [complete], "which is noted once"
    part.hold(1, b"r" * 32)  # what the proposer told us to fetch instead
    again = Send(PROPOSER, Held(PLAN_ID, (DIGEST, b"r" * 32, DIGEST)))
    assert part.show(PROPOSER, 102.3 + RESEND_S) == [Secure(PLAN_ID), again], "it is on no disk yet"


def test_where_nothing_is_held_there_is_nothing_to_write() -> None:
    part = take_part()
    part.on_cut(A, (A, B, C))
    assert part.show(PROPOSER, 102.0) == [Send(PROPOSER, Held(PLAN_ID, (b"",) * 3))]


def test_fetching() -> None:
    part = take_part()
    part.hold(0, DIGEST)
    assert part.on_fetch(Fetch(PLAN_ID, 0, DIGEST, (B,))) == [], "we have it"
    assert part.on_fetch(Fetch(PLAN_ID, 3, DIGEST, (B,))) == [], "there is no such part"
    other = Fetch(PLAN_ID, 0, b"e" * 32, (B, C))
    assert part.on_fetch(other) == [FetchMean(PLAN_ID, 0, b"e" * 32, (B, C))], "ours is the minority's"


def test_the_proposer_is_given_up_after_all_its_deadlines() -> None:
    assert take_part().expires_at == pytest.approx(100.0 + 4.0 + 4.0 + VOTE_S + 4 * RESEND_S)


# ---- the commit -----------------------------------------------------------------------------------------------


def commit(**changes: Any) -> Commit:
    values: dict[str, Any] = dict(
        plan=PLAN_ID,
        contributors=(Contribution(A, 800, 8, 1000), Contribution(B, 800, 8, 1000)),
        parts=tuple(PartResult(p.owner, p.start, p.stop, DIGEST) for p in plan().parts),
        seconds_ms=10,
    )
    result = RoundResult(**{**values, **changes})
    return Commit(
        height=2,
        parent=b"h" * 32,
        version=1,
        tokens=0,
        steps=8,
        lap=8,
        width=1,
        view=(A, B, C),
        left=(),
        ledger=Ledger(),
        round=result,
    )


def test_a_commit_of_the_plan_or_of_another_matter() -> None:
    part = take_part()
    part.check_result(commit(), PROPOSER)
    part.check_result(commit(plan=b"q" * 32, contributors=()), PROPOSER)
    part.check_result(msgspec.structs.replace(commit(), round=None), PROPOSER)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(contributors=(Contribution(D, 800, 8, 1000),)), "were not planned"),
        (dict(contributors=(Contribution(A, 801, 8, 1000),)), "were not planned"),
        (dict(contributors=(Contribution(A, 800, 7, 1000),)), "were not planned"),
        (dict(parts=commit().round.parts[:2]), "other parts"),  # type: ignore[union-attr]
        (dict(parts=(PartResult(A, 0, 1000, DIGEST),)), "other parts"),
    ],
)
def test_a_commit_that_misreports_the_plan(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        take_part().check_result(commit(**changes), PROPOSER)
    assert caught.value.peer == PROPOSER


def test_the_last_round_has_the_codec_that_the_manifest_names_for_it() -> None:
    """Of a run that ends with the lap that is under way, and of one that does not."""
    for steps, wanted in ((HEAD.steps + HEAD.lap, "int8(block=32)"), (HEAD.steps + 9 * HEAD.lap, RULES.uplink)):
        ends = replace(RULES.rules, total_steps=steps)
        settings = replace(RULES, rules=ends, last_codec="int8(block=32)", last_bytes_per_element=1.2)
        assert settings.codecs(HEAD) == (wanted, wanted)
        assert settings.expected_bytes(HEAD) == (1.1 if wanted == RULES.uplink else 1.2)
        named = plan(uplink=wanted, downlink=wanted)
        check_plan(named, HEAD, settings, C, None, PROPOSER)
        for other in ({"uplink": "int8(block=64)"}, {"downlink": "int8(block=64)"}):
            with pytest.raises(Refused, match="codecs that the manifest does not name for it"):
                check_plan(msgspec.structs.replace(named, **other), HEAD, settings, C, None, PROPOSER)
