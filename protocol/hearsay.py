"""What a peer remembers of the run from what others say: those who know it themselves, and where none of them is heard, those who have heard them.

Data nodes count steps and samples, and see the loss. When all of them are gone, whoever begins stage 0 anew counts on from what is remembered, and compares its
loss with that (`lives`, `training/recovery_trial.py`). Counted is as much as half of those who say anything say at least, and the loss is their median: fewer
decide nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from farflung.protocol.lives import BEGINNING, Counters
from farflung.protocol.pipeline_messages import Present


@dataclass(slots=True)
class Hearsay:
    """See the module. In all methods: `homes`, what data nodes that train say of themselves; `others`, what those say who serve another stage."""

    counted: Counters = BEGINNING
    """What stage 0's chain has counted, the newest that enough have said."""
    loss: float = 0.0
    """What `usual_loss` found last."""

    def listen(self, homes: Sequence[Present], others: Sequence[Present]) -> None:
        """Remember what is said now."""
        counted = sorted((one.counted for one in homes or others if one.counted != BEGINNING), key=_progress)
        if counted:
            self.counted = max(self.counted, counted[len(counted) // 2], key=_progress)
        self.loss = self.usual_loss(homes, others)

    def usual_loss(self, homes: Sequence[Present], others: Sequence[Present]) -> float:
        """Of the pipeline's steps, nats per token: by the data nodes; where none is heard what we have heard of them before, or else what others remember.
        0: unknown."""
        return _median_loss(homes) or self.loss or _median_loss(others)


def _median_loss(said: Sequence[Present]) -> float:
    losses = [one.loss for one in said if one.loss > 0.0]
    return median_low(losses) if losses else 0.0


def _progress(counted: Counters) -> tuple[int, int, int]:
    return counted.version, counted.steps, counted.samples
