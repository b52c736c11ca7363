"""What a run of nodes came to, worked out from their events alone: what a simulation reports of itself, and its log."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from farflung.node.events import Event
from farflung.sims.facts import EVENTS
from farflung.sims.faults import Fault, Kill, Leave, Start, describe
from farflung.sims.logs import Events, chain_of
from farflung.sims.pipeline_log import logged_steps
from farflung.sims.pipeline_recoveries import recoveries
from farflung.sims.sim_folder import timeline_of
from farflung.sims.simulation import Report
from farflung.sims.spans import Stretch, compute_spans, kills, pauses
from farflung.sims.summary import commits_by_round
from farflung.sims.swarm import Labour
from farflung.sims.trail import HEADING, log_line


def fill_report(
    report: Report,
    keys: Sequence[str],
    steps_s: Sequence[float],  # what a step takes each of them
    events: Events,
    done: Sequence[tuple[float, Fault]],  # what happened when, in unix seconds
    began: float,
    ended: float,
) -> None:
    """Work out from events what a simulation reports of itself."""
    # By stage and group, life and height of its newest commit, and the view.
    views: dict[tuple[int, str], tuple[tuple[int, int], list[str]]] = {}
    homes: dict[str, tuple[int, str]] = {}  # by peer, the stage and group of its newest commit
    for event in in_order(events):
        report.note(event["time"] - began, event)
        if event["event"] in ("round.commit", "view.commit"):
            stage, life, group = chain_of(event)
            homes[event["peer"]] = stage, group
            known = views.get((stage, group), ((0, 0), []))
            views[stage, group] = max(known, ((life, event["height"]), event["view"]), key=lambda one: one[0])
    rounds = commits_by_round(events)
    report.commits = max((event["height"] for one in events.values() for event in one), default=0)
    report.rounds = max((event["version"] for event in rounds.values()), default=0)
    report.tokens = sum(sum(event["contributors"].values()) for event in rounds.values())
    gone = _ended(keys, done)
    report.members = sum(peer in views[home][1] for peer, home in homes.items() if peer not in gone)
    timeline = timeline_of(done, keys)
    deaths, stopped = kills(timeline), pauses(timeline, ended)
    report.labour = [
        labour_of(events.get(key, ()), deaths.get(key, ()), ended, step_s, stopped.get(key, ()))
        for key, step_s in zip(keys, steps_s, strict=True)
    ]
    report.recoveries = recoveries(events, logged_steps(events), deaths)


def _ended(keys: Sequence[str], done: Sequence[tuple[float, Fault]]) -> set[str]:
    """Peers that were killed, or told to leave, and not started since."""
    last = {fault.peer: fault for _, fault in done if isinstance(fault, Start | Kill | Leave)}
    return {keys[peer] for peer, fault in last.items() if not isinstance(fault, Start)}


def labour_of(
    events: Sequence[Event], kills: Sequence[float], ended: float, step_s: float, pauses: Sequence[Stretch] = ()
) -> Labour:
    """How one peer has spent its time: a life lasts from `node.start` to `node.stop`, a kill or the end, and a step what it stands for.

    The seconds that a node says of a step are more: while a round is applied, or evaluated, it waits for its turn. Of a pipeline, operations are
    told in the place of steps, and by the time that they took without pauses.
    """
    labour = Labour()
    stops = sorted([*kills, *(event["time"] for event in events if event["event"] == "node.stop"), ended])
    for event in events:
        if event["event"] == "node.start":
            labour.running_s += next(stop for stop in stops if stop >= event["time"]) - event["time"]
        elif event["event"] == "pipeline.step":
            labour.training_s += sum(span.seconds for span in compute_spans([event], pauses))
            labour.steps += len(event["ops"])
        elif event["event"] == "step" and "stage" not in event:
            labour.training_s += step_s
            labour.steps += 1
    return labour


def in_order(events: Events) -> list[Event]:
    """All peers' events in the order of time."""
    return sorted((event for one in events.values() for event in one), key=lambda event: float(event["time"]))


def log_text(keys: Sequence[str], events: Events, done: Sequence[tuple[float, Fault]], began: float) -> str:
    """The events for people, with what happened to the nodes between them, in the order of time; `done` and `began` are unix seconds."""
    numbers = {key: number for number, key in enumerate(keys)}
    lines = []
    for event in in_order(events):
        fields = {key: value for key, value in event.items() if key not in HEADING}
        at = event["time"] - began
        lines.append((event["time"], log_line(at, numbers[event["peer"]], event["event"], fields)))
    for at, fault in done:
        lines.append((at, log_line(at - began, None, "fault", {"what": describe(fault).partition(" s  ")[2]})))
    return "".join(line + "\n" for _, line in sorted(lines))


def write_logs(
    keys: Sequence[str], events: Events, done: Sequence[tuple[float, Fault]], began: float, out: Path
) -> None:
    """The events as JSON lines and for people. Raises OSError."""
    (out / EVENTS).write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in in_order(events)))
    (out / "events.log").write_text(log_text(keys, events, done, began), encoding="utf-8")
