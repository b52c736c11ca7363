"""Where a peer's time went, on events small enough to follow by hand, and whatever events there are."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.node.events import Event
from farflung.sims.facts import Incident, RunFacts
from farflung.sims.spans import (
    PHASES,
    STATES,
    USES,
    Span,
    coarse_spans,
    compute_spans,
    kills,
    merged_spans,
    pauses,
    phase_spans,
    seconds_by_use,
    silent_ends,
    state_spans,
    transfer_spans,
    union,
)


def event(at: float, kind: str, **fields: Any) -> Event:
    return {"time": at, "event": kind, "peer": "aa", **fields}


ROUND = [
    event(0.0, "node.start"),
    event(1.0, "node.state", state="training"),
    event(3.0, "step", seconds=2.0),
    event(5.0, "step", seconds=2.0),
    event(5.0, "node.state", state="ready"),
    event(6.0, "round.plan", round=7),
    event(6.0, "node.state", state="round"),
    event(6.0, "round.scatter", round=7),
    event(6.5, "span", what="encode", round=7, seconds=0.5),
    event(8.0, "span", what="scatter", round=7, seconds=2.0),
    event(9.0, "round.cut", round=7),
    event(9.5, "span", what="reduce", round=7, seconds=0.25),
    event(11.0, "round.held", round=7),
    event(12.0, "span", what="decode", round=7, seconds=0.5),
    event(12.5, "span", what="apply", round=7, seconds=0.5),
    event(12.5, "node.state", state="training"),
    event(12.6, "round.commit", round=7),
    event(13.5, "outer.eval", seconds=1.0),
    event(14.0, "node.stop"),
]


def test_the_phases_of_a_round() -> None:
    assert phase_spans(ROUND) == [
        Span(6.0, 8.0, "send", 7),
        Span(8.0, 9.0, "collect", 7),
        Span(9.0, 11.0, "average", 7),
        Span(11.0, 11.5, "vote", 7),
    ]


def test_who_does_not_contribute_does_not_send() -> None:
    quiet = [one for one in ROUND if one["event"] != "round.scatter" and one.get("what") != "scatter"]
    assert [span.what for span in phase_spans(quiet)] == ["collect", "average", "vote"]


@pytest.mark.parametrize("end", ["round.abort", "round.missed", "node.stop"])
def test_a_round_that_comes_to_nothing_ends(end: str) -> None:
    spans = phase_spans([*ROUND[:10], event(8.5, end, round=7), event(20.0, "net")])
    assert spans == [Span(6.0, 8.0, "send", 7), Span(8.0, 8.5, "collect", 7)]


def test_the_round_before_does_not_end_the_next() -> None:
    late = [*ROUND[:8], event(7.0, "span", what="apply", round=6, seconds=0.2), event(7.1, "round.commit", round=6)]
    assert phase_spans([*late, *ROUND[8:]]) == phase_spans(ROUND)


def test_a_round_in_which_the_node_was_killed_ends_with_its_last_word() -> None:
    assert phase_spans([*ROUND[:8], event(7.0, "net")]) == [Span(6.0, 7.0, "send", 7)]


def test_what_was_computed_and_transferred() -> None:
    assert [(s.what, s.start, s.end) for s in compute_spans(ROUND)] == [
        ("train", 1.0, 3.0), ("train", 3.0, 5.0), ("apply", 12.0, 12.5), ("evaluate", 12.5, 13.5),
    ]  # fmt: skip
    assert [s.what for s in transfer_spans(ROUND)] == ["encode", "scatter", "reduce"]


def test_the_wait_for_a_turn_at_the_door_is_not_computing() -> None:
    waited = [
        event(3.0, "step", seconds=3.0),
        event(3.5, "span", what="apply", round=7, seconds=2.5),
        event(6.5, "step", seconds=4.5),
    ]
    assert [(s.what, s.start, s.end) for s in compute_spans(waited)] == [
        ("train", 0.0, 3.0), ("apply", 3.0, 3.5), ("train", 3.5, 6.5),
    ]  # fmt: skip


def test_a_download_is_told_around_the_steps_that_it_lets_pass() -> None:
    beside = [
        event(3.0, "step", seconds=1.0),
        event(5.0, "step", seconds=1.0),
        event(6.0, "span", what="download", round=2, seconds=5.0),
    ]
    assert [(s.start, s.end) for s in compute_spans(beside) if s.what == "download"] == [
        (1.0, 2.0),
        (3.0, 4.0),
        (5.0, 6.0),
    ]


@given(st.lists(st.tuples(st.sampled_from(["step", "apply", "outer.eval"]), st.integers(0, 9), st.integers(1, 9))))
def test_of_a_door_that_does_one_thing_at_a_time_all_the_time_is_told_and_nothing_else(
    calls: list[tuple[str, int, int]],
) -> None:
    """`calls`: what, how long after the call before it was asked for, and what it takes; who asks later is served later."""
    asked, free, busy = 0, 0, []
    said: list[Event] = []
    for what, later, takes in calls:
        asked += later
        began = max(asked, free)
        free = began + takes
        busy.append((float(began), float(free)))
        fields = {"seconds": float(free - asked)} | ({"what": what, "round": 1} if what == "apply" else {})
        said.append(event(float(free), "span" if what == "apply" else what, **fields))
    assert [(span.start, span.end) for span in compute_spans(said)] == busy


def test_every_second_is_counted_once() -> None:
    seconds = {"train": 4.0, "apply": 1.5, "join": 1.0, "round": 6.0, "pause": 0.0, "wait": 1.5}
    assert seconds_by_use(ROUND) == seconds
    stopped = [(2.5, 2.75), (4.0, 6.25), (13.75, 20.0)]
    assert seconds_by_use(ROUND, (), stopped) == seconds | {"train": 2.75, "round": 5.75, "pause": 2.75, "wait": 0.25}


def test_who_is_stopped_neither_computes_nor_takes_part() -> None:
    stopped = [(2.5, 2.75), (4.0, 6.25), (8.0, 9.0)]
    assert [(s.what, s.start, s.end) for s in compute_spans(ROUND, stopped)] == [
        ("train", 1.0, 2.5), ("train", 2.75, 3.0), ("train", 3.0, 4.0), ("apply", 12.0, 12.5), ("evaluate", 12.5, 13.5),
    ]  # fmt: skip
    assert phase_spans(ROUND, (), stopped)[:2] == [Span(6.25, 8.0, "send", 7), Span(9.0, 11.0, "average", 7)]
    operations = event(10.0, "pipeline.step", seconds=4.0, ops=[["F", 0, 0, 0.0, 1000.0], ["B", 0, 0, 1500.0, 4000.0]])
    assert [(s.start, s.end) for s in compute_spans([operations], [(8.0, 9.5)])] == [
        (6.0, 7.0),
        (7.5, 8.0),
        (9.5, 10.0),
    ]


def test_states_after_a_kill_last_until_the_kill() -> None:
    lost = [event(0.0, "node.start"), event(2.0, "node.state", state="training"), event(5.0, "net")]
    assert state_spans(lost) == [Span(0.0, 2.0, "joining"), Span(2.0, 5.0, "training")]
    assert state_spans(lost, [9.0])[-1] == Span(2.0, 9.0, "training")
    again = [*lost, event(20.0, "node.start"), event(21.0, "node.stop")]
    assert state_spans(again) == [*state_spans(lost), Span(20.0, 21.0, "joining")]
    assert state_spans(again, [9.0]) == [*state_spans(lost, [9.0]), Span(20.0, 21.0, "joining")]


@pytest.mark.parametrize("before_it", [[], [event(39.0, "kernels")]])
def test_whoever_was_dead_was_not_there(before_it: list[Event]) -> None:
    """Real nodes say `kernels` before they start, simulated ones do not."""
    killed = [*ROUND[:8], event(7.0, "net")]
    back = [event(40.0, "node.start"), event(41.0, "node.state", state="training"), event(45.0, "node.stop")]
    lives = [*killed, *before_it, *back]
    assert phase_spans(lives, [7.5]) == [Span(6.0, 7.5, "send", 7)]
    assert state_spans(lives, [7.5])[-3:] == [
        Span(6.0, 7.5, "round"), Span(40.0, 41.0, "joining"), Span(41.0, 45.0, "training"),
    ]  # fmt: skip
    assert sum(seconds_by_use(lives, [7.5]).values()) == 7.5 + 5.0
    assert phase_spans(lives, [6.9, 40.5])[-1].end == 7.0, "neither before its last word nor in its next life"


def test_pauses_end_with_what_ends_them() -> None:
    timeline = [
        Incident(time=1.0, what="pause", peer="a"),
        Incident(time=2.0, what="pause", peer="b"),
        Incident(time=3.0, what="slow", peer="a", until=20.0, much=4.0),
        Incident(time=4.0, what="resume", peer="a"),
        Incident(time=5.0, what="pause", peer="a"),
        Incident(time=6.0, what="power", peer="b"),
        Incident(time=7.0, what="skew", peer="b", much=1.0),
    ]
    assert pauses(timeline, 9.0) == {"a": [(1.0, 4.0), (5.0, 9.0)], "b": [(2.0, 6.0)]}
    assert kills(timeline) == {"b": [6.0]}
    run = RunFacts(name="run", started=0.0, ended=9.0, peers=[], timeline=timeline)
    assert silent_ends(run) == {"a": [9.0], "b": [6.0]}, "whoever is paused at the end is still there"


def test_neighbours_too_close_to_tell_apart_are_one() -> None:
    spans = [Span(0.0, 1.0, "train"), Span(1.05, 2.0, "train"), Span(2.0, 2.5, "apply"), Span(4.0, 5.0, "apply")]
    assert merged_spans(spans, 0.1) == [Span(0.0, 2.0, "train"), *spans[2:]]


def test_what_is_too_short_to_be_seen_is_what_most_of_the_time_around_was() -> None:
    spans, at = [Span(0.0, 5.0, "joining")], 5.0
    for number in range(200):
        turn = at + (0.7 if number < 100 else 0.3)
        spans += [Span(at, turn, "training"), Span(turn, at + 1.0, "round")]
        at += 1.0
    spans.append(Span(at, at + 9.0, "finished"))
    found = [(span.what, round(span.start), round(span.end)) for span in coarse_spans(spans, 2.0)]
    assert found == [("joining", 0, 5), ("training", 5, 105), ("round", 105, 205), ("finished", 205, 214)]
    assert coarse_spans(spans, 0.1) == spans, "what can be seen stays"


@given(st.lists(st.tuples(st.sampled_from(STATES), st.floats(0.001, 5.0), st.sampled_from([0.0, 0.0, 0.4, 8.0]))))
def test_a_picture_has_no_more_spans_than_it_can_show(said: list[tuple[str, float, float]]) -> None:
    spans, at = [], 3.0
    for what, seconds, pause in said:
        spans.append(Span(at, at + seconds, what))
        at += seconds + pause
    found = coarse_spans(spans, 1.0)
    assert len(found) <= 2 * (at - 3.0) + 1
    assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(found))
    if spans:
        assert found[0].start == 3.0 and found[-1].end == pytest.approx(max(span.end for span in spans))


intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda two: (min(two), max(two))))


@given(intervals)
def test_a_union_covers_the_same_and_nothing_twice(found: list[tuple[int, int]]) -> None:
    merged = union([(float(a), float(b)) for a, b in found])
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
    covered = {x + 0.5 for a, b in found for x in range(a, b)}
    assert {x + 0.5 for x in range(51) if any(a < x + 0.5 < b for a, b in merged)} == covered


KINDS = st.sampled_from(
    [
        ("node.start", {}), ("node.stop", {}), ("round.plan", {"round": 1}), ("round.scatter", {"round": 1}),
        ("round.cut", {"round": 1}), ("round.held", {"round": 1}), ("round.commit", {"round": 1}), ("net", {}),
        ("round.abort", {"round": 1}), ("step", {"seconds": 1.5}), ("outer.eval", {"seconds": 0.5}),
        *[("node.state", {"state": state}) for state in (*STATES, "ready", "leaving")],
        *[("span", {"what": what, "round": 1, "seconds": 0.75}) for what in ("scatter", "apply", "encode")],
    ]
)  # fmt: skip


@given(st.lists(st.tuples(KINDS, st.floats(0.0, 5.0))))
def test_whatever_is_said_times_add_up(said: list[tuple[tuple[str, dict[str, Any]], float]]) -> None:
    at, events = 100.0, []
    for (kind, fields), gap in said:
        at += gap
        events.append(event(at, kind, **fields))
    seconds = seconds_by_use(events)
    assert set(seconds) == set(USES) and all(value >= -1e-9 for value in seconds.values())
    assert sum(seconds.values()) <= at - 100.0 + 1.5 + 1e-6, "a step may have begun before the first event"
    phases = phase_spans(events)
    assert all(span.what in PHASES and span.seconds > 0 for span in phases)
    assert all(before.end <= after.start for before, after in itertools.pairwise(phases))
