"""The report's pictures of what came out, drawn by matplotlib: losses, bytes, rounds. Each is an `<svg>` element.

Pictures of when (membership, where time went) are in `plots_time`.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from farflung.sims.markup import Markup
from farflung.sims.scene import Scene
from farflung.sims.series import POINTS, Columns, bytes_by_peer, few_curves, outer_curves, solo_curve, training_curves
from farflung.sims.summary import Round, commits_by_round
from farflung.sims.svg import BAD, GOOD, INK, MUTED, SERIES, STATES, STYLE, to_svg

WIDTH_IN = 11.0
"""Width of every wide picture; 72 points per inch, scaled by the page."""

PANEL_IN = (4.7, 3.1)
"""Size of a picture that stands beside others."""

LOSS_SPAN = 1.6
"""Nats above the best held-out loss that the plots of losses show."""

LOSS_MARGIN = 0.1
"""Nats below it."""

RINGS: dict[str, Any] = {
    "linestyle": "",
    "marker": "o",
    "markersize": 3.5,
    "markerfacecolor": "none",
    "markeredgewidth": 0.8,
}
"""Losses of a few samples: no line joins them, for they are no curve of the model's loss."""

LABELLED_ROUNDS = 45
"""Up to so many, their contributors are counted in the picture."""


def plot_losses(scenes: Sequence[Scene]) -> dict[str, Markup]:
    """Held-out losses against time, tokens and bytes, by caption; of a run that stands alone its peers' training losses, too."""
    longest = max(scene.seconds for scene in scenes)
    divisor, unit = time_unit(longest)
    panels = {
        "against time": ("seconds", f"{unit} since the start"),
        "against tokens": ("tokens", "tokens, all workers together"),
        "against bytes": ("bytes", "bytes sent, all peers together"),
    }
    slug = scenes[0].slug if len(scenes) == 1 else "runs-compared"
    shown: dict[str, Markup] = {}
    with matplotlib.rc_context(STYLE):
        for number, (caption, (key, label)) in enumerate(panels.items()):
            figure = Figure(figsize=PANEL_IN, layout="constrained")
            axis = figure.subplots()
            scale = divisor if key == "seconds" else 1.0
            training = training_curves(scenes[0]) if len(scenes) == 1 else {}
            if len(scenes) == 1:
                for peer, curve in training.items():
                    _draw(axis, curve, key, scale, color=scenes[0].colours[peer], linewidth=0.9, alpha=0.75)
                for curve in few_curves(scenes[0]).values():
                    _draw(axis, curve, key, scale, color=INK, zorder=4, **RINGS)
            for scene, colour in zip(scenes, run_colours(len(scenes)), strict=True):
                _draw(axis, solo_curve(scene), key, scale, color=colour, linewidth=1.5, linestyle=(0, (4, 2)), zorder=4)
                outer = outer_curves(scene)
                for curve in outer.values():
                    marker = "o" if len(curve["loss"]) <= LABELLED_ROUNDS else ""
                    width = 2.2 if len(outer) == 1 else 1.1
                    _draw(
                        axis, curve, key, scale, color=colour, linewidth=width, marker=marker, markersize=3.5, zorder=5
                    )
            for scene in scenes:
                _mark_recoveries(axis, scene, key, scale)
            axis.set_xlabel(label)
            axis.set_ylabel("loss, nats per token")
            axis.set_xlim(left=0)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            human = human_bytes if caption == "against bytes" else short_number
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _, human=human: human(value)))
            best = [e["loss"] for scene in scenes for e in scene.outer]
            best += [p.loss for scene in scenes for p in scene.run.solo_loss]
            if len(best) > 1:  # the first steps fall from far above; what is compared lies near the end
                lowest = min([*best, *(loss for curve in training.values() for loss in curve["loss"])])
                axis.set_ylim(lowest - LOSS_MARGIN, min(max(best) + LOSS_MARGIN, min(best) + LOSS_SPAN))
            shown[caption] = Markup(to_svg(figure, f"loss-{number}-{slug}", f"Loss {caption}: {_told(scenes)}"))
    return shown


def _told(scenes: Sequence[Scene]) -> str:
    """The held-out losses in words."""
    said = []
    for scene in scenes:
        name = scene.label or scene.run.name
        if scene.outer:
            said.append(f"{name} from {scene.outer[0]['loss']:.3f} to {scene.outer[-1]['loss']:.3f}")
        else:
            said.append(f"{name} was not evaluated")
    return "; ".join(said)


def _mark_recoveries(axis: Axes, scene: Scene, key: str, scale: float) -> None:
    """When a stage of a pipeline lost its last peer, when it computed again, and what is between: there it had nobody."""
    for one in scene.figures["recoveries"]:
        ends_s = scene.seconds if one["serving_s"] is None else one["serving_s"]
        until = _place(scene, ends_s, key) / scale
        if one["lost_s"] is not None:
            lost = _place(scene, one["lost_s"], key) / scale
            axis.axvspan(lost, until, color=BAD, alpha=0.15, linewidth=0)
            axis.axvline(lost, color=BAD, linewidth=1.1, linestyle=(0, (2, 2)), zorder=3)
            axis.annotate(
                f"stage {one['stage']}",
                (lost, 1.0),
                (-3, -3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                color=BAD,
                fontsize=8,
            )
        if one["serving_s"] is not None:
            axis.axvline(until, color=GOOD, linewidth=1.1, zorder=2)


def _place(scene: Scene, seconds: float, key: str) -> float:
    """Of a time since the start, on an axis of seconds, tokens or bytes."""
    if key == "seconds":
        return seconds
    at = [scene.run.started + seconds]
    return scene.tokens_at(at)[0] if key == "tokens" else scene.bytes_at(at)[0]


def _draw(axis: Axes, curve: Columns, key: str, scale: float, **look: Any) -> None:
    """A curve's losses against one of its columns, if it has that."""
    if key in curve:
        axis.plot([value / scale for value in curve[key]], curve["loss"], **look)


def run_colours(number: int) -> list[str]:
    """One for each run; the ink when there is one."""
    return [INK] if number == 1 else [SERIES[n] if n < len(SERIES) else MUTED for n in range(number)]


def plot_bytes(scene: Scene) -> Markup:
    """Bytes that each peer sent, the busiest of them, beside what data-parallel training would have sent, on a
    logarithmic axis.
    """
    sent = bytes_by_peer(scene, "sent_bytes")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.36 * (len(sent) + 1)), layout="constrained")
        axis = figure.subplots()
        baseline = scene.run.ddp_bytes_per_peer
        shown = [value for value in (*sent.values(), baseline) if value > 0]
        low = 10 ** (len(str(min(shown, default=1))) - 2) if shown else 1
        rows = [("data-parallel", baseline, MUTED)] if baseline else []
        rows += [(scene.names[peer], value, scene.colours[peer]) for peer, value in sent.items()]
        for row, (_, value, colour) in enumerate(rows):
            axis.barh(row, max(0, value - low), left=low, height=0.62, color=colour)
            ratio = (
                f" \N{MIDDLE DOT} {baseline / value:,.0f} times less" if colour != MUTED and value and baseline else ""
            )
            said = f"{human_bytes(value)}{ratio}"
            axis.annotate(said, (max(value, low), row), (6, 0), textcoords="offset points", va="center")
        axis.set_xscale("log")
        axis.set_xlim(low, max(shown, default=10) * 12)
        axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axis.tick_params(axis="y", labelcolor=INK, length=0)
        axis.grid(axis="y", visible=False)
        axis.invert_yaxis()
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("bytes sent in the whole run, logarithmic")
        told = "; ".join(f"{name} {human_bytes(value)}" for name, value, _ in rows)
        return Markup(to_svg(figure, f"bytes-{scene.slug}", f"Bytes sent: {told}"))


def plot_rounds(scene: Scene, letters: Mapping[Round, str]) -> Markup:
    """Seconds of each round (the proposer's), with its number of contributors.

    `letters` says for each round of each group that some peer missed the letters under which its reasons stand in the
    table.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
        axis = figure.subplots()
        commits = commits_by_round(scene.events)
        label_all = len(commits) <= LABELLED_ROUNDS
        groups = sorted({group for _, group in [*commits, *letters]})
        width = 0.7 / max(1, len(groups))  # groups stand side by side
        at = {one: one[0] - 0.35 + width * (groups.index(one[1]) + 0.5) for one in [*commits, *letters]}
        if len(commits) > POINTS:
            _draw_many(axis, [(at[one], event["seconds"], one in letters) for one, event in commits.items()])
        for one, event in commits.items() if len(commits) <= POINTS else ():
            axis.bar(at[one], event["seconds"], width=width, color=BAD if one in letters else STATES["round"])
            if label_all:
                count = str(len(event["contributors"]))
                axis.annotate(count, (at[one], event["seconds"]), (0, 3), textcoords="offset points", ha="center")
        for one, letter in letters.items() if len(letters) <= POINTS else ():
            height = commits[one]["seconds"] if one in commits else 0.0
            lift = 15 if one in commits and label_all else 3
            axis.annotate(
                letter,
                (at[one], height),
                (0, lift),
                textcoords="offset points",
                ha="center",
                color=BAD,
                weight="bold",
            )
            if one not in commits:
                axis.plot(at[one], 0, marker="x", color=BAD, markersize=7, clip_on=False)
        axis.margins(y=0.25)
        shown = [number for number, _ in [*commits, *letters]] or [1]
        axis.set_xlim(min(shown) - 0.8, max(shown) + 0.8)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(20, integer=True))
        axis.grid(axis="x", visible=False)
        axis.set_ylabel("seconds until all held all means")
        axis.set_xlabel("round")
        above = "; above it, its contributors" if label_all else ""
        handles = [Patch(color=STATES["round"], label=f"round{above}")]
        if letters:
            where = "; its letter is in the table" if len(letters) <= POINTS else ""
            handles.append(Patch(color=BAD, label=f"round that some peer missed{where}"))
        figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.2)
        seconds = [event["seconds"] for event in commits.values()]
        told = f"{len(seconds)} rounds, a median of {median(seconds):.1f} s" if seconds else "no rounds"
        return Markup(to_svg(figure, f"rounds-{scene.slug}", f"Seconds of each round: {told}"))


def _draw_many(axis: Axes, rounds: Sequence[tuple[float, float, bool]]) -> None:
    """(where, seconds, whether some peer missed it) of more rounds than there is room for: the longest of neighbours stands for all of them, and all
    bars are one path, but for those with a missed round, which are another."""
    each = -(-len(rounds) // POINTS)
    pieces = [rounds[first : first + each] for first in range(0, len(rounds), each)]
    for missed, colour in ((False, STATES["round"]), (True, BAD)):
        places: list[float] = []
        seconds: list[float] = []
        for piece in pieces:
            if any(one[2] for one in piece) == missed:
                places += [piece[0][0], piece[0][0], math.nan]
                seconds += [0.0, max(one[1] for one in piece), math.nan]
        axis.plot(places, seconds, color=colour, linewidth=1.4, solid_capstyle="butt")


def human_bytes(value: float) -> str:
    """`1.2 MB`, in powers of 1000, without a decimal that says nothing."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def time_unit(longest_s: float) -> tuple[float, str]:
    """(seconds of it, name) of the unit in which so many seconds are to be told."""
    for size, name in ((3 * 3600.0, "hours"), (600.0, "minutes")):
        if longest_s >= size:
            return (3600.0, name) if name == "hours" else (60.0, name)
    return 1.0, "seconds"


def short_number(value: float) -> str:
    """`1.5M`, `20k`, `300`: three digits."""
    value = float(f"{value:.3g}")
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
