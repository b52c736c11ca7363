"""The picture of `farflung bench recovery`: held-out loss against iterations and against modelled hours, a row for each
rate.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.plots import WIDTH_IN
from farflung.sims.recovery_clock import seconds
from farflung.sims.recovery_failures import pattern
from farflung.sims.recovery_methods import METHODS, OURS, Method
from farflung.sims.recovery_rows import Row, by_method
from farflung.sims.recovery_tiers import Tier
from farflung.sims.svg import INK

COLOURS = {
    "none": png.COLOURS[INK],
    "checkpoint": "#8a6d3b",
    "redundant": "#7a7a7a",
    "checkfree": "#2a6fd0",
    "checkfree+": "#58a6e0",
    "copy": "#b98200",
    "random": "#c8a0a8",
    "ours": "#c8323a",
}

ABOVE = 0.9
"""Nats above the best loss that are shown."""


def plot_losses(rows: Sequence[Row], tier: Tier, file: Path) -> None:
    """Write the PNG. Methods that diverged are not on it. Raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 3.0 * len(tier.rates)), layout="constrained")
        grid = figure.subplots(len(tier.rates), 2, squeeze=False)
        for (left, right), rate in zip(grid, tier.rates, strict=True):
            _draw(left, right, by_method(rows, rate), tier, rate)
        for axes, label in zip(grid[-1], ("iterations", "modelled hours"), strict=True):
            axes.set_xlabel(label)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
        png.save(figure, file)


def _draw(left: Axes, right: Axes, rows: dict[str, Row], tier: Tier, rate: float) -> None:
    best = min(loss for row in rows.values() for _, loss in row.curve)
    for method in METHODS:
        row = rows.get(method.name)
        if row is None or not row.curve:
            continue
        steps = [step for step, _ in row.curve]
        losses = [loss for _, loss in row.curve]
        hours = [_hours(method, row, tier, rate, step) for step in steps]
        for axes, x in ((left, steps), (right, hours)):
            axes.plot(
                x,
                losses,
                label=method.name,
                color=COLOURS[method.name],
                linestyle="--" if method.computed else "-",
                linewidth=2.2 if method is OURS else 1.3,
            )
    for axes in (left, right):
        axes.set_ylim(best - 0.05, best + ABOVE)
    left.set_ylabel("held-out loss, nats per byte")
    left.set_title(f"{100 * rate:g} % failures per stage and hour")
    right.set_xlim(right=1.1 * tier.steps * tier.clock.iteration_s / 3600)


def _hours(method: Method, row: Row, tier: Tier, rate: float, step: int) -> float:
    """Mean over the seeds, as each has its own failures."""
    each = [
        seconds(tier, method, step, pattern(tier, rate, seed), (row.kept_percent + row.recovered_percent) / 100)
        for seed in range(tier.seeds)
    ]
    return sum(each) / len(each) / 3600
