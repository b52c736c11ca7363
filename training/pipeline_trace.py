"""A timeline as a Chrome trace: load it at ui.perfetto.dev or chrome://tracing. The same format for simulated and real runs.

One process per peer with two threads, what it computes and what it sends, and as many more as it sends messages at the same time: viewers
misplace spans of a thread that overlap in part. An arrow goes from each message's sending to the operation that it is for. Times are in
microseconds, as the format wants them, lengths the differences of moments.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farflung.training.pipeline_simulate import Timeline

_COMPUTE, _SEND = 0, 1


class Lanes:
    """Threads of processes for spans that may overlap: each goes to the first one that is free by then."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._free_at: dict[int, list[float]] = {}
        """By process, when what each lane has last is over, microseconds."""

    def take(self, pid: int, begin: float, end: float) -> int:
        """The thread of a span from `begin` to `end`, microseconds."""
        free_at = self._free_at.setdefault(pid, [])
        lane = next((number for number, at in enumerate(free_at) if at <= begin), len(free_at))
        free_at[lane : lane + 1] = [end]
        return self._first + lane

    def names(self, called: str) -> Iterator[dict[str, Any]]:
        """Events that name all threads that were taken."""
        for pid, free_at in self._free_at.items():
            for lane in range(len(free_at)):
                name = f"{called} {lane + 1}" if lane else called
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": self._first + lane, "args": {"name": name}}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events; `json.dumps` makes the file."""
    return chrome_traces({"": timeline})


def chrome_traces(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Several below each other, whose peers' names begin with what they are called."""
    events: list[dict[str, Any]] = []
    sending = Lanes(_SEND)
    for called, timeline in timelines.items():
        first = len({event["pid"] for event in events})
        for pid, name in enumerate((called + name for name in timeline.peers), first):
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": _COMPUTE, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": _COMPUTE, "args": {"name": "computes"}})
        pids = range(first, first + len(timeline.peers))
        events += step_events(timeline, pids=pids, sending=sending, mark=called)
    events += sending.names("sends")
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_events(
    timeline: Timeline,
    *,
    pids: Sequence[int],  # of the peers' processes; at least of those that computed or sent
    sending: Lanes,  # shared by all steps of these processes
    compute: int = _COMPUTE,  # the thread of each
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
        events.append(span | _between(start_s + ran.begin_s, start_s + ran.end_s))
    begins = {(ran.op, ran.peer): ran.begin_s for ran in timeline.ran}
    for number, sent in enumerate(timeline.sent):
        args = {"to": timeline.peers[sent.receiver]}
        pid = pids[sent.sender]
        when = _between(start_s + sent.begin_s, start_s + sent.end_s)
        send = sending.take(pid, when["ts"], when["ts"] + when["dur"])
        span = {"ph": "X", "cat": "message", "name": f"for {sent.op}", "pid": pid, "tid": send, "args": args}
        events.append(span | when)
        arrow = {"cat": "message", "name": "message", "id": f"{mark}{number}" if mark else number}
        events.append(arrow | {"ph": "s", "pid": pid, "tid": send, "ts": _us(start_s + sent.begin_s)})
        begin_s = begins.get((sent.op, sent.receiver))
        if begin_s is not None:  # in a real run the receiver may have died first
            arrival = {"ph": "f", "bp": "e", "pid": pids[sent.receiver], "tid": compute, "ts": _us(start_s + begin_s)}
            events.append(arrow | arrival)
    return events


def _between(begin_s: float, end_s: float) -> dict[str, float]:
    begin = _us(begin_s)
    return {"ts": begin, "dur": round(_us(end_s) - begin, 3)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
