"""Where a peer's time went, from its own events: what it computed, in which phase of a round it was, in which state.

Computing, one thing at a time behind the learner's door: `train` (inner steps), `apply` (outer steps), `evaluate`. What nodes say that these
took includes the wait for their turn there, so each begins when the one before has ended, at the earliest. Told beside them is `download` (the outer
state, joining late). A round as one of its members goes through it:

    send       from the plan until the owners have our contribution; only who contributes
    collect    until the set of contributors is fixed: waiting for theirs
    average    until all means are here: ours made and sent, the others' received
    vote       until the commit is applied, or the round given up

Who is stopped (SIGSTOP) does nothing, whatever it was at: what its events say took longer is in pieces around its pauses.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from farflung.node.events import Event
from farflung.sims.facts import KILLED, Incident, RunFacts
from farflung.sims.logs import lives_of

STATES = ("joining", "training", "round", "waiting", "finished")
"""As pictures show them; others of a node's states are `waiting`."""

PHASES = ("send", "collect", "average", "vote")

USES = ("train", "apply", "join", "round", "pause", "wait")
"""Of a peer's time: inner steps; outer steps and evaluations; joining; in a round without computing; stopped; the rest."""

Stretch = tuple[float, float]
"""From, until: unix seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """Unix seconds."""

    start: float
    end: float
    what: str
    round: int = 0
    """0 outside of rounds."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def compute_spans(events: Iterable[Event], pauses: Sequence[Stretch] = ()) -> list[Span]:
    """`train`, `apply`, `evaluate` and `download`, in the order in which they ended; never two of them at once."""
    spans: list[Span] = []
    downloads: list[Span] = []
    for event in events:
        match event["event"], event.get("what"):
            case "pipeline.step", _:
                began = event["time"] - event["seconds"]
                spans += [Span(began + a / 1000.0, began + b / 1000.0, "train") for *_, a, b in event["ops"]]
            case "step", _ if "stage" not in event:  # of a pipeline it is mostly waiting for others
                spans.append(_ended(event, "train", 0))
            case "outer.eval", _:
                spans.append(_ended(event, "evaluate", 0))
            case "span", "apply":
                spans.append(_ended(event, "apply", event["round"]))
            case "span", "download":
                downloads.append(_ended(event, "download", event["round"]))
    computed = _in_turn(spans)
    around = _without(
        downloads, [(span.start, span.end) for span in computed]
    )  # it waits for others, and lets us go on
    return _without(sorted([*computed, *around], key=lambda span: span.end), pauses)


def _in_turn(spans: Iterable[Span]) -> list[Span]:
    """Of what goes through one door, each without its wait for the one before."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.end):
        start = max(span.start, found[-1].end) if found else span.start
        if start < span.end:
            found.append(replace(span, start=start))
    return found


def transfer_spans(events: Iterable[Event]) -> list[Span]:
    """Pieces of a round's work beside the learner: `encode`, `scatter`, `reduce`, `spread`, `fetch`."""
    pieces = ("encode", "scatter", "reduce", "spread", "fetch")
    return [
        _ended(event, event["what"], event["round"])
        for event in events
        if event["event"] == "span" and event["what"] in pieces
    ]


def _ended(event: Event, what: str, round_: int) -> Span:
    return Span(event["time"] - event["seconds"], event["time"], what, round_)


def _without(spans: list[Span], pauses: Sequence[Stretch]) -> list[Span]:
    """What is left of them around pauses."""
    for begin, end in pauses:
        left: list[Span] = []
        for span in spans:
            if span.end <= begin or span.start >= end:
                left.append(span)
                continue
            pieces = (span.start, begin), (end, span.end)
            left += [Span(a, b, span.what, span.round) for a, b in pieces if a < b]
        spans = left
    return spans


def phase_spans(events: Sequence[Event], ends: Sequence[float] = (), pauses: Sequence[Stretch] = ()) -> list[Span]:
    """The PHASES of every round that the peer took part in, in order; of a round that its process did not live to the end of, until it ended (`_lives`)."""
    return _without([span for life, end in _lives(events, ends) for span in _phases(life, end)], pauses)


def _phases(life: Sequence[Event], end: float) -> list[Span]:
    spans: list[Span] = []
    phase, since, number = "", 0.0, 0

    def turn(to: str, at: float) -> None:
        nonlocal phase, since
        if phase and at > since:
            spans.append(Span(since, at, phase, number))
        phase, since = to, at

    for event in life:
        at = float(event["time"])
        match event["event"], event.get("what"):
            case "round.plan", _:
                turn("collect", at)
                number = event["round"]
            case "round.scatter", _ if phase == "collect":
                turn("send", at)
            case "span", "scatter" if phase == "send":
                turn("collect", at)
            case "round.cut", _ if phase:
                turn("average", at)
            case "round.held", _ if phase:
                turn("vote", at)
            case "span", "decode" if phase and event["round"] == number:
                turn("", max(since, at - event["seconds"]))
            # The commit before may still be under way when the next round is planned.
            case (("round.commit" | "round.abort" | "round.missed"), _) if event["round"] >= number:
                turn("", at)
            case "node.stop", _:
                turn("", at)
    turn("", end)
    return spans


def state_spans(events: Sequence[Event], ends: Sequence[float] = ()) -> list[Span]:
    """The STATES of all lives of a peer. A span ends with the next state, or with its life (`_lives`)."""
    return [span for life, end in _lives(events, ends) for span in _states(life, end) if span.seconds > 0]


def _states(life: Sequence[Event], end: float) -> list[Span]:
    spans: list[Span] = []
    state, since = "", 0.0
    for event in life:
        kind, at = event["event"], float(event["time"])
        new = "joining" if kind == "node.start" else event["state"] if kind == "node.state" else state
        if new and new not in STATES:
            new = "waiting"
        if kind == "node.stop" or new != state:
            if state:
                spans.append(Span(since, at, state))
            state, since = "" if kind == "node.stop" else new, at
    if state:
        spans.append(Span(since, end, state))
    return spans


def _lives(events: Sequence[Event], ends: Sequence[float]) -> Iterator[tuple[list[Event], float]]:
    """The lives of a peer (`logs.lives_of`), and when each ended: at the first of `ends`, when lives ended that could not say so (`silent_ends`), between its
    last word and the first one of the next, or else with its last word.
    """
    lives = lives_of(events)
    for life, after in zip_longest(lives, lives[1:]):
        last, before = float(life[-1]["time"]), float(after[0]["time"]) if after else math.inf
        yield life, min((end for end in ends if last < end <= before), default=last)


def seconds_by_use(
    events: Sequence[Event], ends: Sequence[float] = (), pauses: Sequence[Stretch] = ()
) -> dict[str, float]:
    """How many seconds of the peer's presence went into each of USES; what computes counts before what waits. `ends` are those of `state_spans`."""
    states, compute = state_spans(events, ends), compute_spans(events, pauses)
    layers: list[tuple[str, list[Span]]] = [
        (
            "pause",
            [
                Span(max(s.start, a), min(s.end, b), "pause")
                for s in states
                for a, b in pauses
                if a < s.end and b > s.start
            ],
        ),
        ("train", [s for s in compute if s.what == "train"]),
        ("apply", [s for s in compute if s.what in ("apply", "evaluate")]),
        ("join", [s for s in states if s.what == "joining"]),
        ("round", [*phase_spans(events, ends, pauses), *(s for s in states if s.what == "round")]),
        ("wait", states),
    ]
    seconds: dict[str, float] = {}
    covered: list[tuple[float, float]] = []
    before = 0.0
    for use, spans in layers:
        covered = union([*covered, *((span.start, span.end) for span in spans)])
        total = sum(end - start for start, end in covered)
        seconds[use], before = total - before, total
    return seconds


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as disjoint intervals, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def merged_spans(spans: Iterable[Span], gap_s: float) -> list[Span]:
    """Neighbours that do the same within `gap_s` are one: what a picture cannot tell apart anyway."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        last = found[-1] if found else None
        if last is not None and last.what == span.what and span.start <= last.end + gap_s:
            found[-1] = Span(last.start, max(last.end, span.end), span.what, last.round)
        else:
            found.append(span)
    return found


def coarse_spans(spans: Iterable[Span], bin_s: float) -> list[Span]:
    """As many as a picture can show that is `bin_s` fine, at most: where spans that are shorter follow each other, each `bin_s` of them is what filled most of it."""
    found: list[Span] = []
    short: list[Span] = []
    for span in merged_spans(spans, bin_s):
        follows = not short or span.start <= short[-1].end + bin_s
        if short and not (follows and span.seconds < bin_s):
            found += _binned(short, bin_s)
            short = []
        if span.seconds < bin_s:
            short.append(span)
        else:
            found.append(span)
    return merged_spans([*found, *_binned(short, bin_s)], bin_s)


def _binned(short: Sequence[Span], bin_s: float) -> list[Span]:
    """Of spans one after the other, each shorter than a bin: so each lies in two bins at most."""
    if len(short) < 2:
        return list(short)
    start, end = short[0].start, max(span.end for span in short)
    filled: dict[int, dict[str, float]] = {}
    for span in short:
        first = int((span.start - start) / bin_s)
        edge = start + (first + 1) * bin_s
        for number, seconds in ((first, min(span.end, edge) - span.start), (first + 1, span.end - edge)):
            if seconds > 0:
                uses = filled.setdefault(number, {})
                uses[span.what] = uses.get(span.what, 0.0) + seconds
    return [
        Span(start + number * bin_s, min(start + (number + 1) * bin_s, end), max(uses, key=lambda what: uses[what]))
        for number, uses in sorted(filled.items())
    ]


def kills(timeline: Iterable[Incident]) -> dict[str, list[float]]:
    """When each peer was killed or lost power, in unix seconds, by public key."""
    found: dict[str, list[float]] = {}
    for incident in timeline:
        if incident.what in KILLED:
            found.setdefault(incident.peer, []).append(incident.time)
    return found


def pauses(timeline: Iterable[Incident], ended: float) -> dict[str, list[Stretch]]:
    """When each peer's process was stopped, by public key: until it went on, was killed, or the run ended."""
    found: dict[str, list[Stretch]] = {}
    since: dict[str, float] = {}
    for incident in timeline:
        peer = incident.peer
        if incident.what == "pause":
            since[peer] = incident.time
        elif incident.what in (*KILLED, "resume") and peer in since:
            found.setdefault(peer, []).append((since.pop(peer), incident.time))
    for peer, at in since.items():
        found.setdefault(peer, []).append((at, ended))
    return found


def silent_ends(run: RunFacts) -> dict[str, list[float]]:
    """When lives ended that could not say so, by public key: they were killed, or still paused at the end of the run."""
    found = kills(run.timeline)
    for peer, stretches in pauses(run.timeline, run.ended).items():
        if stretches[-1][1] == run.ended:
            found.setdefault(peer, []).append(run.ended)
    return found
