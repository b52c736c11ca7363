"""`farflung bench quality`: what low-bandwidth training methods lose against data-parallel training, in one run.

All methods train the same model on the same tokens of the same data set with the same global batch, split by the peers;
the mathematics, the codecs and the payloads are real, only the peers share one process. Each method's inner learning rate is
chosen on one half of the held-out windows and its loss reported on the other. Settings: `quality_methods`; sizes:
`quality_tiers`.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims import quality_train
from farflung.sims.bench_codec import one_thread
from farflung.sims.kept import Kept
from farflung.sims.outputs import check_outputs
from farflung.sims.quality_making import make, processes, products_in_tf32
from farflung.sims.quality_methods import Method, by_names
from farflung.sims.quality_rows import Row, references, rows
from farflung.sims.quality_runs import Run, Tuned, conduct, planned, tuning
from farflung.sims.quality_tiers import TIERS, Tier
from farflung.sims.quality_train import Outcome
from farflung.training.presets import num_parameters


def run_quality(
    tier_name: str,
    *,
    names: str | None = None,  # of methods, separated by commas; None for all
    peers: int | None = None,  # M, in the place of the tier's
    interval: int | None = None,  # H, in the place of the methods' own
    seeds: int | None = None,  # of what the goals compare, in the place of the tier's; other methods have half as many
    untuned: bool = False,  # the middle rate of each grid only
    data: str | None = None,  # spec of a data set, in the place of the tier's
    device: str | None = None,  # cpu or cuda, in the place of the tier's
    jobs: int = 1,  # runs at a time, in processes of their own if more than one
    out: Path | None = None,  # where runs are kept
    page: Path | None = None,  # folder for quality_TIER.md and its picture
    as_json: bool = False,
) -> list[Row]:
    """Train, show, and return one row per method and reference.

    Raises ValueError for an unknown tier or method, or a damaged `out`; RuntimeError when the tier needs a GPU and there is
    none; DataError, OSError.
    """
    if tier_name not in TIERS:
        raise ValueError(f"no tier is called {tier_name!r}; there are {', '.join(TIERS)}")
    tier = TIERS[tier_name] if peers is None else replace(TIERS[tier_name], peers=peers)
    tier = replace(tier, seeds=seeds or tier.seeds, data=data or tier.data).on(device or tier.device)
    tier = tier.untuned() if untuned else tier
    if tier.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "torch finds no CUDA device here, and this was to run on one; ci and nightly run on the CPU too"
        )
    if interval is not None and not 1 < interval <= tier.steps - tier.warm_steps:
        raise ValueError(f"an interval of {interval} steps: choose 2 to {tier.steps - tier.warm_steps}")
    asked = by_names(names, tier.steps - tier.warm_steps, interval, tier.peers)
    compared = references(asked)
    methods = compared + [method for method in asked if method not in compared]
    console = Console(stderr=as_json)
    check_outputs(files=[out], folders=[page])
    kept = Kept(out, lambda entry: Outcome(**entry))
    kernels.prepare(resolve_paths().cache / "kernels")
    with one_thread() if tier.device == "cpu" else products_in_tf32():
        table = rows(measure(methods, tier, kept, console, jobs), tier)
    if as_json:
        facts = {
            "tier": tier.name,
            "data": tier.data,
            "peers": tier.peers,
            "parameters": num_parameters(tier.model),
            "tokens": tier.num_tokens,
        }
        sys.stdout.write(json.dumps(facts | {"rows": [asdict(row) for row in table]}, indent=2) + "\n")
    else:
        _show(table, tier, console)
    if page is not None:
        from farflung.sims.quality_page import write_page

        given = {"methods": names, "peers": peers, "interval": interval, "seeds": seeds, "data": data, "device": device}
        options = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)
        options += " --untuned" if untuned else ""
        write_page(
            page,
            tier,
            table,
            {method.name: method for method in methods},
            quality_train.corpus(tier).num_samples,
            options,
        )
    return table


SPEED_OVER_S = 4 * 3600.0
"""The time left is told from the runs of so long."""


def measure(methods: Sequence[Method], tier: Tier, runs: Kept[Outcome], console: Console, jobs: int = 1) -> list[Tuned]:
    """Each method at its best learning rate, with all its seeds; runs that are known are not made again."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    # refreshed by hand: a thread that draws would take time from the one core that trains
    bars = Progress(*columns, console=console, transient=True, auto_refresh=False, speed_estimate_period=SPEED_OVER_S)
    with processes(jobs) as pool, bars as shown:
        left = planned(methods, tier)
        task = shown.add_task("starting", total=left)

        def missing(some: list[Run], known: int) -> None:
            nonlocal left
            left = max(left - known, len(some))  # more when rates are tried beyond a grid
            shown.update(task, total=shown.tasks[0].completed + left)
            make(some, runs, pool, jobs, shown, task)
            left -= len(some)

        return conduct([tuning(method, tier) for method in methods], missing, runs)


WIDE = 130
"""Columns of a terminal that has room for all of the table."""
IN_NARROW = ("method", "lr", "loss", "gap %", "recovered", "fewer bytes")
"""Of the table, where there is less; `--json` and the page have all."""


def _show(found: Sequence[Row], tier: Tier, console: Console) -> None:
    table = Table(
        title=f"{tier.name}: {num_parameters(tier.model):,} parameters, {tier.num_tokens:,} tokens, global batch of "
        f"{tier.batch * tier.model.seq_len:,} tokens split by {tier.peers} peers",
        title_justify="left",
    )
    names = (
        "method",
        "inner",
        "H",
        "lr",
        "loss",
        "gap %",
        "± DP",
        "vs adamw %",
        "recovered",
        "bits",
        "fewer bytes",
        "peak bits",
    )
    wide = console.width >= WIDE
    for number, name in enumerate(names):
        if wide or name in IN_NARROW:
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    for row in found:
        cells = (
            row.method,
            row.inner,
            "-" if row.H is None else str(row.H),
            f"{row.lr:g}",
            *(_number(value, spec) for value, spec in _cells(row)),
        )
        table.add_row(*(cell for name, cell in zip(names, cells, strict=True) if wide or name in IN_NARROW))
    console.print(table)
    for note in NOTES:
        console.print(note, style="dim", markup=False, highlight=False)


NOTES = (
    "gap: against data-parallel training with the same inner optimiser; beside it the spread of that over its seeds.",
    "bits: sent and received by one peer per parameter and step after the synchronous start, as coded, headers included.",
    "fewer bytes: than a bf16 ring all-reduce in every step; its own traffic is computed, not coded.",
)


def _cells(row: Row) -> list[tuple[float | None, str]]:
    return [
        (row.eval_loss, ".4f"),
        (row.gap_percent_same_inner, "+.2f"),
        (row.dp_spread_percent, ".2f"),
        (row.gap_percent_adamw, "+.2f"),
        (row.recovered, ".2f"),
        (row.bits_per_param_per_step, ".4g"),
        (row.bytes_ratio_vs_ddp_bf16, ",.0f"),
        (row.peak_bits_per_step, ".3g"),
    ]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else f"{value:{spec}}"
