"""The runs that a comparison of training methods takes: (method, tier, learning rate, seed), and the search for the learning rate.

A run is known by everything that decides its result: the settings of method and tier, whatever their names, go into a fingerprint.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farflung.sims.quality_methods import Method
from farflung.sims.quality_resume import Keeper
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_train import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is to be run."""

    method: Method
    tier: Tier
    lr: float
    seed: int

    @property
    def fingerprint(self) -> str:
        """Of all settings but the names, and but those of a tier that only say which runs are made."""
        method = replace(self.method, name="", lr_scale=1.0)
        tier = replace(self.tier, name="", adamw_lrs=(), muon_lrs=(), seeds=1)
        warm_lr = self.lr / self.method.lr_scale
        return hashlib.sha256(repr((method, tier, self.lr, warm_lr, self.seed)).encode()).hexdigest()[:16]

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

Obtain = Callable[[Run], Outcome]
"""Makes a run, or finds it."""


Grid = tuple[tuple[float, float | None], ...]
"""Learning rates, and the loss of each on the part for choosing; None where it diverged."""


def grid(method: Method, tier: Tier, obtain: Obtain) -> Grid:
    """What each learning rate of the tier comes to with the first seed. As long as the best of them is at an edge, another one is tried
    beyond it, `EXTENSIONS` at most."""

    def tried_at(lr: float) -> tuple[float, float | None]:
        return lr, obtain(Run(method=method, tier=tier, lr=lr, seed=0)).tune_loss

    tried = tuple(tried_at(lr) for lr in sorted(tier.lrs(method)))
    for _ in range(EXTENSIONS):
        lowest, highest = tried[0][0], tried[-1][0]
        if best(tried) == lowest:  # also where all diverge
            tried = (tried_at(lowest / EXTENDED_BY), *tried)
        elif best(tried) == highest:
            tried = (*tried, tried_at(highest * EXTENDED_BY))
    return tried


def best(tried: Grid) -> float:
    """The learning rate with the least loss. When all diverge, the lowest."""
    lr, _ = min(tried, key=lambda one: math.inf if one[1] is None else one[1])
    return lr


def planned(methods: Sequence[Method], tier: Tier) -> int:
    """Runs that a comparison takes, at most."""
    return sum(len(tier.lrs(method)) + EXTENSIONS + num_seeds(method, tier) - 1 for method in methods)


def num_seeds(method: Method, tier: Tier) -> int:
    """Data-parallel training has a spread whatever the tier, for it stands next to every gap."""
    return max(tier.seeds, 2) if method.whole_batch else tier.seeds
