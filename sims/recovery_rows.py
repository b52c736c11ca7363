"""From runs to the rows of the tables: losses against training without failures, modelled hours to a target, bytes.

All differences are taken seed by seed. Iterations count from the first in which something may be lost. The target is
what training without failures has at half of them, so each seed has its own. Hours are of `recovery_clock`; a method
that does not get to the target in one of its runs has none.

A single loss is compared with the same training undisturbed, whose loss falls by `slope` per step meanwhile:

    jump       loss right after the recovery, before any step, minus the undisturbed
    setback    what is left of that after `event_steps`, over the slope: steps by which training lags behind
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.sims.recovery_clock import Curve, first_at, rolled_back, seconds
from farflung.sims.recovery_failures import Event, events, pattern
from farflung.sims.recovery_methods import METHODS, SINGLE, SWAPS_ALONE, Method
from farflung.sims.recovery_runs import Obtain, Run
from farflung.sims.recovery_tiers import Tier
from farflung.sims.recovery_train import Outcome

NONE = METHODS[0]

ONCE_RATE = 0.10
"""Failures per stage and hour that the ladder and its shadows count with in single losses."""


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
    """Of the gap, from the best to the worst seed."""
    reached: int
    """Runs that got to the target."""
    steps_to_target: float | None
    hours_to_target: float | None
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
    setback: float | None
    rungs: dict[str, int]
    """What the stages came back by, all runs together."""


def runs_of(methods: Sequence[Method], tier: Tier) -> list[Run]:
    """All that is to be trained for the tables, seed by seed."""
    found = []
    trained = [method for method in methods if method.fails and not method.computed]
    for seed in range(tier.seeds):
        found.append(_none(tier, seed))
        if any(method.checkfree.plus for method in trained):
            found.append(Run(method=SWAPS_ALONE, tier=tier, rate=0.0, seed=seed))
        found += [Run(method=method, tier=tier, rate=rate, seed=seed) for method in trained for rate in tier.rates]
        if list(methods) == list(METHODS):
            found += [
                run for event in events(tier) for method in _rungs(event) for run in _once(event, method, tier, seed)
            ]
    return list(dict.fromkeys(found))  # undisturbed runs are compared with more than once


def rows(methods: Sequence[Method], tier: Tier, obtain: Obtain) -> list[Row]:
    """One for each method and rate, `none` first, at the rate 0, and behind it the swapped order alone if it was run."""
    undisturbed = [obtain(_none(tier, seed)) for seed in range(tier.seeds)]
    found = [_row(NONE, 0.0, tier, undisturbed, undisturbed)]
    if any(method.checkfree.plus for method in methods):
        swaps = [obtain(Run(method=SWAPS_ALONE, tier=tier, rate=0.0, seed=seed)) for seed in range(tier.seeds)]
        found.append(_row(SWAPS_ALONE, 0.0, tier, swaps, undisturbed))
    for rate in tier.rates:
        for method in methods:
            if method.kind == "none":
                continue
            if method.computed:
                outcomes = undisturbed
            else:
                outcomes = [obtain(Run(method=method, tier=tier, rate=rate, seed=seed)) for seed in range(tier.seeds)]
            found.append(_row(method, rate, tier, outcomes, undisturbed))
    return found


def singles(tier: Tier, obtain: Obtain) -> list[Single]:
    """One for each event and each rung that can recover it."""
    return [_single(event, method, tier, obtain) for event in events(tier) for method in _rungs(event)]


def _row(method: Method, rate: float, tier: Tier, outcomes: Sequence[Outcome], undisturbed: Sequence[Outcome]) -> Row:
    curves, finals, gaps, steps, hours = [], [], [], [], []
    shadow_share = _share([one.kept_bytes + one.recovered_bytes for one in outcomes], outcomes)
    losses = 0
    for seed, (outcome, none) in enumerate(zip(outcomes, undisturbed, strict=True)):
        failures = pattern(tier, rate, seed) if rate else []
        losses += sum(map(len, failures))
        curve = outcome.curve
        if method.kind == "checkpoint":
            curve = rolled_back(curve, failures, tier.checkpoint_every)
        if not outcome.diverged:
            curves.append(curve)
            finals.append(curve[-1][1])
            gaps.append(100 * (curve[-1][1] / none.curve[-1][1] - 1))
        when = first_at(curve, _target(none, tier))
        if when is not None:
            steps.append(when)
            hours.append(seconds(tier.clock, method, when, failures, shadow_share) / 3600)
    whole = len(curves) == tier.seeds
    return Row(
        method=method.name,
        rate=rate,
        seeds=tier.seeds,
        losses=losses / tier.seeds,
        final_loss=_mean(finals) if whole else None,
        gap_percent=_mean(gaps) if whole else None,
        spread_percent=max(gaps) - min(gaps) if whole and tier.seeds > 1 else None,
        reached=len(steps),
        steps_to_target=_mean(steps) if len(steps) == tier.seeds else None,
        hours_to_target=_mean(hours) if len(hours) == tier.seeds else None,
        kept_percent=0.0 if method.computed else 100 * _share([one.kept_bytes for one in outcomes], outcomes),
        recovered_percent=0.0 if method.computed else 100 * _share([one.recovered_bytes for one in outcomes], outcomes),
        rungs={} if method.computed else _sum(outcomes),
        curve=_mean_curve(curves) if whole else (),
    )


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
        setback=_mean(setbacks) if whole else None,
        rungs=_sum(outcomes),
    )


def _none(tier: Tier, seed: int) -> Run:
    return Run(method=NONE, tier=tier, rate=0.0, seed=seed)


def _calm(method: Method, tier: Tier, seed: int) -> Run:
    """The same training, and nothing is lost."""
    undisturbed = SWAPS_ALONE if method.checkfree.plus else NONE
    return Run(method=undisturbed, tier=tier, rate=ONCE_RATE, seed=seed, once=())


def _once(event: Event, method: Method, tier: Tier, seed: int) -> list[Run]:
    """The undisturbed run first."""
    lost = [Run(method=method, tier=tier, rate=ONCE_RATE, seed=seed, once=stages) for stages in event.stages]
    return [_calm(method, tier, seed), *lost]


def _rungs(event: Event) -> list[Method]:
    return [method for method in SINGLE if method.name in event.rungs]


def _target(none: Outcome, tier: Tier) -> float:
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
