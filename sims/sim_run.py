"""`farflung sim run` and `replay`: simulate, judge, say what came of it, and keep what broke."""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
from rich.console import Console

from farflung.node.events import Event
from farflung.sims.churn import make_schedule
from farflung.sims.costs import Costs
from farflung.sims.facts import EVENTS, RUN, save_run
from farflung.sims.failure import chapters, replay, shorten, write_failure
from farflung.sims.faults import Schedule
from farflung.sims.footprint import check_memory
from farflung.sims.how_far import how_far
from farflung.sims.logs import Logs
from farflung.sims.outputs import check_outputs
from farflung.sims.recorder import Recorder
from farflung.sims.report import REPORT, report_folder
from farflung.sims.scenario import Scenario, find_scenario, load_scenario
from farflung.sims.scenario_run import AnyPlan, Playable, make_playable, simulate_any
from farflung.sims.scenario_toml import check_apart, keep_scenario
from farflung.sims.sim_folder import run_facts
from farflung.sims.sim_result import Result, show, summarise
from farflung.sims.simulation import Report
from farflung.sims.summary import broken_in
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.trail import Sink
from farflung.sims.witness import Witness
from farflung.training.host_memory import available_bytes

SHORTEN_RUNS = 12
"""Runs that may be spent on making a failure small: it takes so many times as long as finding it did, at most."""


def run_scenario(
    name: str,
    *,
    seed: int | None,
    method: str | None = None,
    out: Path | None,
    quiet: bool,
    costs: Costs | None = None,
) -> Result:
    """Run a scenario and judge it; `out` gets `events.log`, `result.json`, `scenario.toml`, which repeats it, and what reports are made of with one made of it; `seed`, `method` and `costs` are in
    the place of the scenario's; `quiet`: nothing is said but how far it is. Raises ConfigError.
    """
    path = find_scenario(name)
    scenario = load_scenario(path)
    check_outputs(folders=[out])
    if costs is not None:
        scenario = msgspec.structs.replace(scenario, costs=costs)
    if method is not None:
        scenario = msgspec.structs.replace(scenario, method=method)
    seed = scenario.seed if seed is None else seed
    if out is not None:
        check_apart(out, path)
    result = play_scenario(scenario, seed, make_schedule(scenario, seed, path.parent), out=out, quiet=quiet)
    if out is not None:
        keep_scenario(out, scenario, seed, path)
    return result


def play_scenario(scenario: Scenario, seed: int, schedule: Schedule, *, out: Path | None, quiet: bool) -> Result:
    """The same with a schedule that is made already. Raises ConfigError, also where this machine has too little memory for so many peers."""
    playable = make_playable(scenario, seed, schedule)
    check_memory(scenario, playable.plan, free_bytes=available_bytes())
    began = time.perf_counter()
    witness = Witness(playable.keys)
    with _sinks(scenario, playable, out, witness) as sink:
        report = simulate_any(playable.plan, sink=sink)
    result = summarise(scenario, report, bytes_factor=playable.bytes_factor) | {
        "wall_s": round(time.perf_counter() - began, 1)
    }
    folder = (Path.cwd() if out is None else out) / f"{scenario.name}-seed-{seed}-broken"
    if report.violations:
        _keep_broken(folder, scenario, playable.plan, report)
    done = [(START_UNIX_S + fault.at, fault) for fault in report.faults]
    until = START_UNIX_S + report.seconds
    facts = run_facts(
        scenario,
        playable.keys,
        done,
        report.violations,
        result["expected"],
        between=(START_UNIX_S, until),
        seed=seed,
        ledger=report.ledger,
    )
    shown = broken_in(Logs(events=witness.events, run=facts))
    in_logs = [said for said in shown if said not in report.violations]
    if in_logs and not report.violations:
        _keep_whole(folder, scenario, playable.plan, in_logs)
    if broken := [*report.violations, *in_logs]:
        result |= {"violations": broken, "passed": False, "folder": str(folder)}
    if not quiet:
        show(result)
    if out is not None:
        save_run(out / RUN, facts)
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        report_folder(out)
        if not quiet:
            Console(highlight=False).print(f"report: {out / REPORT}", soft_wrap=True)
    return result


def _keep_broken(folder: Path, scenario: Scenario, plan: AnyPlan, report: Report) -> None:
    """Make it small and write it down."""
    runs = count(1)
    with how_far(f"{scenario.name} is made small", SHORTEN_RUNS, "runs") as reach:
        reach(0, report.violations[0])
        shortest, found = shorten(plan, report, max_runs=SHORTEN_RUNS, on_run=lambda said: reach(next(runs), said))
        if not found.events:
            reach(next(runs), "nothing shorter breaks; once more, for its log")
            shortest = dataclasses.replace(shortest, stop_when_broken=True)
            found = simulate_any(shortest, keep=True)
    write_failure(folder, scenario, shortest, found)


def _keep_whole(folder: Path, scenario: Scenario, plan: AnyPlan, in_logs: list[str]) -> None:
    """Write down a run that only its logs, which are judged when it is over, show to be broken."""
    whole = dataclasses.replace(plan, stop_when_broken=True)
    with how_far(f"{scenario.name} is played once more, for its log", 1, "runs") as reach:
        reach(0, in_logs[0])
        report = simulate_any(whole, keep=True)
    write_failure(folder, scenario, whole, dataclasses.replace(report, violations=in_logs))


@contextlib.contextmanager
def _sinks(scenario: Scenario, playable: Playable, out: Path | None, witness: Witness) -> Iterator[Sink]:
    """Where the log goes: to `witness`; files in `out`; and its times, to whoever waits."""
    with contextlib.ExitStack() as stack:
        takers: list[Sink] = [witness]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((out / "events.log").open("w", encoding="utf-8", newline="\n"))

            def write(line: str, event: Event) -> None:
                log.write(line + "\n")

            takers.append(write)
            takers.append(Recorder(stack.enter_context((out / EVENTS).open("wb")), scenario, playable))
        reach = stack.enter_context(how_far(scenario.name, scenario.duration_s, "virtual s"))
        takers.append(lambda line, event: reach(event["time"], ""))

        def take(line: str, event: Event) -> None:
            for taker in takers:
                taker(line, event)

        yield take


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
    broken = report.violations or (failure.violations if same else [])  # some only logs show
    console.print(
        f"{broken[0] if broken else 'nothing is violated any more'}; {said}",
        markup=False,
        soft_wrap=True,
    )
    return same
