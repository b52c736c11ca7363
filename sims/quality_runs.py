"""The runs that a comparison of training methods takes: (method, tier, learning rate, seed), and the search for the learning rate, which asks for them.

A run is known by everything that decides its result: the data and the settings of method and tier, whatever their names, go into a fingerprint.
"""

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farflung.sims.kept import Kept
from farflung.sims.quality_methods import JUDGED, Method
from farflung.sims.quality_resume import Keeper
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_train import Outcome, content_hash

REVISION = 3
"""Of what runs do with their settings: where that changes, what was kept before is of other runs. 2: methods that are a whole round late begin each interval at the outer
parameters, and end with the mean. 3: the mean of two peers is what both have sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is to be run."""

    method: Method
    tier: Tier
    lr: float
    seed: int

    @property
    def fingerprint(self) -> str:
        """Of the data and all settings but the names, and but those of a tier that only say which runs are made. Raises DataError."""
        method = replace(self.method, name="", lr_scale=1.0)
        tier = replace(self.tier, name="", adamw_lrs=(), muon_lrs=(), seeds=1)
        warm_lr = self.tier.warm_lr(self.method, self.lr)
        return hashlib.sha256(
            repr((REVISION, method, tier, self.lr, warm_lr, self.seed, content_hash(tier))).encode()
        ).hexdigest()[:16]

    @property
    def about(self) -> dict[str, object]:
        """For people."""
        return {"tier": self.tier.name, "method": self.method.name, "lr": self.lr, "seed": self.seed}


def keeper_of(run: Run, file: Path | None) -> Keeper | None:
    """Of this run while it is under way, beside the file of the finished ones; None without one."""
    return None if file is None else Keeper(file.with_name(f"{file.name}.{run.fingerprint}.pt"))


EXTENSIONS = 2
"""Learning rates beyond a method's grid, at most."""
EXTENDED_BY = 2.0

Grid = tuple[tuple[float, float | None], ...]
"""Learning rates, and the loss of each on the part for choosing; None where it diverged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A method at its best learning rate."""

    method: Method
    grid: Grid
    """The learning rates that were tried."""
    outcomes: tuple[Outcome, ...]
    """One per seed, from 0, at the best of them."""

    @property
    def losses(self) -> list[float | None]:
        return [outcome.eval_loss for outcome in self.outcomes]


Search = Generator[list[Run], Sequence[Outcome], Tuned]
"""Yields the runs that it has to know next, is sent what they came to, and returns what it was for."""


def tuning(method: Method, tier: Tier) -> Search:
    """What each learning rate of the tier comes to with the first seed, then all seeds with the best of them. Data-parallel training, to which all are compared, is tried with more
    than one seed, and the best is that of their mean: what one seed likes best may be at the edge of what others bear. As long as the best is at an
    edge, another one is tried beyond it, `EXTENSIONS` at most; but a grid of one rate asks for no choice."""
    each, grid = seeds_tried(method, tier), sorted(tier.lrs(method))

    def tried_at(*lrs: float) -> Generator[list[Run], Sequence[Outcome], Grid]:
        outcomes = yield [Run(method=method, tier=tier, lr=lr, seed=seed) for lr in lrs for seed in range(each)]
        losses = [outcome.tune_loss for outcome in outcomes]
        return tuple((lr, mean(losses[number * each : (number + 1) * each])) for number, lr in enumerate(lrs))

    tried = yield from tried_at(*grid)
    for _ in range(EXTENSIONS if len(grid) > 1 else 0):
        lowest, highest = tried[0][0], tried[-1][0]
        if best(tried) == lowest:  # also where all diverge
            tried = (*(yield from tried_at(lowest / EXTENDED_BY)), *tried)
        elif best(tried) == highest:
            tried = (*tried, *(yield from tried_at(highest * EXTENDED_BY)))
    seeds = range(num_seeds(method, tier))
    outcomes = yield [Run(method=method, tier=tier, lr=best(tried), seed=seed) for seed in seeds]
    return Tuned(method=method, grid=tried, outcomes=tuple(outcomes))


def conduct(
    searches: Sequence[Search],
    make: Callable[[list[Run], int], None],  # keeps runs that are not kept yet; told how many beside them are
    kept: Kept[Outcome],
) -> list[Tuned]:
    """Where all searches end, side by side: what all want to know next is made together."""
    wanted = {index: next(search) for index, search in enumerate(searches)}
    ends: dict[int, Tuned] = {}
    while wanted:
        missing = {run.fingerprint: run for runs in wanted.values() for run in runs if kept.outcome(run) is None}
        make(list(missing.values()), sum(map(len, wanted.values())) - len(missing))
        for index, runs in list(wanted.items()):
            try:
                wanted[index] = searches[index].send([kept.made(run) for run in runs])
            except StopIteration as end:
                ends[index] = end.value
                del wanted[index]
    return [ends[index] for index in range(len(searches))]


def best(tried: Grid) -> float:
    """The learning rate with the least loss. When all diverge, the lowest."""
    lr, _ = min(tried, key=lambda one: math.inf if one[1] is None else one[1])
    return lr


def planned(methods: Sequence[Method], tier: Tier) -> int:
    """Runs that a comparison asks for when no method needs rates beyond its grid; the first seed of each twice."""
    return sum(len(tier.lrs(method)) * seeds_tried(method, tier) + num_seeds(method, tier) for method in methods)


def seeds_tried(method: Method, tier: Tier) -> int:
    """With so many each rate of the grid is tried."""
    return max(_seeds_of_others(tier), 2) if method.whole_batch else 1


def mean(values: Sequence[float | None]) -> float | None:
    """None when any is, or there are none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there and len(there) == len(values) else None


def num_seeds(method: Method, tier: Tier) -> int:
    """With the best rate. All of a tier's for what its goals are told by, half as many for the others; two of data-parallel training whatever the tier, for its spread stands
    next to every gap."""
    seeds = tier.seeds if method.outer is None or method.name in JUDGED else _seeds_of_others(tier)
    return max(seeds, 2) if method.whole_batch else seeds


def _seeds_of_others(tier: Tier) -> int:
    return -(-tier.seeds // 2)
