"""A timeline as a Chrome trace: load it at ui.perfetto.dev or chrome://tracing. The same format for simulated and real runs.

One process per peer with two threads, what it computes and what it sends; an arrow from each message's sending to the
operation that it is for. Times are in microseconds, as the format wants them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from farflung.training.pipeline_simulate import Timeline

_COMPUTE, _SEND = 0, 1


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events; `json.dumps` makes the file."""
    return chrome_traces({"": timeline})


def chrome_traces(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Several below each other, whose peers' names begin with what they are called."""
    events: list[dict[str, Any]] = []
    for called, timeline in timelines.items():
        first = len({event["pid"] for event in events})
        for pid, name in enumerate((called + name for name in timeline.peers), first):
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": _COMPUTE, "args": {"name": name}})
            for thread, said in ((_COMPUTE, "computes"), (_SEND, "sends")):
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": said}})
        events += step_events(timeline, pids=range(first, first + len(timeline.peers)), mark=called)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_events(
    timeline: Timeline,
    *,
    pids: Sequence[int],  # of the peers' processes; at least of those that computed or sent
    compute: int = _COMPUTE,  # threads of each
    send: int = _SEND,
    start_s: float = 0.0,  # of the step, in the trace
    mark: str = "",  # begins the ids of its messages, and makes them different from those of other steps
) -> list[dict[str, Any]]:
    """What was computed and sent in one step, without the names of processes and threads."""
    events: list[dict[str, Any]] = []
    for ran in timeline.ran:
        args: dict[str, Any] = {"stage": ran.stage, "microbatch": ran.op.microbatch, "hop": ran.op.hop}
        span: dict[str, Any] = {
            "ph": "X",
            "cat": ran.op.kind,
            "name": str(ran.op),
            "pid": pids[ran.peer],
            "tid": compute,
            "args": args,
        }
        events.append(span | {"ts": _us(start_s + ran.begin_s), "dur": _us(ran.end_s - ran.begin_s)})
    begins = {(ran.op, ran.peer): ran.begin_s for ran in timeline.ran}
    for number, sent in enumerate(timeline.sent):
        args = {"to": timeline.peers[sent.receiver]}
        pid = pids[sent.sender]
        span = {"ph": "X", "cat": "message", "name": f"for {sent.op}", "pid": pid, "tid": send, "args": args}
        events.append(span | {"ts": _us(start_s + sent.begin_s), "dur": _us(sent.end_s - sent.begin_s)})
        arrow = {"cat": "message", "name": "message", "id": f"{mark}{number}" if mark else number}
        events.append(arrow | {"ph": "s", "pid": pid, "tid": send, "ts": _us(start_s + sent.begin_s)})
        begin_s = begins.get((sent.op, sent.receiver))
        if begin_s is not None:  # in a real run the receiver may have died first
            arrival = {"ph": "f", "bp": "e", "pid": pids[sent.receiver], "tid": compute, "ts": _us(start_s + begin_s)}
            events.append(arrow | arrival)
    return events


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
