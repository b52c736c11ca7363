"""Where a peer's time went, from its own events: what it computed, in which phase of a round it was, in which state.

Computing, one thing at a time behind the learner's door: `train` (inner steps), `apply` (outer steps), `evaluate`,
`download` (the outer state, joining late). A round as one of its members goes through it:

    send       from the plan until the owners have our contribution; only who contributes
    collect    until the set of contributors is fixed: waiting for theirs
    average    until all means are here: ours made and sent, the others' received
    vote       until the commit is applied, or the round given up
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farflung.node.events import Event
from farflung.sims.facts import Incident

STATES = ("joining", "training", "round", "waiting", "finished")
"""As pictures show them; others of a node's states are `waiting`."""

PHASES = ("send", "collect", "average", "vote")

USES = ("train", "apply", "join", "round", "wait")
"""Of a peer's time: inner steps; outer steps and evaluations; joining; in a round without computing; the rest."""


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


def compute_spans(events: Iterable[Event]) -> list[Span]:
    """`train`, `apply`, `evaluate` and `download`, in the order in which they ended."""
    spans = []
    for event in events:
        match event["event"], event.get("what"):
            case "pipeline.step", _:
                began = event["time"] - event["seconds"]
                spans += [Span(began + a / 1000.0, began + b / 1000.0, "train") for *_, a, b in event["ops"]]
            case "step", _ if "stage" not in event:  # of a pipeline it is mostly waiting for others
                spans.append(_ended(event, "train", 0))
            case "outer.eval", _:
                spans.append(_ended(event, "evaluate", 0))
            case "span", "apply" | "download":
                spans.append(_ended(event, event["what"], event["round"]))
    return spans


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


def phase_spans(events: Sequence[Event]) -> list[Span]:
    """The PHASES of every round that the peer took part in, in order."""
    spans: list[Span] = []
    phase, since, number = "", 0.0, 0

    def turn(to: str, at: float) -> None:
        nonlocal phase, since
        if phase and at > since:
            spans.append(Span(since, at, phase, number))
        phase, since = to, at

    for event in events:
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
            case "span", "apply" if phase and event["round"] == number:
                turn("", max(since, at - event["seconds"]))
            # The commit before may still be under way when the next round is planned.
            case (("round.commit" | "round.abort" | "round.missed"), _) if event["round"] >= number:
                turn("", at)
            case (("node.start" | "node.stop"), _):
                turn("", at)
    if phase:
        turn("", float(events[-1]["time"]))
    return spans


def state_spans(events: Sequence[Event], killed_at: float | None = None) -> list[Span]:
    """The STATES of all lives of a peer. A span ends with the next state, or with the last thing heard of that life.

    `killed_at` is when the last life ended from outside, if it did.
    """
    spans: list[Span] = []
    state, since, last = "", 0.0, 0.0
    for event in events:
        kind, at = event["event"], float(event["time"])
        new = "joining" if kind == "node.start" else event["state"] if kind == "node.state" else state
        if new and new not in STATES:
            new = "waiting"
        if kind == "node.start" or kind == "node.stop" or new != state:
            if state:
                # After a kill nobody says when it ended: the last event of that life does.
                spans.append(Span(since, last if kind == "node.start" else at, state))
            state, since = "" if kind == "node.stop" else new, at
        last = at
    if state:
        spans.append(Span(since, last if killed_at is None else max(killed_at, last), state))
    return [span for span in spans if span.seconds > 0]


def seconds_by_use(events: Sequence[Event], killed_at: float | None = None) -> dict[str, float]:
    """How many seconds of the peer's presence went into each of USES; what computes counts before what waits."""
    states, compute = state_spans(events, killed_at), compute_spans(events)
    layers: list[tuple[str, list[Span]]] = [
        ("train", [s for s in compute if s.what == "train"]),
        ("apply", [s for s in compute if s.what in ("apply", "evaluate")]),
        ("join", [s for s in states if s.what == "joining"]),
        ("round", [*phase_spans(events), *(s for s in states if s.what == "round")]),
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


def kills(timeline: Iterable[Incident]) -> dict[str, list[float]]:
    """When each peer was killed, in unix seconds, by public key."""
    found: dict[str, list[float]] = {}
    for incident in timeline:
        if incident.what == "kill":
            found.setdefault(incident.peer, []).append(incident.time)
    return found


def kill_time(timeline: Iterable[Incident], peer: str) -> float | None:
    """When the peer's last life was ended from outside; None when it was not."""
    last = None
    for incident in timeline:
        if incident.peer == peer:
            last = incident
    return last.time if last is not None and last.what == "kill" else None
