"""`farflung bench recovery`: what the loss of a stage costs, by how it comes back, in one run.

A small model is trained in stages on the embedded corpus. Before a step, stages are lost at the published rates:
their parameters, moments and whatever their peers kept for others are overwritten, and a method has what survives.
The same failures, batches and learning rates for all methods of a seed; iterations are trained, wall-clock is
modelled on the published clock (`recovery_clock`). Sizes: `recovery_tiers`; methods: `recovery_methods`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.bench_codec import one_thread
from farflung.sims.recovery_methods import METHODS, by_names
from farflung.sims.recovery_rows import Row, Single, rows, runs_of, singles
from farflung.sims.recovery_runs import Run, Runs
from farflung.sims.recovery_tiers import TIERS, Tier
from farflung.sims.recovery_words import number_or_dash
from farflung.training.presets import num_parameters


def run_recovery(
    tier_name: str,
    *,
    names: str | None = None,  # of methods, separated by commas; None for all, and single losses as well
    seeds: int | None = None,  # in the place of the tier's
    out: Path | None = None,  # where runs are kept
    page: Path | None = None,  # folder for recovery.md and its picture
    as_json: bool = False,
) -> tuple[list[Row], list[Single]]:
    """Train, show, and return one row per method and rate, and one per single loss and rung.

    Raises ValueError for an unknown tier or method, a damaged `out`, or a page of only some methods; DataError and
    OSError.
    """
    if tier_name not in TIERS:
        raise ValueError(f"no tier is called {tier_name!r}; there are {', '.join(TIERS)}")
    tier, methods = TIERS[tier_name], by_names(names)
    if seeds is not None:
        tier = replace(tier, seeds=seeds)
    whole = methods == list(METHODS)
    if page is not None and not whole:
        raise ValueError("a page compares all methods; leave --methods out")
    console = Console(stderr=as_json)
    kernels.prepare(resolve_paths().cache / "kernels")
    runs = Runs(out)
    with one_thread():
        make(runs_of(methods, tier), runs, console)
    found, once = rows(methods, tier, runs.made), singles(tier, runs.made) if whole else []
    if page is not None:
        from farflung.sims.recovery_page import write_page

        write_page(page, tier, found, once)
    if as_json:
        facts = {"tier": tier.name, "parameters": num_parameters(tier.model), "tokens": tier.num_tokens}
        told = {"rows": [asdict(row) for row in found], "single_losses": [asdict(one) for one in once]}
        sys.stdout.write(json.dumps(facts | told, indent=2) + "\n")
    else:
        _show(found, once, tier, console)
    return found, once


def make(planned: Sequence[Run], runs: Runs, console: Console) -> None:
    """Train what is not known yet."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    # refreshed by hand: a thread that draws would take time from the one core that trains
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        task = shown.add_task("starting", total=sum(run.steps for run in planned))
        for run in planned:
            done = shown.tasks[0].completed
            if runs.outcome(run) is None:
                shown.update(task, description=_told(run), refresh=True)

                def progress(step: int, loss: float, done: float = done) -> None:
                    shown.update(task, completed=done + step, refresh=step % 10 == 0)

                started = time.monotonic()
                outcome = run.make(progress)
                runs.keep(run, outcome, time.monotonic() - started)
            shown.update(task, completed=done + run.steps)


def _told(run: Run) -> str:
    what = f"{100 * run.rate:g} %" if run.once is None else f"without stages {list(run.once)}"
    return f"{run.method.name}, {what}, seed {run.seed}"


def _show(found: Sequence[Row], once: Sequence[Single], tier: Tier, console: Console) -> None:
    table = Table(
        title=f"{tier.name}: {num_parameters(tier.model):,} parameters in {tier.stages} stages, {tier.steps} iterations, "
        f"seeds: {tier.seeds}",
        title_justify="left",
    )
    headings = ("method", "failures", "lost", "loss", "gap %", "to target", "hours", "kept %", "recovered %")
    for number, name in enumerate(headings):
        table.add_column(name, justify="right" if number else "left")
    for row in found:
        table.add_row(
            row.method,
            f"{100 * row.rate:g} %" if row.rate else "-",
            f"{row.losses:.1f}",
            number_or_dash(row.final_loss, ".4f"),
            number_or_dash(row.gap_percent, "+.2f"),
            number_or_dash(row.steps_to_target, ".0f"),
            number_or_dash(row.hours_to_target, ".2f"),
            f"{row.kept_percent:.2f}",
            f"{row.recovered_percent:.2f}",
        )
    console.print(table)
    if once:
        table = Table(title=f"Single losses, {tier.event_steps} iterations later", title_justify="left")
        for number, name in enumerate(("lost", "back by", "jump, nats", "left, nats", "iterations behind")):
            table.add_column(name, justify="left" if number < 2 else "right")
        for one in once:
            table.add_row(
                one.event,
                one.rung,
                number_or_dash(one.jump, "+.3f"),
                number_or_dash(one.left, "+.4f"),
                number_or_dash(one.setback, "+.1f"),
            )
        console.print(table)
    for note in NOTES:
        console.print(note, style="dim", markup=False, highlight=False)


NOTES = (
    "gap: of the final held-out loss to training without failures, at equal iterations, seed by seed.",
    "to target, hours: iterations, and modelled wall-clock, to what training without failures has at half of its iterations; - if a run never got there.",
    "kept, recovered: bytes that keep copies fresh, and that new peers get, over activations and gradients in 8 bits, as coded.",
)
