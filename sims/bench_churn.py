"""`farflung bench churn`: four unequal machines, and a fifth of the peers replaced per hundred steps, beside four equal ones that stay.

For each seed four swarms are played under virtual time with real mathematics (`churn_swarms`):

- `equal`: four machines of speed 0.575, the reference.
- `unequal`: speeds 1, 0.7, 0.4 and 0.2, the same in sum.
- `unequal, waiting`: everybody makes H steps and rounds wait for the slowest: the baseline, with our overlap and codec for free.
- `unequal, replaced`: as `unequal`, and one peer in four is killed every 125 steps, and another comes in its place: 20 % per 100 steps.

A *gap* is the mean over the evaluations in the last third of both curves' tokens, of the losses' difference at as many tokens, interpolated between
rounds (`bench_unequal.gap_percent`), seed by seed. The first two gaps are to `equal`, that of `replaced` is to `unequal`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.sims.churn_page import write_page
from farflung.sims.churn_rows import HEADINGS, Churn, cells, checks, compare
from farflung.sims.churn_swarms import SWARMS, ChurnSwarm, Played, Task, play
from farflung.sims.outputs import check_outputs

SHOWN = ("swarm", "computing %", "M tokens", "last loss", "gap % (seeds)", "± equal's seeds %")
"""On a terminal, which is narrow; the page has all."""


def run_churn(
    *,
    seeds: int = 2,
    page: Path | None = None,  # folder for churn.md and its picture
    as_json: bool = False,
    task: Task | None = None,
) -> Churn:
    """Play all, show, and return the figures. Raises BenchError, ConfigError, OSError."""
    check_outputs(folders=[page])
    task = Task() if task is None else task
    console = Console(stderr=as_json)
    played: dict[ChurnSwarm, list[Played]] = {swarm: [] for swarm in SWARMS}
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    # refreshed by hand: a thread that draws would take time from the one core that trains
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        bar = shown.add_task("starting", total=None)
        for seed in range(seeds):
            for swarm in SWARMS:

                def say(text: str, of: str = f"{swarm.name}, seed {seed}") -> None:
                    shown.update(bar, description=f"{of}: {text}", refresh=True)

                played[swarm].append(play(swarm, task, seed, say))
                tokens, loss = played[swarm][-1].curve[-1]
                console.print(f"{swarm.name}, seed {seed}: {loss:.4f} after {tokens:,} tokens", highlight=False)
    found = compare(played)
    if as_json:
        sys.stdout.write(json.dumps(_figures(found), indent=2) + "\n")
    else:
        _show(found, task, console)
    if page is not None:
        write_page(page, task, found)
    return found


def _figures(found: Churn) -> dict[str, Any]:
    """For JSON."""
    rows = [
        asdict(row.swarm)
        | {"against": row.against, "gap_percent": row.gap, "gaps_percent": row.gaps, "utilisation": row.utilisation}
        | {"played": [asdict(one) for one in row.played]}
        for row in found.rows
    ]
    goals = [asdict(check) for check in checks(found)]
    return {"equal_spread_percent": found.spread_percent, "goals": goals, "rows": rows}


def _show(found: Churn, task: Task, console: Console) -> None:
    table = Table(title=f"{task.steps} steps at speed 1 of {task.batch_tokens} tokens", title_justify="left")
    shown = [place for place, name in enumerate(HEADINGS) if name in SHOWN]
    for place in shown:
        table.add_column(HEADINGS[place])
    for row in found.rows:
        told = cells(row, found)
        table.add_row(*(told[place] for place in shown))
    console.print(table)
    console.print("computing: the least of all seeds, machine by machine.", style="dim", highlight=False)
