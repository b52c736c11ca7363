"""What losing a stage costs, by how it comes back: iterations of the whole pipeline, and seconds (digest, 5.5).

    cost of a try        transfer at the speed of the link, and what must be computed; the pipeline stands still
                         meanwhile, or, if routes can leave the stage out, does work worth (1 - SKIP_TAX)
    chance of a try      that all who take part survive it: exp(-peers * failures per second * duration)
    setback              iterations until the loss is what it would have been without the failure

The setbacks are measured ones, and a swarm may put its own in their place; where they come from:

- a copy that is n steps old: the digest has 0 to 0.3 n iterations of that stage alone. In the bench's small model 40
  steps cost 0.003 nats where a step gains 0.004, but 29 steps 0.09 to 0.12 nats for the data node's layers and its
  embedding, norm and head (docs/experiments.md);
- the neighbour mean: the extra iterations of CheckFree in the 500 M model, per loss: 57, 31 and 23 at 5, 10 and 16 %
  failures per stage and hour. Losses that follow each other closely share their cost;
- the others as multiples of it, by what each loses in the digest's small model (6.3): the fit takes a quarter off the
  mean, a copy of the neighbour loses 1.8 times as much, a random stage 5.4 times. A twin of CheckFree+ loses nothing
  that can be told from the tax of its swaps; half the mean is an upper guess. Interpolation over two lost stages is
  counted as the copy, since each of both is as near to one survivor as a copy is, and the other is one further away;
- the first stage, on which all others build, without a copy of it: 34 means as a copy of the next one, 45 anew. So in
  both sizes of `farflung bench recovery`, with the embedding lost and with it kept: 280 to 750 and 350 to 1,000
  iterations, where a mean within costs 8 to 22. The last stage costs no more than one within.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SETBACK_PER_STEP_BEHIND = 0.05
"""Iterations per step that a copy of a stage's layers is behind."""

FIRST_SETBACK_PER_STEP = 1.0
"""The same of the first stage's layers, and of embedding, norm and head, on which all others build."""

MEAN_SETBACKS = ((0.05, 57.0), (0.10, 31.0), (0.16, 23.0))
"""(failures per stage and hour, iterations per loss) of the neighbour mean."""

SKIP_TAX = 0.25
"""Of an iteration that leaves a stage out: skipping a third of the visits takes 1.25 to 1.3 times the iterations (6.3)."""


class Rung(StrEnum):
    """A way to get a stage back."""

    REPLICA = "live replica"
    OWN = "own disk"
    """What the new peer was itself in an earlier life of the stage: nobody serves that, and nobody need send it."""
    BEHIND = "replica behind"
    SHADOW = "shadow"
    TWIN = "swap twin"
    FITTED = "fitted mean"
    MEAN = "neighbour mean"
    INTERPOLATION = "interpolation"
    RANDOM = "random"

    @property
    def is_exact(self) -> bool:
        """The stage's own outer state, its momentum too, not a copy of weights or what others give. The optimiser's moments come from one's own disk alone."""
        return self in (Rung.REPLICA, Rung.OWN, Rung.BEHIND)

    @property
    def bumps_lr(self) -> bool:
        """The stage's learning rate is raised for a while: it was made of others, and has to become itself again."""
        return self in (Rung.TWIN, Rung.FITTED, Rung.MEAN, Rung.INTERPOLATION)

    @property
    def is_fitted(self) -> bool:
        """To what the neighbours remember of the lost one, where they do: it has nothing of that itself. A plain mean is what remains where they do not."""
        return self in (Rung.FITTED, Rung.INTERPOLATION, Rung.RANDOM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setbacks:
    """Iterations that a recovery costs; the defaults are the digest's."""

    per_step_behind: float = SETBACK_PER_STEP_BEHIND
    first_per_step_behind: float = FIRST_SETBACK_PER_STEP
    mean: tuple[tuple[float, float], ...] = MEAN_SETBACKS
    """Increasing in the rate; between the points linear, outside of them flat."""
    times_mean: Mapping[Rung, float] = field(
        default_factory=lambda: {
            Rung.TWIN: 0.5,
            Rung.FITTED: 0.75,
            Rung.MEAN: 1.0,
            Rung.INTERPOLATION: 1.8,
            Rung.RANDOM: 5.4,
        }
    )
    first_times_mean: Mapping[Rung, float] = field(
        default_factory=lambda: {Rung.INTERPOLATION: 34.0, Rung.RANDOM: 45.0}
    )
    """Of the first stage, where it differs."""

    def iterations(self, rung: Rung, *, stage: int, steps_behind: int, failures_per_hour: float) -> float:
        """Of one recovery of `stage` by this rung, at so many failures per stage and hour (a share, 0 to 1)."""
        if rung.is_exact or rung is Rung.SHADOW:
            return self.per_step(stage) * steps_behind
        times = self.times_mean if stage else {**self.times_mean, **self.first_times_mean}
        return times[rung] * self._mean(failures_per_hour)

    def without_copy(self, stage: int, failures_per_hour: float) -> float:
        """The same of what such a stage is made of when all its peers are lost, and nobody has a copy."""
        rung = Rung.MEAN if stage else Rung.INTERPOLATION
        return self.iterations(rung, stage=stage, steps_behind=0, failures_per_hour=failures_per_hour)

    def per_step(self, stage: int) -> float:
        """Of copies of a stage."""
        return self.per_step_behind if stage else self.first_per_step_behind

    def _mean(self, rate: float) -> float:
        if rate <= self.mean[0][0]:
            return self.mean[0][1]
        for (low, first), (high, second) in zip(self.mean, self.mean[1:], strict=False):
            if rate <= high:
                return first + (second - first) * (rate - low) / (high - low)
        return self.mean[-1][1]


def per_second(failures_per_hour: float) -> float:
    """The rate of a process that fails within an hour with this chance, 1/s."""
    return -math.log1p(-failures_per_hour) / 3600.0


def per_iteration(failures_per_hour: float, iteration_s: float) -> float:
    """The chance to fail within an iteration: 1 - (1 - p)**(T / 3600) (digest, 2.4)."""
    return -math.expm1(-per_second(failures_per_hour) * iteration_s)
