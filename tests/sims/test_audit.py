"""Each check of the logs, against a sound log of three peers and the same log with one thing wrong in it."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from tests.sims.sound_logs import A, B, C, Damage, Logs, Writer, change, commit, figures, of, remove, sound, step

from farflung.node.events import Event
from farflung.node.trainer import Trainer
from farflung.sims.audit_samples import Claim, compare
from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.facts import Incident, RunFacts
from farflung.sims.faults import Kill, Schedule, Start
from farflung.sims.simulation import simulate
from farflung.sims.summary import checked, not_better, summarise, violations
from farflung.sims.toy import ToyLearner
from farflung.training.inner import StepReport


def test_a_sound_run_breaks_nothing_and_says_what_was_compared() -> None:
    result = figures(sound())
    assert violations(result) == []
    assert checked(result) == (
        "checked: the bits of 3 versions (1); 6 moves from version to version (2); what 3 rounds left out (3); the weights of 8 "
        "contributions (4); what peers know of 3 commits (5); how 3 nodes ended (8); the reasons of 1 round missed or given up, and "
        "the ends of 10 contributions (9); 72 samples that rounds count (6); 72 samples that steps trained for them (6)"
    )
    assert (result["samples_trained_twice"], result["samples_lost"], result["samples_miscounted"]) == (0, 0, 0)


def test_what_left_nothing_to_compare_is_not_claimed() -> None:
    assert checked(figures({}, ledger=None, exits={})) == "checked: nothing, for the logs left nothing to compare"
    alone = {A: [event for event in sound()[A] if event["event"] != "step"]}
    whiches = {one["which"] for one in figures(alone, exits={})["checked"]}
    assert not whiches & {1, 5, 7, 8}, "one log has no second one to be compared with"


def in_all(kind: str, number: int, **fields: Any) -> Damage:
    def damage(logs: Logs) -> None:
        for events in logs.values():
            of(events, kind)[number].update(fields)

    return damage


def with_lost(damage: Damage, **event: Any) -> Damage:
    """The same, and a peer says something in the second round."""

    def both(logs: Logs) -> None:
        damage(logs)
        place = logs[A].index(of(logs[A], "round.held")[1])
        logs[A].insert(place, logs[A][place] | event)

    return both


SAMPLES = sound()[A]
FIRST: dict[str, list[list[int]]] = of(SAMPLES, "round.commit")[0]["samples"]


@pytest.mark.parametrize(
    ("which", "said", "damage"),
    [
        (1, "node 2 held other bits at version 2", change(B, "round.commit", 1, digest="other")),
        (2, "node 3 went back from version 3 to 2", change(C, "node.stop", 0, version=2)),
        (2, "node 1 came from version 1 to 2 without a commit", remove(A, "round.commit", 1)),
        (3, "round 2 left 1 part out, though nobody was lost", in_all("round.commit", 1, parts_left_out=1)),
        (4, "node 2 in round 1 was counted, and had sent no contribution", remove(B, "round.scatter", 0)),
        (4, "node 2 in round 1 was counted with 0 tokens", in_all("round.commit", 0, contributors={A: 80, B: 0, C: 80})),
        (4, "weigh other than their samples", in_all("round.commit", 0, contributors={A: 80, B: 90, C: 80})),
        (5, "different commits of height 1: contributors differ", change(C, "round.commit", 0, contributors={A: 80, B: 80})),
        (5, "different commits of height 1: samples differ", change(C, "round.commit", 0, samples=FIRST | {A: [[0, 4], [6, 10]]})),
        (5, "different commits of height 3: lap differ", change(B, "round.commit", 2, lap=3)),
        (5, "node 1 came to height 2 after 2", change(A, "round.commit", 2, height=2, round=3)),
        (9, "node 3 says no reason for round 2", change(C, "round.missed", 0, reason=" ")),
        (9, "node 3 sent a contribution to round 2, and nothing says", remove(C, "round.missed", 0)),
    ],
)  # fmt: skip
def test_one_thing_wrong_is_found(which: int, said: str, damage: Damage) -> None:
    logs = sound()
    damage(logs)
    found = figures(logs)["invariants_broken"]
    assert any(one["which"] == which and said in one["detail"] for one in found), found
    assert {one["which"] for one in found} <= {which, 6}, "samples may come with it"


def test_one_peer_holds_the_same_bits_in_all_its_lives() -> None:
    (commit_again,) = (event for event in sound()[A] if event["event"] == "round.commit" and event["round"] == 3)
    logs = {
        A: [
            *sound()[A],
            sound()[A][0] | {"time": 61.0, "resumed": True},
            commit_again | {"digest": "other", "time": 62.0},
        ]
    }
    (found,) = figures(logs, ledger=None)["invariants_broken"]
    assert found == {"which": 1, "detail": "node 1 held other bits at version 3 than were held before or elsewhere"}


def test_parts_may_be_left_out_where_a_member_was_lost_or_lacked_them() -> None:
    left_out = in_all("round.commit", 1, parts_left_out=1)
    lost = with_lost(left_out, event="peer.suspect", of=B, reason="silent")
    lacking = copy.deepcopy(sound())
    for damage in (left_out, remove(B, "round.held", 1)):
        damage(lacking)
    suspected = sound()
    lost(suspected)
    assert violations(figures(suspected)) == violations(figures(lacking)) == []
    elsewhere = sound()
    with_lost(left_out, event="peer.suspect", of="dd" * 32, reason="silent")(elsewhere)
    assert violations(figures(elsewhere)), "somebody who was in no plan is nobody's reason"


def test_parts_may_be_left_out_while_messages_are_lost_or_late() -> None:
    logs = sound()
    in_all("round.commit", 1, parts_left_out=1)(logs)

    def broken(**run: Any) -> bool:
        return any(one["which"] == 3 for one in figures(logs, **run)["invariants_broken"])

    for what in ("drop", "delay"):
        assert not broken(timeline=[Incident(time=22.0, what=what, until=24.0)])
        assert broken(timeline=[Incident(time=2.0, what=what, until=4.0)])
    cut, heal = (Incident(time=at, what=what, number=3) for at, what in ((2.0, "apart"), (22.0, "heal")))
    assert not broken(timeline=[cut]) and not broken(timeline=[cut, heal])
    early = Incident(time=4.0, what="heal", number=3)
    assert broken(timeline=[cut, early]) and broken(timeline=[]) and not broken(lossy=True)


def test_a_download_is_a_reason_for_another_version() -> None:
    logs = sound()
    remove(A, "round.commit", 1)(logs)
    place = logs[A].index(of(logs[A], "round.commit")[1])
    logs[A].insert(
        place - 5, logs[A][1] | {"event": "span", "what": "download", "round": 2, "version": 1, "seconds": 1.0}
    )
    assert not [one for one in figures(logs)["invariants_broken"] if one["which"] == 2]


def test_what_a_round_counts_that_a_node_could_not_see_is_no_silence() -> None:
    """It contributed to round 2, was overtaken and downloaded the state; the next commit it takes part in is not its own."""
    logs = sound()
    remove(A, "round.commit", 1)(logs)
    of(logs[A], "round.commit")[1].update(contributed=False)
    remove(A, "round.scatter", 2)(logs)
    assert not [one for one in figures(logs)["invariants_broken"] if one["which"] == 9]


def test_a_contribution_to_the_next_round_does_not_hide_what_the_last_one_missed() -> None:
    """A node may send it before it has applied the round that left it out."""
    logs = sound()
    remove(C, "round.missed", 0)(logs)
    (next_one,) = (event for event in of(logs[C], "round.scatter") if event["round"] == 3)
    logs[C].remove(next_one)
    logs[C].insert(logs[C].index(of(logs[C], "round.commit")[1]), next_one)
    (found,) = figures(logs)["invariants_broken"]
    assert found["which"] == 9 and "to round 2, and nothing says" in found["detail"]


def test_processes_that_end_badly_are_told_but_for_those_that_were_never_up() -> None:
    assert violations(figures(sound(), exits={A: 0, C: -9})) == [
        "invariant 8, a bad message is an error, never a crash: node 3 ended with status -9"
    ]
    logs = sound()
    logs["dd" * 32] = []
    assert violations(figures(logs, exits={"dd" * 32: -15})) == []


def test_refusals_are_shown_unless_they_are_of_what_came_late_or_twice() -> None:
    logs = sound()
    for error, reason in (
        ("Stale", "old"),
        ("Malformed", "no map"),
        ("Malformed", "no list"),
        ("BadSignature", "not it"),
    ):
        logs[A].append(logs[A][-1] | {"event": "refused", "error": error, "of": B, "reason": reason, "more": 0})
    result = figures(logs)
    assert result["refused"] == [
        {"peer": "node 1", "of": "node 2", "error": "Malformed", "reason": "no list", "times": 2},
        {"peer": "node 1", "of": "node 2", "error": "BadSignature", "reason": "not it", "times": 1},
    ]
    assert violations(result) == []


# ---- samples -------------------------------------------------------------------------------------------------------


def trained(which: int, samples: list[list[int]]) -> Logs:
    """Node 1's step of that number trains others than it should."""
    logs = sound()
    of(logs[A], "step")[which]["samples"] = samples
    return logs


def test_a_trainer_that_trains_other_samples_shows() -> None:
    result = figures(trained(5, [[500, 504]]))
    assert result["samples_miscounted"] == 4, "those it should have; the others came after the last that counts"
    said = [one["detail"] for one in result["invariants_broken"]]
    assert said == ["node 1 has 4 samples that rounds count and it did not train: 52 to 55"]
    result = figures(trained(1, [[500, 504]]))
    said = [one["detail"] for one in result["invariants_broken"]]
    assert said == [
        "node 1 has 4 samples that rounds count and it did not train: 4 to 7",
        "node 1 trained 4 samples for a round that counts others: 500 to 503",
    ]


def test_a_trainer_that_repeats_samples_shows() -> None:
    result = figures(trained(1, [[4, 8], [4, 6]]))
    assert (result["samples_trained_twice"], result["samples_miscounted"]) == (2, 2)
    assert "2 samples trained twice" in [one["detail"] for one in result["invariants_broken"]]
    assert figures(trained(0, [[0, 4], [8, 9]]))["samples_trained_twice"] == 1, (
        "node 2 has trained and counted that one"
    )


def mark(at: float, kind: str) -> Event:
    return {"time": at, "event": kind}


@pytest.mark.parametrize(
    ("events", "claims"),
    [
        # a kill: what came after the checkpoint is trained again
        ([step(1, (0, 8)), step(2, (8, 16)), mark(3, "node.start"), step(4, (8, 16))], [Claim(5, [(0, 16)])]),
        # counted while the node was away, and trained again from an old checkpoint until it heard of that
        ([step(1, (0, 8)), step(2, (8, 16)), mark(4, "node.start"), step(5, (8, 16)), mark(6, "progress.dropped")],
         [Claim(3, [(0, 16)])]),
        # a step came to no number: what went before it is trained again, and its samples are counted untrained
        ([step(1, (0, 8)), mark(2, "progress.dropped"), step(3, (0, 8)), step(4, (8, 16)) | {"event": "step.passed"},
          step(5, (16, 24))], [Claim(6, [(0, 24)])]),
        # dropped, for others had them; later they came back
        ([step(1, (0, 8)), mark(2, "progress.dropped"), step(3, (20, 28)), step(4, (0, 8))], [Claim(5, [(20, 28), (0, 8)])]),
        # trained on while the round was under way: the rest is counted by the next, which cuts a step in two
        ([step(1, (0, 8)), step(2, (8, 16)), step(3, (16, 24))], [Claim(2, [(0, 8)]), Claim(4, [(8, 20)])]),
    ],
)  # fmt: skip
def test_what_was_lost_or_given_up_may_be_trained_again(events: list[Event], claims: list[Claim]) -> None:
    found = compare(events, claims)
    assert (found.missing, found.foreign) == ([], [])
    wanted = sum(stop - start for claim in claims for start, stop in claim.intervals)
    assert sum(stop - start for start, stop in found.counted) == wanted


def test_a_round_that_only_its_dead_member_knew_of_counts_what_that_had_trained_before() -> None:
    """It decides alone, and ends before a word of it; from an old checkpoint it trains some of the same again, and then hears from its disk what it had decided."""
    write = Writer(A)
    write(0.0, "node.start", pid=1, device="cpu", agent="a", resumed=False)
    for at, first in ((1.0, 0), (2.0, 4)):
        write(at, "step", loss=1.0, tokens=40, samples=[[first, first + 4]], seconds=1.0)
    write(3.0, "round.scatter", round=1, bytes=9)
    write(20.0, "node.start", pid=2, device="cpu", agent="a", resumed=True)
    write(21.0, "step", loss=1.0, tokens=40, samples=[[0, 4]], seconds=1.0)
    write(21.5, "progress.dropped", steps=1, reason="a round counted it")
    write.context |= {"height": 1, "version": 1}
    write(22.0, "round.commit", **commit(1, {A: [[0, 4], [4, 8]]}, A))
    result = figures({A: write.events}, ledger=None)
    assert violations(result) == [] and result["samples_trained_twice"] == result["samples_miscounted"] == 0


def test_the_same_again_without_a_break_is_not_forgiven() -> None:
    found = compare([step(1, (0, 8)), step(2, (8, 16)), step(3, (8, 16))], [Claim(5, [(0, 16)])])
    assert found.foreign == [(8, 16)]


def test_of_a_pipeline_no_steps_are_compared() -> None:
    logs = sound()
    for events in logs.values():
        for event in events:
            event["stage"] = 0
    of(logs[A], "step")[0]["samples"] = []
    result = figures(logs)
    assert result["samples_miscounted"] is None and violations(result) == []
    assert not any("steps trained" in one["what"] for one in result["checked"])


def test_a_swarm_that_learns_no_more_than_one_worker_is_told_and_breaks_nothing() -> None:
    known = {"outer_loss": 3.5, "solo_loss": 3.25, "outer_better": False}
    assert (
        not_better(known)
        == "The swarm's held-out loss, 3.5000, is NOT lower than that of the best worker alone, 3.2500."
    )
    assert not_better(known | {"outer_better": True}) == not_better(known | {"outer_better": None}) == ""


# ---- nodes ---------------------------------------------------------------------------------------------------------


def played() -> dict[str, Any]:
    """The figures of three simulated nodes, one of which is killed and comes back."""
    faults = [*(Start(at=0.5 * peer, peer=peer) for peer in range(3)), Kill(at=40.0, peer=1), Start(at=52.0, peer=1)]
    plan = toy_plan(
        3, Schedule(num_peers=3, duration_s=90.0, faults=tuple(faults)), Wire(step_s=(0.7, 1.0, 1.3)), calm_s=0.0
    )
    keys = [signer.peer_id.hex() for signer in plan.outfit.signers]
    logs: Logs = {key: [] for key in keys}

    def take(line: str, event: Event) -> None:
        if "peer" in event:
            logs[keys[event["peer"]]].append(event | {"peer": keys[event["peer"]]})

    simulate(plan, sink=take)
    return summarise(logs, RunFacts(name="s", started=0.0, ended=90.0, peers=[]))


def test_honest_nodes_break_nothing() -> None:
    result = played()
    assert violations(result) == [] and result["samples_miscounted"] == 0 and result["rounds_committed"] > 5
    assert {one["which"] for one in result["checked"]} == {1, 2, 3, 4, 5, 6, 9}


def test_a_node_whose_trainer_takes_others_samples_shows_though_the_ledger_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the accounts' back: what the learner is given is not the batch."""
    given: list[int] = []

    def note(self: Trainer, report: StepReport, began: float, tokens: int, numbers: Sequence[int]) -> None:
        really(self, report, began, tokens, given)

    def train(self: ToyLearner, numbers: Sequence[int], global_step: int) -> StepReport:
        given[:] = [numbers[0]] * len(numbers) if global_step == 5 else numbers
        return trains(self, given, global_step)

    really, trains = Trainer._note, ToyLearner.train
    monkeypatch.setattr(Trainer, "_note", note)
    monkeypatch.setattr(ToyLearner, "train", train)  # its virtual seconds go by its name
    result = played()
    assert result["samples_trained_twice"] > 0 and result["samples_miscounted"] > 0
    assert {one["which"] for one in result["invariants_broken"]} == {6}
