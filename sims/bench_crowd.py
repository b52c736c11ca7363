"""`farflung bench crowd`: how long a crowd of newcomers takes that comes at once to a swarm of one home machine.

The nodes' own code under virtual time, 35 M parameters that only cost time, which are 280 MB of outer state. Everybody has the same uplink and a downlink that is faster. Two swarms:

- `members only`: newcomers download from those who hold the state, as others do it.
- `newcomers too`: they also give each other the chunks that they have (`node/statesync.py`).

Beside both is what one copy of the state takes on one uplink: nobody can be there sooner, for all of it has to leave the first machine once.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from farflung.node.events import Event
from farflung.sims.bench_codec import one_thread
from farflung.sims.bench_workers import BenchError
from farflung.sims.churn import make_schedule
from farflung.sims.churn_swarms import unwatched
from farflung.sims.scenario import parse_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate
from farflung.training.outer import BYTES_PER_ELEMENT
from farflung.training.presets import num_parameters, preset

FELLOWS = {"members only": 0, "newcomers too": 8}
"""By swarm, how many fellows a newcomer asks."""

PRESET = "35m"

PATIENCE = 2.5
"""Times as long as copies one after another take is waited for everybody."""

COME_S = 20.0
"""Until the last of the crowd has started."""

SCENARIO = """
about = "A home machine that trains alone, and a crowd."
mode = "cost"
method = "none"
duration_s = {seconds}
[manifest.model]
preset = "{preset}"
[manifest.swarm]
batch_tokens = 262144
inner_steps = 30
min_round_s = 5.0
max_round_s = 600.0
[[peers]]
name = "first"
count = 1
tokens_per_s = 26214.4
up_mbit = {up_mbit}
down_mbit = {down_mbit}
[[peers]]
name = "crowd"
count = {newcomers}
tokens_per_s = 26214.4
up_mbit = {up_mbit}
down_mbit = {down_mbit}
join_s = [10.0, {come_s}]
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Who comes to what."""

    newcomers: int = 16
    up_mbit: float = 20.0
    down_mbit: float = 250.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One swarm."""

    name: str
    half_s: float
    """From when the last has started to when half of the newcomers hold the state."""
    all_s: float
    copy_s: float
    """What one copy takes on one uplink."""
    sources: float
    """From how many others a newcomer had its chunks, the median."""


def run_crowd(*, seeds: int = 3, as_json: bool = False, task: Task | None = None) -> list[Row]:
    """Simulate both with so many seeds, show, and return the medians. Raises BenchError."""
    task = Task() if task is None else task
    console, rows = Console(stderr=as_json), list[Row]()
    with Progress(console=console, transient=True) as shown, one_thread():
        bar = shown.add_task("simulating", total=seeds * len(FELLOWS))
        for name, fellows in FELLOWS.items():
            runs = list[Row]()
            for seed in range(seeds):
                shown.update(bar, description=f"{name}, seed {seed}")
                runs.append(play(name, fellows, task, seed))
                shown.advance(bar)
            rows.append(_median(runs))
    ratio = rows[0].all_s / rows[1].all_s
    if as_json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows], "ratio": ratio}, indent=2) + "\n")
        return rows
    table = Table(
        title=f"{task.newcomers} newcomers at once, {task.up_mbit:g} Mbit/s up; one copy takes {rows[0].copy_s:.0f} s"
    )
    for heading in ("chunks come from", "half are there after, s", "all, s", "of a copy", "sources of each"):
        table.add_column(heading, justify="left" if heading.startswith("chunks") else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.half_s:.0f}", f"{row.all_s:.0f}", f"{row.all_s / row.copy_s:.2f}", f"{row.sources:g}"
        )
    console.print(table)
    console.print(f"{ratio:.1f} times as fast")
    return rows


def _median(runs: Sequence[Row]) -> Row:
    """Of each figure: who is served first is chance, and moves the slow swarm's by half."""
    return replace(
        runs[0],
        half_s=median(run.half_s for run in runs),
        all_s=median(run.all_s for run in runs),
        sources=median(run.sources for run in runs),
    )


def play(name: str, fellows: int, task: Task, seed: int = 0) -> Row:
    """One swarm until everybody is there. Raises BenchError when somebody never is, or an invariant was broken."""
    numel = num_parameters(preset(PRESET))
    copy_s = BYTES_PER_ELEMENT * numel * 8 / 1e6 / task.up_mbit
    seconds = COME_S + PATIENCE * (task.newcomers + 1) * copy_s
    text = SCENARIO.format(preset=PRESET, seconds=seconds, come_s=COME_S, **asdict(task))
    scenario = parse_scenario(text, name="crowd")
    plan = unwatched(prepare(scenario, seed, make_schedule(scenario, seed, Path())).plan)
    terms = replace(plan.outfit.terms, fellows=fellows)
    arrivals = _Arrivals()
    report = simulate(
        replace(plan, outfit=replace(plan.outfit, terms=terms)), sink=lambda line, event: arrivals.take(event)
    )
    if report.violations:
        raise BenchError(f"{name}: {report.violations[0]}")
    if len(arrivals.at) < task.newcomers:
        raise BenchError(
            f"{name}: {len(arrivals.at)} of {task.newcomers} newcomers have the state after {seconds:.0f} s"
        )
    after = sorted(at - arrivals.first_at - COME_S for at in arrivals.at.values())
    return Row(
        name=name,
        half_s=after[(len(after) - 1) // 2],
        all_s=after[-1],
        copy_s=copy_s,
        sources=median(arrivals.sources.values()),
    )


class _Arrivals:
    """When each peer has the outer state, and from how many others."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self.sources: dict[str, int] = {}
        self.first_at = 0.0

    def take(self, event: Event) -> None:
        """What a node has logged."""
        self.first_at = self.first_at or event["time"]
        if event["event"] == "state.sync" and event["chunks_done"] == event["chunks"]:
            self.at.setdefault(event["peer"], event["time"])
            self.sources.setdefault(event["peer"], len(event["donors"]))
