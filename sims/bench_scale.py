"""`farflung bench scale`: what it takes to simulate a peer for an hour, by how many there are, in one run.

Home machines with sessions of five hours train a model of 3 M parameters that only costs time, with nodes' own code: a node looks about four times a second and
greets every other one one by one, every two seconds or, of more than 16, more rarely. Processor time is that of this process, which has one thread.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from farflung.protocol.limits import MAX_GROUP_PEERS
from farflung.sims.bench_codec import one_thread
from farflung.sims.check import Check
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import parse_scenario
from farflung.sims.scenario_run import make_playable, simulate_any

MOST_S = 600.0
"""In which a thousand peers are to be simulated for a day."""
WANTED_PEER_HOURS = 1000 * 24.0
MOST_OVER_LINEAR = 1.5
"""Of the time for a peer and an hour, from the fewest peers to the most."""

SCENARIO = """
about = "Home machines that come and go."
mode = "cost"
duration_s = {seconds}
[manifest.model]
preset = "3m"
[manifest.swarm]
batch_tokens = 16384
inner_steps = 60
min_round_s = 5.0
max_round_s = 600.0
[[peers]]
name = "home"
count = {peers}
tokens_per_s = 16384.0
up_mbit = 20.0
down_mbit = 250.0
join_s = [0.0, 60.0]
session = {{ mean_s = 18000.0 }}
absence = {{ mean_s = 900.0 }}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Of one number of peers."""

    peers: int
    hours: float
    """Virtual."""
    rounds: int
    members: int
    """In the end."""
    processor_s: float
    per_peer_hour_s: float


def run_scale(*, sizes: Sequence[int], minutes: float, as_json: bool = False) -> list[Row]:
    """Simulate each number of peers, show, and return one row for each. Raises ConfigError."""
    console, rows = Console(stderr=as_json), list[Row]()
    with Progress(console=console, transient=True) as shown, one_thread():
        task = shown.add_task("simulating", total=sum(sizes))
        for peers in sizes:
            shown.update(task, description=f"{peers} peers")
            rows.append(measure(peers, minutes))
            shown.advance(task, peers)
    goals = checks(rows)
    if as_json:
        told = {"rows": [asdict(row) for row in rows], "goals": [asdict(goal) for goal in goals]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return rows
    table = Table(title=f"{minutes:g} virtual minutes, one core")
    for name in ("peers", "members", "rounds", "processor s", "s per peer and hour"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.peers), str(row.members), str(row.rounds), f"{row.processor_s:.1f}", f"{row.per_peer_hour_s:.2f}"
        )
    console.print(table)
    for goal in goals:
        console.print(f"{goal.verdict}: {goal.target}: {goal.measured}", markup=False, soft_wrap=True)
    return rows


def parse_sizes(text: str) -> list[int]:
    """From `8,16`. Raises ValueError."""
    sizes = [int(one) for one in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{text!r}: give numbers of peers from 1 on")
    return sizes


def measure(peers: int, minutes: float) -> Row:
    """Simulate so many peers for so long."""
    scenario = parse_scenario(SCENARIO.format(peers=peers, seconds=60.0 * minutes), name="scale")
    playable = make_playable(scenario, 0, make_schedule(scenario, 0, Path()))
    began = time.process_time()
    report = simulate_any(playable.plan)
    took = time.process_time() - began
    return Row(
        peers=peers,
        hours=minutes / 60.0,
        rounds=report.rounds,
        members=report.members,
        processor_s=took,
        per_peer_hour_s=took / (peers * minutes / 60.0),
    )


def checks(rows: Sequence[Row]) -> list[Check]:
    """What scale is held to, by the fewest and the most peers measured."""
    fewest, most = min(rows, key=lambda row: row.peers), max(rows, key=lambda row: row.peers)
    takes_s, growth = most.per_peer_hour_s * WANTED_PEER_HOURS, most.per_peer_hour_s / fewest.per_peer_hour_s
    return [
        Check(
            target=f"1,000 peers for 24 hours in {MOST_S:.0f} s",
            measured=f"{takes_s / 3600:,.0f} h at what a peer takes among {most.peers}, {takes_s / MOST_S:,.0f} times too long; and a swarm has {MAX_GROUP_PEERS} members at most",
            met=takes_s <= MOST_S,
        ),
        Check(
            target=f"a peer's hour at most {MOST_OVER_LINEAR:g} times as dear among the most as among the fewest",
            measured=f"{growth:.2f} times from {fewest.peers} to {most.peers} peers",
            met=growth <= MOST_OVER_LINEAR if most.peers > fewest.peers else None,
        ),
    ]
