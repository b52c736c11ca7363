"""A timeline as a Chrome trace: load it at ui.perfetto.dev or chrome://tracing. The same format for simulated and real runs.

One process per peer with two threads, what it computes and what it sends; an arrow from each message's sending to the
operation that it is for. Times are in microseconds, as the format wants them.
"""

from typing import Any

from farflung.training.pipeline_simulate import Timeline

_COMPUTE, _SEND = 0, 1


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events; `json.dumps` makes the file."""
    events: list[dict[str, Any]] = []
    for peer, name in enumerate(timeline.peers):
        events.append({"ph": "M", "name": "process_name", "pid": peer, "tid": _COMPUTE, "args": {"name": name}})
        for thread, said in ((_COMPUTE, "computes"), (_SEND, "sends")):
            events.append({"ph": "M", "name": "thread_name", "pid": peer, "tid": thread, "args": {"name": said}})
    for ran in timeline.ran:
        args: dict[str, Any] = {"stage": ran.stage, "microbatch": ran.op.microbatch, "hop": ran.op.hop}
        span: dict[str, Any] = {
            "ph": "X",
            "cat": ran.op.kind,
            "name": str(ran.op),
            "pid": ran.peer,
            "tid": _COMPUTE,
            "args": args,
        }
        events.append(span | {"ts": _us(ran.begin_s), "dur": _us(ran.end_s - ran.begin_s)})
    begins = {ran.op: ran.begin_s for ran in timeline.ran}
    for number, sent in enumerate(timeline.sent):
        args = {"to": timeline.peers[sent.receiver]}
        span = {"ph": "X", "cat": "message", "name": f"for {sent.op}", "pid": sent.sender, "tid": _SEND, "args": args}
        events.append(span | {"ts": _us(sent.begin_s), "dur": _us(sent.end_s - sent.begin_s)})
        arrow = {"cat": "message", "name": "message", "id": number}
        events.append(arrow | {"ph": "s", "pid": sent.sender, "tid": _SEND, "ts": _us(sent.begin_s)})
        if sent.op in begins:  # in a real run the receiver may have died first
            arrival = {"ph": "f", "bp": "e", "pid": sent.receiver, "tid": _COMPUTE, "ts": _us(begins[sent.op])}
            events.append(arrow | arrival)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
