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
from farflung.sims.incidents import LASTING, count_things, things_done
from farflung.sims.markup import Markup
from farflung.sims.plots import WIDTH_IN, time_unit
from farflung.sims.plots_incidents import LANE_IN, Frame, draw_lanes, draw_on_rows, handles, lanes_of, make_axes
from farflung.sims.scene import Scene
from farflung.sims.series import BINS, FINEST, MOST_ROWS, state_counts, state_spans_of
from farflung.sims.spans import PHASES, Span, merged_spans
from farflung.sims.summary import commits_by_round
from farflung.sims.svg import GRID, INK, MUTED, STATES, STYLE, WORK, to_svg

STATE_LABELS = {
    "joining": "joining",
    "training": "training",
    "round": "in a round",
    "waiting": "ready, waiting",
    "finished": "finished",
}

ROW, ROW_IN = 0.62, 0.38
"""Height of a peer's bars, of its row, and of the row."""

WINDOW_ROUNDS = 3.2
"""Rounds that the window of the Gantt chart shows."""

GANTT_ROW = 0.76
"""Height of both lanes of a peer in the Gantt chart, of its row."""

WINDOW_PEERS = 10
"""Peers that it shows at most."""


def plot_membership(scene: Scene) -> Markup:
    """What every peer did when, or for many peers how many did what, and what was done to them."""
    divisor, unit = time_unit(scene.seconds)
    frame = Frame(
        scene=scene,
        things=things_done(scene.run),
        start=scene.run.started,
        end=scene.run.started + scene.seconds,
        divisor=divisor,
    )
    with matplotlib.rc_context(STYLE):
        few = len(scene.peers) <= MOST_ROWS
        lanes = lanes_of(frame, peers_too=not few)
        proper_in = ROW_IN * len(scene.peers) if few else 2.3
        figure = Figure(figsize=(WIDTH_IN, 1.3 + proper_in + LANE_IN * len(lanes)), layout="constrained")
        top, axis = make_axes(figure, lanes, proper_in, "network" if few else "done")
        if few:
            _rows(axis, frame)
        else:
            _counts(axis, scene, divisor)
        if top is not None:
            draw_lanes(top, axis, frame, lanes)
        axis.set_xlim(0, frame.width)
        axis.set_xlabel(f"{unit} since the start")
        shown = [Patch(color=colour, label=STATE_LABELS[state]) for state, colour in STATES.items()]
        figure.legend(
            handles=[*shown, *handles(frame, on_rows=few)], loc="outside lower left", ncols=5, handlelength=1.2
        )
        figures = scene.figures
        told = f"{len(scene.peers)} peers, {figures['peers_joined']} of which joined on the way; {figures['peers_killed']} were killed"
        told += f"; {done}" if (done := count_things(scene.run)) else ""
        return Markup(to_svg(figure, f"membership-{scene.slug}", f"Who was there: {told}"))


def _rows(axis: Axes, frame: Frame) -> None:
    scene = frame.scene
    for row, peer in enumerate(scene.peers):
        for span in state_spans_of(scene, peer):
            left = (span.start - frame.start) / frame.divisor
            axis.barh(row, span.seconds / frame.divisor, left=left, height=ROW, color=STATES[span.what])
    draw_on_rows(axis, frame, scene.peers, ROW)
    _name_rows(axis, [scene.names[peer] for peer in scene.peers])


def _counts(axis: Axes, scene: Scene, divisor: float) -> None:
    times = [(number + 0.5) * scene.seconds / BINS / divisor for number in range(BINS)]
    counts = state_counts(scene)
    axis.stackplot(times, *counts.values(), colors=[STATES[state] for state in counts])
    axis.set_ylabel("peers")
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _name_rows(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", labelcolor=INK, length=0)
    axis.grid(axis="y", visible=False)


def window(scene: Scene) -> tuple[float, float]:
    """The unix seconds that the Gantt chart shows: some rounds around the first kill, else around the beginning of the first trouble that was made, else
    around the first missed round, else in the middle of the run.
    """
    commits = [event["time"] for event in commits_by_round(scene.events).values()]
    gaps = [after - before for before, after in itertools.pairwise(commits) if after > before]
    length = min(WINDOW_ROUNDS * median(gaps), scene.seconds) if gaps else scene.seconds
    kills = [incident.time for incident in scene.run.timeline if incident.what in KILLED]
    trouble = [thing.start for thing in things_done(scene.run) if thing.what in LASTING]
    missed = sorted(event["time"] for peer in scene.peers for event in scene.of(peer, "round.missed"))
    middle = [commits[len(commits) // 2]] if commits else [scene.run.started]
    around = (kills or trouble or missed or middle)[0]
    start = min(max(scene.run.started, around - 0.4 * length), scene.run.started + scene.seconds - length)
    return start, start + length


def plot_gantt(scene: Scene) -> Markup:
    """Two lanes for each peer in a window: what it computed, and below in which phase of a round it was; and what was done to them."""
    start, end = window(scene)
    frame = Frame(scene=scene, things=things_done(scene.run), start=start, end=end)
    peers = _present(frame)
    finest = (end - start) * FINEST
    with matplotlib.rc_context(STYLE):
        lanes = lanes_of(frame, peers_too=False)
        proper_in = 0.54 * max(1, len(peers))
        figure = Figure(figsize=(WIDTH_IN, 0.9 + proper_in + LANE_IN * len(lanes)), layout="constrained")
        top, axis = make_axes(figure, lanes, proper_in)
        for row, peer in enumerate(peers):
            _lane(axis, row - 0.2, scene.computed(peer), start, end, finest)
            _lane(axis, row + 0.2, scene.phases(peer), start, end, finest)
        for (number, _), event in commits_by_round(scene.events).items():
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
        draw_on_rows(axis, frame, peers, GANTT_ROW)
        if top is not None:
            draw_lanes(top, axis, frame, lanes)
        if drawn := handles(frame, on_rows=True):
            figure.legend(handles=drawn, loc="outside lower left", ncols=5, handlelength=1.2)
        axis.set_xlim(0, end - start)
        _name_rows(axis, [scene.names[peer] for peer in peers])
        axis.grid(axis="x", color=GRID)
        axis.set_xlabel(f"seconds, from {start - scene.run.started:,.0f} s after the start")
        told = (
            f"what {len(peers)} peers did from second {start - scene.run.started:.0f} to {end - scene.run.started:.0f}"
        )
        return Markup(to_svg(figure, f"gantt-{scene.slug}", told))


def _present(frame: Frame) -> list[str]:
    """Those who did something then: whom something happened to first, in the order of the run."""
    scene, start, end = frame.scene, frame.start, frame.end
    there = [peer for peer in scene.peers if any(span.start < end and span.end > start for span in scene.states(peer))]
    troubled = {peer for thing in frame.seen for peer in thing.peers}
    chosen = sorted(there, key=lambda peer: peer not in troubled)[:WINDOW_PEERS]
    return [peer for peer in there if peer in chosen]


def _lane(axis: Axes, y: float, spans: Iterable[Span], start: float, end: float, finest: float) -> None:
    seen = [span for span in spans if span.end > start and span.start < end]
    for span in merged_spans(seen, finest):
        left, right = max(span.start, start), min(span.end, end)
        thin = 0.22 if span.what in PHASES else 0.34
        axis.barh(y, max(right - left, finest), left=left - start, height=thin, color=WORK[span.what])
