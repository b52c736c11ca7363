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
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farflung.sims.check import Check
from farflung.sims.kept import Kept
from farflung.sims.outputs import check_outputs
from farflung.sims.recovery_jobs import make_all
from farflung.sims.recovery_methods import by_names
from farflung.sims.recovery_rows import Row, Single, gap_percent, rows, runs_of, single_runs_of, singles, undisturbed
from farflung.sims.recovery_runs import Run
from farflung.sims.recovery_tiers import TIERS, Tier
from farflung.sims.recovery_train import Outcome, outcome_of
from farflung.sims.recovery_words import checks, number_or_dash
from farflung.training.presets import num_parameters


def run_recovery(
    tier_name: str,
    *,
    names: str | None = None,  # of methods, separated by commas; None for all
    rates: Sequence[float] = (),  # failures per stage and hour, in the place of the tier's
    seeds: int | None = None,  # in the place of the tier's
    single_seeds: int | None = None,  # of single losses; None: as many, 0: without them
    checkpoint_every: int | None = None,  # iterations, in the place of the tier's
    jobs: int = 1,  # processes
    out: Path | None = None,  # JSON-lines file where runs are kept
    page: Path | None = None,  # folder for recovery.md, or that of another tier, and its picture
    as_json: bool = False,
) -> tuple[list[Row], list[Single], list[Check]]:
    """Train, show, and return one row per method and rate, one per single loss and rung, and the goals.

    Raises ValueError for an unknown tier or method, a period of checkpoints below 1, or a damaged `out`; DataError and OSError.
    """
    if tier_name not in TIERS:
        raise ValueError(f"no tier is called {tier_name!r}; there are {', '.join(TIERS)}")
    tier = TIERS[tier_name]
    tier = replace(tier, seeds=tier.seeds if seeds is None else seeds, rates=tuple(rates) or tier.rates)
    if checkpoint_every is not None:
        tier = replace(tier, checkpoint_every=checkpoint_every)
    single = tier if single_seeds is None else replace(tier, seeds=single_seeds) if single_seeds else None
    methods = by_names(names)
    console = Console(stderr=as_json)
    check_outputs(files=[out], folders=[page])
    runs = Kept(out, outcome_of)
    planned = [*runs_of(methods, tier), *(single_runs_of(methods, single) if single else [])]
    make(list(dict.fromkeys(planned)), runs, console, jobs=jobs)  # undisturbed runs are compared with more than once
    found, once = rows(methods, tier, runs.made), singles(methods, single, runs.made) if single else []
    goals = checks(found, once, tier)
    if as_json:
        facts = {"tier": tier.name, "parameters": num_parameters(tier.model), "tokens": tier.num_tokens}
        told = {"rows": [asdict(row) for row in found], "single_losses": [asdict(one) for one in once]}
        told["goals"] = [asdict(check) for check in goals]
        sys.stdout.write(json.dumps(facts | told, indent=2) + "\n")
    else:
        _show(found, once, tier, console)
        _show_goals(goals, console)
    if page is not None:
        from farflung.sims.recovery_page import write_page

        write_page(page, methods, tier, found, once, single_seeds=single_seeds)
    return found, once, goals


def parse_rates(percents: str | None) -> tuple[float, ...]:
    """From `10,16`; none for None. Raises ValueError."""
    rates = tuple(float(one) / 100 for one in percents.split(",")) if percents is not None else ()
    if any(not 0.0 < rate < 1.0 for rate in rates):
        raise ValueError(f"--rates {percents}: percents above 0 and below 100, separated by commas")
    return rates


def make(planned: Sequence[Run], runs: Kept[Outcome], console: Console, *, jobs: int = 1) -> None:
    """Train what is not known yet, and say what each run came to as soon as it is there."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    missing = [run for run in planned if runs.outcome(run) is None]
    steps, done, began = sum(run.steps for run in missing), 0, time.monotonic()
    if len(missing) < len(planned):
        console.print(f"{len(planned) - len(missing)} of {len(planned)} runs are there already")
    # refreshed by hand: a thread that draws would take time from the core that trains
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        task = shown.add_task(f"{len(missing)} runs", total=steps)

        def progress(step: int, loss: float) -> None:
            shown.update(task, completed=done + step, refresh=step % 10 == 0)

        shown.refresh()
        with closing(make_all(missing, jobs=jobs, progress=progress)) as making:
            for number, (run, outcome, seconds) in enumerate(making, start=1):
                runs.keep(run, outcome, seconds)
                done += run.steps
                left_s = (time.monotonic() - began) / done * (steps - done)
                said = f"{number} of {len(missing)}: {_told(run)}: {_measured(run, outcome, runs)}; {seconds:.0f} s"
                console.print(f"{said}, some {left_s / 60:.0f} min left", highlight=False, soft_wrap=True)
                shown.update(task, completed=done, refresh=True)


def _measured(run: Run, outcome: Outcome, runs: Kept[Outcome]) -> str:
    if outcome.diverged:
        return "diverged"
    loss = f"{outcome.losses} lost, loss {outcome.curve[-1][1]:.4f}"
    none = runs.outcome(undisturbed(run))
    return loss if none is None or run.once is not None else f"{loss}, {gap_percent(outcome.curve, none.curve):+.2f} %"


def _told(run: Run) -> str:
    what = f"{100 * run.rate:g} %" if run.once is None else f"without stages {list(run.once)}"
    return f"{run.method.name}, {what}, seed {run.seed}"


def _show(found: Sequence[Row], once: Sequence[Single], tier: Tier, console: Console) -> None:
    table = Table(
        title=f"{tier.name}: {num_parameters(tier.model):,} parameters in {tier.stages} stages, {tier.steps} iterations, "
        f"seeds: {tier.seeds}",
        title_justify="left",
    )
    headings = ("method", "failures", "lost", "loss", "gap %", "±", "to target", "hours", "kept %", "recovered %")
    for number, name in enumerate(headings):
        table.add_column(name, justify="right" if number else "left")
    for row in found:
        table.add_row(
            row.method,
            f"{100 * row.rate:g} %" if row.rate else "-",
            f"{row.losses:.1f}",
            number_or_dash(row.final_loss, ".4f"),
            number_or_dash(row.gap_percent, "+.2f"),
            number_or_dash(row.spread_percent, ".2f"),
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


def _show_goals(goals: Sequence[Check], console: Console) -> None:
    for check in goals:
        style = "green" if check.met else "red" if check.met is False else "dim"
        console.print(
            f"{check.verdict}: {check.target}: {check.measured}",
            style=style,
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


NOTES = (
    "gap: of the final held-out loss to training without failures, at equal iterations, seed by seed; ±: standard deviation over the seeds.",
    "to target, hours: iterations, and modelled wall-clock, to what training without failures has at half of its iterations; - if a run never got there.",
    "kept, recovered: bytes that keep copies fresh, and that new peers get, over activations and gradients in 8 bits, as coded.",
)
