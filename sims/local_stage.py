"""What an operation of a pipeline takes on a slower machine, and a stage that takes as long: for `farflung sim local`, and for virtual time.

A machine's speed is given in tokens a second that it would train with the whole model; a step of it is a forward and a backward of twice that, three
parts. A stage has its layers' share of the parameters, and head and loss the share of the output table:

    forward   tokens · seconds a token · share of the layers / 3
    backward  three times that, for it computes its forward anew
    loss      tokens · seconds a token · share of the table

The embedding is looked up, which takes nothing. Inner steps, rounds and evaluations take what they take here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farflung.node.stage_learner import StageLearner
from farflung.training.model import ModelConfig, parameter_shapes
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_worker import Accumulated, Worker


@dataclass(frozen=True, slots=True)
class StagePace:
    """What the operations of one stage take on one machine."""

    token_s: float
    """Seconds for each token that it would train with the whole model."""
    layers: float
    """Share of the stage's layers in the model's work."""
    head: float
    """Share of head and loss."""

    @classmethod
    def of(cls, model: ModelConfig, part: StageSlice, token_s: float) -> "StagePace":
        work = {name: shape.numel() for name, shape in parameter_shapes(model) if name.startswith("model.layers.")}
        table = model.vocab_size * model.dim
        total = sum(work.values()) + table
        return cls(token_s, sum(one for name, one in work.items() if part.holds(name)) / total, table / total)

    def seconds(self, kind: Kind, tokens: int) -> float:
        """See the module."""
        share = {Kind.F: self.layers / 3.0, Kind.B: self.layers, Kind.LOSS: self.head}[kind]
        return tokens * self.token_s * share


class PacedWorker(Worker):
    """Computes, and then sleeps until it has taken as long as on that machine. Seconds of what took longer by itself become a line of a file."""

    def __init__(self, worker: Worker, pace: StagePace, late: Path) -> None:
        self.__dict__.update(worker.__dict__)
        self._pace = pace
        self._late = late

    def forward(self, stage: int, x: Tensor) -> Tensor:
        with self._taking(Kind.F, x):
            return super().forward(stage, x)

    def loss(self, x_BTD: Tensor, targets_BT: Tensor, into: Accumulated) -> tuple[float, Tensor]:
        with self._taking(Kind.LOSS, x_BTD):
            return super().loss(x_BTD, targets_BT, into)

    def backward(self, stage: int, x: Tensor, gradient: Tensor, into: Accumulated) -> Tensor | None:
        with self._taking(Kind.B, x):
            return super().backward(stage, x, gradient, into)

    @contextmanager
    def _taking(self, kind: Kind, x: Tensor) -> Iterator[None]:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        left_s = self._pace.seconds(kind, x.shape[0] * x.shape[1]) - took
        if left_s < 0.0:
            with self._late.open("a") as lines:
                lines.write(f"{took}\n")
        time.sleep(max(0.0, left_s))


class PacedStageLearner(StageLearner):
    """A stage on a slower machine: what comes from others, and our own microbatches; evaluations are not slowed."""

    def __init__(self, learner: StageLearner, token_s: float, late: Path) -> None:
        self.__dict__.update(learner.__dict__)
        replica = learner.replica
        self._paced = PacedWorker(replica.worker, StagePace.of(replica.model.config, replica.part, token_s), late)

    @property
    def worker(self) -> Worker:
        return self._paced
