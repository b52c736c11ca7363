"""`farflung bench codec`: bits, error and speed of every codec, beside other projects' codecs, in one run.

Every codec encodes three distributions and the pseudo-gradients of a model that the bench trains first. One core:
torch has one thread, and times are CPU times of the process, so that a busy machine disturbs little. The same rows make
the table, the JSON and the page `docs/compression.md`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.codec_baselines import baselines
from farflung.sims.codec_methods import EAGER, MEANS, SPECS, eager, ours
from farflung.sims.codec_rows import BUDGET_S, Row, butterfly, measure, number
from farflung.sims.codec_sources import DELTA_ADAMW, GAUSS, Source, delta, gauss, laplace, student4
from farflung.sims.codec_targets import RATES, checks, nearest_to_bound
from farflung.sims.outputs import check_outputs
from farflung.sims.pseudo_gradients import ADAMW, MUON, Recipe

SIZE_MB = 64.0
"""fp32 megabytes (1e6 bytes) of the Gaussian vector, at which speed is judged: twice a large L3 cache."""
SMALLER = 4
"""The other distributions' vectors are this much shorter: they are there for the quality."""
WHOLE = 1 << 14
"""Vectors are multiples of this many elements, so that every block of every codec is whole."""
RECIPES = (ADAMW, MUON)
"""Of the pseudo-gradients."""
MEAN_NUMEL = 1 << 20
"""Elements of each peer's vector in a butterfly, at most."""


def run_codec(
    *,
    as_json: bool = False,
    size_mb: float = SIZE_MB,
    page: Path | None = None,
    recipes: Sequence[Recipe] = RECIPES,
    budget_s: float = BUDGET_S,
) -> list[dict[str, Any]]:
    """Measure, show, write the page into the folder `page` if given, and return one row per codec and source.

    Raises ValueError for a size below 0.07 MB, OSError when the page cannot be written.
    """
    numel = int(size_mb * 1e6) // 4 // WHOLE * WHOLE
    if numel == 0:
        raise ValueError(f"{size_mb} MB are too little: vectors have at least {WHOLE} elements of fp32")
    check_outputs(folders=[page])
    console = Console(stderr=as_json)
    # refreshed by hand: a thread that draws would count as the codecs' CPU time
    with Progress(TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False) as shown:
        task = shown.add_task("starting", total=None)

        def say(text: str) -> None:
            shown.update(task, description=text, refresh=True)

        with one_thread():
            sources, rows, skipped = measure_all(numel=numel, recipes=recipes, budget_s=budget_s, progress=say)
    plain = [asdict(row) for row in rows]
    if as_json:
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(sources, rows, console)
    for text in skipped:
        console.print(f"not measured: {text}", style="dim", markup=False, highlight=False)
    if page is not None:
        from farflung.sims.codec_page import write_page

        write_page(page, sources, rows, skipped)
    return plain


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread, and with as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_all(
    *, numel: int, recipes: Sequence[Recipe], budget_s: float, progress: Callable[[str], None]
) -> tuple[list[Source], list[Row], list[str]]:
    """(sources, rows, what could not be measured) with vectors of `numel` elements."""
    others, skipped = baselines()
    prepared = kernels.prepare(resolve_paths().cache / "kernels")
    if not prepared.native:
        skipped.append(f"our C kernels; PyTorch stands in: {prepared.reason}")
    methods = [ours(spec) for spec in SPECS] + others
    progress("drawing")
    sources = [gauss(numel), laplace(numel // SMALLER), student4(numel // SMALLER)]
    sources += [delta(recipe, progress) for recipe in recipes]
    rows: list[Row] = []
    for source in sources:
        slow = [eager(spec) for spec in EAGER] if source.name == GAUSS else []
        for method in methods + slow:
            progress(f"{source.name}: {method.by} {method.name}")
            rows.append(measure(method, source, budget_s=budget_s))
    for mean in MEANS:
        progress(f"{mean.source}: {mean.codec}")
        rows.append(butterfly(mean, numel=min(numel, MEAN_NUMEL)))
    return sources, rows, skipped


def _show(sources: Sequence[Source], rows: Sequence[Row], console: Console) -> None:
    size = max(row.mb for row in rows)
    table = Table(
        title=f"Bits per parameter and NMSE; encode and decode-add of {size:.0f} MB as a ratio to memcpy",
        title_justify="left",
    )
    table.add_column("codec", overflow="fold")
    told = [
        source.name for source in sources if source.name in (GAUSS, DELTA_ADAMW)
    ]  # all are in the JSON and the page
    for name in (*told, "above bound", "encode", "decode-add"):
        table.add_column(name, justify="right", no_wrap=name in told)
    for first in (row for row in rows if row.source == sources[0].name):
        same = {row.source: row for row in rows if row.label == first.label}
        cells = [
            f"{same[name].bits_per_param:.2f} {number(same[name].nmse, '.1e')}" if name in same else "" for name in told
        ]
        speed = (first.bits_above_bound, first.encode_ratio, first.decode_add_ratio)
        table.add_row(first.label, *cells, *(number(value, ".2f") for value in speed))
    console.print(table)
    for note in dict.fromkeys(f"{row.by} {row.codec}: {row.note}" for row in rows if row.note):
        console.print(note, style="dim", markup=False, highlight=False)
    for rate in RATES:
        row = nearest_to_bound(rows, rate)
        if row is not None:
            said = f"{row.bits_above_bound:.3f} bits above the Gaussian bound at {row.bits_per_param:.2f}: {row.codec}"
            console.print(said, style="dim", markup=False, highlight=False)
    for check in checks(rows):
        style = "green" if check.met else "red" if check.met is False else "dim"
        console.print(f"{check.verdict}: {check.target}; {check.measured}", style=style, markup=False)
