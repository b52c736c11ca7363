"""`farflung bench feedback`: what error feedback is worth, without it and with it, on the same problems in one run.

The problems are those of `feedback_curves`: a quadratic whose optimum is known, its downlink, and a small model from a warm start and
from random weights. The same curves make the table, the JSON and the page `docs/feedback.md`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from farflung.compression import kernels
from farflung.compression.registry import parse_codec
from farflung.node.paths import resolve_paths
from farflung.sims.bench_codec import one_thread
from farflung.sims.feedback_curves import Curve, cold_curves, downlink_curves, quadratic_curves, warm_curves
from farflung.sims.feedback_page import write_page
from farflung.sims.feedback_words import WORDS, Curves, finals, kinds
from farflung.sims.outputs import check_outputs

SHORT: tuple[str, ...] = ("sign(block=64)", "deadzone(bits=1.0)", "topk(chunk=256,k=8)")
"""Codecs of the quadratic, whose vectors are short."""
OF_OWNERS: tuple[str, ...] = SHORT[:2]
"""Codecs of its downlink: a quarter of a vector is too short for chunks."""
LONG: tuple[str, ...] = ("sign", "deadzone(bits=1.0)", "deadzone(bits=0.36)", "topk")
"""Codecs of the model."""


def run_feedback(*, as_json: bool = False, page: Path | None = None) -> Curves:
    """Measure, show, write the page into the folder `page` if given, and return the curves. Raises OSError."""
    check_outputs(folders=[page])
    console = Console(stderr=as_json)
    with Progress(TextColumn("{task.description}"), console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        kernels.prepare(resolve_paths().cache / "kernels")
        with one_thread():
            curves = measure(lambda text: shown.update(task, description=text))
    if as_json:
        plain = {name: [asdict(curve) for curve in found] for name, found in curves.items()}
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        for name, found in curves.items():
            console.print(_table(name, found))
    if page is not None:
        write_page(page, curves)
    return curves


def measure(progress: Callable[[str], None]) -> Curves:
    """All curves: about two minutes of one core."""
    problems: tuple[tuple[str, Callable[..., list[Curve]], Sequence[str]], ...] = (
        ("quadratic", quadratic_curves, SHORT),
        ("downlink", downlink_curves, OF_OWNERS),
        ("warm", warm_curves, LONG),
        ("cold", cold_curves, LONG),
    )
    curves: Curves = {}
    for name, draw, specs in problems:
        progress(name)
        curves[name] = draw([parse_codec(spec) for spec in specs])
    return curves


def _table(name: str, curves: Sequence[Curve]) -> Table:
    title, form = WORDS[name]
    table = Table(title=title, title_justify="left")
    table.add_column("codec")
    columns = kinds(curves)
    for kind in columns:
        table.add_column(kind, justify="right")
    for codec, values in finals(curves).items():
        table.add_row(codec, *(format(values[kind], form) if kind in values else "" for kind in columns))
    return table
