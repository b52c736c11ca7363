"""Who evaluates the outer parameters after a full cycle of fragments, and how much of the held-out samples it may read.

Every cycle is evaluated by one peer, the contributor that was ready soonest: it stands longest. While it stands that costs nobody anything, and a
two-hundredth of its time beside that is not noticed. Where this is too little for all held-out samples, a peer of several reads a few of them all the
same, so that a cycle without an evaluation is the exception. These few are always the same and every evaluation reads them, so `few_loss` can be
compared from one to the next; it is a noisier word on the model than `loss`, and off by what these few are easier or harder than the rest: the two are
told apart, and never make one curve.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from farflung.node.learner import FEW_SAMPLES, HELDOUT_SAMPLES
from farflung.protocol.chain import Contribution
from farflung.protocol.keys import PeerId

SHARE = 0.005
"""Part of the time that evaluations may take beyond the time a node waits anyway."""

FEW_SHARE = 0.02
"""The same for an evaluation of a few samples, where there are several peers: of one peer's time, and not of everybody's. A lap of 150 samples or
more costs so much."""

FAILED_SHARE = 0.1
"""Of the time that an evaluation took, what counts where nothing came of it: it is tried again sooner."""


class Extent(Enum):
    """How much is read; the value is the number of samples, or all where there are fewer."""

    NOTHING = 0
    FEW = FEW_SAMPLES
    WHOLE = FEW_SAMPLES + HELDOUT_SAMPLES
    """The few once more: what is read with them is not kept."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out losses of the outer parameters, nats per token."""

    loss: float | None
    """None where only a few samples were read."""
    few_loss: float | None
    """None where evaluations are of the whole only."""


def evaluator(contributors: Iterable[Contribution], alive: Callable[[PeerId], bool]) -> PeerId | None:
    """Who evaluates after a round: of its contributors that live the one that was ready soonest. None when all are dead.

    Members may differ for a moment about who lives. Then two evaluate, or nobody does; a version has one loss whoever computes it.
    """
    living = [c for c in contributors if alive(c.peer)]
    return min(living, key=lambda c: (c.ready_ms, c.peer)).peer if living else None


class Budget:
    """What evaluations may cost this node, by what they have cost."""

    def __init__(self, *, has_few: bool) -> None:
        self._has_few = has_few
        """Whether an evaluation of a few samples costs less."""
        self._sample_s = 0.0
        self._last_at = 0.0

    def extent(self, now: float, stood_s: float, *, alone: bool) -> Extent:
        """How much to read now; `stood_s`: what this node has stood since the last cycle. The first time everything: its cost is not known yet."""
        since = now - self._last_at
        allowance_s = stood_s + SHARE * since
        if self._cost_s(Extent.WHOLE) <= allowance_s:
            return Extent.WHOLE
        if self._has_few and self._cost_s(Extent.FEW) <= max(allowance_s, 0.0 if alone else FEW_SHARE * since):
            return Extent.FEW
        return Extent.NOTHING

    def spent(self, extent: Extent, seconds: float, now: float, *, failed: bool) -> None:
        """An evaluation took so long, until now."""
        self._last_at = now
        self._sample_s = seconds / extent.value * (FAILED_SHARE if failed else 1.0)

    def _cost_s(self, extent: Extent) -> float:
        return self._sample_s * extent.value
