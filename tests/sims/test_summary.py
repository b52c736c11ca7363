"""Every figure of the summary against events small enough to work out by hand."""

from typing import Any

import pytest

from farflung.node.events import Event
from farflung.sims.facts import Incident, Interval, LedgerFacts, PeerFacts, RunFacts, SoloPoint
from farflung.sims.intervals import merge
from farflung.sims.summary import commits_by_round, summarise, violations

A, B = "aa" * 32, "bb" * 32
LEDGER = LedgerFacts(cursor=0)


def facts(ledger: LedgerFacts = LEDGER, **changed: Any) -> RunFacts:
    known: dict[str, Any] = {
        "name": "t",
        "started": 100.0,
        "ended": 161.5,
        "peers": [
            PeerFacts(peer=A, name="node 1", role="founder"),
            PeerFacts(peer=B, name="node 2", role="late"),
        ],
        "timeline": [
            Incident(time=100.0, what="start", peer=A),
            Incident(time=110.0, what="join", peer=B),
            Incident(time=120.0, what="kill", peer=B),
        ],
        "solo_loss": [SoloPoint(0, 0, 0.0, 5.5), SoloPoint(10, 100, 4.0, 3.25)],
        "ddp_bytes_per_peer": 1000,
        "ledger": ledger,
    }
    return RunFacts(**(known | changed))


def event(peer: str, at: float, kind: str, **fields: Any) -> Event:
    return {"time": at, "event": kind, "peer": peer, "height": 0, "version": 0, "step": 0, **fields}


def commit(peer: str, number: int, samples: dict[str, list[Interval]], digest: str = "d", at: float = 110.0) -> Event:
    contributors = dict.fromkeys(samples, 10)
    return event(
        peer, at, "round.commit", round=number, version=number, digest=digest, samples=samples, seconds=1.0,
        contributors=contributors, view=[A, B], parts_left_out=0, lap=4, contributed=peer in samples, up_bits=8.5 if peer in samples else 0.0, down_bits=8.25,
        owed=0.6 if peer in samples else None,
        delay_steps=3 if peer in samples else None,
    )  # fmt: skip


def figures(*events: Event, run: RunFacts | None = None) -> dict[str, Any]:
    by_peer: dict[str, list[Event]] = {A: [], B: []}
    for one in events:
        by_peer[one["peer"]].append(one)
    return summarise(by_peer, run or facts())


def test_losses_are_the_last_ones() -> None:
    result = figures(
        event(A, 130.0, "outer.eval", seconds=0.5, loss=3.0, few_loss=None, tokens=200, version=2),
        event(B, 125.0, "outer.eval", seconds=0.5, loss=4.0, few_loss=None, tokens=100, version=1),
        event(B, 131.0, "outer.eval", seconds=0.5, loss=None, few_loss=2.0, tokens=300, version=3),
    )
    assert result["outer_loss"] == 3.0
    assert result["solo_loss"] == 3.25 and result["outer_better"] is True
    alone = figures(run=facts(solo_loss=[]))
    assert alone["solo_loss"] is None and alone["outer_better"] is None


def test_bytes_add_up_over_the_lives_of_a_peer() -> None:
    result = figures(
        event(A, 100.0, "node.start", device="cpu", resumed=False),
        event(A, 101.0, "net", sent_bytes=5, received_bytes=0, peers=0),
        event(A, 102.0, "net", sent_bytes=70, received_bytes=0, peers=0),
        event(A, 105.0, "node.start", device="cpu", resumed=True),
        event(A, 106.0, "net", sent_bytes=30, received_bytes=0, peers=0),
    )
    assert result["bytes_sent_per_peer"] == {"node 1": 100, "node 2": 0}
    assert result["ddp_bytes_per_peer"] == 1000
    assert result["bits_per_parameter"] == {}, "no round, nothing sent"


def test_a_commit_seen_by_two_peers_is_one_round() -> None:
    samples: dict[str, list[Interval]] = {A: [(0, 4)], B: [(4, 8)]}
    result = figures(commit(A, 1, samples), commit(B, 1, samples), commit(A, 2, {A: [(8, 12)]}))
    assert result["rounds_committed"] == 2
    assert result["samples_trained_twice"] == 0
    assert result["bits_per_parameter"] == {"up": 8.5, "down": 8.25}
    assert result["left_out"] == 0.6
    assert result["delay_steps"] == 3


def test_of_a_round_counts_who_applied_it_first() -> None:
    first = commit(B, 1, {A: [(0, 4)]}, at=110.0)
    late = commit(A, 1, {A: [(0, 4)]}, at=140.0) | {"seconds": 1.5}
    assert commits_by_round({A: [late], B: [first]}) == {(1, ""): first}, "not who was stopped meanwhile, or says more"


def test_groups_have_rounds_of_their_own() -> None:
    """At one height, by others: neither the same round nor two that differ."""
    first, other = commit(A, 3, {A: [(0, 4)]}), commit(B, 3, {B: [(1024, 1030)]}) | {"group": "ab" * 32}
    assert list(commits_by_round({A: [first], B: [other]})) == [(3, ""), (3, "ab" * 32)]
    late = event(B, 121.0, "round.missed", round=4, reason="it was late", group="ab" * 32)
    result = figures(first, other, late)
    assert (result["rounds_committed"], result["tokens_committed"]) == (2, 20)
    assert not {one["which"] for one in result["invariants_broken"]} & {1, 5} and result["samples_trained_twice"] == 0
    assert [one["group"] for one in result["rounds_missed"]] == ["ab" * 32]
    two = figures(first, commit(B, 3, {B: [(1024, 1030)]}))
    assert {one["which"] for one in two["invariants_broken"]} >= {5}, "in one group those are two histories"


def test_rounds_of_a_later_life_of_stage_0_count_on() -> None:
    heights = {0: (1, 2, 4), 1: (1, 3)}
    events = [commit(A, height, {A: [(0, 4)]}) | {"life": life} for life, own in heights.items() for height in own]
    assert list(commits_by_round({A: events})) == [(number, "") for number in (1, 2, 4, 5, 7)]
    missed = {"round": 2, "reason": "it was late", "stage": 0}
    result = figures(
        *events, event(B, 120.0, "round.missed", **missed, life=1), event(B, 121.0, "round.missed", **missed, life=2)
    )
    assert [one["round"] for one in result["rounds_missed"]] == [6, 9]  # nothing of life 2 was committed


def test_missed_rounds_carry_their_reasons() -> None:
    result = figures(event(B, 111.0, "round.missed", round=7, reason="too late by 2 s"))
    assert result["rounds_missed"] == [{"peer": "node 2", "round": 7, "group": "", "reason": "too late by 2 s"}]


@pytest.mark.parametrize(("digest", "equal"), [("d", True), ("e", False)])
def test_digests_of_one_version_are_compared_over_peers(digest: str, equal: bool) -> None:
    result = figures(commit(A, 1, {A: [(0, 4)]}), commit(B, 1, {A: [(0, 4)]}, digest=digest))
    assert result["digests_equal"] is equal
    assert any("held other bits" in said for said in violations(result)) is not equal
    assert figures(commit(A, 1, {A: [(0, 4)]}))["digests_equal"] is None, "nobody to compare it with"


def test_samples_in_two_commits_count_as_trained_twice() -> None:
    result = figures(commit(A, 1, {A: [(0, 10)]}), commit(A, 2, {A: [(7, 12)]}), commit(A, 3, {B: [(8, 9)]}))
    assert result["samples_trained_twice"] == 3 + 1
    within = figures(commit(A, 1, {A: [(0, 10)], B: [(9, 12)]}))
    assert within["samples_trained_twice"] == 1


def test_two_different_commits_of_one_round_show_as_trained_twice() -> None:
    result = figures(commit(A, 1, {A: [(0, 10)]}), commit(B, 1, {A: [(0, 10)], B: [(10, 20)]}))
    assert result["samples_trained_twice"] == 10


def test_samples_in_nobodys_hands_are_lost() -> None:
    ledger = LedgerFacts(cursor=100, free=[(10, 20)], held={A: [(20, 40)]}, suspended={B: [(40, 45), (90, 120)]})
    result = figures(commit(A, 1, {A: [(0, 10)]}), commit(A, 2, {B: [(50, 90)]}), run=facts(ledger))
    assert result["samples_lost"] == 5  # 45 to 50
    assert "invariant 6, each sample once: 5 samples lost" in violations(result)


def test_samples_that_a_lost_stage_0_had_in_hand_are_let_go() -> None:
    ledger = LedgerFacts(cursor=100, let_go=[(10, 45)])
    assert figures(commit(A, 1, {A: [(0, 10), (40, 99)]}), run=facts(ledger))["samples_lost"] == 1


def test_counts_and_seconds() -> None:
    result = figures()
    assert (result["peers_killed"], result["peers_joined"], result["seconds"]) == (1, 1, 61.5)
    assert result["rounds_committed"] == 0 and result["rounds_missed"] == []
    assert violations(result) == []


def test_broken_invariants_are_told() -> None:
    result = figures(event(A, 101.0, "invariant.broken", which=5, detail="two histories"))
    assert result["invariants_broken"] == [{"which": 5, "detail": "node 1 reports: two histories"}]
    assert violations(result) == ["invariant 5, one history: node 1 reports: two histories"]


def test_an_invariant_that_is_not_known_is_told_all_the_same() -> None:
    result = figures(event(A, 101.0, "invariant.broken", which=99, detail="odd"), event(B, 102.0, "invariant.broken"))
    assert violations(result) == [
        "invariant 99, unknown here: node 1 reports: odd",
        "invariant None, unknown here: node 2 reports: nothing more",
    ]


def test_merge() -> None:
    assert merge([(5, 9), (0, 2), (2, 4), (6, 7), (3, 3)]) == [(0, 4), (5, 9)]
