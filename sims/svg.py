"""Figures as SVG text that takes its colours from the page around it.

Every colour is drawn as a marker value and replaced by a CSS variable, so one picture serves light and dark
mode. Text stays text, in the page's font. No pyplot and no global settings: a figure is made, written and
forgotten.
"""

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID, CARD = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0102{number:02x}" for number in range(1, 9))
STATES = {
    "joining": "#010301",
    "training": "#010302",
    "round": "#010303",
    "waiting": "#010304",
    "finished": "#010305",
}
GOOD, BAD = "#010401", "#010402"
WORK = {
    "train": "#010501",
    "apply": "#010502",
    "evaluate": "#010503",
    "download": "#010504",
    "send": "#010505",
    "collect": "#010506",
    "average": "#010507",
    "vote": "#010508",
}
"""What a peer computes, and the phases of a round: `spans`."""
DONE = {
    "pause": "#010601",
    "partition": "#010602",
    "slow": "#010603",
    "delay": "#010604",
    "drop": "#010605",
    "duplicate": "#010606",
    "apart": "#010607",
}
"""What was done from outside, and lasted: `incidents`."""
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    CARD: "--card",
    GOOD: "--good",
    BAD: "--bad",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES, start=1)},
    **{colour: f"--state-{state}" for state, colour in STATES.items()},
    **{colour: f"--work-{what}" for what, colour in WORK.items()},
    **{colour: f"--done-{what}" for what, colour in DONE.items()},
}
"""Marker colour to the CSS variable it becomes."""

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    # names and regions are people's words, and a dollar in them begins no formula
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.4,
    "lines.solid_capstyle": "round",
}


def to_svg(figure: Figure, name: str, told: str) -> str:
    """The figure as an `<svg>` element for an HTML page: variables for colours, ids that begin with `name`, no
    namespace URLs. `told` says what it shows, for those who do not see it.
    """
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = svg.replace('role="img"', f'role="img" aria-label="{escape(told)}"', 1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
