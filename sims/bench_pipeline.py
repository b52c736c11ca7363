"""`farflung bench pipeline`: a pipeline of twelve real processes on shaped links, against its simulation, and what skipping is worth.

Processes of the real engine on loopback: stage servers, drivers, TLS. Links are shaped in user space inside the transport (`node.distance`): every peer
has an uplink and is so far from every other (`pipeline_task`). Computing is rehearsed (`stage_peer`): an operation really computes, and then sleeps until it has taken
as long as its peer would take, so that twelve processes do not fight for the processors of this machine. What is measured: `pipeline_measure`.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.bench_codec import one_thread
from farflung.sims.outputs import check_outputs
from farflung.sims.pipeline_figures import (
    DEATH_HEADINGS,
    NOTES,
    USED_HEADINGS,
    Measured,
    codec_cells,
    death_cells,
    plan_cells,
    skipping_cells,
    used_cells,
)
from farflung.sims.pipeline_measure import Feed, PlanFigures, Say, computed, data_node_death, deaths, time_plan, train
from farflung.sims.pipeline_page import checks, write_page
from farflung.sims.pipeline_skipping import SkippingRow, skipping_rows
from farflung.sims.pipeline_task import COLUMNS, FULL, SKIPPING, BenchTask
from farflung.sims.stage_group import stage_group
from farflung.training.pipeline_simulate import simulate
from farflung.training.pipeline_trace import chrome_traces

WITHIN_S = 1500.0
"""For everything that processes do; then something hangs, and they are ended."""


def measure(task: BenchTask, say: Say = lambda text: None) -> Measured:
    """Plan, start processes, and measure. Raises BenchError, BadPlan, DataError."""
    say("planning")
    plans = task.plans()
    feed = Feed(task)
    with tempfile.TemporaryDirectory() as folder:
        say("starting processes")
        with stage_group(task.peers, Path(folder), within_s=WITHIN_S, far=task.far) as group:
            say(COLUMNS)
            columns, _ = time_plan(group, task, feed, COLUMNS, plans[COLUMNS])
            full, _ = train(group, task, feed, FULL, plans[FULL], say)
            skipping, ran = train(group, task, feed, SKIPPING, plans[SKIPPING], say)
            codecs = []
            for codec in codecs_of(task.model.dim):
                say(codec)
                codecs.append(time_plan(group, task, feed, FULL, plans[FULL], codec=codec)[0])
            died = [
                *deaths(group, task, feed, full, plans[FULL], say),
                *deaths(group, task, feed, skipping, plans[SKIPPING], say),
                data_node_death(group, task, feed, full, plans[FULL], say),
            ]
    return Measured(
        plans=(computed(columns, full), full, skipping),
        codecs=(full, *codecs),
        deaths=tuple(died),
        ran=ran,
        simulated=simulate(plans[SKIPPING], task.costs("fp32")),
    )


def codecs_of(width: int) -> list[str]:
    """Activation codecs beside fp32."""
    named = f"width={width}"
    return [f"tokenint8({named})", f"rotint4({named},block={width})", f"subspace({named},rank={width // 4})"]


def run_pipeline(
    *,
    as_json: bool = False,
    out: Path | None = None,  # file for the figures, as JSON
    page: Path | None = None,  # folder for pipeline.md and its pictures
    skip_stages: bool = False,  # only what leaving stages out at inference costs
    trace: Path | None = None,  # file for a step, measured and simulated, as a Chrome trace
    task: BenchTask | None = None,
) -> dict[str, Any]:
    """Measure, show, and return the figures. A page has both parts.

    Raises ValueError for a page of only one; BenchError, BadPlan, DataError, OSError.
    """
    if page is not None and skip_stages:
        raise ValueError("a page has both parts; leave --skip-stages out")
    if trace is not None and skip_stages:
        raise ValueError("--skip-stages runs no processes to trace; leave one of the two out")
    check_outputs(files=[out, trace], folders=[page])
    console = Console(stderr=as_json)
    task = BenchTask() if task is None else task
    kernels.prepare(resolve_paths().cache / "kernels")
    found: Measured | None = None
    rows: list[SkippingRow] = []
    with (
        one_thread(),
        Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as shown,
    ):
        bar = shown.add_task("starting", total=None)

        def say(text: str) -> None:
            shown.update(bar, description=text)

        if not skip_stages:
            found = measure(task, say)
        if skip_stages or page is not None:
            rows = skipping_rows(say)
    figures = _figures(task, found, rows)
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        _show(task, found, rows, console)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
    if trace is not None and found is not None:
        steps = {"measured ": found.ran, "simulated ": found.simulated}
        trace.write_text(json.dumps(chrome_traces(steps)))
    if page is not None and found is not None:
        write_page(page, task, found, rows)
    return figures


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The goals that the figures of `run_pipeline` miss, for people."""
    return [f"{goal['target']}: {goal['measured']}" for goal in figures.get("goals", []) if goal["met"] is False]


def _figures(task: BenchTask, found: Measured | None, rows: Sequence[SkippingRow]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if found is not None:
        told = {
            "links": {
                "up_mbit_s": [round(rate / 125_000, 1) for rate in task.up_bytes_per_s],
                "latency_ms": [[round(1000 * one, 1) for one in row] for row in task.latency_s],
                "forward_ms": [round(1000 * one, 1) for one in task.network.layer_s],
            },
            "rehearsed": NOTES[0],
            "target": task.target,
            "plans": [_row(one) for one in found.plans],
            "codecs": [_row(one) for one in found.codecs],
            "deaths": [asdict(one) for one in found.deaths],
            "goals": [asdict(check) for check in checks(found)],
        }
    return told | ({"skipped_at_inference": [asdict(row) for row in rows]} if rows else {})


def _row(one: PlanFigures) -> dict[str, Any]:
    return asdict(one) | {"ratio": one.ratio}


def _show(task: BenchTask, found: Measured | None, rows: Sequence[SkippingRow], console: Console) -> None:
    if found is not None:
        _show_plans(task, found, console)
        _show_codecs(found, console)
        _show_deaths(found, console)
        for note in NOTES:
            console.print(note, style="dim", markup=False, highlight=False)
    if rows:
        table = _table("Perplexity with stages left out at inference: mean (least to most) over all choices")
        for name in ("trained", "whole", *(f"{share} % left out" for share in rows[0].left_out)):
            table.add_column(name, justify="right" if table.columns else "left")
        for row in rows:
            table.add_row(*skipping_cells(row))
        console.print(table)


def _show_plans(task: BenchTask, found: Measured, console: Console) -> None:
    table = _table(
        f"{task.peers} processes, {task.model.num_layers} stages of two, {task.microbatches} microbatches of {task.tokens} tokens, fp32"
    )
    headings = ("plan", "simulated s", "measured s", "ratio", "learning s", "utilisation", "simulated")
    for name in (*headings, f"steps to {task.target:g}", "seconds"):
        table.add_column(name, justify="right" if table.columns else "left")
    for one in found.plans:
        table.add_row(*plan_cells(one))
    console.print(table)
    table = _table("Utilisation of each peer, measured and simulated")
    for name in USED_HEADINGS:
        table.add_column(name, justify="right")
    for cells in used_cells(found.plans):
        table.add_row(*cells)
    console.print(table)


def _show_codecs(found: Measured, console: Console) -> None:
    table = _table(f"Codecs of the boundaries, {FULL}")
    for name in ("codec", "bytes a token and boundary", "simulated s", "measured s", "ratio"):
        table.add_column(name, justify="right" if table.columns else "left")
    for one in found.codecs:
        table.add_row(*codec_cells(one))
    console.print(table)


def _show_deaths(found: Measured, console: Console) -> None:
    table = _table("A peer is killed")
    for name in DEATH_HEADINGS:
        table.add_column(name, justify="right" if table.columns else "left")
    for one in found.deaths:
        table.add_row(*death_cells(one))
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")
