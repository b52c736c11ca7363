"""`farflung sim fuzz`: draw scenarios, play each under the judges, and make small what breaks an invariant.

A seed draws one scenario (`scenario_drawing`), the keys of its peers and what the network does, whatever other seeds are tried. What breaks is drawn again with
fewer and lower choices as long as it breaks in the same way (`failure.kind_of`), cut off after the moment at which it does, and written to a folder of
its own: beside what `failure` writes, `scenario.toml`, which `farflung sim run` plays.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import msgspec
from rich.console import Console

from farflung.protocol.errors import ConfigError
from farflung.sims.aftermath import add_what_logs_show
from farflung.sims.choices import Choices
from farflung.sims.churn import make_schedule
from farflung.sims.failure import kind_of, write_failure
from farflung.sims.how_far import how_far
from farflung.sims.outputs import check_outputs
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_drawing import draw_scenario
from farflung.sims.scenario_run import AnyPlan, make_playable, simulate_any
from farflung.sims.scenario_toml import SCENARIO, write_scenario
from farflung.sims.shrinking import Shrinker
from farflung.sims.sim_result import Result
from farflung.sims.simulation import Report
from farflung.sims.witness import Witness

SHRINK_TRIES = 150
"""Scenarios that are played to make one that fails small, at most: most of them are smaller, and end where they break."""

LENGTHENS = ("calm", "tail")
"""Choices that make a run last longer, and do nothing else."""


def fuzz(first: int, seeds: int, *, minutes: float | None, out: Path) -> Result:
    """Search seeds for violations; each is made small and written to `out/fuzz-SEED`. Begins no seed after `minutes`, if given. How far it is goes to stderr.

    Raises ConfigError when nothing can be written to `out`; it is only there at the end if something failed, or if it was before. Whatever else it raises is a
    defect of the search or of the simulator: its seed is told on stderr and noted on the error, and the scenario lies in `out/fuzz-SEED`.
    """
    was_there = out.exists()
    check_outputs(folders=[out])
    if not was_there:
        out.rmdir()
    console = Console(stderr=True, highlight=False)
    ends_at = float("inf") if minutes is None else time.monotonic() + 60.0 * minutes
    failed = []
    tried = 0
    for seed in range(first, first + seeds):
        if time.monotonic() >= ends_at:
            break
        folder, choices, drawn = out / f"fuzz-{seed}", Choices(seed), None
        try:
            drawn = draw_scenario(seed, choices)
            failed += _search(seed, drawn, choices, folder, console)
        except Exception as error:  # which ends the search, so it is ours and no node's; it only learns whose it is
            _name(error, seed, drawn, folder, console)
            raise
        tried += 1
    return {"first": first, "tried": tried, "failed": failed}


def _search(seed: int, scenario: Scenario, choices: Choices, folder: Path, console: Console) -> list[Result]:
    """What one seed, of which `choices` has drawn the scenario, came to: nothing, or what it broke."""
    report = play(scenario)[1]
    said = report.violations[0] if report.violations else "ok"
    console.print(f"seed {seed}: {report.num_peers} peers, {report.rounds} rounds, {said}", markup=False)
    if not report.violations:
        return []
    small = _make_small(seed, choices.taken, report)
    found = write_found(folder, small)
    size = {"peers": small.num_peers, "happenings": len(small.happenings)}
    return [{"seed": seed, "violations": found.violations, **size, "folder": str(folder)}]


def _name(error: Exception, seed: int, drawn: Scenario | None, folder: Path, console: Console) -> None:
    """Note on an error what it takes to see it again, leave what was drawn, to be played by itself, and say both."""
    if drawn is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCENARIO).write_text(write_scenario(drawn), encoding="utf-8")
        error.add_note(f"farflung sim run {folder / SCENARIO}")
    error.add_note(f"farflung sim fuzz --first {seed} --seeds 1")
    said = "; ".join(error.__notes__)
    console.print(f"seed {seed}: {type(error).__name__} ends the search: {said}", markup=False, soft_wrap=True)


def _make_small(seed: int, choices: Mapping[str, int], report: Report) -> Scenario:
    """And tell how far that is."""
    tries = count(1)
    with how_far(f"seed {seed} is made small", SHRINK_TRIES, "tries") as reach:

        def tell(scenario: Scenario, said: str) -> None:
            size = f"{scenario.num_peers} peers, {len(scenario.happenings)} happenings"
            reach(next(tries), f"{size}: {said}")

        reach(0, "")
        return make_small(seed, choices, report, max_tries=SHRINK_TRIES, on_try=tell)


def play(scenario: Scenario, *, keep: bool = False) -> tuple[AnyPlan, Report]:
    """Until something is broken, or to the end, and then its logs are looked at; `keep`: with its log. Raises ConfigError."""
    schedule = make_schedule(scenario, scenario.seed, Path())  # names no traces
    playable = make_playable(scenario, scenario.seed, schedule)
    plan = dataclasses.replace(playable.plan, stop_when_broken=True)
    witness = Witness(playable.keys)
    report = simulate_any(plan, sink=witness, keep=keep)
    add_what_logs_show(report, witness, playable.keys, lossy=scenario.network.loss > 0.0)
    return plan, report


def make_small(
    seed: int,
    choices: Mapping[str, int],  # what the seed's scenario is made of
    report: Report,  # of it, and broken
    *,
    max_tries: int,
    on_try: Callable[[Scenario, str], None] = lambda scenario, said: None,  # is told of each, and what came of it
) -> Scenario:
    """The smallest scenario that was found to break in the same way."""
    which = kind_of(report.violations[0])

    def attempt(fixed: Mapping[str, int]) -> Mapping[str, int] | None:
        smaller = Choices(seed, fixed)
        scenario = draw_scenario(seed, smaller)
        found = _breaks(scenario, which)
        on_try(scenario, "ok" if found is None else found.violations[0])
        return None if found is None else smaller.taken

    # what never breaks is played to its end: without the calm first, that comes sooner
    hasty = {name: value for name, value in choices.items() if name not in LENGTHENS}
    smallest = Shrinker(attempt, max_tries=max_tries).shrink(attempt(hasty) or choices)
    return _cut_off(draw_scenario(seed, Choices(seed, smallest)), which)


def _breaks(scenario: Scenario, which: str) -> Report | None:
    """Its report, when it breaks in that way."""
    try:
        _, report = play(scenario)
    except ConfigError:  # what is left of it cannot be run
        return None
    return report if report.violations and kind_of(report.violations[0]) == which else None


def _cut_off(scenario: Scenario, which: str) -> Scenario:
    """Without what comes after the violation. Where a calm has to follow, or only logs show it, that is all of it."""
    report = _breaks(scenario, which)
    assert report is not None
    if scenario.calm_s or report.broken_at is None:
        return scenario
    all_join_s = max(peer_class.join_s[0] for peer_class in scenario.peers)  # a file with peers who never do is refused
    ends_s = max(10.0, math.ceil(max(report.broken_at, all_join_s)) + 1.0)
    shorter = msgspec.structs.replace(
        scenario,
        duration_s=min(scenario.duration_s, ends_s),
        happenings=tuple(one for one in scenario.happenings if one.at <= report.broken_at),
    )
    again = _breaks(shorter, which)
    return scenario if again is None else shorter


def write_found(folder: Path, scenario: Scenario) -> Report:
    """Write a scenario that breaks, and the log of it up to there."""
    plan, report = play(scenario, keep=True)
    write_failure(folder, scenario, plan, report)
    (folder / SCENARIO).write_text(write_scenario(scenario), encoding="utf-8")
    return report
