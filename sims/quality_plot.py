"""The picture of `farflung bench quality`: gap to data-parallel training against bytes, all methods on it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.plots import WIDTH_IN
from farflung.sims.quality_rows import Row
from farflung.sims.quality_tiers import Tier
from farflung.sims.svg import GRID, INK, MUTED

INNERS = (
    ("adamw", "AdamW inside", "#2a6fd0", "o"),
    ("muon", "Muon inside", "#c8323a", "D"),
    ("gradient", "none inside", "#b98200", "s"),
)
"""(inner, label, colour, marker)."""

PANELS = (
    ("gap_percent_same_inner", "loss against data-parallel training with the same inner optimiser"),
    ("gap_percent_adamw", "loss against data-parallel AdamW"),
)

Point = tuple[float, float]
"""(times fewer bytes, gap in %)."""


def plot_frontier(rows: Sequence[Row], tier: Tier, file: Path) -> None:
    """Write the PNG. Methods that diverged are not on it; one peer alone, which sends nothing, is a dotted line. Raises
    OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.8), layout="constrained")
        for axes, (field, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
            _draw(axes, rows, field)
            axes.set_title(title)
        figure.axes[0].legend(loc="upper left")
        figure.suptitle(f"tier {tier.name}, {tier.peers} peers", x=0.01, ha="left")
        png.save(figure, file)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those to which no other is as good in both, from few bytes saved to many."""
    best: list[Point] = []
    for ratio, gap in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or gap < best[-1][1]:
            best.append((ratio, gap))
    return best[::-1]


def _draw(axes: Axes, rows: Sequence[Row], field: str) -> None:
    everything: list[Point] = []
    for inner, label, colour, marker in INNERS:
        shown = [row for row in rows if row.inner == inner and getattr(row, field) is not None]
        points = [(row.bytes_ratio_vs_ddp_bf16, getattr(row, field)) for row in shown if row.bytes_ratio_vs_ddp_bf16]
        names = [row.method for row in shown if row.bytes_ratio_vs_ddp_bf16]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle="none", label=label)
        for point, name in zip(points, names, strict=True):
            axes.annotate(name, point, xytext=(5, 4), textcoords="offset points", fontsize=8, color=png.COLOURS[INK])
        for row in shown:
            if not row.bytes_ratio_vs_ddp_bf16:
                axes.axhline(getattr(row, field), color=colour, linestyle=":", linewidth=1.0, label=row.method)
        everything += points
    best = frontier(everything)
    if best:
        axes.plot(*zip(*best, strict=True), color=png.COLOURS[MUTED], linewidth=0.8, zorder=0)
    axes.axhline(0, color=png.COLOURS[GRID], zorder=0)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than a bf16 ring all-reduce in every step")
    axes.set_ylabel("gap, %")
