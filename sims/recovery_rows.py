"""From runs to the rows of the tables: losses against training without failures, modelled hours to a target, bytes.

All differences are taken seed by seed. Iterations count from the first in which something may be lost. The target is
what training without failures has at half of them, so each seed has its own. Hours are of `recovery_clock`; a method
that does not get to the target in one of its runs has none.

A single loss comes in the middle of a run (`Tier.midway`) and is compared with the same training undisturbed, whose loss falls by `slope` per
step meanwhile:

    jump       loss right after the recovery, before any step, minus the undisturbed
    setback    what is left of that after `event_steps`, over the slope: steps by which training lags behind
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from farflung.sims.recovery_clock import Curve, first_at, rolled_back, seconds
from farflung.sims.recovery_failures import Event, events, pattern
from farflung.sims.recovery_methods import METHODS, OURS, SWAPS_ALONE, Method, rungs_of
from farflung.sims.recovery_runs import Obtain, Run
from farflung.sims.recovery_tiers import Tier
from farflung.sims.recovery_train import Outcome

NONE = METHODS[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method at one rate; means over the seeds. None where a run diverged or did not get there."""

    method: str
    rate: float
    """Failures per stage and hour; 0 of `none`."""
    seeds: int
    losses: float
    """Stages lost in a run."""
    final_loss: float | None
    gap_percent: float | None
    """Of the final loss, to training without failures."""
    spread_percent: float | None
    """Standard deviation of the gap over the seeds."""
    gaps: tuple[float | None, ...]
    """By seed, each to the undisturbed run of the same seed."""
    reached: int
    """Runs that got to the target."""
    steps_to_target: float | None
    hours_to_target: float | None
    hours: tuple[float | None, ...]
    """By seed, to the target."""
    end_hours: tuple[float, ...]
    """By seed, to the end of the run: who has not reached the target by then takes longer."""
    kept_percent: float
    """Bytes that keep copies fresh, over the pipeline's own."""
    recovered_percent: float
    """Bytes that new peers get, the same way."""
    rungs: dict[str, int]
    """By what stages came back, in all runs together."""
    curve: Curve
    """Mean over the seeds; empty when one diverged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One kind of single loss, recovered by one rung; means over stages and seeds. None where a run diverged."""

    event: str
    rung: str
    runs: int
    jump: float | None
    left: float | None
    """Nats above undisturbed training after `event_steps`."""
    lefts: tuple[float, ...]
    """The same by seed and stage; of runs that did not diverge."""
    setback: float | None
    rungs: dict[str, int]
    """What the stages came back by, all runs together."""


def runs_of(methods: Sequence[Method], tier: Tier) -> list[Run]:
    """All that is to be trained for the table of whole runs, seed by seed, the most telling first."""
    found = []
    trained = [method for method in methods if method.fails and not method.computed]
    trained.sort(key=lambda method: method is not OURS)
    for seed in range(tier.seeds):
        found.append(_none(tier, seed))
        found += [Run(method=method, tier=tier, rate=rate, seed=seed) for method in trained for rate in tier.rates]
        if any(method.checkfree.plus for method in trained):
            found.append(Run(method=SWAPS_ALONE, tier=tier, rate=0.0, seed=seed))
    return found


def single_runs_of(methods: Sequence[Method], tier: Tier) -> list[Run]:
    """All for that of single losses, seed by seed."""
    rungs = _rungs(methods, tier)
    return [run for seed in range(tier.seeds) for event, rung in rungs for run in _once(event, rung, tier, seed)]


def undisturbed(run: Run) -> Run:
    """The same seed's without failures."""
    return _none(run.tier, run.seed)


def rows(methods: Sequence[Method], tier: Tier, obtain: Obtain) -> list[Row]:
    """One for each method and rate, `none` first, at the rate 0, and behind it the swapped order alone if it was run."""
    calm = [obtain(_none(tier, seed)) for seed in range(tier.seeds)]
    found = [_row(NONE, 0.0, tier, calm, calm)]
    if any(method.checkfree.plus for method in methods):
        swaps = [obtain(Run(method=SWAPS_ALONE, tier=tier, rate=0.0, seed=seed)) for seed in range(tier.seeds)]
        found.append(_row(SWAPS_ALONE, 0.0, tier, swaps, calm))
    for rate in tier.rates:
        for method in methods:
            if method.kind == "none":
                continue
            if method.computed:
                outcomes = calm
            else:
                outcomes = [obtain(Run(method=method, tier=tier, rate=rate, seed=seed)) for seed in range(tier.seeds)]
            found.append(_row(method, rate, tier, outcomes, calm))
    return found


def singles(methods: Sequence[Method], tier: Tier, obtain: Obtain) -> list[Single]:
    """One for each event and each rung that can recover it."""
    return [_single(event, rung, tier, obtain) for event, rung in _rungs(methods, tier)]


def _row(method: Method, rate: float, tier: Tier, outcomes: Sequence[Outcome], calm: Sequence[Outcome]) -> Row:
    curves, finals, gaps, steps, hours, end_hours = [], [], [], [], [], []
    shadow_share = _share([one.kept_bytes + one.recovered_bytes for one in outcomes], outcomes)
    losses = 0
    for seed, (outcome, none) in enumerate(zip(outcomes, calm, strict=True)):
        failures = pattern(tier, rate, seed) if rate else []
        losses += sum(map(len, failures))
        curve = outcome.curve
        if method.kind == "checkpoint":
            curve = rolled_back(curve, failures, tier.checkpoint_every)
        if not outcome.diverged:
            curves.append(curve)
            finals.append(curve[-1][1])
        gaps.append(None if outcome.diverged else gap_percent(curve, none.curve))
        when = first_at(curve, target(none, tier))
        if when is not None:
            steps.append(when)
        hours.append(None if when is None else seconds(tier, method, when, failures, shadow_share) / 3600)
        end_hours.append(seconds(tier, method, tier.steps, failures, shadow_share) / 3600)
    whole = len(curves) == tier.seeds
    known = [gap for gap in gaps if gap is not None]
    arrived = [one for one in hours if one is not None]
    return Row(
        method=method.name,
        rate=rate,
        seeds=tier.seeds,
        losses=losses / tier.seeds,
        final_loss=_mean(finals) if whole else None,
        gap_percent=_mean(known) if whole else None,
        spread_percent=stdev(known) if whole and tier.seeds > 1 else None,
        gaps=tuple(gaps),
        reached=len(arrived),
        steps_to_target=_mean(steps) if len(steps) == tier.seeds else None,
        hours_to_target=_mean(arrived) if len(arrived) == tier.seeds else None,
        hours=tuple(hours),
        end_hours=tuple(end_hours),
        kept_percent=0.0 if method.computed else 100 * _share([one.kept_bytes for one in outcomes], outcomes),
        recovered_percent=0.0 if method.computed else 100 * _share([one.recovered_bytes for one in outcomes], outcomes),
        rungs={} if method.computed else _sum(outcomes),
        curve=_mean_curve(curves) if whole else (),
    )


def gap_percent(curve: Curve, none: Curve) -> float:
    """Of the final loss, to that of the same seed without failures."""
    return 100 * (curve[-1][1] / none[-1][1] - 1)


def _single(event: Event, method: Method, tier: Tier, obtain: Obtain) -> Single:
    jumps, lefts, setbacks, outcomes = [], [], [], []
    for seed in range(tier.seeds):
        calm = obtain(_calm(method, tier, seed)).curve
        slope = (calm[0][1] - calm[-1][1]) / tier.event_steps
        for run in _once(event, method, tier, seed)[1:]:
            outcome = obtain(run)
            outcomes.append(outcome)
            if outcome.diverged:
                continue
            jumps.append(outcome.curve[0][1] - calm[0][1])
            lefts.append(outcome.curve[-1][1] - calm[-1][1])
            setbacks.append(lefts[-1] / slope)
    whole = len(jumps) == len(outcomes)
    return Single(
        event=event.name,
        rung=method.name,
        runs=len(outcomes),
        jump=_mean(jumps) if whole else None,
        left=_mean(lefts) if whole else None,
        lefts=tuple(lefts),
        setback=_mean(setbacks) if whole else None,
        rungs=_sum(outcomes),
    )


def _none(tier: Tier, seed: int) -> Run:
    return Run(method=NONE, tier=tier, rate=0.0, seed=seed)


def _calm(method: Method, tier: Tier, seed: int) -> Run:
    """The same training, and nothing is lost."""
    same = SWAPS_ALONE if method.checkfree.plus else NONE
    return Run(method=same, tier=tier.midway, rate=0.0, seed=seed, once=())


def _once(event: Event, method: Method, tier: Tier, seed: int) -> list[Run]:
    """The undisturbed run first."""
    lost = [Run(method=method, tier=tier.midway, rate=0.0, seed=seed, once=stages) for stages in event.stages]
    return [_calm(method, tier, seed), *lost]


def _rungs(methods: Sequence[Method], tier: Tier) -> list[tuple[Event, Method]]:
    """What is lost once, and the rungs of these methods that can recover it."""
    return [(event, rung) for event in events(tier) for rung in rungs_of(methods) if rung.name in event.rungs]


def target(none: Outcome, tier: Tier) -> float:
    """What training without failures has at half of its iterations."""
    return next(loss for step, loss in none.curve if 2 * step >= tier.steps)


def _share(nbytes: Sequence[int], outcomes: Sequence[Outcome]) -> float:
    return sum(nbytes) / sum(one.pipeline_bytes for one in outcomes)


def _sum(outcomes: Sequence[Outcome]) -> dict[str, int]:
    total = Counter[str]()
    for outcome in outcomes:
        total.update(outcome.rungs)
    return dict(total.most_common())


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    return tuple((points[0][0], _mean([loss for _, loss in points])) for points in zip(*curves, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def by_method(found: Sequence[Row], rate: float) -> dict[str, Row]:
    """The rows of a rate, and those without failures, by method."""
    return {row.method: row for row in found if row.rate in (0.0, rate)}
