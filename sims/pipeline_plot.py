"""The pictures of `farflung bench pipeline`: who computed when, measured and simulated; and loss against time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farflung.sims import png
from farflung.sims.pipeline_measure import PlanFigures
from farflung.sims.pipeline_task import FULL, SKIPPING
from farflung.sims.plots import WIDTH_IN
from farflung.sims.svg import INK
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_simulate import Timeline

COLOURS = {Kind.F: "#58a6e0", Kind.B: "#2a6fd0", Kind.LOSS: "#c8323a"}
SAID = {Kind.F: "forward", Kind.B: "backward", Kind.LOSS: "head and loss"}
CURVES = {FULL: png.COLOURS[INK], SKIPPING: "#c8323a"}


def plot_steps(measured: Timeline, simulated: Timeline, file: Path) -> None:
    """A row for each peer, measured above simulated. Write the PNG; raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 7.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for axes, timeline, said in ((above, measured, "measured"), (below, simulated, "simulated")):
            _draw_peers(axes, timeline)
            axes.set_title(f"{said}: {timeline.makespan_s:.2f} s")
        below.set_xlabel("seconds since the step began")
        handles = [Patch(color=colour, label=SAID[kind]) for kind, colour in COLOURS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        png.save(figure, file)


def _draw_peers(axes: Axes, timeline: Timeline) -> None:
    for ran in timeline.ran:
        axes.barh(ran.peer, ran.end_s - ran.begin_s, left=ran.begin_s, height=0.8, color=COLOURS[ran.op.kind])
    axes.set_yticks(range(len(timeline.peers)))
    axes.set_ylabel("peer")
    axes.invert_yaxis()


def plot_losses(plans: Sequence[PlanFigures], target: float, file: Path) -> None:
    """Of the plans that were trained. Write the PNG; raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN / 2, 3.4), layout="constrained")
        axes = figure.subplots()
        for one in plans:
            if one.curve:
                seconds, losses = zip(*one.curve, strict=True)
                axes.plot(seconds, losses, label=one.plan, color=CURVES[one.plan])
        axes.axhline(target, linestyle="--", linewidth=1.0, color=png.COLOURS[INK])
        axes.set_xlabel("seconds")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_xlim(left=0.0)
        axes.set_ylim(target - 0.1, target + 1.2)
        axes.legend()
        png.save(figure, file)
