"""The picture of `farflung bench quality`: gap to data-parallel training against bytes, all methods on it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import BboxBase

from farflung.sims import png
from farflung.sims.plots import WIDTH_IN
from farflung.sims.quality_rows import Row
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_words import goals
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

CEILING = 13.0
"""Gaps above so many % stand at the upper edge, with their number: those below ten are what the picture is for."""

Point = tuple[float, float]
"""(times fewer bytes, gap in %)."""


def plot_frontier(rows: Sequence[Row], tier: Tier, file: Path) -> None:
    """Write the PNG. Methods that diverged are not on it; one peer alone, which sends nothing, is a dotted line. Raises
    OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 5.4), layout="constrained")
        for axes, (field, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
            _draw(axes, rows, field)
            axes.set_title(title)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.suptitle(f"tier {tier.name}, {tier.peers} peers", x=0.01, ha="left")
        spread_names(figure)
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
        sending = {
            row.method: (row.bytes_ratio_vs_ddp_bf16 or 1.0, float(getattr(row, field)))
            for row in shown
            if row.peers > 1
        }
        if sending:
            inside = [(ratio, min(gap, CEILING)) for ratio, gap in sending.values()]
            axes.plot(*zip(*inside, strict=True), color=colour, marker=marker, linestyle="none", label=label)
        for name, (ratio, gap) in sending.items():
            beyond = f" {gap:+.0f} %" if gap > CEILING else ""
            _say(axes, f"{name}{beyond}", (ratio, min(gap, CEILING)))
        for row in shown:
            if row.peers == 1:
                axes.axhline(getattr(row, field), color=colour, linestyle=":", linewidth=1.0, label=row.method)
        everything += sending.values()
    for number, (name, point) in enumerate(goals(rows, field).items()):
        star = axes.plot(*point, color=png.COLOURS[MUTED], marker="*", markersize=11, linestyle="none")[0]
        star.set(markerfacecolor="none", label="" if number else "goals")
        _say(axes, f"goal of {name}", point)
    best = frontier([point for point in everything if point[1] <= CEILING])
    if best:
        axes.plot(*zip(*best, strict=True), color=png.COLOURS[MUTED], linewidth=0.8, zorder=0)
    axes.axhline(0, color=png.COLOURS[GRID], zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(0.7, 3e4)  # room for the names of the last ones
    axes.set_xlabel("times fewer bytes than a bf16 ring all-reduce in every step")
    axes.set_ylabel("gap, %")


def spread_names(figure: Figure) -> None:
    """Move names down until none covers another."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        names = [text for text in axes.texts if isinstance(text, Annotation)]
        placed: list[BboxBase] = []
        for name in sorted(names, key=lambda name: -name.xy[1]):
            while any(name.get_window_extent().overlaps(other) for other in placed):
                name.xyann = (name.xyann[0], name.xyann[1] - 1.0)
            placed.append(name.get_window_extent())


def _say(axes: Axes, text: str, point: Point) -> None:
    """Beside the point; downwards from the upper edge."""
    va = "top" if point[1] == CEILING else "bottom"
    ink = png.COLOURS[INK]
    axes.annotate(text, point, xytext=(6, 4), textcoords="offset points", va=va, fontsize=8, color=ink)
