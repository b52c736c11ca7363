"""The report's pictures of when, drawn by matplotlib: who was there, and what peers did second by second."""

import itertools
from collections.abc import Iterable, Sequence
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from farflung.sims.facts import KILLED
from farflung.sims.markup import Markup
from farflung.sims.plots import WIDTH_IN, time_unit
from farflung.sims.scene import Scene
from farflung.sims.series import BINS, FINEST, MOST_ROWS, state_counts, state_spans_of
from farflung.sims.spans import PHASES, Span, merged_spans
from farflung.sims.summary import commits_by_round
from farflung.sims.svg import BAD, CARD, GOOD, GRID, INK, MUTED, STATES, STYLE, WORK, to_svg

STATE_LABELS = {
    "joining": "joining",
    "training": "training",
    "round": "in a round",
    "waiting": "ready, waiting",
    "finished": "finished",
}

WINDOW_ROUNDS = 3.2
"""Rounds that the window of the Gantt chart shows."""

WINDOW_PEERS = 10
"""Peers that it shows at most."""


def plot_membership(scene: Scene) -> Markup:
    """What every peer did when, or for many peers how many did what; kills and joins marked."""
    divisor, unit = time_unit(scene.seconds)
    with matplotlib.rc_context(STYLE):
        few = len(scene.peers) <= MOST_ROWS
        figure = Figure(figsize=(WIDTH_IN, 1.3 + 0.36 * len(scene.peers) if few else 3.6), layout="constrained")
        axis = figure.subplots()
        if few:
            _rows(axis, scene, divisor)
        else:
            _counts(axis, scene, divisor)
        axis.set_xlim(0, scene.seconds / divisor)
        axis.set_xlabel(f"{unit} since the start")
        handles = [Patch(color=colour, label=STATE_LABELS[state]) for state, colour in STATES.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=5, handlelength=1.2)
        figures = scene.figures
        told = f"{len(scene.peers)} peers, {figures['peers_joined']} of which joined on the way; {figures['peers_killed']} were killed"
        return Markup(to_svg(figure, f"membership-{scene.slug}", f"Who was there: {told}"))


def _rows(axis: Axes, scene: Scene, divisor: float) -> None:
    start = scene.run.started
    for row, peer in enumerate(scene.peers):
        for span in state_spans_of(scene, peer):
            left = (span.start - start) / divisor
            axis.barh(row, span.seconds / divisor, left=left, height=0.62, color=STATES[span.what])
    _incidents(axis, scene, scene.peers, divisor, start)
    _name_rows(axis, [scene.names[peer] for peer in scene.peers])


def _counts(axis: Axes, scene: Scene, divisor: float) -> None:
    times = [(number + 0.5) * scene.seconds / BINS / divisor for number in range(BINS)]
    counts = state_counts(scene)
    axis.stackplot(times, *counts.values(), colors=[STATES[state] for state in counts])
    axis.set_ylabel("peers")
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _incidents(axis: Axes, scene: Scene, peers: Sequence[str], divisor: float, zero: float) -> None:
    row_of = {peer: row for row, peer in enumerate(peers)}
    for incident in scene.run.timeline:
        if incident.peer not in row_of:
            continue
        at, row = (incident.time - zero) / divisor, row_of[incident.peer]
        if incident.what in KILLED:
            axis.plot(at, row, marker="X", color=BAD, markersize=9, markeredgecolor=CARD, zorder=5)
            axis.annotate("killed", (at, row), (8, 0), textcoords="offset points", va="center", color=BAD)
        elif incident.what == "join":
            axis.plot(at, row, marker=">", color=GOOD, markersize=8, markeredgecolor=CARD, zorder=5)
            axis.annotate("joins", (at, row), (-8, 0), textcoords="offset points", va="center", ha="right")


def _name_rows(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", labelcolor=INK, length=0)
    axis.grid(axis="y", visible=False)


def window(scene: Scene) -> tuple[float, float]:
    """The unix seconds that the Gantt chart shows: some rounds around the first kill, else around the first missed round, else
    in the middle of the run.
    """
    commits = [event["time"] for event in commits_by_round(scene.events).values()]
    gaps = [after - before for before, after in itertools.pairwise(commits) if after > before]
    length = min(WINDOW_ROUNDS * median(gaps), scene.seconds) if gaps else scene.seconds
    kills = [incident.time for incident in scene.run.timeline if incident.what in KILLED]
    missed = sorted(event["time"] for peer in scene.peers for event in scene.of(peer, "round.missed"))
    middle = [commits[len(commits) // 2]] if commits else [scene.run.started]
    around = (kills or missed or middle)[0]
    start = min(max(scene.run.started, around - 0.4 * length), scene.run.started + scene.seconds - length)
    return start, start + length


def plot_gantt(scene: Scene) -> Markup:
    """Two lanes for each peer in a window: what it computed, and below in which phase of a round it was."""
    start, end = window(scene)
    peers = _present(scene, start, end)
    finest = (end - start) * FINEST
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.52 * max(1, len(peers))), layout="constrained")
        axis = figure.subplots()
        for row, peer in enumerate(peers):
            _lane(axis, row - 0.2, scene.computed(peer), start, end, finest)
            _lane(axis, row + 0.2, scene.phases(peer), start, end, finest)
        for number, event in commits_by_round(scene.events).items():
            if start <= event["time"] <= end:
                axis.axvline(event["time"] - start, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
                at = (event["time"] - start, 1.0)
                axis.annotate(
                    f"round {number}",
                    at,
                    (3, 1),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    color=MUTED,
                )
        _incidents(axis, scene, peers, 1.0, start)
        axis.set_xlim(0, end - start)
        _name_rows(axis, [scene.names[peer] for peer in peers])
        axis.grid(axis="x", color=GRID)
        axis.set_xlabel(f"seconds, from {start - scene.run.started:,.0f} s after the start")
        told = (
            f"what {len(peers)} peers did from second {start - scene.run.started:.0f} to {end - scene.run.started:.0f}"
        )
        return Markup(to_svg(figure, f"gantt-{scene.slug}", told))


def _present(scene: Scene, start: float, end: float) -> list[str]:
    """Those who did something then: whom something happened to first, in the order of the run."""
    there = [peer for peer in scene.peers if any(span.start < end and span.end > start for span in scene.states(peer))]
    troubled = {incident.peer for incident in scene.run.timeline if start <= incident.time <= end}
    chosen = sorted(there, key=lambda peer: peer not in troubled)[:WINDOW_PEERS]
    return [peer for peer in there if peer in chosen]


def _lane(axis: Axes, y: float, spans: Iterable[Span], start: float, end: float, finest: float) -> None:
    seen = [span for span in spans if span.end > start and span.start < end]
    for span in merged_spans(seen, finest):
        left, right = max(span.start, start), min(span.end, end)
        thin = 0.22 if span.what in PHASES else 0.34
        axis.barh(y, max(right - left, finest), left=left - start, height=thin, color=WORK[span.what])
