"""The report's pictures of a pipeline, drawn by matplotlib: who computed which microbatch when, how long steps took, and who served each stage."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from farflung.sims.incidents import LASTING, things_done
from farflung.sims.markup import Markup
from farflung.sims.pipeline_log import LoggedStep
from farflung.sims.plots import WIDTH_IN, time_unit
from farflung.sims.plots_incidents import LANE_IN, Frame, draw_lanes, draw_on_rows, handles, lanes_of, make_axes
from farflung.sims.scene import Scene
from farflung.sims.svg import BAD, CARD, GRID, INK, MUTED, SERIES, STYLE, to_svg
from farflung.training.pipeline_plan import Kind

WINDOW_STEPS = 3
"""Steps of the Gantt chart."""

LONGEST_PAUSE = 1.5
"""Between two of them, in steps."""

WINDOW_PEERS = 24
"""Peers that it shows at most."""

MOST_STAGES = 12
"""Stages whose peers are counted over time: those that had the fewest."""

STEPS_ROW = 0.8
"""Height of all that is drawn of a peer in the Gantt chart, of its row."""

FORWARD = 0.5
"""Opacity of forwards; backwards are solid."""

NARROWEST = 0.011
"""Of the window: a bar that is wider has its microbatch's number in it."""


def stage_of(steps: Sequence[LoggedStep]) -> dict[str, int]:
    """The stage that each peer last computed in these steps."""
    return {step.timeline.peers[ran.peer]: ran.stage for step in steps for ran in step.timeline.ran}


def window_steps(scene: Scene) -> list[LoggedStep]:
    """Consecutive steps: around the first in which a peer was lost or a microbatch cut, else around the beginning of the first trouble that was made, else in
    the middle of the run. A step after a long pause is left out, which would leave no room for the others."""
    troubled = [number for number, step in enumerate(scene.steps) if step.trouble]
    if not troubled:
        begun = [thing.start for thing in things_done(scene.run) if thing.what in LASTING]
        troubled = [number for number, step in enumerate(scene.steps) if begun and step.end > begun[0]]
    around = troubled[0] if troubled else len(scene.steps) // 2
    first = max(0, min(around - 1, len(scene.steps) - WINDOW_STEPS))
    shown = scene.steps[first : first + WINDOW_STEPS]
    longest = LONGEST_PAUSE * median(step.seconds for step in shown)
    kept = next((n for n, (one, after) in enumerate(pairwise(shown), 1) if after.start - one.end > longest), len(shown))
    return shown[:kept] if around < first + kept else shown[kept:]


def plot_steps(scene: Scene) -> Markup:
    """A row for each peer, by stages: above what it computed, coloured by microbatch, below what it had on its way to others."""
    steps = window_steps(scene)
    start, end = steps[0].start, max(step.end for step in steps)
    frame = Frame(scene=scene, things=things_done(scene.run), start=start, end=end)
    stages = stage_of(steps)
    peers = sorted(stages, key=lambda peer: (stages[peer], scene.names.get(peer, peer)))[:WINDOW_PEERS]
    row_of = {peer: row for row, peer in enumerate(peers)}
    with matplotlib.rc_context(STYLE):
        lanes = lanes_of(frame, peers_too=False)
        proper_in = 0.46 * len(peers)
        figure = Figure(figsize=(WIDTH_IN, 0.9 + proper_in + LANE_IN * len(lanes)), layout="constrained")
        top, axis = make_axes(figure, lanes, proper_in)
        for peer, row in row_of.items():
            for span in scene.states(peer):
                left, right = max(span.start, start), min(span.end, end)
                if right > left:  # it was there: what is not covered below is idle
                    axis.barh(row - 0.1, right - left, left=left - start, height=0.56, color=GRID, alpha=0.55)
        for step in steps:
            _draw_step(axis, step, row_of, start, end)
        for one, next_ in pairwise(peers):
            if stages[one] != stages[next_]:
                axis.axhline(row_of[next_] - 0.5, color=MUTED, linewidth=0.6)
        draw_on_rows(axis, frame, peers, STEPS_ROW)
        if top is not None:
            draw_lanes(top, axis, frame, lanes)
        if drawn := handles(frame, on_rows=True):
            figure.legend(handles=drawn, loc="outside lower left", ncols=5, handlelength=1.2)
        later = next((step for step in scene.steps if step.start > steps[-1].start), None)
        if later is not None and later.start > end + 1.0:
            said = f"step {later.number} began {later.start - end:.0f} s later"
            axis.annotate(
                said, (1.0, 1.0), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="right", color=MUTED
            )
        axis.set_xlim(0, end - start)
        axis.set_yticks(range(len(peers)), [f"{scene.names.get(p, p[:12])} · stage {stages[p]}" for p in peers])
        axis.set_ylim(len(peers) - 0.4, -0.6)
        axis.tick_params(axis="y", labelcolor=INK, length=0)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"seconds, from {start - scene.run.started:,.0f} s after the start")
        told = f"what {len(peers)} peers computed and sent in steps {steps[0].number} to {steps[-1].number}"
        return Markup(to_svg(figure, f"steps-{scene.slug}", told))


def _draw_step(axis: Axes, step: LoggedStep, row_of: Mapping[str, int], start: float, end: float) -> None:
    zero = step.start - start
    for ran in step.timeline.ran:
        row = row_of.get(step.timeline.peers[ran.peer])
        if row is None:
            continue
        colour = SERIES[ran.op.microbatch % len(SERIES)]
        width = ran.end_s - ran.begin_s
        axis.barh(
            row - 0.1,
            width,
            left=zero + ran.begin_s,
            height=0.56,
            color=INK if ran.op.kind is Kind.LOSS else colour,
            alpha=FORWARD if ran.op.kind is Kind.F else 1.0,
            edgecolor=CARD,
            linewidth=0.4,
        )
        if width > NARROWEST * (end - start) and ran.op.kind is not Kind.LOSS:
            middle = (zero + ran.begin_s + width / 2, row - 0.1)
            said = str(ran.op.microbatch)
            colour = INK if ran.op.kind is Kind.F else CARD
            axis.annotate(said, middle, ha="center", va="center", fontsize=7.5, color=colour, clip_on=True)
    for sent in step.timeline.sent:
        row = row_of.get(step.timeline.peers[sent.sender])
        if row is not None:
            left, width = zero + sent.begin_s, sent.end_s - sent.begin_s
            colour = SERIES[sent.op.microbatch % len(SERIES)]
            axis.barh(row + 0.29, width, left=left, height=0.1, color=colour, alpha=0.7)
    axis.axvline(zero, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    axis.annotate(
        f"step {step.number}",
        (zero, 1.0),
        (3, 1),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=BAD if step.trouble else MUTED,
    )


def plot_step_seconds(scene: Scene, letters: Mapping[str, str]) -> Markup:
    """Seconds of each step against the time of its end; those with trouble under the letters of their reasons."""
    divisor, unit = time_unit(scene.seconds)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.0), layout="constrained")
        axis = figure.subplots()
        calm = [step for step in scene.steps if not step.trouble]
        axis.plot(
            [(step.end - scene.run.started) / divisor for step in calm],
            [step.seconds for step in calm],
            linestyle="",
            marker="o",
            markersize=3.5,
            color=SERIES[0],
            alpha=0.8,
        )
        for step in scene.steps:
            if step.trouble:
                x = (step.end - scene.run.started) / divisor
                axis.plot(x, step.seconds, marker="X", color=BAD, markersize=7, markeredgecolor=CARD)
                said = "".join(letters[reason] for reason in step.trouble)
                axis.annotate(said, (x, step.seconds), (5, 4), textcoords="offset points", color=BAD, weight="bold")
        middle = median(step.seconds for step in scene.steps)
        axis.axhline(middle, color=MUTED, linewidth=0.9, linestyle=(0, (4, 2)))
        axis.annotate(
            f"median {middle:.2f} s",
            (1.0, middle),
            (-4, 4),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
        axis.set_xlim(0, scene.seconds / divisor)
        axis.set_ylim(0, 1.15 * max(step.seconds for step in scene.steps))
        axis.set_ylabel("seconds of a step")
        axis.set_xlabel(f"{unit} since the start")
        told = f"{len(scene.steps)} steps, a median of {middle:.2f} s, {len(scene.steps) - len(calm)} with trouble"
        return Markup(to_svg(figure, f"step-seconds-{scene.slug}", f"Seconds of each step: {told}"))


def stage_counts(scene: Scene) -> dict[int, list[tuple[float, int]]]:
    """By stage: (seconds since the start, how many peers served it from then on). A peer that still joins does not serve."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for peer in scene.peers:
        stages = [(float(e["time"]), int(e["stage"])) for e in scene.of(peer, "node.start") if "stage" in e]
        for span in scene.states(peer):
            since = [stage for at, stage in stages if at <= span.start + 1e-6]
            if since and span.what != "joining":
                own = changes.setdefault(since[-1], [])
                own += [(span.start - scene.run.started, 1), (span.end - scene.run.started, -1)]
    counts: dict[int, list[tuple[float, int]]] = {}
    for stage in range(max(changes, default=-1) + 1):
        here, counts[stage] = 0, [(0.0, 0)]
        for at, change in sorted(changes.get(stage, ())):
            here += change
            if at == counts[stage][-1][0]:
                counts[stage].pop()
            counts[stage].append((at, here))
    return counts


def plot_stages(scene: Scene) -> Markup:
    """How many peers served each stage when, until the last step, after which they leave; nobody is marked."""
    divisor, unit = time_unit(scene.seconds)
    until = max(step.end for step in scene.steps) - scene.run.started
    counts = stage_counts(scene)
    shown = sorted(sorted(counts, key=lambda stage: max(count for _, count in counts[stage]))[:MOST_STAGES])
    most = max((count for stage in shown for _, count in counts[stage]), default=1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.7 + 0.62 * max(1, len(shown))), layout="constrained")
        axes = list(figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0])
        for axis, stage in zip(axes, shown, strict=False):
            known = [(at, count) for at, count in counts[stage] if at < until]
            times = [at / divisor for at, _ in known] + [until / divisor]
            heights = [count for _, count in known] + [known[-1][1]]
            axis.fill_between(times, heights, step="post", color=SERIES[stage % len(SERIES)], alpha=0.75, linewidth=0)
            _mark_nobody(axis, times, heights)
            axis.set_ylim(0, most + 0.3)
            axis.yaxis.set_major_locator(MaxNLocator(2, integer=True))
            axis.set_ylabel(f"stage {stage}", rotation=0, ha="right", va="center", color=INK)
        axes[-1].set_xlim(0, until / divisor)
        axes[-1].set_xlabel(f"{unit} since the start")
        told = "; ".join(f"stage {stage}: at most {max(count for _, count in counts[stage])}" for stage in shown)
        return Markup(to_svg(figure, f"stages-{scene.slug}", f"How many peers served each stage: {told}"))


def _mark_nobody(axis: Axes, times: Sequence[float], heights: Sequence[int]) -> None:
    """After somebody was there for the first time."""
    begun = next((number for number, count in enumerate(heights) if count), len(heights))
    for number in range(begun, len(heights) - 1):
        if not heights[number] and times[number + 1] > times[number]:
            axis.axvspan(times[number], times[number + 1], color=BAD, alpha=0.35, linewidth=0)
