"""Figures as PNG files for the pages in `docs/`, in the look of the reports (`svg`) and with their light colours."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from farflung.sims.svg import CARD, GRID, INK, MUTED, STYLE

COLOURS = {INK: "#1c1c1a", MUTED: "#6a6963", GRID: "#e4e3de", CARD: "#ffffff"}
"""A file has no page around it to take colours from: those of the reports' light mode."""

DOTS_PER_INCH = 110


def style() -> dict[Any, Any]:
    """What figures are to be drawn with, as an `rc_context`."""
    inked = {key: COLOURS.get(value, value) for key, value in STYLE.items()}
    # all words are ours, and powers of ten stand at logarithmic axes
    return inked | {"figure.facecolor": COLOURS[CARD], "text.parse_math": True}


def save(figure: Figure, file: Path) -> None:
    """Write a figure that was drawn in `style`. Raises OSError."""
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
