"""Runs as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing show, a process for each peer.

Three tracks each: what it computed, the phases of its rounds, and its state; of a pipeline also what it sent on, on as many as overlapped. The transfers of a round may
overlap, and are therefore asynchronous events; what went wrong is an instant beside the phases. The operations of a pipeline are told as
`training.pipeline_trace` tells those of a simulated step. Times are microseconds since the start of the run, and all of them whole, rounded as moments
and not as lengths: viewers misplace spans of a track that overlap in part, be it by one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farflung.sims.scene import Scene
from farflung.sims.spans import Span, transfer_spans
from farflung.training.pipeline_trace import Lanes, step_events

COMPUTING, SENDING = 1, 4
TRACKS = {COMPUTING: "computing", 2: "round", 3: "state"}


def write_trace(scenes: Sequence[Scene], file: Path) -> None:
    """Write all runs into one file. Raises OSError."""
    events = [event for number, scene in enumerate(scenes) for event in trace_events(scene, number * 1_000_000)]
    file.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))


def trace_events(scene: Scene, first_pid: int = 0) -> Iterator[dict[str, Any]]:
    """Events in the format of Chrome's trace viewer; processes are numbered from `first_pid` + 1."""
    prefix = f"{scene.label}: " if scene.label else ""
    pid_of = {peer: first_pid + number for number, peer in enumerate(scene.peers, start=1)}
    for peer, pid in pid_of.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": prefix + scene.names[peer]}}
        for tid, name in TRACKS.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        events = scene.events.get(peer, ())
        computed = [span for span in scene.computed(peer) if not (scene.steps and span.what == "train")]
        stopped = [Span(begin, end, "stopped") for begin, end in scene.pauses.get(peer, ())]
        for tid, spans in ((COMPUTING, [*computed, *stopped]), (2, scene.phases(peer)), (3, scene.states(peer))):
            yield from (_complete(scene, span, pid, tid) for span in spans)
        for number, span in enumerate(transfer_spans(events)):
            common = {"name": span.what, "cat": "transfer", "id": f"{pid}.{number}", "pid": pid, "tid": 2}
            yield {**common, "ph": "b", "ts": _us(scene, span.start), "args": {"round": span.round}}
            yield {**common, "ph": "e", "ts": _us(scene, span.end)}
        for event in events:
            if event["event"] in ("round.missed", "round.abort", "state.repair", "invariant.broken"):
                reason = event.get("reason") or event.get("detail", "")
                yield _instant(scene, event["time"], f"{event['event']}: {reason}", pid, "p")
    sending = Lanes(SENDING)
    for number, step in enumerate(scene.steps):
        told = step_events(
            step.timeline,
            pids=[pid_of.get(peer, 0) for peer in step.timeline.peers],
            sending=sending,
            compute=COMPUTING,
            start_s=step.start - scene.run.started,
            mark=f"{first_pid}.{number}.",
        )
        yield from map(_whole, told)
    yield from sending.names("sending")
    for incident in scene.run.timeline:
        if not incident.peer or incident.peer in pid_of:  # of the network: a line through all of them
            yield _instant(scene, incident.time, incident.what, pid_of.get(incident.peer, first_pid + 1), "g")


def _complete(scene: Scene, span: Span, pid: int, tid: int) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "name": span.what, "pid": pid, "tid": tid, "ts": _us(scene, span.start)}
    event["dur"] = _us(scene, span.end) - event["ts"]
    if span.round:
        event["args"] = {"round": span.round}
    return event


def _whole(event: dict[str, Any]) -> dict[str, Any]:
    start = round(event["ts"])
    return event | {"ts": start} | ({"dur": round(event["ts"] + event["dur"]) - start} if "dur" in event else {})


def _instant(scene: Scene, at: float, name: str, pid: int, scope: str) -> dict[str, Any]:
    return {"ph": "i", "name": name, "pid": pid, "tid": 2, "ts": _us(scene, at), "s": scope}


def _us(scene: Scene, at: float) -> int:
    return round(1e6 * (at - scene.run.started))
