"""`farflung sim run`, `fuzz` and `replay`: simulate, judge, say what came of it, and keep what broke."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from farflung.node.events import Event
from farflung.sims.chaos import fuzz_plan
from farflung.sims.churn import make_schedule
from farflung.sims.costs import load_costs
from farflung.sims.facts import save_run
from farflung.sims.failure import chapters, replay, shorten, write_failure
from farflung.sims.pipeline_scenario import has_pipeline, run_pipeline
from farflung.sims.report import report_folder
from farflung.sims.scenario import Scenario, find_scenario, load_scenario
from farflung.sims.scenario_plan import Prepared, prepare
from farflung.sims.sim_folder import EVENTS, RUN, Recorder, public_keys, run_facts
from farflung.sims.sim_result import Result, show, summarise
from farflung.sims.simulation import simulate
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.trail import Sink

SHORTEN_RUNS = 12
"""Runs that may be spent on making a failure small: it takes so many times as long as finding it did, at most."""


def run_scenario(name: str, *, seed: int | None, out: Path | None, quiet: bool, costs: Path | None = None) -> Result:
    """Run a scenario and judge it; `out` gets `events.log`, `result.json`, and what reports are made of with one made of it; `costs` is a file
    in the place of the scenario's. Raises ConfigError.
    """
    path = find_scenario(name)
    scenario = load_scenario(path)
    if costs is not None:
        scenario = msgspec.structs.replace(scenario, costs=load_costs(costs))
    seed = scenario.seed if seed is None else seed
    schedule = make_schedule(scenario, seed, path.parent)
    if has_pipeline(scenario):
        return run_pipeline(scenario, seed, schedule, out=out, quiet=quiet)
    prepared = prepare(scenario, seed, schedule)
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
