"""The runs that the bench takes, whole ones and those in which something is lost once.

A run is known by all settings, whatever its method and tier are called; a changed one is a new run. What nodes' own
code decides is no setting, but for how long a learning rate rises: after a change there, take a new file.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

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
    def about(self) -> dict[str, object]:
        """For people."""
        named = {"tier": self.tier.name, "method": self.method.name}
        return {**named, "rate": self.rate, "seed": self.seed, "once": self.once}

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
