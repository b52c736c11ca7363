"""`docs/feedback.md` and its picture, from the curves of one run of `farflung bench feedback`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from farflung.sims import png
from farflung.sims.feedback_curves import COLD_RATE, INNER_STEPS, LATE_ROUNDS, RATE, ROUNDS, WARM_STEPS, Curve
from farflung.sims.feedback_words import WORDS, Curves, finals, kinds
from farflung.sims.plots import WIDTH_IN
from farflung.sims.svg import INK

PAGE, PICTURE = "feedback.md", "feedback.png"

CODEC_COLOURS = ("#6a6963", "#2a6fd0", "#c8323a", "#b98200", "#129a70")
"""The exact codec, then the others in their order."""
Line = Literal["-"] | tuple[float, Sequence[float]]
LINES: dict[str, Line] = {"none": (0, (2, 2)), "ef14": "-", "kept": "-"}
"""Of the kinds that every picture has; others are dotted."""
OTHER_LINE: Line = (0, (1, 1))
LOW = 1e-6
"""What the plots of distances show of the way to 0."""


def write_page(folder: Path, curves: Curves) -> None:
    """Write the page and its picture into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_curves(curves, folder / PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(curves)) + "\n", encoding="utf-8")


def plot_curves(curves: Curves, file: Path) -> None:
    """A panel for each problem: distances logarithmic, losses as what they are above the exact codec's."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 7.6), layout="constrained")
        panels = dict(zip(curves, figure.subplots(2, 2).flat, strict=True))
        for name, axis in panels.items():
            if name in ("quadratic", "downlink"):
                _plot_distances(axis, curves[name])
            else:
                _plot_losses(axis, curves[name])
            axis.set_title(WORDS[name][0].partition(":")[0])
            axis.set_xlabel("rounds")
        figure.legend(handles=_handles(curves), loc="outside lower left", ncols=5)
        png.save(figure, file)


def _plot_distances(axis: Axes, curves: Sequence[Curve]) -> None:
    for curve in curves:
        _draw(axis, curve, curve.values)
    axis.set_yscale("log")
    axis.set_ylim(bottom=LOW)
    axis.set_ylabel("distance to the optimum, 1 at the start")


def _plot_losses(axis: Axes, curves: Sequence[Curve]) -> None:
    exact = curves[0]
    for curve in curves[1:]:
        _draw(axis, curve, [value - best for value, best in zip(curve.values, exact.values, strict=True)])
    axis.axhline(0.0, color=png.COLOURS[INK], linewidth=1.0)
    axis.set_ylabel("held-out loss above that of fp32, nats")


def _draw(axis: Axes, curve: Curve, values: Sequence[float]) -> None:
    line = LINES.get(curve.feedback, OTHER_LINE)
    axis.plot(values, color=_colour(curve.codec), linestyle=line, linewidth=1.4)


def _colour(codec: str) -> str:
    """One for all settings of a codec but for the dead zone's two rates."""
    order = ("fp32", "sign", "deadzone(bits=1.0)", "topk", "deadzone(bits=0.36)")
    name = codec if codec in order else codec.partition("(")[0]
    return CODEC_COLOURS[order.index(name)]


def _handles(curves: Curves) -> list[Line2D]:
    shown = {
        codec if codec.startswith("deadzone") else codec.partition("(")[0]: _colour(codec)
        for found in curves.values()
        for codec in finals(found)
    }
    handles = [Line2D([], [], color=colour, label=codec) for codec, colour in shown.items()]
    ink = png.COLOURS[INK]
    handles += [
        Line2D([], [], color=ink, linestyle=LINES["ef14"], label="with feedback"),
        Line2D([], [], color=ink, linestyle=LINES["none"], label="without"),
        Line2D([], [], color=ink, linestyle=OTHER_LINE, label="other kinds: see the tables"),
    ]
    return handles


def _lines(curves: Curves) -> list[str]:
    return [
        "# Error feedback: what a codec leaves out is sent later",
        "",
        "Made by `farflung bench feedback --page docs`; do not edit. CPU, seeded.",
        "",
        "A codec that sends a bit per parameter leaves out more than half of what it is given, and always the same kind of it: top-k small elements, a sign the "
        "differences between magnitudes. With error feedback (EF14) the sender keeps what was left out, and adds it to what it encodes next. In the end everything is "
        "sent; what is owed at any time is one residual per peer.",
        "",
        'In a node: `[feedback]` in the manifest (`uplink`, `downlink`, `decay`, `after_rounds`; with `uplink = "kept"` also `last_codec`, of the last round), or `farflung create --feedback`. The methods `default` and `thrifty` have `uplink = "kept"` from the first round on, whatever the codec, and for means a residual in long runs of `default` and where somebody has chosen a coarse codec for them. With `--method none` `create` turns residuals on by itself, both ways, with codecs '
        "below 3 bits per parameter, from the second quarter of the run on; where it was asked for, by that flag, as a `residual` or by a `decay` below 1, from the first round. It costs 4 bytes of host memory per parameter and direction. A residual moves only when a commit "
        "counts the contribution that it comes from; a round that fails changes nothing. `farflung status` and the log's `round.commit` (`owed`) show how much was left out.",
        "",
        "`uplink = \"kept\"` leaves what the uplink's codec left out in the peer's own parameters, and so in its next pseudo-gradient. It costs no memory, and the "
        "peer does not make the same progress again, which is what spoils feedback at the lowest rates (`docs/experiments.md`, why sparse error feedback fails). It is not part of the curves below.",
        "",
        f"![With and without feedback on four problems]({PICTURE})",
        "",
        "## A quadratic with a known optimum",
        "",
        "Four peers whose optima differ; 512 parameters, 300 rounds, steps that get smaller. Values are (f - f*) / (f(0) - f*). *30 % of rounds fail*: they count nothing, "
        "and the residual stays what it was. EF21 sends changes of an estimate that both ends keep; it does not fit swarms whose members change.",
        "",
        *_table("quadratic", curves["quadratic"]),
        "",
        "## The owner of a part",
        "",
        "The same quadratic with exact contributions and coded means. The four owners of parts change places every fifth round; a residual that is *dropped* with the "
        "ownership loses some of the mean at every move, one that is *kept* by its peer until the next turn does not. A node keeps it.",
        "",
        *_table("downlink", curves["downlink"]),
        "",
        "## A small model",
        "",
        f"Two replicas of the smallest preset on the embedded corpus, H = {INNER_STEPS}, {ROUNDS} rounds, AdamW, norms as fp32; held-out loss of the outer parameters "
        f"in nats per token. From a warm start ({WARM_STEPS} steps of one peer), rate {RATE:g}:",
        "",
        *_table("warm", curves["warm"]),
        "",
        f"From random weights at a high rate, {COLD_RATE:g}; also with feedback that starts after {LATE_ROUNDS} rounds. "
        "Here what arrives a round late is old; compare the columns before setting `after_rounds`:",
        "",
        *_table("cold", curves["cold"]),
    ]


def _table(name: str, curves: Sequence[Curve]) -> list[str]:
    columns, form = kinds(curves), WORDS[name][1]
    lines = ["| codec | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for codec, values in finals(curves).items():
        cells = [format(values[kind], form) if kind in values else "" for kind in columns]
        lines.append(f"| {codec} | " + " | ".join(cells) + " |")
    return lines
