"""Runs that are kept: a folder with a file for each that is finished, so that a comparison goes on where it was cut.

A run is known by all settings, whatever its method and tier are called; a changed one is a new run. What nodes' own
code decides is no setting, but for how long a learning rate rises: after a change there, take a new folder.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from farflung.node.durable import write_atomically
from farflung.sims.recovery_methods import NODES_OWN, Method
from farflung.sims.recovery_tiers import Tier
from farflung.sims.recovery_train import Outcome, Progress, lose_once, train
from farflung.training.recovery_rise import RISE_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is to be run."""

    method: Method
    tier: Tier
    rate: float
    """Failures per stage and hour; of undisturbed runs, and where something is lost once, 0."""
    seed: int
    once: tuple[int, ...] | None = None
    """The stages that are lost together, once; None for a whole run with failures of the rate."""

    @property
    def fingerprint(self) -> str:
        """Of all settings but the names, and but those of a tier that only say which runs are made, or what is computed from them."""
        method = replace(self.method, name="")
        tier = replace(self.tier, name="", seeds=1, rates=(), checkpoint_every=1)
        nodes_own = (RISE_STEPS,) if method.kind in NODES_OWN else ()
        decides = (method, tier, self.rate, self.seed, self.once, *nodes_own)
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]

    @property
    def steps(self) -> int:
        """Steps that it takes."""
        return self.tier.steps if self.once is None else self.tier.event_steps

    def make(self, progress: Progress) -> Outcome:
        """Train. Raises DataError."""
        if self.once is None:
            return train(self.method, self.tier, rate=self.rate, seed=self.seed, progress=progress)
        return lose_once(self.method, self.tier, self.once, seed=self.seed, progress=progress)


Obtain = Callable[[Run], Outcome]
"""Makes a run, or finds it."""


class Runs:
    """The folder, which is made when missing, and all that is in it. Raises OSError, and ValueError when a file of it is no run."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, Outcome] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob("*.json")):
            try:
                entry = json.loads(file.read_text(encoding="utf-8"))
                outcome = Outcome(**entry["outcome"])
                curve = tuple((int(step), float(loss)) for step, loss in outcome.curve)
                self._known[entry["fingerprint"]] = replace(outcome, curve=curve)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} is no run: remove it, or name another folder") from error

    def outcome(self, run: Run) -> Outcome | None:
        """What the run came to, if it was ever made."""
        return self._known.get(run.fingerprint)

    def made(self, run: Run) -> Outcome:
        """What a run came to that was made."""
        return self._known[run.fingerprint]

    def keep(self, run: Run, outcome: Outcome, seconds: float) -> None:
        """Remember it, on disk too if there is a folder: there in one piece or not at all."""
        self._known[run.fingerprint] = outcome
        if self._folder is None:
            return
        entry = {
            "fingerprint": run.fingerprint,
            "tier": run.tier.name,
            "method": run.method.name,
            "rate": run.rate,
            "seed": run.seed,
            "once": run.once,
            "seconds": round(seconds, 1),
            "outcome": asdict(outcome),
        }
        write_atomically(self._folder / f"{run.fingerprint}.json", json.dumps(entry).encode())
