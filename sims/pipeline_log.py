"""Steps of a pipelined swarm, put together from what its peers wrote of them (`pipeline.step` in docs/events.md).

Each peer's milliseconds count from when it heard that the step began, and its log says when that was by its own clock: between machines with other
clocks the lanes of a step are apart by as much.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from farflung.node.diary import NAME_BYTES
from farflung.node.events import Event
from farflung.sims.spans import compute_spans
from farflung.training.pipeline_plan import Kind, Op
from farflung.training.pipeline_simulate import Ran, Sent, Timeline

_KEY = r"\b[0-9a-f]{12,64}\b"
"""A public key in a reason, which would make the same reason another one for each peer."""

LEAST_S = 0.0005
"""Logs tell of milliseconds: less than this apart is the same moment."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a data node decided on the way."""

    what: str
    """`lost`, `rebound`, `dropped` or `cut`."""
    microbatch: int
    """-1 where it is about all of them."""
    peer: str
    """Who was lost, or takes over; as the step names it."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One step, with the logs of those that lived to its end."""

    number: int
    start: float
    """Unix seconds, when the first peer heard that it began."""
    seconds: float
    """Until the last data node's microbatches were home and settled."""
    timeline: Timeline
    """Seconds from `start`; peers are public keys in hex, or their beginning where no log of theirs is known."""
    takeovers: tuple[Takeover, ...]
    lost: tuple[str, ...]
    """Peers of which a data node says that what they summed up does not count."""
    landed: int
    cut: int

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def trouble(self) -> list[str]:
        """Why it took longer than it had to, a clause each, without names."""
        said = [f"a peer was lost: {one.reason}" for one in self.takeovers if one.what == "lost"]
        said += [f"a microbatch was cut short: {one.reason}" for one in self.takeovers if one.what == "cut"]
        if not said and any(one.what in ("rebound", "dropped") for one in self.takeovers):
            said = ["a peer gave up what it was asked to do"]
        if not said and self.lost:
            said = ["a peer was not there for the end of the step: what it summed up does not count"]
        return list(dict.fromkeys(said))

    @cached_property
    def routes(self) -> dict[int, list[int]]:
        """By microbatch, the peers (places in the timeline) that it went through in the end: who did the backward of a hop, or else its last forward."""
        hops: dict[int, dict[int, tuple[bool, float, int]]] = {}
        for ran in self.timeline.ran:
            if ran.op.kind is not Kind.LOSS:
                best = (ran.op.kind is Kind.B, ran.begin_s, ran.peer)
                mine = hops.setdefault(ran.op.microbatch, {})
                mine[ran.op.hop] = max(mine.get(ran.op.hop, best), best)
        return {number: [mine[hop][2] for hop in sorted(mine)] for number, mine in sorted(hops.items())}


def logged_steps(events_by_peer: Mapping[str, Sequence[Event]]) -> list[LoggedStep]:
    """All steps that any log tells of, in order. A step that was planned anew by another coordinator is another one. Operations are told from their turn at
    the learner's door on, not from when they were asked for.
    """
    names = {peer[: 2 * NAME_BYTES]: peer for peer in events_by_peer}
    found: dict[tuple[int, str], dict[str, Event]] = {}
    for peer, events in events_by_peer.items():
        for event in events:
            if event["event"] == "pipeline.step":
                found.setdefault((event["number"], event["coordinator"]), {})[peer] = event
    ends = {
        peer: [span.end for span in compute_spans(events_by_peer[peer])]
        for peer in {peer for its in found.values() for peer in its}
    }
    steps = [_step(number, its, names, ends) for (number, _), its in found.items()]
    return sorted(steps, key=lambda step: (step.start, step.number))


def _step(
    number: int,
    its: Mapping[str, Event],  # by peer
    names: Mapping[str, str],  # of peers, by how steps name them
    ends: Mapping[str, Sequence[float]],  # by peer, when what it computed ended, ascending
) -> LoggedStep:
    begun = {peer: float(event["time"]) - event["seconds"] for peer, event in its.items()}
    start = min(begun.values())
    place: dict[str, int] = {peer: index for index, peer in enumerate(sorted(its))}

    def place_of(name: str) -> int:
        return place.setdefault(names.get(name, name), len(place))

    ran, sent, takeovers = [], [], []
    for peer, event in its.items():
        zero = begun[peer] - start
        for kind, microbatch, hop, began, ended in event["ops"]:
            op = Op(Kind(kind), microbatch, hop)
            over = zero + ended / 1000.0
            before = bisect_left(ends[peer], start + over - LEAST_S)
            turn = ends[peer][before - 1] - start if before else -math.inf
            ran.append(Ran(op, event["stage"], place[peer], max(zero + began / 1000.0, turn), over))
        for kind, microbatch, hop, receiver, began, ended in event["sent"]:
            op = Op(Kind(kind), microbatch, hop)
            to = place_of(receiver)
            sent.append(Sent(op, place[peer], to, zero + began / 1000.0, zero + ended / 1000.0))
        for what, microbatch, who, why in event["notes"]:
            takeovers.append(Takeover(what, microbatch, names.get(who, who), re.sub(_KEY, "it", why)))
    homes = [event for event in its.values() if event["stage"] == 0] or list(its.values())
    return LoggedStep(
        number=number,
        start=start,
        seconds=max(float(event["time"]) for event in homes) - start,
        timeline=Timeline(
            peers=tuple(place),
            ran=tuple(sorted(ran, key=lambda one: one.begin_s)),
            sent=tuple(sorted(sent, key=lambda one: one.begin_s)),
        ),
        takeovers=tuple(takeovers),
        lost=tuple(dict.fromkeys(peer for event in its.values() for peer in event["lost"])),
        landed=sum(event["landed"] for event in its.values()),
        cut=sum(event["cut"] for event in its.values()),
    )


def pipeline_figures(steps: Sequence[LoggedStep]) -> dict[str, Any] | None:
    """For `summary.summarise`; None of a swarm without a pipeline.

    * `steps`, and `median_step_s`; `microbatches` that came home, and those `cut` short; how often a peer was `lost` for a step, and a microbatch
    `rerouted` around one; the shares of the steps' time that peers of each stage `computed`.
    """
    if not steps:
        return None
    whats = Counter(one.what for step in steps for one in step.takeovers)
    busy: dict[int, list[float]] = {}
    for step in steps:
        computed: dict[tuple[int, int], float] = {}
        for ran in step.timeline.ran:
            key = ran.stage, ran.peer
            computed[key] = computed.get(key, 0.0) + ran.end_s - ran.begin_s
        for (stage, _), seconds in computed.items():
            busy.setdefault(stage, []).append(seconds / step.seconds if step.seconds else 0.0)
    return {
        "steps": len(steps),
        "median_step_s": round(median(step.seconds for step in steps), 3),
        "microbatches": sum(step.landed for step in steps),
        "cut": sum(step.cut for step in steps),
        "lost": sum(len(step.lost) for step in steps),
        "rerouted": whats["rebound"] + whats["dropped"],
        "computed": {stage: round(sum(shares) / len(shares), 4) for stage, shares in sorted(busy.items())},
    }
