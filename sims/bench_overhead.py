"""`farflung bench overhead`: what being a node costs, when nobody else is there.

Two processes train the same model on the same samples with the same optimiser and the same threads: a lone node (real
engine, DHT, `Peer`, storage, a round with itself after every H steps) and a bare PyTorch loop (`bench_peer`). They
take turns of H steps; while one works the other waits at the end of its turn, so both meet the same machine. A turn of
the node ends when its round is over, so that the round is in. The figure is the median of the ratios of neighbours.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.sims.bench_workers import Worker, workers

WITHIN_S = 1800.0
"""Then something hangs; the processes are ended."""

TARGET = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadFigures:
    """One paired run."""

    preset: str
    parameters: int
    threads: int
    """Torch's, in both processes."""
    inner_steps: int
    """H: steps in one turn, and between two rounds of the node."""
    tokens_per_step: int
    step_s: float
    """Median seconds of a step of the bare loop."""
    node_tokens_per_s: float
    """Median over the turns."""
    loop_tokens_per_s: float
    ratio: float
    """Node over loop: the median of `ratios`."""
    ratios: tuple[float, ...]
    """One for each pair of turns."""
    warm_up_ratio: float
    """Of the first pair, which is not counted."""


def measure_overhead(
    *,
    preset: str = "1m",
    batch: int = 16,
    steps: int = 100,
    pairs: int = 9,
    threads: int = 0,
    progress: Progress | None = None,
) -> OverheadFigures:
    """Run `pairs` pairs of turns of `steps` steps of `batch` sequences, after one to warm up.

    `threads`: torch's, in each process; 0 leaves them to torch. Raises BenchError.
    """
    task = progress.add_task("starting", total=1 + pairs) if progress is not None else None
    arguments = ["--preset", preset, "--batch", str(batch), "--steps", str(steps), "--threads", str(threads)]
    with workers(WITHIN_S) as start:
        loop, node = start(["loop", *arguments]), start(["node", *arguments])
        facts = loop.hear()
        same = node.hear()
        assert facts == same, (facts, same)
        taken: list[tuple[float, float]] = []
        for pair in range(1 + pairs):
            if progress is not None and task is not None:
                progress.update(task, description=f"pair {pair} of {pairs}" if pair else "warm-up", completed=pair)
            # who goes first changes, so that a machine that slows down favours nobody
            turns = [(node, 1), (loop, 0)] if pair % 2 else [(loop, 0), (node, 1)]
            seconds = {who: _turn(worker) for worker, who in turns}
            taken.append((seconds[0], seconds[1]))
    ratios = [of_loop / of_node for of_loop, of_node in taken]
    loop_s = statistics.median(of_loop for of_loop, _ in taken[1:])
    node_s = statistics.median(of_node for _, of_node in taken[1:])
    return OverheadFigures(
        preset=preset,
        parameters=facts["parameters"],
        threads=facts["threads"],
        inner_steps=steps,
        tokens_per_step=facts["tokens"] // steps,
        step_s=loop_s / steps,
        node_tokens_per_s=facts["tokens"] / node_s,
        loop_tokens_per_s=facts["tokens"] / loop_s,
        ratio=statistics.median(ratios[1:]),
        ratios=tuple(ratios[1:]),
        warm_up_ratio=ratios[0],
    )


def missed(row: dict[str, Any]) -> list[str]:
    """The goals that the figures of `run_overhead` miss, for people."""
    return [] if row["ratio"] >= TARGET else [f"a node at {row['ratio']:.3f} of a loop; at least {TARGET} is wanted"]


def _turn(worker: Worker) -> float:
    worker.tell(order="go")
    return float(worker.hear()["seconds"])


def run_overhead(*, as_json: bool = False) -> dict[str, Any]:
    """Measure, show, and return the figures. Raises BenchError."""
    console = Console(stderr=as_json)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        figures = measure_overhead(progress=progress)
    row = asdict(figures)
    if as_json:
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
        return row
    table = Table(
        title=f"{figures.preset}: {figures.parameters / 1e6:.1f} M parameters, {figures.tokens_per_step} tokens and "
        f"{1000 * figures.step_s:.0f} ms a step, a round every {figures.inner_steps} steps",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_row("bare PyTorch loop", f"{figures.loop_tokens_per_s:,.0f}")
    table.add_row("lone node", f"{figures.node_tokens_per_s:,.0f}")
    table.add_row("ratio", f"{figures.ratio:.3f}")
    console.print(table)
    said = ", ".join(f"{ratio:.3f}" for ratio in figures.ratios)
    console.print(f"median of {said}; at least {TARGET} is wanted", style="dim", highlight=False)
    return row
