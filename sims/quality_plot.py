"""The picture of `farflung bench quality`: gap to data-parallel training against bytes, all methods on it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.plots import WIDTH_IN
from farflung.sims.quality_rows import Row
from farflung.sims.quality_tiers import Tier
from farflung.sims.svg import GRID, INK

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


def plot_frontier(rows: Sequence[Row], tier: Tier, file: Path) -> None:
    """Write the PNG. Methods that send nothing, or diverged, are not on it. Raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.8), layout="constrained")
        for axes, (field, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
            for inner, label, colour, marker in INNERS:
                points = [
                    (row.bytes_ratio_vs_ddp_bf16, getattr(row, field), row.method)
                    for row in rows
                    if row.inner == inner and row.bytes_ratio_vs_ddp_bf16 and getattr(row, field) is not None
                ]
                axes.plot(
                    *zip(*[point[:2] for point in points], strict=True) if points else ([], []),
                    color=colour, marker=marker, linestyle="none", label=label,
                )  # fmt: skip
                for ratio, gap, name in points:
                    axes.annotate(
                        name,
                        (ratio, gap),
                        xytext=(5, 4),
                        textcoords="offset points",
                        fontsize=8,
                        color=png.COLOURS[INK],
                    )
            axes.axhline(0, color=png.COLOURS[GRID], zorder=0)
            axes.set_xscale("log")
            axes.set_xlabel("times fewer bytes than a bf16 ring all-reduce in every step")
            axes.set_ylabel("gap, %")
            axes.set_title(title)
        figure.axes[0].legend(loc="upper left")
        figure.suptitle(f"tier {tier.name}, {tier.peers} peers", x=0.01, ha="left")
        png.save(figure, file)
