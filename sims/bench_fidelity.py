"""`farflung bench fidelity`: how far virtual time is from real processes, for one scenario played both ways in one run.

What things cost a node comes from `bench calibrate`, which goes first; that all processes share this machine's processors is modelled (`Costs.processors`).
Nothing is fitted to what the processes then do. Compared are

    rounds        that were committed
    round time    the median, from the plan until all members held all means
    payload       encoded contributions and means of committed rounds: bytes that a peer sent for each contribution which counted, so that they are of as
                  many rounds
    net           all bytes that peers sent by their `net` events, for each contribution which counted: also states that newcomers fetch, and control messages
    training      share of the time that peers ran in which they trained: told, without a target

A run in which something broke, that did not come to what its file expects, or that made no round, is not compared as if it were well: that is a missed
goal with its reason, whatever the figures are.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from farflung.sims.bench_calibrate import calibrate
from farflung.sims.check import Check, machine
from farflung.sims.costs import load_costs
from farflung.sims.local_run import count_cores, playable, run_local
from farflung.sims.outputs import check_outputs
from farflung.sims.scenario import find_scenario, load_scenario
from farflung.sims.sim_result import Result
from farflung.sims.sim_run import run_scenario

ROUNDS, ROUND_S, BYTES = 10.0, 15.0, 2.0
"""Percent that virtual time may be off."""

PAGE = "fidelity.md"


def run_fidelity(
    scenario: str, *, costs: Path | None = None, page: Path | None = None, as_json: bool = False
) -> dict[str, Any]:
    """Calibrate (or take `costs`, a file of an earlier calibration), play, compare, show. Raises ConfigError, BenchError, NodeFailed, OSError."""
    check_outputs(folders=[page])
    playable(
        load_scenario(find_scenario(scenario))
    )  # what cannot be played should be told of before minutes of measuring
    console = Console(stderr=as_json)
    if costs is None:
        console.print("what things cost a node on this machine", style="dim")
        measured = calibrate(console)[0]
    else:
        measured = load_costs(costs)
    shared = msgspec.structs.replace(measured, processors=count_cores())
    console.print(f"{scenario}, by real processes", style="dim")
    local = run_local(scenario, seed=None, out=None, minutes=None, quiet=as_json)
    console.print(f"{scenario}, under virtual time", style="dim")
    virtual = run_scenario(scenario, seed=None, out=None, quiet=as_json, costs=shared)
    found = compared(local, virtual) | {"costs": msgspec.to_builtins(shared), "local": local, "virtual": virtual}
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _show(found, console)
    if page is not None:
        (page / PAGE).write_text("\n".join(lines(scenario, found)) + "\n", encoding="utf-8")
    return found


def compared(local: Result, virtual: Result) -> dict[str, Any]:
    """Percent by which virtual time is off, None where that cannot be told, and what that is held to."""
    off = {name: _off_percent(figure(local), figure(virtual)) for name, figure in FIGURES.items()}
    checks = [
        Check(target=f"{side} fit to be compared", measured=reason, met=False)
        for side, one in (("processes", local), ("virtual time", virtual))
        if (reason := unfit(one))
    ]
    checks += [
        Check(
            target=f"{what} within {most:g} %", measured=_percent(found), met=found is not None and abs(found) <= most
        )
        for found, what, most in (
            (off["rounds"], "rounds committed", ROUNDS),
            (off["round_s"], "median round", ROUND_S),
            (off["payload"], "payload bytes of rounds for each contribution", BYTES),
            (off["net"], "all bytes that peers sent (`net`) for each contribution", BYTES),
        )
    ]
    return {
        "off_percent": {key: None if value is None else round(value, 4) for key, value in off.items()},
        "goals": [asdict(check) for check in checks],
    }


def unfit(one: Result) -> str:
    """Why a run says nothing of others; empty when it is well."""
    if one["violations"]:
        more = len(one["violations"]) - 1
        return f"{one['violations'][0]}{f', and {more} more' if more else ''}"
    unmet = [f"expected {goal['what']}, got {goal['got']}" for goal in one["expected"] if not goal["met"]]
    return "; ".join(unmet) or ("" if one["rounds"] else "no round was committed")


def _off_percent(local: float | None, virtual: float | None) -> float | None:
    return 100.0 * (virtual / local - 1.0) if local and virtual is not None else None


def _percent(off: float | None) -> str:
    return "nothing to compare" if off is None else f"{off:+.1f} %"


def per_contribution(one: Result, key: str) -> float | None:
    """Of a figure of all peers; None where nobody has contributed."""
    return one[key] / one["contributed"] if one["contributed"] else None


FIGURES: dict[str, Callable[[Result], float | None]] = {
    "rounds": lambda one: float(one["rounds"]),
    "round_s": lambda one: one["median_round_s"],
    "payload": lambda one: per_contribution(one, "sent_bytes"),
    "net": lambda one: per_contribution(one, "net_bytes"),
    "training": lambda one: float(one["training_share"]),
}
"""What is compared; None where a run has none."""


def missed(found: Mapping[str, Any]) -> list[str]:
    """Goals that were not met, in words."""
    return [f"{goal['target']}: {goal['measured']}" for goal in found["goals"] if not goal["met"]]


HEADINGS = ("", "processes", "virtual time", "off")


ROWS = (
    ("rounds", "rounds committed", ".0f"),
    ("round_s", "median round, s", ".3f"),
    ("payload", "payload bytes of committed rounds, for each contribution", ",.0f"),
    ("net", "all bytes that peers sent (`net`), for each contribution", ",.0f"),
    ("training", "share of the time in training", ".3f"),
)
"""Of FIGURES: key, what it is, how it is written."""


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What was compared, as cells."""
    told = []
    for key, what, form in ROWS:
        both = [FIGURES[key](found[side]) for side in ("local", "virtual")]
        cells = ["none" if figure is None else format(figure, form) for figure in both]
        told.append([what, *cells, _percent(found["off_percent"][key])])
    return told


def lines(scenario: str, found: Mapping[str, Any]) -> list[str]:
    """The page."""
    costs, local = found["costs"], found["local"]
    return [
        "# How far virtual time is off",
        "",
        f"Made by `farflung bench fidelity {scenario} --page docs`; do not edit. Machine: {machine()}.",
        "",
        f"`{scenario}`: {local['about']} {local['duration_s']:.0f} s, {local['peers']} peers, {local['faults']} starts and faults. Once by real processes on this machine (`farflung sim local`), once under virtual time "
        f"(`farflung sim run`) with what `bench calibrate` measured just before and {costs['processors']} processors for all peers together. Nothing is fitted to what the processes did.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(found)),
        "",
        "| goal | off | |",
        "|---|---|---|",
        *(Check(**goal).line for goal in found["goals"]),
        "",
        f"Calibrated: a start takes {costs['start_s']:.1f} s, a control message {1000 * costs['message_s']:.2f} ms, a write to a stream {1000 * costs['write_s']:.2f} ms, a call {1000 * costs['door_s']:.2f} ms to a thread and back, and there {1000 * costs['hand_s']:.2f} ms if it is not measured by itself. "
        f"{100 * local['late_steps']:.1f} % of the processes' steps took longer than the scenario says.",
    ]


def _show(found: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Virtual time beside real processes", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if table.columns else "left")
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
