"""The proposer's decisions: what, and the sentence that says why."""

from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.keys import short
from farflung.protocol.messages import Ready
from farflung.protocol.planning import (
    ChangeView,
    Situation,
    StartRound,
    Wait,
    agreed,
    choose_cut,
    conclude,
    decide,
    no_quorum,
)
from farflung.protocol.quorum import is_quorum

A, B, C, D, E = (bytes([i]) * 32 for i in range(1, 6))
READY = Ready(tokens=800, samples=8, up_bytes_per_s=0.0, down_bytes_per_s=0.0, ready_ms=1)
X, Y, Z = b"x" * 32, b"y" * 32, b"z" * 32


def situation(**changes: Any) -> Situation:
    """Three members, all alive and ready."""
    values: dict[str, Any] = dict(
        view=(A, B, C), live=frozenset({A, B, C}), left=frozenset(), gone=frozenset(),
        readies={A: READY, B: READY, C: READY}, awaited=frozenset(), joiners=(), min_contributors=1,
        max_group=8, divides=False, patience_left_s=30.0, hold_s=0.0, finished=False,
    )  # fmt: skip
    merged = {**values, **changes}
    silent = frozenset(merged["view"]) - merged["live"]
    return Situation(**{"holders": merged["live"], "sure": merged["live"], "dead": silent, **merged})


ONE_WAITS: dict[str, Any] = dict(readies={A: READY, B: READY}, awaited=frozenset({C}))
C_GONE: dict[str, Any] = dict(live=frozenset({A, B}), readies={}, awaited=frozenset({A, B}), gone=frozenset({C}))


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, StartRound, "3 of 3 members are ready"),
        (dict(live=frozenset({A}), readies={A: READY}), Wait, f"no quorum: 1 of 3 members reachable; {short(B)}, {short(C)} must come back, 1 of them"),
        (dict(live=frozenset({A, B}), readies={A: READY, B: READY}), StartRound, "2 of 2 members are ready"),
        (ONE_WAITS, Wait, f"waiting up to 30 s more for {short(C)}"),
        (
            dict(ONE_WAITS, patience_left_s=0.0),
            StartRound,
            f"2 of 3 members are ready, without waiting longer for {short(C)}",
        ),
        (dict(ONE_WAITS, patience_left_s=0.0, min_contributors=3), Wait, "2 of at least 3 contributors are ready"),
        (dict(readies={}, awaited=frozenset({A, B, C})), Wait, "all train for the next round"),
        (dict(readies={}), Wait, "0 of at least 1 contributors are ready"),
        (dict(min_contributors=4), Wait, "3 of at least 4 contributors are ready"),
        (dict(finished=True), Wait, "the run is complete"),
        (dict(finished=True, joiners=(D,)), ChangeView, f"admits {short(D)}"),
        (dict(readies={}, joiners=(D,)), ChangeView, f"admits {short(D)}"),
        (dict(joiners=(D,)), StartRound, "3 of 3 members are ready"),
        (dict(hold_s=1.0), Wait, "lets a newcomer catch up"),
        (dict(hold_s=1.0, joiners=(D,)), StartRound, "3 of 3 members are ready"),
        (dict(hold_s=1.0, max_group=3), StartRound, "3 of 3 members are ready"),
        (C_GONE, ChangeView, f"removes {short(C)} (silent)"),
        (dict(C_GONE, gone=frozenset(), left=frozenset({C})), ChangeView, f"lets {short(C)} go"),
        (dict(C_GONE, joiners=(D,)), ChangeView, f"admits {short(D)}; removes {short(C)} (silent)"),
        (dict(holders=frozenset({A})), Wait, "no quorum: 1 of 3 members hold the outer state, the others download it"),
        (dict(C_GONE, holders=frozenset({A, B}), live=frozenset({A, B, C})), ChangeView, f"removes {short(C)} (silent)"),
        (
            dict(readies={}, holders=frozenset({A, B}), left=frozenset({A, B})),
            Wait,
            "0 of at least 1 contributors are ready",
        ),
        (dict(readies={}, joiners=(D,), max_group=3), Wait, "0 of at least 1 contributors are ready"),
    ],
)  # fmt: skip
def test_decide(changes: dict[str, Any], kind: type, reason: str) -> None:
    decision = decide(situation(**changes))
    assert (type(decision), decision.reason) == (kind, reason)


def test_a_round_takes_joiners_along_as_receivers_only() -> None:
    decision = decide(situation(joiners=(D, E), max_group=4))
    assert isinstance(decision, StartRound)
    assert decision.members == (A, B, C, D) and decision.contributors == (A, B, C)


def test_a_view_change_names_who_left_and_who_stays() -> None:
    decision = decide(situation(**{**C_GONE, "left": frozenset({C}), "gone": frozenset(), "joiners": (D, E)}))
    assert decision == ChangeView((A, B, D, E), (C,), decision.reason)


@pytest.mark.parametrize(
    ("view", "sure", "dead", "stays"),
    [
        ((A, B, C), {A, B, C}, set(), (A, B)),
        ((A, B, C), {A, C}, set(), (A, B)),  # A alone decides with half of two
        ((A, B, C), {B, C}, set(), None),  # A may have just died
        ((A, B, C), {B, C}, {A}, (B,)),  # it has: with it in the view B could decide nothing
        ((A, B, C, D), {A, C, D}, {B}, (A, B, D)),  # enough without it, and it may come back
        ((A, B, C, D), {C, D}, {B}, None),
        ((A, C), {A, C}, set(), (A,)),
        ((A, C), {C}, set(), None),
    ],
)
def test_nobody_is_let_go_before_enough_of_the_others_are_surely_there(
    view: tuple[bytes, ...], sure: set[bytes], dead: set[bytes], stays: tuple[bytes, ...] | None
) -> None:
    facts = dict(live=frozenset({*view} - dead), left=frozenset({C}), readies={}, awaited=frozenset())
    decision = decide(situation(view=view, sure=frozenset(sure), dead=frozenset(dead), **facts))
    if stays is None:
        assert isinstance(decision, Wait)
        return
    silent = [short(p) for p in view if p not in {*stays, C}]
    reasons = [f"removes {', '.join(silent)} (silent)"] if silent else []
    assert decision == ChangeView(stays, (C,), "; ".join([*reasons, f"lets {short(C)} go"]))


@pytest.mark.parametrize("awaited", [set(), {A}, {A, B}, {A, B, C}], ids=len)
@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("joiners", [(), (D,)], ids=len)
def test_what_is_not_asked_while_nobody_is_ready_would_decide_nothing(
    awaited: set[bytes], least: int, joiners: tuple[bytes, ...]
) -> None:
    """How long to wait, who is surely there, and which of those who train are too slow, as long as enough are not (`proposer`)."""
    facts: dict[str, Any] = dict(readies={}, min_contributors=least, joiners=joiners)
    plain = decide(situation(**facts, awaited=frozenset(awaited), sure=frozenset(), patience_left_s=0.0))
    for patience, sure in product((-1.0, 30.0), (frozenset({A}), frozenset({A, B, C}))):
        for slow in (slow for k in range(4) for slow in combinations(sorted(awaited), k)):
            waited = awaited - {*slow}
            if not slow or len(waited) >= least:
                said = dict(patience_left_s=patience, sure=sure, awaited=frozenset(waited))
                assert decide(situation(**facts, **said)) == plain


def test_many_names_are_cut_short() -> None:
    many = tuple(bytes([i]) * 32 for i in range(10, 20))
    decision = decide(situation(readies={}, joiners=many, max_group=64))
    assert decision.reason.endswith("and 6 more")


peers = st.sets(st.sampled_from([A, B, C, D, E]))


@given(view=peers.filter(bool), live=peers, left=peers, gone=peers, ready=peers, awaited=peers, joiners=peers,
       least=st.integers(1, 4), patience=st.floats(-5, 5), finished=st.booleans())  # fmt: skip
def test_whatever_it_decides_can_be_voted_for(
    view: set[bytes], live: set[bytes], left: set[bytes], gone: set[bytes], ready: set[bytes],
    awaited: set[bytes], joiners: set[bytes], least: int, patience: float, finished: bool,
) -> None:  # fmt: skip
    live = (live & view) - left
    s = situation(
        view=tuple(sorted(view)), live=frozenset(live), left=frozenset(left & view),
        gone=frozenset(gone & view - live - left), readies={p: READY for p in sorted(ready & live)},
        awaited=frozenset(awaited & live - ready), joiners=tuple(sorted(joiners - view)),
        min_contributors=least, patience_left_s=patience, hold_s=0.0, finished=finished,
    )  # fmt: skip
    decision = decide(s)
    assert decision.reason
    if isinstance(decision, StartRound):
        assert is_quorum(view, live) and len(decision.contributors) >= least and not finished
        assert set(decision.contributors) <= set(decision.members) & view
    elif isinstance(decision, ChangeView):
        assert is_quorum(view, decision.view) and not set(decision.left) & set(decision.view)
        assert set(decision.view) != view


# ---- the cut --------------------------------------------------------------------------------------------------


def cut_of(reports: dict[bytes, set[bytes]], tokens: dict[bytes, int] | None = None) -> tuple[Any, Any]:
    sizes = {owner: 100 for owner in reports}
    return choose_cut({o: frozenset(r) for o, r in reports.items()}, sizes, tokens or {p: 10 for p in (A, B, C, D)})


def test_everything_arrived() -> None:
    assert cut_of({o: {A, B, C} for o in (A, B, C)}) == ((A, B, C), {A, B, C})


def test_a_contribution_counts_wholly_or_not_at_all() -> None:
    assert cut_of({A: {A, B, C}, B: {A, B}, C: {A, B, C}}) == ((A, B), {A, B, C})


def test_an_owner_that_received_little_is_given_up() -> None:
    assert cut_of({A: {A, B, C, D}, B: {B}, C: {A, B, C, D}}) == ((A, B, C, D), {A, C})


def test_big_contributors_weigh_more() -> None:
    reports = {A: {A, D}, B: {A, B, C}, C: {A, B, C, D}}
    assert cut_of(reports)[0] != cut_of(reports, {A: 1, B: 1, C: 1, D: 1000})[0]


def test_nothing_arrived() -> None:
    assert cut_of({A: set(), B: set()}) == ((), frozenset())
    assert choose_cut({}, {}, {A: 1}) == ((), frozenset())
    assert cut_of({A: {E}}) == ((), {A}), "who was not planned does not count"


@given(st.dictionaries(st.sampled_from([A, B, C, D]), peers, min_size=1), st.dictionaries(
    st.sampled_from([A, B, C, D, E]), st.integers(1, 5), min_size=1))  # fmt: skip
def test_every_kept_owner_holds_every_counted_contribution(
    reports: dict[bytes, set[bytes]], tokens: dict[bytes, int]
) -> None:
    common, owners = choose_cut({o: frozenset(r) for o, r in reports.items()}, {o: 7 for o in reports}, tokens)
    assert list(common) == sorted(common) and set(common) <= set(tokens)
    assert all(set(common) <= reports[o] for o in owners)


# ---- the end --------------------------------------------------------------------------------------------------


def test_complete() -> None:
    result = conclude((A, B, C), {p: (X, Y) for p in (A, B, C)}, 2)
    assert result is not None and (result.digests, result.view, result.reason) == ((X, Y), (A, B, C), "complete")


def test_a_part_that_only_a_few_hold_is_left_out_for_everybody() -> None:
    result = conclude((A, B, C), {A: (X, Y), B: (X, b""), C: (X, b"")}, 2)
    assert result is not None and result.digests == (X, b"") and result.view == (A, B, C)
    assert result.reason == "1 of 2 parts left out"


def test_a_member_that_lacks_what_a_quorum_holds_is_left_behind() -> None:
    result = conclude((A, B, C), {A: (X, Y), B: (X, Y), C: (X, b"")}, 2)
    assert result is not None and result.digests == (X, Y) and result.view == (A, B)


def test_no_quorum_no_result() -> None:
    assert conclude((A, B, C), {A: (X, Y)}, 2) is None
    assert conclude((A, B, C), {p: (b"", b"") for p in (A, B, C)}, 2) is None
    assert conclude((A, B, C), {}, 1) is None


def test_an_owner_that_told_different_things_loses_its_minority() -> None:
    result = conclude((A, B, C), {A: (X,), B: (X,), C: (Z,)}, 1)
    assert result is not None and result.digests == (X,) and result.view == (A, B)


def test_joiners_alone_decide_nothing() -> None:
    assert conclude((A, B, C), {A: (X,), D: (X,), E: (X,)}, 1) is None
    result = conclude((A, B, C), {A: (X,), B: (X,), D: (X,)}, 1)
    assert result is not None and result.view == (A, B, D), "but they become members"


def test_all_small_cases() -> None:
    """Three members, two parts, each held, other bytes, or missing: what is committed is held by a quorum, and the order of arrival is nothing."""
    per_part = (b"", X, Y)
    for states in product(product(per_part, repeat=2), repeat=3):
        held = dict(zip((A, B, C), states, strict=True))
        result = conclude((A, B, C), held, 2)
        for order in permutations(held):
            assert conclude((A, B, C), {p: held[p] for p in order}, 2) == result
        if result is not None:
            assert any(result.digests) and is_quorum((A, B, C), result.view)
            for peer in result.view:
                assert all(d in (b"", mine) for d, mine in zip(result.digests, held[peer], strict=True))
        else:
            for pair in combinations((A, B, C), 2):
                for k in range(2):
                    same = {held[p][k] for p in pair}
                    # A part that two of three hold alike could have been committed alone.
                    assert same == {b""} or len(same) > 1


def test_agreed_breaks_ties_by_value() -> None:
    assert agreed({A: (Y,), B: (X,)}, 0) == agreed({B: (X,), A: (Y,)}, 0) == X
    assert agreed({A: (b"",)}, 0) == b""


def test_a_round_is_held_back_while_a_newcomer_catches_up() -> None:
    held = decide(situation(hold_s=1.0))
    assert isinstance(held, Wait) and "newcomer" in held.reason
    assert isinstance(decide(situation(hold_s=-1.0)), StartRound)


@pytest.mark.parametrize(
    ("live", "holders", "said"),
    [
        ((A,), (A,), f"1 of 3 members reachable; {short(B)}, {short(C)} must come back, 1 of them"),
        ((A, B), (A,), "1 of 3 members hold the outer state, the others download it"),
        ((A, B), (), f"nobody reachable holds the outer state; who has it must come back ({short(C)})"),
        ((A, B, C), (), "nobody reachable holds the outer state"),
    ],
)
def test_what_a_quorum_lacks(live: tuple[bytes, ...], holders: tuple[bytes, ...], said: str) -> None:
    assert no_quorum((A, B, C), live, holders) == f"no quorum: {said}"
