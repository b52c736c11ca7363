"""`docs/drift.md` and its picture, from one run of `farflung bench drift`."""

from pathlib import Path
from statistics import fmean
from typing import Literal

import matplotlib
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.check import machine
from farflung.sims.drift_rows import HEADINGS, Drift, cells
from farflung.sims.pipeline_drift import LAST_STEPS, DriftTask
from farflung.sims.plots import WIDTH_IN
from farflung.sims.svg import INK
from farflung.training.presets import num_parameters

PAGE, PICTURE = "drift.md", "drift.png"
COLOURS = {"columns": png.COLOURS[INK], "home": "#2a6fd0", "mesh": "#c8323a"}
LINES: dict[str, Literal["-", "--"]] = {"whole": "-", "rotating": "--"}


def write_page(folder: Path, task: DriftTask, found: Drift) -> None:
    """Write the page and its picture into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(task, found, folder / PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(task, found)) + "\n", encoding="utf-8")


def plot(task: DriftTask, found: Drift, file: Path) -> None:
    """The gap against H, a line for each kind of routes and rounds. Write the PNG; raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.0), layout="constrained")
        axes = figure.subplots()
        for rounds, line in LINES.items():
            for routes, colour in COLOURS.items():
                gaps = [found.row(routes, h, rounds).gap for h in task.inner_steps]
                axes.plot(task.inner_steps, gaps, line, color=colour, marker="o", label=f"{routes}, {rounds}")
        axes.axhline(0.0, color=png.COLOURS[INK], linewidth=1.0)
        axes.set_xscale("log")
        axes.set_xticks(task.inner_steps, [str(h) for h in task.inner_steps])
        axes.set_xlabel("H: steps between two rounds of the same parameters")
        axes.set_ylabel("held-out loss above averaging in each step, %")
        axes.legend(ncols=2)
        png.save(figure, file)


def _lines(task: DriftTask, found: Drift) -> list[str]:
    """The page."""
    together = fmean(one.heldout for one in found.together)
    return [
        "# Pipelines whose peers train apart: which routes, which rounds",
        "",
        f"Made by `farflung bench drift --seeds {len(found.together)} --page docs`; do not edit. Machine: {machine()}.",
        "",
        f"{num_parameters(task.model):,} parameters in {task.model.num_layers} stages of one layer, {task.columns} peers each, trained in one process with the parts that nodes have "
        f"(`StageReplica`, `Fragment`): {task.steps} steps of {task.microbatches} microbatches of {task.batch} sequences of {task.model.seq_len} bytes, Muon inside at {task.inner.schedule.peak:g}, "
        f"Nesterov {task.outer.lr:g}/{task.outer.momentum:g} outside, rounds exact. All ways of a seed begin with the same parameters and see the same batches.",
        "",
        "* *columns*: a microbatch stays with the peers of its data node's column.",
        f"* *home*: at each hop {task.leave:.0%} of the step's microbatches are dealt out anew among the columns.",
        "* *mesh*: at each hop all are.",
        f"* *whole* rounds move the whole stage every H steps, *rotating* ones a {task.fragments}th of it every H/{task.fragments} steps: as many bytes, and a peak of a {task.fragments}th.",
        "",
        f"![Gap against H]({PICTURE})",
        "",
        f"Peers that average their gradients in each step come to {together:.4f} nats per byte, held out. *gap*: of the outer parameters after the last round to that; "
        f"*in training*: mean loss of the last {LAST_STEPS} steps, of microbatches as they were routed (averaged in each step: {fmean(one.local for one in found.together):.4f}).",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row)) + " |" for row in found.rows),
    ]
