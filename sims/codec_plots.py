"""The pictures of `docs/compression.md`: rate against distortion, and speed beside memcpy; PNG files."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from farflung.sims import png
from farflung.sims.codec_methods import OURS
from farflung.sims.codec_rows import Row
from farflung.sims.codec_sources import DELTA_ADAMW, DELTA_MUON, GAUSS, LAPLACE, STUDENT4
from farflung.sims.plots import WIDTH_IN
from farflung.sims.svg import INK

FAMILIES: tuple[tuple[str, str, str, frozenset[str]], ...] = (
    ("casts", "#6a6963", "s", frozenset({"fp32", "bf16", "fp16"})),
    ("integers, scale per block", "#2a6fd0", "o", frozenset({"int8", "int4"})),
    ("4-bit tables and floats", "#0e8fa8", "v", frozenset({"nf4", "mxfp4", "nvfp4", "e3m0"})),
    ("2 bits and 1 bit", "#c94a86", "^", frozenset({"stat2", "sign"})),
    ("dead zone", "#c8323a", "o", frozenset({"deadzone"})),
    ("trellis", "#1f1e1a", "^", frozenset({"trellis"})),
    ("sparse", "#b98200", "D", frozenset({"topk", "randk"})),
    ("low rank, DCT", "#6551c4", "P", frozenset({"lowrank", "dct"})),
)
"""(label, colour, marker, codecs) of ours."""
OTHERS = ("other projects", "#129a70", "X")

LOW_NMSE, LOW_BITS, HIGH_BITS = 1e-8, 0.05, 20.0
"""What the plots of rate against distortion show."""
LOW_GAP, HIGH_GAP = -1.0, 2.0
"""What the plot of distances to the bound shows, in bits; casts are further away."""
GAPS = "distance"


def plot_rate_distortion(rows: Sequence[Row], file: Path) -> None:
    """NMSE against bits per parameter for each source; for AdamW's pseudo-gradients also the distance to the bound."""
    layout = [[DELTA_ADAMW, DELTA_ADAMW, GAPS, GAPS], [GAUSS, LAPLACE, STUDENT4, DELTA_MUON]]
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 9.0), layout="constrained")
        axes = figure.subplot_mosaic(layout, height_ratios=[5, 3])  # type: ignore[arg-type]
        curves = {name: _curves([row for row in rows if row.source == name]) for name in axes if name != GAPS}
        for source, same in curves.items():
            _plot_rates(axes[source], str(source), same)
        _plot_gaps(axes[GAPS], curves[DELTA_ADAMW])
        handles = [Line2D([], [], color=png.COLOURS[INK], linestyle=(0, (4, 2)), label="bound for Gaussian data")]
        present = {_family(same[0]) for same in curves[DELTA_ADAMW]}
        for family in [family[:3] for family in FAMILIES] + [OTHERS]:
            if family in present:
                label, colour, marker = family
                handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", label=label))
        figure.legend(handles=handles, loc="outside lower left", ncols=5)
        png.save(figure, file)


def _curves(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows that have an error above 0, together when they are settings of one codec, by their bits."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.nmse:
            kinds.setdefault((row.by, row.kind), []).append(row)
    return [sorted(same, key=lambda row: row.bits_per_param) for same in kinds.values()]


def _plot_rates(axis: Axes, source: str, curves: Sequence[Sequence[Row]]) -> None:
    bits = np.geomspace(LOW_BITS, HIGH_BITS, 400)
    axis.plot(bits, 4.0**-bits, color=png.COLOURS[INK], linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    for same in curves:
        _draw(axis, same, [row.nmse or 0.0 for row in same], 6 if source == DELTA_ADAMW else 4)
    axis.set_title(source)
    axis.set_yscale("log")
    axis.set_ylim(LOW_NMSE, 1.5)
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylabel("NMSE, logarithmic" if source in (DELTA_ADAMW, GAUSS) else "")


def _plot_gaps(axis: Axes, curves: Sequence[Sequence[Row]]) -> None:
    axis.axhline(0, color=png.COLOURS[INK], linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    for same in curves:
        gaps = [row.bits_per_param + 0.5 * math.log2(row.nmse or 1.0) for row in same]
        _draw(axis, same, gaps, 6)
        if LOW_GAP < gaps[-1] < HIGH_GAP:
            place = (same[-1].bits_per_param, gaps[-1])
            axis.annotate(same[-1].kind, place, (7, -3), textcoords="offset points", fontsize=8.5)
    axis.set_title(f"{DELTA_ADAMW}: bits above the bound")
    axis.set_ylim(LOW_GAP, HIGH_GAP)


def _draw(axis: Axes, same: Sequence[Row], y: Sequence[float], size: float) -> None:
    _, colour, marker = _family(same[0])
    x = [row.bits_per_param for row in same]
    axis.plot(x, y, color=colour, marker=marker, markersize=size, linewidth=1.2, alpha=0.9)
    axis.set_xscale("log", base=2)
    axis.set_xlim(LOW_BITS, HIGH_BITS)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("bits per parameter, logarithmic")


def plot_speed(rows: Sequence[Row], file: Path) -> None:
    """Encode and decode-add of the Gaussian rows, as bars against memcpy."""
    shown = [row for row in rows if row.source == GAUSS]
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 1.2 + 0.3 * len(shown)), layout="constrained")
        for axis, title, ratios in zip(
            figure.subplots(1, 2, sharey=True),
            ("encode", "decode-add"),
            ([row.encode_ratio for row in shown], [row.decode_add_ratio for row in shown]),
            strict=True,
        ):
            for place, (row, ratio) in enumerate(zip(shown, ratios, strict=True)):
                axis.barh(place, ratio or 0, height=0.66, color=_family(row)[1])
                said = f"{ratio:.2f}" if ratio is not None else "does not decode"
                axis.annotate(said, (ratio or 0, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
            axis.axvline(1.0, color=png.COLOURS[INK], linewidth=1.0, linestyle=(0, (4, 2)))
            axis.set_title(title)
            axis.set_xlim(0, max(1.25, 1.15 * max(ratio or 0 for ratio in ratios)))
            axis.set_xlabel("times the speed of memcpy, one core")
            axis.grid(axis="y", visible=False)
            axis.tick_params(axis="y", length=0, labelcolor=png.COLOURS[INK])
        axis.set_yticks(range(len(shown)), [row.label for row in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        png.save(figure, file)


def _family(row: Row) -> tuple[str, str, str]:
    if row.by != OURS:
        return OTHERS
    name = row.kind.partition("+")[0]
    return next((label, colour, marker) for label, colour, marker, names in FAMILIES if name in names)
