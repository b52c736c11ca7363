"""What trains, as the node sees it, and what does so on a peer that holds the whole model: a replica fed from a data set.

Rounds, checkpoints and late joins need a `Learner`, be it of the whole model or of a stage (`stage_learner`); only who holds
the whole can take inner steps and evaluate by itself, a `WholeLearner`.

All methods block and compute: the node calls them through its door (`farflung.node.door`), never from the loop.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from farflung.training.coupled import Slice, Update
from farflung.training.data import Dataset
from farflung.training.inner import StepReport
from farflung.training.model_state import ModelState
from farflung.training.order import SampleOrder
from farflung.training.outer import OuterState
from farflung.training.replica import Replica

HELDOUT_SAMPLES = 64
"""Sequences of the held-out split that an evaluation reads: its standard error is well below the changes between rounds."""

FEW_SAMPLES = 8
"""Of them, where there is little time: always the same, as evenly spread as all."""


class Saves(Protocol):
    """Whose state a checkpoint takes."""

    def save(self, folder: Path) -> None:
        """Write everything, atomically. Raises OSError."""


class Learner(Saves, Protocol):
    """One peer's mathematics as rounds see it: local progress, and the outer state that all peers share."""

    @property
    def outer(self) -> OuterState: ...

    @property
    def num_parameters(self) -> int: ...

    def offer(self, start: int, stop: int) -> None:
        """Remember the local parameters of elements [start, stop) as what the next round, which moves these, shall count; training may go on."""

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        """Outer minus offered parameters of elements [start, stop), fp32 on the CPU; in flight from now on. Raises NothingOffered."""

    def apply(
        self,
        updates: Sequence[Update],
        *,
        contributed: bool,
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        """One outer step on slices (start, stop, mean); see `training.coupled.Coupled.apply`."""

    def adopt_outer(
        self, previous: Tensor | None, *, counted: Sequence[Slice] = (), told: Mapping[int, Tensor] | None = None
    ) -> None:
        """Go on from outer state that was written into `outer`; `previous` None drops local progress. See `training.coupled.Coupled.adopt_outer`."""

    def discard_progress(self) -> None:
        """Local parameters become the outer ones."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises DamagedCheckpoint."""


class WholeLearner(Learner, Protocol):
    """With the whole model."""

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        """One inner step on the samples with these numbers. Raises NonFinite, with nothing changed."""

    def start_over(self) -> None:
        """Local parameters become the outer ones, and nothing else is left of earlier steps: as after a download."""

    def pass_over(self, numbers: Sequence[int]) -> None:
        """No step is made with these samples, and they are the next ones that a round counts."""

    def evaluate(self) -> float:
        """Held-out loss of the outer parameters, nats per token."""

    def evaluate_few(self) -> float:
        """The same of `FEW_SAMPLES` only."""


S = TypeVar("S", bound=ModelState)


class LearnerOf(Generic[S]):
    """The real `Learner`, of a replica or a stage: what it holds does the work."""

    def __init__(self, replica: S) -> None:
        self.replica = replica

    @property
    def outer(self) -> OuterState:
        return self.replica.outer

    @property
    def num_parameters(self) -> int:
        return self.replica.num_parameters

    def offer(self, start: int, stop: int) -> None:
        self.replica.offer(start, stop)

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        return self.replica.offered_gradient(start, stop)

    def apply(
        self,
        updates: Sequence[Update],
        *,
        contributed: bool,
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.replica.apply(updates, contributed=contributed, told=told)

    def adopt_outer(
        self, previous: Tensor | None, *, counted: Sequence[Slice] = (), told: Mapping[int, Tensor] | None = None
    ) -> None:
        self.replica.adopt_outer(previous, counted=counted, told=told)

    def discard_progress(self) -> None:
        self.replica.discard_progress()

    def save(self, folder: Path) -> None:
        self.replica.save(folder)

    def load(self, folder: Path) -> None:
        self.replica.load(folder)


class SwarmLearner(LearnerOf[Replica]):
    """The real `WholeLearner`: `farflung.training`'s replica, data set and sample order."""

    def __init__(self, replica: Replica, dataset: Dataset, order: SampleOrder) -> None:
        super().__init__(replica)
        self._dataset = dataset
        self._order = order
        self._heldout = dataset.heldout(HELDOUT_SAMPLES)
        self._few = self._heldout[:: max(1, len(self._heldout) // FEW_SAMPLES)][:FEW_SAMPLES]

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        tokens = np.stack([self._dataset.tokens(self._order.index(number)) for number in numbers])
        return self.replica.train_step(tokens, global_step)

    def start_over(self) -> None:
        self.replica.optimizer.load({}, 0)
        self.discard_progress()

    def pass_over(self, numbers: Sequence[int]) -> None:
        """Nothing is learnt of them."""

    def evaluate(self) -> float:
        return self.replica.evaluate(self._heldout)

    def evaluate_few(self) -> float:
        return self.replica.evaluate(self._few)
