"""`farflung sim run`, `fuzz` and `replay`: simulate, judge, say what came of it, and keep what broke."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.node.events import Event
from farflung.sims.chaos import fuzz_plan
from farflung.sims.churn import make_schedule
from farflung.sims.costs import load_costs
from farflung.sims.facts import save_run
from farflung.sims.failure import chapters, replay, shorten, write_failure
from farflung.sims.report import report_folder
from farflung.sims.scenario import Scenario, find_scenario, load_scenario
from farflung.sims.scenario_plan import Prepared, prepare
from farflung.sims.sim_folder import EVENTS, RUN, Recorder, public_keys, run_facts
from farflung.sims.simulation import Report, Sink, simulate
from farflung.sims.swarm import START_UNIX_S

SHORTEN_RUNS = 12
"""Runs that may be spent on making a failure small: it takes so many times as long as finding it did, at most."""

Result = dict[str, Any]
"""What `--json` prints."""


def run_scenario(name: str, *, seed: int | None, out: Path | None, quiet: bool, costs: Path | None = None) -> Result:
    """Run a scenario and judge it; `out` gets `events.log`, `result.json`, and what reports are made of with one made of it; `costs` is a file
    in the place of the scenario's. Raises ConfigError.
    """
    path = find_scenario(name)
    scenario = load_scenario(path)
    if costs is not None:
        scenario = msgspec.structs.replace(scenario, costs=load_costs(costs))
    seed = scenario.seed if seed is None else seed
    prepared = prepare(scenario, seed, make_schedule(scenario, seed, path.parent))
    began = time.perf_counter()
    with _sinks(scenario, prepared, out, quiet) as sink:
        report = simulate(prepared.plan, sink=sink)
    result = summarise(scenario, report, bytes_factor=prepared.bytes_factor) | {
        "wall_s": round(time.perf_counter() - began, 1)
    }
    if report.violations:
        folder = (Path.cwd() if out is None else out) / f"{scenario.name}-seed-{seed}-broken"
        result["folder"] = str(folder)
        shortest, found = shorten(prepared.plan, report, max_runs=SHORTEN_RUNS)
        if not found.events:  # nothing shorter breaks it: its log is made now
            shortest = dataclasses.replace(shortest, stop_when_broken=True)
            found = simulate(shortest, keep=True)
        write_failure(folder, "scenario", scenario, shortest, found)
    if out is not None:
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        done = [(START_UNIX_S + fault.at, fault) for fault in prepared.plan.schedule.faults]
        until = START_UNIX_S + scenario.duration_s
        facts = run_facts(
            scenario, public_keys(prepared), done, report.violations, result["expected"], (START_UNIX_S, until)
        )
        save_run(out / RUN, facts)
        report_folder(out)
    if not quiet:
        show(result)
    return result


def summarise(scenario: Scenario, report: Report, *, bytes_factor: float = 1.0) -> Result:
    """Figures of a run, per class too, and what became of what was expected; a byte of the report stands for `bytes_factor`."""
    roster = scenario.roster()
    classes = {}
    for peer_class in scenario.peers:
        labour = [report.labour[n] for n, (c, _, _) in enumerate(roster) if c is peer_class]
        running_s = sum(one.running_s for one in labour)
        classes[peer_class.name] = {
            "peers": peer_class.count,
            "running_h": round(running_s / 3600, 3),
            "training_share": round(sum(one.training_s for one in labour) / max(running_s, 1e-9), 4),
            "steps": sum(one.steps for one in labour),
        }
    running_s = sum(one.running_s for one in report.labour)
    figures = {
        "rounds": report.rounds,
        "members": report.members,
        "missed_share": round(report.missed / max(1, report.missed + report.contributed), 4),
        "training_share": round(sum(one.training_s for one in report.labour) / max(running_s, 1e-9), 4),
        "median_round_s": round(median(report.round_seconds), 3) if report.round_seconds else None,
        "loss": round(report.losses[-1][2], 4) if report.losses and scenario.mode == "real" else None,
    }
    wanted = [
        ("rounds", ">=", scenario.expect.min_rounds, 0),
        ("members", ">=", scenario.expect.min_members, 0),
        ("training_share", ">=", scenario.expect.min_training_share, 0.0),
        ("missed_share", "<=", scenario.expect.max_missed_share, 1.0),
        ("median_round_s", "<=", scenario.expect.max_median_round_s, None),
        ("loss", "<=", scenario.expect.max_loss, None),
    ]
    defaults = {field: getattr(type(scenario.expect)(), field) for field in scenario.expect.__struct_fields__}
    given = {field for field in defaults if getattr(scenario.expect, field) != defaults[field]}
    expected = []
    for key, sign, limit, _ in wanted:
        if not any(field.endswith(key) for field in given):
            continue
        got = figures[key]
        met = got is not None and (got >= limit if sign == ">=" else got <= limit)
        expected.append({"what": f"{key} {sign} {limit:g}", "got": got, "met": met})
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "mode": scenario.mode,
        "seed": report.seed,
        "duration_s": scenario.duration_s,
        "peers": scenario.num_peers,
        "faults": len(report.schedule),
        **figures,
        "commits": report.commits,
        "tokens": report.tokens,
        "missed": report.missed,
        "repairs": report.repairs,
        "dropped_steps": report.dropped_steps,
        "sent_bytes": round(report.sent_bytes * bytes_factor),
        "classes": classes,
        "expected": expected,
        "violations": report.violations,
        "passed": not report.violations and all(one["met"] for one in expected),
        "log_sha256": report.log_sha256,
    }


def show(result: Result) -> None:
    """The result for people."""
    console = Console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row(
        "rounds", f"{result['rounds']:,} in {result['duration_s']:,.0f} s, {result['members']} members at the end"
    )
    facts.add_row("median round", "none" if result["median_round_s"] is None else f"{result['median_round_s']:.2f} s")
    facts.add_row(
        "tokens", f"{result['tokens']:,}" + (f", loss {result['loss']}" if result["loss"] is not None else "")
    )
    facts.add_row(
        "missed",
        f"{result['missed']:,} contributions ({result['missed_share']:.1%}), {result['dropped_steps']:,} steps dropped",
    )
    facts.add_row("sent", f"{result['sent_bytes'] / 1e9:,.2f} GB for committed rounds")
    for name, one in result["classes"].items():
        facts.add_row(
            name, f"{one['peers']} peers, {one['running_h']:.2f} h, trained {one['training_share']:.0%} of it"
        )
    for one in result["expected"]:
        facts.add_row("expected" if one["met"] else "[red]NOT MET[/]", f"{one['what']}: {one['got']}")
    for said in result["violations"]:
        facts.add_row("[bold red]VIOLATED[/]", said)
    if "late_steps" in result:
        slow = f"{result['late_steps']:.1%} of the steps took longer than they stand for"
        facts.add_row("this machine", f"{slow}; a node was up after {result['start_s']} s")
    if result["log_sha256"]:
        facts.add_row("log", result["log_sha256"])
    console.print(facts)
    if "folder" in result:
        console.print(f"Step through it with: farflung sim replay {result['folder']}", soft_wrap=True)


@contextlib.contextmanager
def _sinks(scenario: Scenario, prepared: Prepared, out: Path | None, quiet: bool) -> Iterator[Sink]:
    """Where the log goes: files in `out`, and a progress bar on the terminal."""
    with contextlib.ExitStack() as stack:
        takers: list[Sink] = []
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((out / "events.log").open("w", encoding="utf-8", newline="\n"))

            def write(line: str, event: Event) -> None:
                log.write(line + "\n")

            takers.append(write)
            takers.append(Recorder(stack.enter_context((out / EVENTS).open("wb")), scenario, prepared))
        if not quiet and sys.stderr.isatty():
            progress = stack.enter_context(
                Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TextColumn("{task.completed:,.0f} of {task.total:,.0f} s"),
                    TimeElapsedColumn(),
                    console=Console(stderr=True),
                )
            )
            task = progress.add_task(scenario.name, total=scenario.duration_s)
            takers.append(lambda line, event: progress.update(task, completed=event["time"]))

        def take(line: str, event: Event) -> None:
            for taker in takers:
                taker(line, event)

        yield take


def fuzz(first: int, seeds: int, *, minutes: float | None, out: Path, quiet: bool) -> Result:
    """Search seeds for violations; each is made small and written to `out/fuzz-SEED`. Stops after `minutes`, if given."""
    console = Console(stderr=True)
    ends_at = float("inf") if minutes is None else time.monotonic() + 60.0 * minutes
    failed = []
    tried = 0
    for seed in range(first, first + seeds):
        if time.monotonic() >= ends_at:
            break
        plan = dataclasses.replace(fuzz_plan(seed), stop_when_broken=True)
        report = simulate(plan)
        tried += 1
        if not quiet:
            console.print(f"seed {seed}: {report.rounds} rounds, {report.violations[0] if report.violations else 'ok'}")
        if not report.violations:
            continue
        shortest, found = shorten(plan, report, max_runs=2 * SHORTEN_RUNS)
        if not found.events:
            found = simulate(shortest, keep=True)
        folder = out / f"fuzz-{seed}"
        write_failure(folder, "fuzz", None, shortest, found)
        failed.append(
            {
                "seed": seed,
                "violations": found.violations,
                "faults": len(shortest.schedule.faults),
                "folder": str(folder),
            }
        )
    return {"first": first, "tried": tried, "failed": failed}


def step_through(folder: Path, *, everything: bool) -> bool:
    """Replay a failure on the terminal, a chapter at a time; returns whether it went as it was written down."""
    failure, report = replay(folder)
    console = Console(highlight=False)
    waits = not everything and sys.stdin.isatty() and console.is_terminal
    pieces = chapters(report.events)
    for number, piece in enumerate(pieces, start=1):
        console.print("\n".join(piece), markup=False, soft_wrap=True)
        if waits and number < len(pieces):
            if console.input(f"[dim]{number} of {len(pieces)}; Enter: on, q: end [/]").strip() == "q":
                break
    same = report.log_sha256 == failure.log_sha256
    said = "the same log as when it was found" if same else "ANOTHER LOG than when it was found: the code has changed"
    console.print(
        f"{report.violations[0] if report.violations else 'nothing is violated any more'}; {said}",
        markup=False,
        soft_wrap=True,
    )
    return same
