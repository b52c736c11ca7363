"""`farflung bench scale`: what it takes to simulate a peer for an hour, by how many there are, in one run.

Home machines with sessions of five hours train a model of 3 M parameters that only costs time, by the method `default`, in groups of 16. A step takes 25 s and a lap 40 minutes, as in what was
trained so over the internet (INTELLECT-1: 38 minutes), a third of the model every 13. They run nodes' own code; greetings that say nothing new are reckoned (`echoes`), and for the
fewest peers also sent one by one, for comparison. Goals are of a thousand peers, and of ten thousand, which are simulated only where somebody asks for them: they take hours, and 15 GB. All come within a minute, and what that takes is told apart from what follows: the first half of the time, and the second, of a day nearly all.
Processor time and memory are those of this process, which has one thread.
"""

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from farflung.node.events import Event
from farflung.sims.bench_codec import one_thread
from farflung.sims.bench_workers import BenchError
from farflung.sims.check import Check
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import parse_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate

MOST_S = 600.0
"""In which a thousand peers are to be simulated for a day."""
WANTED_PEER_HOURS = 1000 * 24.0
MOST_OVER_LINEAR = 1.5
"""Of the time for a peer and an hour, from the fewest peers to the most."""
MOST_MB = 4096
"""Of memory, however many peers there are."""
TEN_THOUSAND = 10_000
"""Peers that are to be simulated for an hour in the same time."""

SCENARIO = """
about = "Home machines that come and go."
mode = "cost"
duration_s = {seconds}
[manifest.model]
preset = "3m"
seq_len = 4096
[manifest.swarm]
batch_tokens = 40960
inner_steps = 96
min_round_s = 5.0
max_round_s = 3600.0
max_group = 16
[[peers]]
name = "home"
count = {peers}
tokens_per_s = 1638.4
up_mbit = 20.0
down_mbit = 250.0
join_s = [0.0, 60.0]
session = {{ mean_s = 18000.0 }}
absence = {{ mean_s = 900.0 }}
[network]
greetings = "{greetings}"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Of one number of peers."""

    peers: int
    greetings: str
    """How they were simulated, as scenarios say."""
    hours: float
    """Virtual."""
    rounds: int
    members: int
    """In the end."""
    processor_s: float
    coming_s: float
    """Of the processor, for a peer and an hour, in the first half of the time."""
    settled_s: float
    """And in the second."""
    peak_mb: float | None
    """That this process has had so far; None where that was in a larger simulation before."""


def run_scale(*, sizes: Sequence[int], minutes: float, as_json: bool = False) -> list[Row]:
    """Simulate each number of peers, show, and return one row for each. Raises BenchError where an invariant was broken."""
    console, rows = Console(stderr=as_json), list[Row]()
    with Progress(console=console, transient=True) as shown, one_thread():
        task = shown.add_task("simulating", total=sum(sizes))
        for peers in sorted(sizes):  # of memory, what a smaller number has taken hides nothing
            shown.update(task, description=f"{peers} peers")
            rows.append(measure(peers, minutes))
            shown.advance(task, peers)
        shown.update(task, description="the fewest, greeting by greeting")
        rows.insert(0, replace(measure(min(sizes), minutes, greetings="sent"), peak_mb=None))
    goals = checks(rows)
    if as_json:
        told = {"rows": [asdict(row) for row in rows], "goals": [asdict(goal) for goal in goals]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return rows
    table = Table(title=f"{minutes:g} virtual minutes, one core")
    for name in ("peers", "greetings", "members", "rounds", "processor s", "s per peer and hour", "then", "peak MB"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row.processor_s:.0f}", f"{row.coming_s:.2f}", f"{row.settled_s:.2f}")
        peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
        table.add_row(str(row.peers), row.greetings, str(row.members), str(row.rounds), *figures, peak)
    console.print(table)
    console.print(ratio(rows), markup=False, soft_wrap=True)
    for goal in goals:
        console.print(f"{goal.verdict}: {goal.target}: {goal.measured}", markup=False, soft_wrap=True)
    return rows


def parse_sizes(text: str) -> list[int]:
    """From `8,16`. Raises ValueError."""
    sizes = [int(one) for one in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"{text!r}: give numbers of peers from 1 on")
    return sizes


def ratio(rows: Sequence[Row]) -> str:
    """What it brings to reckon greetings, by those rows of the fewest peers."""
    sent = next(row for row in rows if row.greetings == "sent")
    reckoned = next(row for row in rows if row.peers == sent.peers and row.greetings != "sent")
    times = sent.settled_s / reckoned.settled_s
    return f"{sent.peers} peers whose greetings are reckoned cost {reckoned.settled_s:.2f} s an hour, {times:.1f} times less than by messages ({sent.settled_s:.2f} s)"


def measure(peers: int, minutes: float, *, greetings: str = "reckoned") -> Row:
    """Simulate so many peers for so long. Raises BenchError."""
    text = SCENARIO.format(peers=peers, seconds=60.0 * minutes, greetings=greetings)
    scenario = parse_scenario(text, name="scale")
    plan = prepare(scenario, 0, make_schedule(scenario, 0, Path())).plan
    halves = _Halves(30.0 * minutes)
    report = simulate(plan, sink=lambda line, event: halves.look(event))
    if report.violations:
        raise BenchError(f"{peers} peers: {report.violations[0]}")
    coming_s, settled_s = halves.end()
    peer_hours = peers * minutes / 120.0  # in half of the time
    return Row(
        peers=peers,
        greetings=greetings,
        hours=minutes / 60.0,
        rounds=report.rounds,
        members=report.members,
        processor_s=coming_s + settled_s,
        coming_s=coming_s / peer_hours,
        settled_s=settled_s / peer_hours,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


class _Halves:
    """Processor time until some moment of a simulation, and from there on."""

    def __init__(self, half_at: float) -> None:
        """`half_at`: virtual seconds from the beginning."""
        self._half_at = half_at
        self._began_s = self._half_s = time.process_time()
        self._is_over = False

    def look(self, event: Event) -> None:
        """Something has happened."""
        if not self._is_over and event["time"] >= self._half_at:
            self._half_s, self._is_over = time.process_time(), True

    def end(self) -> tuple[float, float]:
        """Seconds of both."""
        return self._half_s - self._began_s, time.process_time() - self._half_s


def checks(rows: Sequence[Row]) -> list[Check]:
    """What scale is held to, by the fewest and the most peers measured."""
    rows = [row for row in rows if row.greetings == "reckoned"]
    fewest, most = min(rows, key=lambda row: row.peers), max(rows, key=lambda row: row.peers)
    assert most.peak_mb is not None, "by size, each after the smaller ones"
    takes_s, growth = most.settled_s * WANTED_PEER_HOURS, most.settled_s / fewest.settled_s
    return [
        Check(
            target=f"1,000 peers for 24 hours in {MOST_S:.0f} s",
            measured=f"{takes_s / 3600:,.1f} h at what a peer takes among {most.peers}, {takes_s / MOST_S:,.1f} times as long",
            met=takes_s <= MOST_S,
        ),
        _ten_thousand(most),
        Check(
            target=f"a peer's hour at most {MOST_OVER_LINEAR:g} times as dear among the most as among the fewest",
            measured=f"{growth:.2f} times from {fewest.peers} to {most.peers} peers",
            met=growth <= MOST_OVER_LINEAR if most.peers > fewest.peers else None,
        ),
        Check(
            target=f"{MOST_MB} MB at most",
            measured=f"{most.peak_mb:,.0f} MB with {most.peers} peers",
            met=most.peak_mb <= MOST_MB,
        ),
    ]


def _ten_thousand(most: Row) -> Check:
    """Only what was run is told: a peer among ten thousand is dearer than one among a thousand."""
    target = f"{TEN_THOUSAND:,} peers for an hour in {MOST_S:.0f} s"
    if most.peers < TEN_THOUSAND:
        return Check(target=target, measured=f"ask for it: --peers 100,{TEN_THOUSAND}", met=None, untold="not run")
    takes_s = most.processor_s / most.hours * TEN_THOUSAND / most.peers
    measured = f"{takes_s:,.0f} s, {takes_s / MOST_S:,.1f} times as long, by {60.0 * most.hours:g} virtual minutes of {most.peers:,}"
    return Check(target=target, measured=measured, met=takes_s <= MOST_S)
