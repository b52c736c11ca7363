"""`docs/bandwidth.md` and its picture, from the rows of `farflung sim bandwidth`."""

from collections.abc import Sequence
from pathlib import Path

from farflung.sims.bandwidth import SHARE
from farflung.sims.bandwidth_plot import plot_utilisation
from farflung.sims.bandwidth_table import MODELS, RATIO, THRESHOLDS, Row, agreement, differences
from farflung.sims.quality_methods import DELAY_STEPS

PAGE, PICTURE = "bandwidth.md", "bandwidth.png"


def write_page(folder: Path, rows: Sequence[Row]) -> None:
    """Write the page and its picture into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_utilisation(rows, folder / PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(rows)) + "\n", encoding="utf-8")


def figures_of(row: Row) -> list[str]:
    """The cells of a row: Gbit/s for each threshold, the published figure in brackets where there is one."""
    published = row.published_gbit_s or (None,) * len(THRESHOLDS)
    return [
        ("none" if ours is None else f"{ours:.3g}") + ("" if theirs is None else f" ({theirs:g})")
        for ours, theirs in zip(row.gbit_s, published, strict=True)
    ]


def _lines(rows: Sequence[Row]) -> list[str]:
    found = agreement(rows)
    first = [row for row in rows if row.model == MODELS[0].name]
    ours = [row for row in first if row.published_gbit_s is None]
    fp4 = next(row for row in first if row.method == "+ fp4")
    return [
        "# Bandwidth: how fast a link must be",
        "",
        "Made by `farflung sim bandwidth --page docs`; do not edit.",
        "",
        "A peer that waits for its link does not compute. **Compute utilisation** is the share of the time in which it does. How it depends on the link's speed "
        "follows from the timetable of exchanges and their size; the table of Streaming DiLoCo (arXiv 2501.18512, table 4) says it for two peers and models of "
        "1, 10 and 100 billion parameters. Below is that table, computed again, and our settings by the same arithmetic. Nothing here is measured on a network.",
        "",
        "## Utilisation against speed",
        "",
        f"![Compute utilisation against link speed, for each method and model]({PICTURE})",
        "",
        "Further left is better. The thick lines are ours.",
        "",
        "## Speeds that are needed",
        "",
        "Gbit/s, each way at once, for a utilisation of so much; the published figure in brackets. All are points of the paper's grid, "
        f"neighbours a factor of {RATIO:.4f} apart.",
        "",
        "| model | method | H | fragments | delay | bits | " + " | ".join(f"{t:.0%}" for t in THRESHOLDS) + " |",
        "|---|---|---|---|---|---|" + "---|" * len(THRESHOLDS),
        *(
            f"| {row.model} | {_name(row)} | {row.interval} | {row.fragments} | {row.delay} | {row.bits:.3g} | {' | '.join(figures_of(row))} |"
            for row in rows
        ),
        "",
        "Delay is in inner steps, bits are per parameter and exchange. "
        + " and ".join(f"`{row.method}`" for row in ours if row.delay == DELAY_STEPS)
        + " are what `farflung bench quality` tells the loss of. A swarm applies a mean when it is there, and trains on until the next exchange before it waits: so slow may a link be in the other "
        "two rows of ours. Means that are as late as that cost something (0.3 % of the loss with 19 steps in the tier nightly, [log](experiments.md), 2026-11-30). Per parameter and inner step, "
        + " and ".join(
            f"`{row.method}` sends {row.bits / row.interval:.2g} bits" for row in ours if row.delay != DELAY_STEPS
        )
        + f", where `+ fp4` sends {fp4.bits / fp4.interval:.2g}; with fewer fragments and a larger share of steps that end in an exchange, they need faster links "
        "for the last percents.",
        "",
        "## How far this is the published table",
        "",
        f"{found.within_one} of {found.entries} published entries come out within one point of the grid ({found.share:.0%}), {found.exact} of them exactly. The others:",
        "",
        *(f"* {said}" for said in differences(rows)),
        "",
        "## The model behind it",
        "",
        "A step is a forward pass through the layers, a third of its time, and a backward pass. When a fragment is due, each of its layers becomes a message as soon "
        "as its backward pass has ended. The link carries one message after another. A layer's forward pass waits for its message once the delay is over. "
        f"One number is fitted to the table: {SHARE:g} of the parameters are exchanged (with all of them, 74 of the 75 entries are within a point, but few exact).",
        "",
        "As in the paper there is no latency, no overhead of TCP and no other traffic, and all peers are equally fast. An independent measurement of rounds between four nodes "
        "over TCP took 1.08 to 1.92 times as long as such a model says. With more than two peers a butterfly moves up to twice as much per peer, and gathering moves as much "
        "for each further peer.",
    ]


def _name(row: Row) -> str:
    return f"**{row.method}**" if row.published_gbit_s is None else row.method
