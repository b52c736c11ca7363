"""The inner learning rate: a pure function of the global inner step.

A step counts for the whole run, not for the round and not for the peer, so that peers that join late use
the rate of everybody else (DiLoCo, 2311.08105; digest 1.1).
"""

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up, then one of three shapes. Raises ValueError for numbers that make no schedule."""

    peak: float
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    total_steps: int = 0
    """Global steps of the run; beyond it the final rate stays. Not used by `constant`."""
    kind: Kind = "cosine"
    """`cosine` down to the final rate; `wsd` stays at the peak and falls linearly at the end; `constant`."""
    final_ratio: float = 0.1
    """The last rate, as a share of the peak."""
    decay_ratio: float = 0.2
    """For `wsd`: share of the total steps in which the rate falls."""

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "wsd", "constant"):
            raise ValueError(f"schedule kind {self.kind!r} is none of cosine, wsd, constant")
        if not 0 < self.peak < math.inf or self.warmup_steps < 0:
            raise ValueError("peak must be positive and warmup_steps at least 0")
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps {self.total_steps} must exceed warmup_steps {self.warmup_steps}")
        if not 0 <= self.final_ratio <= 1 or not 0 < self.decay_ratio <= 1:
            raise ValueError("final_ratio must be in [0, 1] and decay_ratio in (0, 1]")

    def at(self, global_step: int) -> float:
        """The learning rate of step `global_step`, which counts from 0."""
        if global_step < self.warmup_steps:
            return self.peak * (global_step + 1) / self.warmup_steps
        match self.kind:
            case "constant":
                return self.peak
            case "cosine":
                done = min(1.0, (global_step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
                share = 0.5 * (1 + math.cos(math.pi * done))
            case "wsd":
                decay_steps = min(self.decay_ratio * self.total_steps, self.total_steps - self.warmup_steps)
                share = min(1.0, max(0.0, (self.total_steps - global_step) / decay_steps))
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * share)
