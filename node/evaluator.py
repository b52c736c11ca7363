"""Who evaluates the outer parameters after a full cycle of fragments, and how much of the held-out samples it may read.

Every cycle is evaluated by one peer, the contributor that was ready soonest: it stands longest. While it stands that costs nobody anything, and a
two-hundredth of its time beside that is not noticed. Where this is too little for all held-out samples yet, a peer of several reads a few of them
meanwhile, so that a cycle without an evaluation is the exception; what that costs is not taken from what is saved up for the whole. The few are always
the same, so their losses can be compared from one to the next; but they are a noisier word on the model, and off by what these few are easier or harder
than the rest: the two losses are told apart, and never make one curve.
"""

from collections.abc import Callable, Iterable
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
    WHOLE = HELDOUT_SAMPLES


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
        """Whether an evaluation of a few samples costs less. Where it does not, as in a pipeline, whose model has to be fetched, the whole may take the share of the few."""
        self._sample_s = 0.0
        self._last_at = 0.0
        """When the last one ended."""
        self._whole_at = 0.0
        """When the last whole one did."""

    def extent(self, now: float, stood_s: float, *, alone: bool) -> Extent:
        """How much to read now; `stood_s`: what this node has stood since the last cycle. The first time everything: its cost is not known yet."""
        if self._cost_s(Extent.WHOLE) <= stood_s + (SHARE if self._has_few else FEW_SHARE) * (now - self._whole_at):
            return Extent.WHOLE
        few_share = 0.0 if alone else FEW_SHARE
        if self._has_few and self._cost_s(Extent.FEW) <= stood_s + few_share * (now - self._last_at):
            return Extent.FEW
        return Extent.NOTHING

    def spent(self, extent: Extent, seconds: float, now: float, *, failed: bool) -> None:
        """An evaluation took so long, until now."""
        self._last_at = now
        if extent is Extent.WHOLE:
            self._whole_at = now
        self._sample_s = seconds / extent.value * (FAILED_SHARE if failed else 1.0)

    def _cost_s(self, extent: Extent) -> float:
        return self._sample_s * extent.value
