"""The series behind a report's pictures, as `report.json` has them and as the pictures are drawn from: columns of equal length, thinned to what can be seen.

Seconds count from the run's start; peers have the names that people read.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from farflung.node.events import Event
from farflung.sims.incidents import LASTING, things_done, words
from farflung.sims.logs import chain_of
from farflung.sims.scene import Scene, smooth, swarm_tokens
from farflung.sims.spans import STATES, Span, coarse_spans
from farflung.sims.summary import Round, commits_by_round, total_bytes

Columns = dict[str, list[float]]
"""By name, of one curve."""

POINTS = 400
"""Of a curve, at most: more cannot be seen."""

MOST_ROWS = 16
"""Peers that are shown one by one."""

FINEST = 1 / 700
"""Of the time that a picture shows: what is shorter is drawn as one with its neighbours."""

BINS = 240
"""Points in time at which many peers are counted."""


def series_of(scene: Scene) -> dict[str, Any]:
    """All that the page plots: `loss`, `bytes`, `membership` and `rounds`."""
    few = len(scene.peers) <= MOST_ROWS
    return {
        "loss": {
            "outer": outer_curves(scene),
            "few": few_curves(scene),
            "solo": solo_curve(scene),
            "training": {scene.names[peer]: curve for peer, curve in training_curves(scene).items()},
        },
        "bytes": {
            "sent": {scene.names[peer]: sent for peer, sent in bytes_by_peer(scene, "sent_bytes").items()},
            "received": {scene.names[peer]: got for peer, got in bytes_by_peer(scene, "received_bytes").items()},
            "data_parallel": scene.run.ddp_bytes_per_peer,
        },
        "membership": {
            "states": {scene.names[peer]: _told(scene, peer) for peer in scene.peers} if few else state_counts(scene),
            "lasting": [
                [
                    thing.what,
                    *(round(at - scene.run.started, 2) for at in (thing.start, thing.end)),
                    [scene.names.get(peer, peer[:12]) for peer in thing.peers],
                    words(thing),
                ]
                for thing in things_done(scene.run)
                if thing.what in LASTING
            ],
            "incidents": [
                [round(one.time - scene.run.started, 2), one.what, scene.names.get(one.peer, one.peer[:12])]
                for one in scene.run.timeline
                if one.what not in LASTING
            ],
        },
        "rounds": _rounds(scene),
    }


def outer_curves(scene: Scene) -> dict[str, Columns]:
    """Held-out losses of the outer parameters, of each group by its name: groups are not equally far."""
    return _evaluations(scene, scene.outer, "loss")


def few_curves(scene: Scene) -> dict[str, Columns]:
    """The same of a few held-out samples, always the same ones: to be compared among themselves only."""
    return _evaluations(scene, scene.outer_few, "few_loss")


def solo_curve(scene: Scene) -> Columns:
    """Those of the best worker that trained alone; its seconds are its own."""
    points = scene.run.solo_loss
    return {
        "seconds": [point.seconds for point in points],
        "tokens": [point.tokens for point in points],
        "loss": [point.loss for point in points],
    }


def training_curves(scene: Scene) -> dict[str, Columns]:
    """By public key, the training loss, smoothed, of each of the `Scene.seers`."""
    tokens_at = swarm_tokens(scene)
    curves = {}
    for peer in scene.seers:
        steps = [event for event in scene.of(peer, "step") if event["loss"] is not None]
        curves[peer] = _thinned(
            {
                "seconds": [round(event["time"] - scene.run.started, 2) for event in steps],
                "tokens": [tokens_at[peer][event["time"]] for event in steps],
                "loss": [round(loss, 4) for loss in smooth([event["loss"] for event in steps])],
            }
        )
    return curves


def bytes_by_peer(scene: Scene, key: str) -> dict[str, int]:
    """By public key, `sent_bytes` or `received_bytes` of the whole run; of many peers only the busiest."""
    totals = {peer: total_bytes(scene.events.get(peer, ()), key) for peer in scene.peers}
    if len(totals) > MOST_ROWS:
        totals = dict(sorted(totals.items(), key=lambda one: -one[1])[:MOST_ROWS])
    return totals


def state_spans_of(scene: Scene, peer: str) -> list[Span]:
    """What a peer did when, as fine as can be seen."""
    return coarse_spans(scene.states(peer), scene.seconds * FINEST)


def state_counts(scene: Scene) -> dict[str, list[int]]:
    """How many peers did what, at BINS times of the run."""
    start, width = scene.run.started, scene.seconds / BINS
    counts = {state: [0] * BINS for state in STATES}
    for peer in scene.peers:
        for span in scene.states(peer):
            first = max(0, int((span.start - start) / width + 0.5))
            for number in range(first, min(BINS, int((span.end - start) / width + 0.5))):
                counts[span.what][number] += 1
    return counts


def _told(scene: Scene, peer: str) -> list[list[Any]]:
    """[state, from, until] of each span."""
    start = scene.run.started
    return [[s.what, round(s.start - start, 2), round(s.end - start, 2)] for s in state_spans_of(scene, peer)]


def _rounds(scene: Scene) -> dict[str, Any]:
    """Of each round its height, its group, its seconds until all members held all means, how many contributed, and why how many missed it: {reason: times}."""
    missed: dict[Round, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in scene.figures["rounds_missed"]:
        missed[one["round"], one["group"]][one["reason"]] += 1
    commits = commits_by_round(scene.events)
    rounds = sorted({*commits, *missed})
    return {
        "round": [number for number, _ in rounds],
        "group": [group for _, group in rounds],
        "seconds": [commits[one]["seconds"] if one in commits else None for one in rounds],
        "contributors": [len(commits[one]["contributors"]) if one in commits else 0 for one in rounds],
        "missed": [missed[one] if one in missed else {} for one in rounds],
    }


def _evaluations(scene: Scene, events: Sequence[Event], which: str) -> dict[str, Columns]:
    """In the order of time. Where there are several groups, tokens are those of the whole swarm at that time: what a commit says of them is of one history."""
    by_group: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: float(event["time"])):
        by_group[chain_of(event)[2]].append(event)
    curves = {}
    for group, own in sorted(by_group.items()):
        times = [float(event["time"]) for event in own]
        curves[group] = _thinned(
            {
                "seconds": [round(time - scene.run.started, 2) for time in times],
                "tokens": list(scene.tokens_at(times) if len(by_group) > 1 else (event["tokens"] for event in own)),
                "bytes": list(scene.bytes_at(times)),
                "loss": [event[which] for event in own],
            }
        )
    return curves


def _thinned(columns: Columns) -> Columns:
    """About POINTS of each at most, the first and the last among them."""
    return {name: _every(values) for name, values in columns.items()}


def _every(values: Sequence[float]) -> list[float]:
    every = max(1, len(values) // POINTS)
    last = len(values) - 1
    return [value for number, value in enumerate(values) if number % every == 0 or number == last]
