"""The report's pictures, drawn by matplotlib: losses, bytes, membership, rounds. Each returns an `<svg>`
element.
"""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from farflung.sims.scene import Scene, smooth, state_spans, swarm_tokens
from farflung.sims.summary import commits_by_round, outer_losses, total_bytes
from farflung.sims.svg import BAD, CARD, GOOD, INK, MUTED, SERIES, STATES, STYLE, to_svg

WIDTH_IN = 11.0
"""Width of every picture; 72 points per inch, scaled by the page."""

LOSS_SPAN = 1.6
"""Nats above the best held-out loss that the plot of losses shows."""

LOSS_MARGIN = 0.1
"""Nats below it."""

STATE_LABELS = {
    "joining": "joining",
    "training": "training",
    "round": "in a round",
    "waiting": "ready, waiting",
    "finished": "finished",
}


def plot_loss(scene: Scene) -> str:
    """Losses against tokens of the whole run, against seconds, and against the steps of one worker."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 4.1), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        tokens_at = swarm_tokens(scene)
        start = scene.run.started
        for peer in scene.peers:
            steps = [event for event in scene.of(peer, "step") if event["loss"] is not None]
            if not steps:
                continue
            losses = smooth([event["loss"] for event in steps])
            ways = (
                [tokens_at[peer][event["time"]] for event in steps],
                [event["time"] - start for event in steps],
                [event["step"] for event in steps],
            )
            for axis, x in zip(axes, ways, strict=True):
                axis.plot(x, losses, color=scene.colours[peer], linewidth=0.9, alpha=0.75)
        _plot_held_out(scene, axes)
        labels = ("tokens, all workers together", "seconds since the start", "steps of each worker")
        titles = ("against tokens", "against time", "against a worker's own steps")
        for axis, label, title in zip(axes, labels, titles, strict=True):
            axis.set_xlabel(label)
            axis.set_title(title)
            axis.set_xlim(left=0)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes[0].set_ylabel("loss, nats per token")
        best = [event["loss"] for event in outer_losses(scene.events)] + [p.loss for p in scene.run.solo_loss]
        if best:  # the first steps fall from far above; what is compared lies near the end
            axes[0].set_ylim(min(best) - LOSS_MARGIN, min(best) + LOSS_SPAN)
        handles = [Line2D([], [], color=INK, linewidth=2.4, marker="o", markersize=4, label="swarm, outer, held out")]
        if scene.run.solo_loss:
            alone = Line2D([], [], color=INK, linewidth=1.6, linestyle=(0, (4, 2)), label="one worker alone, held out")
            handles.append(alone)
        handles += [
            Line2D([], [], color=scene.colours[peer], label=f"{scene.names[peer]}, training")
            for peer in scene.peers[: len(SERIES)]
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=4)
        return to_svg(figure, "loss")


def _plot_held_out(scene: Scene, axes: Sequence[Axes]) -> None:
    outer, solo = outer_losses(scene.events), scene.run.solo_loss
    outer_ways: tuple[list[float], ...] = (
        [event["tokens"] for event in outer],
        [event["time"] - scene.run.started for event in outer],
        [event["step"] for event in outer],
    )
    solo_ways: tuple[list[float], ...] = (
        [p.tokens for p in solo],
        [p.seconds for p in solo],
        [p.step for p in solo],
    )
    for axis, outer_x, solo_x in zip(axes, outer_ways, solo_ways, strict=True):
        axis.plot(
            outer_x,
            [event["loss"] for event in outer],
            color=INK,
            linewidth=2.4,
            marker="o",
            markersize=4,
            zorder=5,
        )
        axis.plot(solo_x, [p.loss for p in solo], color=INK, linewidth=1.6, linestyle=(0, (4, 2)), zorder=4)


def plot_bytes(scene: Scene) -> str:
    """Bytes that each peer sent beside what data-parallel training would have sent, on a logarithmic axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.36 * (len(scene.peers) + 1)), layout="constrained")
        axis = figure.subplots()
        sent = {peer: total_bytes(scene.events.get(peer, ()), "sent_bytes") for peer in scene.peers}
        baseline = scene.run.ddp_bytes_per_peer
        shown = [value for value in (*sent.values(), baseline) if value > 0]
        low = 10 ** (len(str(min(shown, default=1))) - 2) if shown else 1
        rows = [("data-parallel", baseline, MUTED)]
        rows += [(scene.names[peer], sent[peer], scene.colours[peer]) for peer in scene.peers]
        for row, (_, value, colour) in enumerate(rows):
            axis.barh(row, max(0, value - low), left=low, height=0.62, color=colour)
            ratio = f" \N{MIDDLE DOT} {baseline / value:,.0f} times less" if row and value and baseline else ""
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
        return to_svg(figure, "bytes")


def plot_membership(scene: Scene) -> str:
    """One bar per peer, coloured by what it did when; kills and joins marked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 1.3 + 0.36 * len(scene.peers)), layout="constrained")
        axis = figure.subplots()
        start = scene.run.started
        for row, peer in enumerate(scene.peers):
            for begin, end, state in state_spans(scene, peer):
                axis.barh(row, end - begin, left=begin - start, height=0.62, color=STATES[state])
        row_of = {peer: row for row, peer in enumerate(scene.peers)}
        for incident in scene.run.timeline:
            if incident.peer not in row_of:
                continue
            at, row = incident.time - start, row_of[incident.peer]
            if incident.what == "kill":
                axis.plot(at, row, marker="X", color=BAD, markersize=9, markeredgecolor=CARD, zorder=5)
                axis.annotate("killed", (at, row), (8, 0), textcoords="offset points", va="center", color=BAD)
            elif incident.what == "join":
                axis.plot(at, row, marker=">", color=GOOD, markersize=8, markeredgecolor=CARD, zorder=5)
                axis.annotate("joins", (at, row), (-8, 0), textcoords="offset points", va="center", ha="right")
        axis.set_xlim(0, max(scene.run.ended - start, 1))
        axis.set_yticks(range(len(scene.peers)), [scene.names[peer] for peer in scene.peers])
        axis.tick_params(axis="y", labelcolor=INK, length=0)
        axis.grid(axis="y", visible=False)
        axis.invert_yaxis()
        axis.set_xlabel("seconds since the start")
        handles = [Patch(color=colour, label=STATE_LABELS[state]) for state, colour in STATES.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=5, handlelength=1.2)
        return to_svg(figure, "membership")


def plot_rounds(scene: Scene, letters: Mapping[int, str]) -> str:
    """Seconds of each round (the slowest peer's), with its number of contributors.

    `letters` says for each round that some peer missed the letters under which its reasons stand in the
    table.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
        axis = figure.subplots()
        commits = commits_by_round(scene.events)
        label_all = len(commits) <= 45
        for number, event in commits.items():
            axis.bar(number, event["seconds"], width=0.7, color=BAD if number in letters else STATES["round"])
            if label_all:
                count = str(len(event["contributors"]))
                axis.annotate(count, (number, event["seconds"]), (0, 3), textcoords="offset points", ha="center")
        for number, letter in letters.items():
            height = commits[number]["seconds"] if number in commits else 0.0
            lift = 15 if number in commits and label_all else 3
            axis.annotate(
                letter,
                (number, height),
                (0, lift),
                textcoords="offset points",
                ha="center",
                color=BAD,
                weight="bold",
            )
            if number not in commits:
                axis.plot(number, 0, marker="x", color=BAD, markersize=7, clip_on=False)
        axis.margins(y=0.25)
        shown = [*commits, *letters] or [1]
        axis.set_xlim(min(shown) - 0.8, max(shown) + 0.8)
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(20, integer=True))
        axis.grid(axis="x", visible=False)
        axis.set_ylabel("seconds, plan to commit")
        axis.set_xlabel("round")
        handles = [Patch(color=STATES["round"], label="round; above it, its contributors")]
        if letters:
            handles.append(Patch(color=BAD, label="round that some peer missed; its letter is in the table"))
        figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1.2)
        return to_svg(figure, "rounds")


def human_bytes(value: float) -> str:
    """`1.2 MB`, in powers of 1000, without a decimal that says nothing."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def short_number(value: float) -> str:
    """`1.5M`, `20k`, `300`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
