"""Whether a stage that was begun anew has full weight yet: a data node's trial of it, by the loss of the whole model.

What a founder has made was tried on activations that its neighbours remember (`recovery_fit`), which says what the stage does and not what comes of it. The
data nodes see that: for the first steps that their microbatches make through another life of a stage they compare the mean loss of those microbatches with
what it was before. Where it is worse by more than a margin, all other stages would follow gradients of a broken model; so of such a step only what the peers
of the new stage have summed up counts. The stage learns among others that stand still, the samples are trained again (but for those of a stage 0 that is tried
itself, which has learnt from them), and after `TRIAL_STEPS` it has full weight whatever the loss, for then it would be for the whole model to adapt to it.

Each data node judges by its own microbatches, and for what is summed up for it. One that is new compares with what the others say the loss was, and tries what
they are trying, for three steps of its own; where nobody says anything there is nothing to compare, and it tries nothing. So those who begin stage 0 anew try it,
too: the other stages remember the loss of the data nodes that are gone.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean

TRIAL_STEPS = 3
"""Steps through a new life of a stage that are tried."""

MARGIN = 0.5
"""Nats per token by which the loss may be worse. The mean of a few microbatches is off by tenths, a stage that is left out costs whole nats."""

RECENT = 4
"""Steps before the loss of the stage, with what their microbatches' loss is compared: few, for early in a run it falls fast."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of one stage in one step."""

    stage: int
    life: int
    number: int
    """Of the trial, from 1."""
    loss: float
    """Mean over the microbatches that visited it, nats per token."""
    usual: float
    """What it was before."""

    @property
    def passes(self) -> bool:
        """Whether it has full weight in this step; a loss that is no number has not."""
        return self.loss <= self.usual + MARGIN

    @property
    def why(self) -> str:
        """For people."""
        said = f"the loss through life {self.life} of stage {self.stage} is {self.loss:.3f}, and was {self.usual:.3f} before"
        if self.passes:
            return f"{said}: the step counts"
        return f"{said}, which is worse by more than {MARGIN}: the step counts at that stage only"


class LossTrial:
    """Of all stages, by one data node. `look` once after each of its steps."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        """Mean losses of the last steps that had full weight; before the first of ours, what others say."""
        self._lives: dict[int, int] = {}
        """By stage, the newest life that we know."""
        self._tried: dict[int, int] = {}
        """By stage that is on trial, how often it was tried."""
        self.has_begun = False
        """Whether this data node knows what it tries, and does not only hear of it."""

    @property
    def usual(self) -> float:
        """What the loss was of late, nats per token; 0: unknown."""
        return fmean(self._recent) if self._recent else 0.0

    @property
    def tries(self) -> tuple[int, ...]:
        """The stages that are on trial."""
        return tuple(sorted(self._tried))

    def begin(
        self,
        told: float,  # what others say that the loss is, nats per token; 0: nobody does
        tries: Collection[int],  # the stages that they try, and the one that we have just made
    ) -> None:
        """Before our first step."""
        self.has_begun = True
        if told:
            self._recent.append(told)
            self._tried = dict.fromkeys(tries, 0)

    def look(
        self,
        losses: Mapping[int, float],  # by microbatch of ours that came home, nats per token
        visited: Mapping[int, Collection[int]],  # by microbatch, the stages on its way
        lives: Mapping[int, int],  # by stage, the number of the life that serves
    ) -> list[Tried]:
        """The stages that are tried in this step."""
        known, self._lives = self._lives, {**self._lives, **lives}
        for stage, life in lives.items():
            if life > known.get(stage, life) and self._recent:
                self._tried[stage] = 0
        found: list[Tried] = []
        for stage in self.tries:
            tried = self._try(stage, losses, visited)
            if tried is not None:
                found.append(tried)
                if stage == 0 and not tried.passes:
                    break  # it was on the way of all of them, so they say nothing of other stages
        if losses and all(tried.passes for tried in found):
            mean = fmean(losses.values())
            if math.isfinite(mean):
                self._recent.append(mean)
        return found

    def _try(self, stage: int, losses: Mapping[int, float], visited: Mapping[int, Collection[int]]) -> Tried | None:
        """None where nothing went through it."""
        through = [loss for microbatch, loss in losses.items() if stage in visited[microbatch]]
        if not through:
            return None
        self._tried[stage] += 1
        number = self._tried[stage]
        if number == TRIAL_STEPS:
            del self._tried[stage]
        return Tried(stage, self._lives[stage], number, fmean(through), self.usual)


def counting(tried: Collection[Tried], stages: int) -> frozenset[int]:
    """The stages at which a step counts after these trials."""
    failed = frozenset(one.stage for one in tried if not one.passes)
    return failed or frozenset(range(stages))
