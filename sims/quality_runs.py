"""Runs that are kept: a JSON-lines file with one line per (method, tier, learning rate, seed), so that a comparison of
hours goes on where it was interrupted.

A run is known by everything that decides its result: the settings of method and tier, whatever their names, go
into a fingerprint. A changed setting is a new run, and a file may hold the runs of many ablations.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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


class Runs:
    """The file, and all that is in it. Raises OSError, and ValueError when a line of it is no run."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, Outcome] = {}
        for number, line in enumerate(_lines(file), start=1):
            try:
                entry = json.loads(line)
                self._known[entry["fingerprint"]] = Outcome(**entry["outcome"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} of {file} is no run: remove it, or name another file") from error

    def outcome(self, run: Run) -> Outcome | None:
        """What the run came to, if it was ever made."""
        return self._known.get(run.fingerprint)

    def keeper(self, run: Run) -> Keeper | None:
        """Of this run while it is under way; None without a file."""
        return None if self._file is None else Keeper(self._file.with_name(f"{self._file.name}.{run.fingerprint}.pt"))

    def keep(self, run: Run, outcome: Outcome, seconds: float) -> None:
        """Remember it, on disk too if there is a file."""
        self._known[run.fingerprint] = outcome
        if self._file is None:
            return
        entry = {
            "fingerprint": run.fingerprint,
            "tier": run.tier.name,
            "method": run.method.name,
            "lr": run.lr,
            "seed": run.seed,
            "seconds": round(seconds, 1),
            "outcome": asdict(outcome),
        }
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
            out.flush()
            os.fsync(out.fileno())


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


def _lines(file: Path | None) -> Iterator[str]:
    if file is not None and file.exists():
        yield from file.read_text(encoding="utf-8").splitlines()
