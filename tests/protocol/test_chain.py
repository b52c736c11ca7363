"""One history: what names a commit, what follows from its parent, and what a certificate proves."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.protocol.bus import LAP, RULES, SWARM, WINDOW, certify, history_of, signers

from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Contribution, Half, PartResult, RoundResult, Rules, Vote
from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lap import Lap, Laps
from farflung.protocol.ledger import Ledger, count
from farflung.protocol.lives import Counters, Life
from farflung.training.streaming import Timetable

WHO = signers(4)
A, B, C, D = (s.peer_id for s in WHO)
PARENT = history_of(WHO)[-1].commit
FROM = b"\7" * 32


def round_of(**changes: Any) -> RoundResult:
    values: dict[str, Any] = dict(
        plan=b"p" * 32,
        contributors=(Contribution(A, 800, 8, 1000), Contribution(B, 400, 4, 2000)),
        parts=(PartResult(A, 0, 500, b"d" * 32), PartResult(B, 500, 1000, b"")),
        seconds_ms=1234,
    )
    return RoundResult(**{**values, **changes})


def follow(**changes: Any) -> Commit:
    values: dict[str, Any] = dict(view=(A, B, C, D), left=(), result=round_of())
    return chain.successor(SWARM, PARENT, **{"rules": RULES, **values, **changes})


def check(commit: Commit, rules: Rules = RULES) -> None:
    chain.check_successor(SWARM, PARENT, commit, rules, peer=FROM)


def refused(commit: Commit, why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        check(commit)
    assert caught.value.peer == FROM


def but(commit: Commit, **changes: Any) -> Commit:
    return msgspec.structs.replace(commit, **changes)


def test_golden_hashes() -> None:
    """Changed bytes mean a new protocol version: nodes of two kinds would never agree on a history."""
    genesis = chain.genesis(WHO[0].peer_id, RULES)
    assert chain.commit_hash(SWARM, genesis).hex() == GOLDEN_GENESIS
    assert chain.commit_hash(SWARM, follow()).hex() == GOLDEN_ROUND
    assert chain.vote_bytes(SWARM, 7, 3, b"d" * 32) == (
        b"farflung/vote/1\0" + SWARM + bytes(7) + b"\7" + bytes(7) + b"\3" + b"d" * 32
    )


GOLDEN_GENESIS = "1a28287f452cd2812e4eb88871fac842a984803aa4338f996ff73fb174063ae6"
GOLDEN_ROUND = "678a3d0c0ae2d0d6fb40b76a537b4468195717fd34aa621f4458f3147f1a68ae"


def test_every_field_changes_the_hash() -> None:
    commit = follow()
    others = [
        but(commit, height=9), but(commit, parent=b"q" * 32), but(commit, version=9), but(commit, tokens=9),
        but(commit, steps=9), but(commit, lap=9), but(commit, width=2),
        but(commit, view=(A,)), but(commit, left=(A,)), but(commit, ledger=Ledger()), but(commit, round=None), but(commit, lives=(Life(1, 1, A),)),
        but(commit, group=b"g" * 32), but(commit, half=Half((D,), Ledger())), but(commit, half=Half((D,), Ledger(cursor=1))),
    ]  # fmt: skip
    hashes = {chain.commit_hash(SWARM, c) for c in [commit, *others]} | {chain.commit_hash(b"w" * 32, commit)}
    assert len(hashes) == len(others) + 2


def test_what_a_round_changes() -> None:
    commit = follow()
    assert (commit.height, commit.version, commit.tokens) == (2, PARENT.version + 1, PARENT.tokens + 1200)
    assert commit.ledger.window(A)[0][0] == PARENT.ledger.window(A)[0][0] + 8
    assert (commit.steps, commit.lap) == (PARENT.steps + PARENT.lap, PARENT.lap)
    check(commit)


def test_a_round_begins_a_lap_within_the_limits_and_hands_out_samples_for_it() -> None:
    rules = replace(RULES, laps=Laps(least=LAP, most=3 * LAP), total_steps=PARENT.lap + 20)
    for lap in (LAP, 2 * LAP, 20):
        commit = follow(rules=rules, lap=Lap(lap))
        check(commit, rules)
        assert count(commit.ledger.window(B)) == rules.ahead * lap and commit.steps == PARENT.lap
    for lap in (LAP - 1, 21, 3 * LAP):
        with pytest.raises(Refused, match=f"begins a lap of {lap} steps, with 20 steps left"):
            check(follow(rules=rules, lap=Lap(lap)), rules)
    with pytest.raises(Refused, match="changes the lap without a round"):
        check(follow(rules=rules, lap=Lap(2 * LAP), result=None), rules)


def test_a_round_begins_one_that_moves_as_many_fragments_as_the_rules_allow() -> None:
    laps = Laps(least=LAP, most=3 * LAP, widths=(1, 2, 4))
    rules = replace(RULES, laps=laps, cuts=(0, 250, 500, 750, 1000), total_steps=PARENT.lap + 40)
    result = round_of(parts=(PartResult(A, *rules.span(PARENT), b"d" * 32),))
    wide = follow(rules=rules, result=result, lap=Lap(2 * LAP, 2))
    check(wide, rules)
    assert (wide.width, rules.turns(wide)) == (2, 2)
    for lap in (Lap(2 * LAP - 1, 2), Lap(41, 4), Lap(3 * LAP, 3), Lap(LAP, 3)):
        with pytest.raises(Refused, match=f"{lap.steps} steps and {lap.width} fragments"):
            check(follow(rules=rules, result=result, lap=lap), rules)
    with pytest.raises(Refused, match="changes the lap without a round"):
        check(follow(rules=rules, lap=Lap(PARENT.lap, 2), result=None), rules)
    with pytest.raises(ValueError, match="4 fragments cannot move by"):
        replace(rules, laps=replace(laps, widths=(1, 3)))


def test_what_a_change_of_view_does_not_change() -> None:
    commit = follow(result=None, view=(A, B, C), left=(D,))
    assert (commit.version, commit.tokens, commit.round) == (PARENT.version, PARENT.tokens, None)
    assert not commit.ledger.suspended and (commit.steps, commit.lap) == (PARENT.steps, PARENT.lap)
    check(commit)


FULL = replace(RULES, max_group=4, divides=True)


def divided(stays: tuple[bytes, ...] = (A, C), goes: tuple[bytes, ...] = (B, D)) -> Commit:
    return follow(result=None, rules=FULL, view=stays, goes=goes)


def test_a_full_group_becomes_two_that_go_on_from_one_commit() -> None:
    commit = divided()
    check(commit, FULL)
    assert commit.view == (A, C) and commit.half == Half((B, D), commit.half.ledger) and commit.group == b""  # type: ignore[union-attr]
    other = chain.turned(SWARM, commit)
    check(other, FULL)
    assert other.view == (B, D) and len(other.group) == 32 and other.version == commit.version
    assert chain.as_decided(other) == commit == chain.as_decided(commit)
    assert chain.commit_hash(SWARM, other) == chain.commit_hash(SWARM, commit)
    for peer in (A, B, C, D):
        own = commit if peer in commit.view else other
        assert own.ledger.window(peer) == PARENT.ledger.window(peer), "everybody keeps what it holds"
    for mine in (commit, other):
        after = chain.successor(SWARM, mine, FULL, view=mine.view, left=(), result=None)
        chain.check_successor(SWARM, mine, after, FULL, peer=FROM)
        assert after.group == mine.group and after.half is None and after.ledger.share.stride == 2
        wrong = commit if mine is other else other
        with pytest.raises(Refused):
            chain.check_successor(SWARM, wrong, after, FULL, peer=FROM)
    again = chain.turned(SWARM, replace_view(other))
    assert again.group not in (b"", other.group)


def replace_view(commit: Commit) -> Commit:
    """A later division of the same group."""
    half = Half(commit.view[1:], commit.ledger)
    return but(commit, height=commit.height + 5, view=commit.view[:1], half=half)


@pytest.mark.parametrize(
    ("stays", "goes", "why"),
    [
        ((A, B, C), (D,), "into 3 and 1 members"),
        ((A,), (B, C, D), "into 1 and 3 members"),
        ((A, B), (B, C), "both halves"),
        ((A, B), (C,), "loses members"),
        ((A, B), (C, WHO[0].peer_id[::-1]), "loses members, or wins some"),
    ],
)
def test_halves_that_are_none_are_refused(stays: tuple[bytes, ...], goes: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(Refused, match=why):
        check(divided(stays, goes), FULL)


def test_who_may_divide() -> None:
    for rules in (replace(FULL, divides=False), replace(FULL, max_group=5)):
        with pytest.raises(Refused, match="must not"):
            check(divided(), rules)
    with pytest.raises(Refused, match="must not"):
        check(but(divided(), round=round_of()), FULL)
    with pytest.raises(Refused, match="ledger that does not follow"):
        commit = divided()
        assert commit.half is not None
        check(but(commit, half=but(commit.half, ledger=Ledger())), FULL)  # type: ignore[arg-type]


def test_the_view_is_sorted() -> None:
    assert follow(view=(D, B, A, C)) == follow()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(height=3), "does not follow"),
        (dict(height=1), "does not follow"),
        (dict(parent=b"q" * 32), "does not follow"),
        (dict(parent=b""), "does not follow"),
        (dict(view=(A,)), "without a quorum"),
        (dict(view=()), "a view of 0"),
        (dict(view=(C, D)), "without a quorum"),
        (dict(left=(D,)), "keeps a member that left"),
        (dict(version=2), "ledger"),
        (dict(version=0), "ledger"),
        (dict(tokens=1), "ledger"),
        (dict(steps=1), "ledger"),
        (dict(lap=LAP + 1), "begins a lap of 9 steps"),
        (dict(view=(B, A, C, D)), "unsorted view"),
        (dict(view=(A, A, B, C, D)), "unsorted view"),
        (dict(view=tuple(sorted([A, B, C, D, *(bytes([i]) * 32 for i in range(20))]))), "a view of 24"),
        (dict(left=(FROM,)), "lets outsiders leave"),
        (dict(ledger=PARENT.ledger), "ledger"),
        (dict(round=None), "ledger"),
        (dict(round=round_of(contributors=(Contribution(FROM, 100, 1, 1),))), "outside the view"),
        (dict(round=round_of(contributors=(Contribution(A, 100 * WINDOW + 100, WINDOW + 1, 1),))), "claims"),
        (dict(round=round_of(contributors=(Contribution(A, 800, 8, 1),) * 2)), "unsorted contributors"),
        (dict(round=round_of(contributors=())), "unsorted contributors"),
        (dict(round=round_of(contributors=(Contribution(A, 801, 8, 1),))), "tokens that are not"),
        (dict(round=round_of(contributors=(Contribution(A, 0, 0, 1),))), "tokens that are not"),
        (dict(round=round_of(parts=())), "ends at element 0, not at 1000"),
        (dict(round=round_of(parts=(PartResult(A, 0, 999, b"d" * 32),))), "ends at element 999, not at 1000"),
        (dict(round=round_of(parts=(PartResult(A, 1, 1000, b"d" * 32),))), "gaps or overlap"),
        (dict(round=round_of(parts=(PartResult(A, 0, 0, b"d" * 32), PartResult(B, 0, 1000, b"d" * 32)))), "gaps"),
        (dict(round=round_of(parts=(PartResult(A, 0, 1000, b"d" * 31),))), "a digest that is none"),
        (dict(round=round_of(parts=(PartResult(A, 0, 1000, b""),))), "moves nothing"),
        (dict(round=round_of(contributors=(Contribution(A, 900, 9, 1), Contribution(B, 400, 4, 1)))), "ledger"),
    ],
)  # fmt: skip
def test_what_does_not_follow_is_refused(changes: dict[str, Any], why: str) -> None:
    refused(but(follow(), **changes), why)


def test_other_rules_do_not_follow() -> None:
    gone = follow(view=(A, B, C))
    check(gone)
    for other in (replace(RULES, ahead=RULES.ahead + 1), replace(RULES, max_group=2), replace(RULES, cuts=(0, 1001))):
        with pytest.raises(Refused):
            check(gone, other)


@pytest.mark.parametrize(("left", "lap"), [(LAP, LAP), (1, 1), (LAP - 1, LAP - 1), (0, LAP)])
def test_a_later_life_begins_with_what_is_left_of_the_run(left: int, lap: int) -> None:
    rules = replace(RULES, since=Counters(steps=RULES.total_steps - left))
    commit = chain.genesis(WHO[0].peer_id, rules)
    assert commit.lap == lap and rules.finished(commit) is (left == 0)
    assert chain.is_genesis(commit, WHO[0].peer_id, rules) and rules.laps.allows(commit.next_round, left)


@pytest.mark.parametrize(("interval", "num"), [(30, 1), (30, 3), (12, 4)])
def test_fragments_take_turns_as_in_the_timetable_until_the_order_moves_on(interval: int, num: int) -> None:
    cuts = tuple(range(0, 10 * num + 1, 10))
    rules = replace(RULES, cuts=cuts, total_steps=(4 * num + 1) * LAP)
    table = Timetable(interval=interval, fragments=num)
    sent = [e.fragment for step in range(1, 4 * interval + 1) for e in table.after(step).sends]
    turns = [rules.span(but(PARENT, version=version, steps=LAP * version)) for version in range(4 * num + 1)]
    assert turns[:-1] == [(cuts[p], cuts[p + 1]) for p in sent]
    assert turns[-1] == (0, 10 * num), "in the end nothing stays behind"


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
def test_whoever_takes_part_now_and_then_meets_all_fragments(num: int) -> None:
    """In every third round of three fragments, say; and no fragment waits for longer than twice a turn."""
    rules = replace(RULES, cuts=tuple(range(0, 10 * num + 1, 10)), total_steps=1 << 40)
    turns = [rules.span(but(PARENT, version=version, steps=version))[0] // 10 for version in range(32 * num * num)]
    for every in range(1, 2 * num + 1):
        for first in range(every):
            assert set(turns[first::every]) == set(range(num))
    for fragment in range(num):
        when = [version for version, turn in enumerate(turns) if turn == fragment]
        assert max(later - earlier for earlier, later in pairwise(when)) < 2 * num
        assert 0 <= when[0] < num


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_wide_rounds_move_everything_in_turn_as_well(width: int) -> None:
    rules = replace(RULES, cuts=tuple(range(0, 61, 10)), total_steps=1 << 40)
    spans = [rules.span(but(PARENT, version=version, steps=version, width=width)) for version in range(20)]
    assert {stop - start for start, stop in spans} == {10 * width}
    turns = 6 // width
    for first in range(0, 20 - 2 * turns):
        assert {start for start, _ in spans[first : first + 2 * turns]} == set(range(0, 60, 10 * width))


def test_a_round_moves_the_fragment_whose_turn_it_is() -> None:
    rules = replace(RULES, cuts=(0, 300, 600, 1000))
    span = rules.span(PARENT)
    assert span != (0, 1000)
    result = round_of(parts=(PartResult(A, *span, b"d" * 32),))
    check(follow(rules=rules, result=result), rules)
    for start, stop in {(0, 300), (300, 600), (600, 1000), (0, 1000)} - {span}:
        wrong = round_of(parts=(PartResult(A, start, stop, b"d" * 32),))
        with pytest.raises(Refused, match=r"gaps or overlap|ends at element"):
            check(follow(rules=rules, result=wrong), rules)


def test_those_who_say_goodbye_help_to_decide_it() -> None:
    """Three of four may leave at once: they vote for it, and one is left who can go on alone."""
    check(follow(view=(D,), left=(A, B, C), result=None))


def certificate_error(certified: Certified, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        chain.check_certificate(SWARM, certified, PARENT.view, peer=FROM)
    assert caught.value.peer == FROM  # type: ignore[attr-defined]


def test_certificates() -> None:
    commit = follow()
    for voters in (WHO, WHO[:3], WHO[1:], WHO[:2]):  # the last: half with the first
        chain.check_certificate(SWARM, certify(commit, voters), PARENT.view, peer=FROM)


def test_too_few_votes() -> None:
    commit = follow()
    certificate_error(certify(commit, []), Refused)
    certificate_error(certify(commit, WHO[2:]), Refused)
    certificate_error(certify(commit, [WHO[0]] * 4), Refused)


def test_votes_of_outsiders() -> None:
    outsider = Ed25519Signer(b"o" * 32)
    certificate_error(certify(follow(), [*WHO, outsider]), Refused)


def test_forged_votes() -> None:
    commit = follow()
    good = certify(commit, WHO[:3])
    for forged in (
        but_votes(good, Vote(A, b"s" * 64)),
        but_votes(good, Vote(A, certify(commit, WHO[1:2]).votes[0].signature)),  # B's word in A's name
        but_votes(good, certify(commit, WHO[:1], ballot=1).votes[0]),  # A's word about another ballot
        but_votes(good, certify(PARENT, WHO[:1]).votes[0]),  # A's word about another commit
        msgspec.structs.replace(good, ballot=5),
        msgspec.structs.replace(good, commit=but(commit, tokens=0)),
    ):
        certificate_error(forged, BadSignature)


def test_votes_of_another_swarm() -> None:
    with pytest.raises(BadSignature):
        chain.check_certificate(b"w" * 32, certify(follow(), WHO), PARENT.view, peer=FROM)


def but_votes(certified: Certified, first: Vote) -> Certified:
    return msgspec.structs.replace(certified, votes=(first, *certified.votes[1:]))
