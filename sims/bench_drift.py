"""`farflung bench drift`: routes and rounds of a pipeline whose peers train apart, beside peers that average their gradients in each step, in one run.

What is trained, and how: `pipeline_drift`. All ways of a seed have the same initial parameters and the same batches in the same order.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.bench_codec import one_thread
from farflung.sims.drift_page import write_page
from farflung.sims.drift_rows import HEADINGS, Drift, DriftRow, cells
from farflung.sims.outputs import check_outputs
from farflung.sims.pipeline_drift import DriftTask, Trained, Way, train


def run_drift(
    *,
    seeds: int = 1,
    page: Path | None = None,  # folder for drift.md and its picture
    as_json: bool = False,
    task: DriftTask | None = None,
) -> Drift:
    """Train, show, and return the figures. Raises DataError, OSError."""
    check_outputs(folders=[page])
    task = DriftTask() if task is None else task
    console = Console(stderr=as_json)
    kernels.prepare(resolve_paths().cache / "kernels")
    with one_thread():
        found = _measure(task, seeds, console)
    if as_json:
        sys.stdout.write(json.dumps(_figures(found), indent=2) + "\n")
    else:
        console.print(_table(task, found))
    if page is not None:
        write_page(page, task, found)
    return found


def _measure(task: DriftTask, seeds: int, console: Console) -> Drift:
    """All ways with all seeds; says what each run came to."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    ways: list[Way | None] = [None, *task.ways()]
    runs: dict[Way | None, list[Trained]] = {way: [] for way in ways}
    # refreshed by hand: a thread that draws would take time from the one core that trains
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        bar = shown.add_task("starting", total=seeds * len(ways) * task.steps)
        for seed in range(seeds):
            for way in ways:
                done = shown.tasks[0].completed

                def say(
                    step: int, loss: float, told: str = f"{_name_of(way)}, seed {seed}", done: float = done
                ) -> None:
                    if step % 10 == 0:
                        shown.update(bar, completed=done + step, description=f"{told}: loss {loss:.3f}", refresh=True)

                trained = train(task, way, seed, say)
                runs[way].append(trained)
                shown.update(bar, completed=done + task.steps)
                gap = _percent(trained, runs[None][seed])
                console.print(f"{_name_of(way)}, seed {seed}: {trained.heldout:.4f} ({gap:+.2f} %)", highlight=False)
    together = tuple(runs[None])
    return Drift(
        together=together,
        rows=tuple(
            DriftRow(way=way, runs=tuple(own), gaps=tuple(map(_percent, own, together)))
            for way, own in runs.items()
            if way is not None
        ),
    )


def _name_of(way: Way | None) -> str:
    """For people."""
    return "averaged in each step" if way is None else f"{way.routes}, H = {way.inner_steps}, {way.rounds} rounds"


def _figures(found: Drift) -> dict[str, Any]:
    """For JSON."""
    return {
        "together": [asdict(one) for one in found.together],
        "rows": [
            asdict(row.way)
            | {"rounds": row.way.rounds, "gap_percent": row.gap, "runs": [asdict(one) for one in row.runs]}
            for row in found.rows
        ],
    }


def _percent(one: Trained, against: Trained) -> float:
    return 100 * (one.heldout / against.heldout - 1)


def _table(task: DriftTask, found: Drift) -> Table:
    title = f"{task.model.num_layers} stages of {task.columns} peers, {task.steps} steps; averaged in each step: "
    table = Table(title=title + f"{fmean(one.heldout for one in found.together):.4f}", title_justify="left")
    for name in HEADINGS:
        table.add_column(name, justify="left" if name in ("routes", "rounds") else "right")
    for row in found.rows:
        table.add_row(*cells(row))
    return table
