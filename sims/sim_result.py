"""What came of a scenario, played under virtual time or by processes: its figures, and whether they are what was expected."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from farflung.sims.happenings import given
from farflung.sims.pipeline_recoveries import Recovered
from farflung.sims.scenario import Scenario
from farflung.sims.simulation import Report

Result = dict[str, Any]
"""What `--json` prints."""


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
    sent = report.missed + report.contributed
    figures = {
        "rounds": report.rounds,
        "members": report.members,
        "missed_share": round(report.missed / sent, 4) if sent else None,
        "training_share": round(sum(one.training_s for one in report.labour) / max(running_s, 1e-9), 4),
        "median_round_s": round(median(report.round_seconds), 3) if report.round_seconds else None,
        "recovery_iterations": slowest_recovery(report.recoveries),
        "loss": round(newest_loss(report.losses), 4) if report.losses and scenario.mode == "real" else None,
    }
    wanted = [
        ("rounds", ">=", scenario.expect.min_rounds, 0),
        ("members", ">=", scenario.expect.min_members, 0),
        ("training_share", ">=", scenario.expect.min_training_share, 0.0),
        ("missed_share", "<=", scenario.expect.max_missed_share, 1.0),
        ("median_round_s", "<=", scenario.expect.max_median_round_s, None),
        ("loss", "<=", scenario.expect.max_loss, None),
        ("recovery_iterations", "<=", scenario.expect.max_recovery_iterations, None),
    ]
    expected = []
    for key, sign, limit, _ in wanted:
        if not any(field.endswith(key) for field in given(scenario.expect)):
            continue
        got = figures[key]
        met = got is not None and (got >= limit if sign == ">=" else got <= limit)
        expected.append({"what": f"{key} {sign} {limit:g}", "got": got, "met": met})
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "mode": scenario.mode,
        "seed": report.seed,
        "method": scenario.method,
        "duration_s": scenario.duration_s,
        "peers": scenario.num_peers,
        "faults": len(report.schedule),
        **figures,
        "commits": report.commits,
        "tokens": report.tokens,
        "contributed": report.contributed,
        "missed": report.missed,
        "repairs": report.repairs,
        "dropped_steps": report.dropped_steps,
        "sent_bytes": round(report.sent_bytes * bytes_factor),
        "net_bytes": round(report.net_bytes * bytes_factor),
        "classes": classes,
        "expected": expected,
        "violations": report.violations,
        "passed": not report.violations and all(one["met"] for one in expected),
        "log_sha256": report.log_sha256,
    }


def newest_loss(losses: Sequence[tuple[float, int, float]]) -> float:
    """Of the outer parameters with the most tokens: a slow peer may still evaluate old ones when others tell of newer. `losses`, at least one: as `Report.losses`."""
    return max(losses, key=lambda one: (one[1], one[0]))[2]


def slowest_recovery(recoveries: Sequence[Recovered]) -> float | None:
    """Most iterations that a stage was away; None where none was lost, or one did not come back."""
    took = [one.iterations for one in recoveries]
    known = [one for one in took if one is not None]
    return round(max(known), 3) if known and len(known) == len(took) else None


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
        f"{result['missed']:,} of {result['missed'] + result['contributed']:,} contributions, {result['dropped_steps']:,} steps dropped",
    )
    facts.add_row(
        "sent", f"{result['sent_bytes'] / 1e9:,.2f} GB for committed rounds, {result['net_bytes'] / 1e9:,.2f} GB in all"
    )
    for name, one in result["classes"].items():
        facts.add_row(
            name, f"{one['peers']} peers, {one['running_h']:.2f} h, trained {one['training_share']:.0%} of it"
        )
    if result["recovery_iterations"] is not None:
        facts.add_row(
            "lost stages", f"served again after {result['recovery_iterations']:.2f} steps, and what fetching took"
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
