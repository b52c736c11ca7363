"""The picture of `farflung sim bandwidth`: compute utilisation against link speed, a panel for each model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from farflung.sims import png
from farflung.sims.bandwidth_table import MODELS, Row, grid
from farflung.sims.plots import WIDTH_IN
from farflung.sims.quality_methods import DELAY_STEPS

Dashes = Literal["-"] | tuple[float, Sequence[float]]
LINES: dict[str, tuple[str, float, Dashes]] = {
    "data-parallel": ("#6a6963", 1.3, "-"),
    "diloco": ("#b98200", 1.3, "-"),
    "streaming": ("#129a70", 1.3, (0, (4, 2))),
    "+ overlap": ("#129a70", 1.3, "-"),
    "+ fp4": ("#6551c4", 1.3, "-"),
    f"default, {DELAY_STEPS} late": ("#2a6fd0", 2.4, (0, (3, 1.5))),
    "default": ("#2a6fd0", 2.4, "-"),
    f"thrifty, {DELAY_STEPS} late": ("#c8323a", 2.4, (0, (3, 1.5))),
    "thrifty": ("#c8323a", 2.4, "-"),
}
"""Method → colour, width, dashes; ours are thick."""

SPEED_TICKS = {0.001: "1 Mbit/s", 0.01: "10", 0.1: "100", 1.0: "1 Gbit/s", 10.0: "10", 100.0: "100", 1000.0: "1 Tbit/s"}


def plot_utilisation(rows: Sequence[Row], file: Path) -> None:
    """Write the PNG. Raises OSError."""
    speeds = grid()
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.4), layout="constrained")
        for axis, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
            for row in rows:
                if row.model == model.name:
                    colour, width, dashes = LINES[row.method]
                    label = f"{row.method}: H {row.interval}, {row.bits:.3g} bits"
                    axis.plot(speeds, row.utilisation, color=colour, linewidth=width, linestyle=dashes, label=label)
            axis.set_xscale("log")
            axis.set_xlim(speeds[0], speeds[-1])
            axis.set_ylim(0, 1.02)
            axis.set_xticks(list(SPEED_TICKS))
            axis.minorticks_off()
            axis.xaxis.set_major_formatter(FuncFormatter(lambda speed, _: SPEED_TICKS.get(round(speed, 6), "")))
            axis.tick_params(axis="x", labelsize=8, labelrotation=35)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.set_title(f"{model.name} parameters, a step of {model.step_s:g} s")
        figure.axes[0].set_ylabel("share of the time in which a peer computes")
        figure.axes[len(MODELS) // 2].set_xlabel("speed of each peer's link, one way")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
        png.save(figure, file)
