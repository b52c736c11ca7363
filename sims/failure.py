"""A simulation that broke an invariant: made small, written to a folder, and played again.

    failure.json    what is needed to run it again: seed, scenario, and the faults that are left
    faults.txt      those faults, for people
    events.log      the log of the short run, up to the violation

A violation depends on nothing that happens after it, so the faults after it go first; what is left is cut to the shortest prefix that still breaks
the same invariant, by halving, and may then lose single faults, for as many runs as one is willing to wait for. Halving finds a prefix of which one
fault less would not do; a shorter one that breaks it by another way there may be. The founder's start stays: without it there is no swarm, or that of somebody else.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from farflung.protocol.errors import ConfigError
from farflung.sims.faults import Fault, Schedule, Start, Window, put_right
from farflung.sims.happenings import REJOIN_S
from farflung.sims.last_ledger import COMMITS
from farflung.sims.logs import Chain, chain_of
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_run import AnyPlan, plan_scenario, simulate_any
from farflung.sims.simulation import Report

AFTER_S = 30.0
"""How long a shortened run may go on after the moment at which the long one broke."""

_LINE = re.compile(r" *(?P<time>\S+) +(\d+ +)?(?P<what>\S+) +(?P<fields>.*)")
"""See `trail.log_line`."""

_STAGE = re.compile(r"^stage \d+(, life \d+)?, ")
_NUMBERS = re.compile(r"\b[0-9a-f]{8,}\b|\d+(\.\d+)?(e[+-]?\d+)?")


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of `failure.json`."""

    seed: int
    scenario: Scenario
    num_peers: int
    founder: int
    """Who founds the swarm."""
    duration_s: float
    calm_s: float
    faults: list[dict[str, Any]]
    violations: list[str]
    log_sha256: str

    def plan(self) -> AnyPlan:
        """What to simulate. Raises ConfigError when the file does not make sense."""
        try:
            schedule = Schedule(
                num_peers=self.num_peers,
                duration_s=self.duration_s,
                faults=tuple(map(_decode, self.faults)),
                founded_by=self.founder,
            )
        except (ValueError, KeyError, msgspec.ValidationError) as error:
            raise ConfigError(f"failure.json does not describe a schedule: {error}") from error
        plan = plan_scenario(self.scenario, self.seed, schedule)
        return dataclasses.replace(plan, schedule=schedule, calm_s=self.calm_s, stop_when_broken=True)


def _encode(fault: Fault) -> dict[str, Any]:
    return {"what": type(fault).__name__, **dataclasses.asdict(fault)}


def _decode(fields: dict[str, Any]) -> Fault:
    kinds: dict[str, type[Fault]] = {kind.__name__: kind for kind in get_args(Fault)}
    rest = {key: value for key, value in fields.items() if key != "what"}
    return msgspec.convert(rest, kinds[fields["what"]])


# ---- making it small -----------------------------------------------------------------------------------------------


def shorten(
    plan: AnyPlan, report: Report, *, max_runs: int, on_run: Callable[[str], None] = lambda said: None
) -> tuple[AnyPlan, Report]:
    """The plan with as few faults as `max_runs` runs can find, and the report of its run. `report` is of `plan`, and broken."""
    broken_at = report.broken_at
    assert broken_at is not None
    which = kind_of(report.violations[0])
    calm_s = plan.calm_s if which.startswith("invariant 0") else 0.0
    shortest, found = plan, report
    before = tuple(f for f in plan.schedule.faults if f.at <= broken_at)
    founding = next((f for f in before if isinstance(f, Start) and f.peer == plan.schedule.founder), None)
    runs = 0

    def breaks(faults_left: tuple[Fault, ...]) -> bool:
        nonlocal shortest, found, runs
        if founding is not None and founding not in faults_left:
            return False
        try:
            schedule = _schedule(plan.schedule, faults_left, broken_at, calm_s)
        except ValueError:
            return False  # who is killed must have been started
        candidate = dataclasses.replace(plan, schedule=schedule, calm_s=calm_s, stop_when_broken=True)
        runs += 1
        tried = simulate_any(candidate, keep=True)
        on_run(f"{len(faults_left)} faults: {tried.violations[0] if tried.violations else 'ok'}")
        if not tried.violations or kind_of(tried.violations[0]) != which:
            return False
        shortest, found = candidate, tried
        return True

    if not breaks(before):
        return plan, report  # only what came later, or the length of the calm, broke it
    low, high = 0, len(before)
    while high - low > 1 and runs < max_runs:
        middle = (low + high) // 2
        if breaks(before[:middle]):
            high = middle
        else:
            low = middle
    left = before[:high]
    for fault in reversed(left):
        if runs >= max_runs:
            break
        fewer = tuple(f for f in left if f is not fault)
        if breaks(fewer):
            left = fewer
    return shortest, found


def kind_of(violation: str) -> str:
    """What two violations have in common that are told apart by numbers, names and stages only: the invariant, what was seen, and of a crash the error."""
    whole = _STAGE.sub("", violation)
    parts = whole.split(": ")
    kept = parts[:3] if "crashed" in whole else parts[:2]
    invariant, _, seen = ": ".join(kept).partition(": ")
    return f"{invariant}: {_NUMBERS.sub('#', seen)}"


def _schedule(whole: Schedule, left: tuple[Fault, ...], broken_at: float, calm_s: float) -> Schedule:
    """Only these faults. To see whether a swarm lives, all that is wrong is put right after them, and a calm stretch follows.

    Raises ValueError when they do not fit together.
    """
    if calm_s:
        over_at = max((fault.until if isinstance(fault, Window) else fault.at for fault in left), default=0.0)
        left = (*left, *put_right(left, over_at + REJOIN_S))
        duration_s = max((fault.at for fault in left), default=0.0) + calm_s
    else:
        duration_s = min(whole.duration_s, broken_at + AFTER_S)
    clipped = tuple(
        dataclasses.replace(f, until=min(f.until, duration_s)) if isinstance(f, Window) else f for f in left
    )
    return Schedule(num_peers=whole.num_peers, duration_s=duration_s, faults=clipped, founded_by=whole.founder)


# ---- the folder ----------------------------------------------------------------------------------------------------


def write_failure(folder: Path, scenario: Scenario, plan: AnyPlan, report: Report) -> None:
    """Write what `load_failure` and people read. `report` is of `plan`, with its log kept."""
    failure = Failure(
        seed=plan.seed,
        scenario=scenario,
        num_peers=plan.schedule.num_peers,
        founder=plan.schedule.founder,
        duration_s=plan.schedule.duration_s,
        calm_s=plan.calm_s,
        faults=[_encode(fault) for fault in plan.schedule.faults],
        violations=report.violations,
        log_sha256=report.log_sha256,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failure.json").write_bytes(msgspec.json.format(msgspec.json.encode(failure)))
    (folder / "faults.txt").write_text(plan.schedule.describe() + "\n", encoding="utf-8")
    (folder / "events.log").write_text("\n".join(report.events) + "\n", encoding="utf-8")


def load_failure(folder: Path) -> Failure:
    """Read `failure.json`. Raises ConfigError."""
    file = folder / "failure.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Failure)
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}; give the folder that `farflung sim run` or `fuzz` wrote"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def replay(folder: Path) -> tuple[Failure, Report]:
    """Run a failure again, with its log. Raises ConfigError."""
    failure = load_failure(folder)
    return failure, simulate_any(failure.plan(), keep=True)


def chapters(events: list[str]) -> list[list[str]]:
    """A log in pieces, each beginning with a fault, a commit's first line, or a broken invariant; of several at one moment with the first."""
    pieces: list[list[str]] = [[]]
    began_at = -math.inf
    known: set[tuple[Chain, int]] = set()
    for line in events:
        found = _LINE.match(line)
        assert found is not None, f"no line of a log: {line}"
        time, what = float(found["time"]), found["what"]
        begins = what in ("fault", "invariant.broken")
        if what in COMMITS:
            fields = msgspec.json.decode(found["fields"])
            place = chain_of(fields), fields["height"]
            begins = place not in known
            known.add(place)
        if begins and time > began_at:
            began_at = time
            if pieces[-1]:
                pieces.append([])
        pieces[-1].append(line)
    return pieces
