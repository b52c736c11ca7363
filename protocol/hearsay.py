"""What a peer remembers of the run from what others say: those who know it themselves, and where none of them is heard, those who have heard them.

Data nodes count steps and samples, and see the loss. When all of them are gone, whoever begins stage 0 anew counts on from what is remembered, and compares its
loss with that (`lives`, `training/recovery_trial.py`). Counted is as much as half of those who say anything say at least, and the loss is their median, of two the
lower: a lie of one among three decides nothing, and one of two that is too low costs three steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from farflung.protocol.lives import BEGINNING, Counters
from farflung.protocol.pipeline_messages import Present


@dataclass(slots=True)
class Hearsay:
    """See the module."""

    counted: Counters = BEGINNING
    """What stage 0's chain has counted, the newest that enough have said."""
    loss: float = 0.0
    """Of the pipeline's steps of late, nats per token; 0: unknown."""

    def listen(
        self,
        homes: Sequence[Present],  # of data nodes that train, or have made the last round
        others: Sequence[Present],  # of those who serve another stage
    ) -> None:
        """Remember what is said now. What we have heard of data nodes ourselves is not changed by what others remember of them."""
        counted = sorted((one.counted for one in homes or others if one.counted != BEGINNING), key=_progress)
        if counted:
            self.counted = max(self.counted, counted[len(counted) // 2], key=_progress)
        self.loss = _median_loss(homes) or self.loss or _median_loss(others)


def _median_loss(said: Sequence[Present]) -> float:
    losses = [one.loss for one in said if one.loss > 0.0]
    return median_low(losses) if losses else 0.0


def _progress(counted: Counters) -> tuple[int, int, int]:
    return counted.version, counted.steps, counted.samples
