"""Learners of scenarios: real mathematics with a small model, and none at all."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from farflung.node.learner import LearnerOf, SwarmLearner
from farflung.node.stage_learner import StageLearner
from farflung.sims.books import SampleBook, gradient_of
from farflung.sims.toy import ToyLearner
from farflung.training.coupled import Coupled, Offered, Slice, Update
from farflung.training.data import Dataset
from farflung.training.flat import flatten, unflatten
from farflung.training.inner import StepReport
from farflung.training.model_state import ModelState
from farflung.training.order import SampleOrder
from farflung.training.pipeline_worker import Accumulated
from farflung.training.replica import Replica
from farflung.training.stage_replica import StageReplica

S = TypeVar("S", bound=ModelState)


class BookedLearner(LearnerOf[S], SampleBook):
    """Notes what rounds do with the local progress; its steps are those of a replica or of a stage."""

    @property
    def coupled(self) -> Coupled:
        return self.replica

    def strayed(self) -> float:
        return 0.0  # where Adam should have gone nobody can say

    def offer(self, start: int, stop: int) -> None:
        super().offer(start, stop)
        self.book_offer()

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        gradient = super().offered_gradient(start, stop)
        assert self.replica.sent is not None
        self.book_gradient(gradient_of(self.outer.params, self.replica.sent))
        return gradient

    def apply(self, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None) -> None:
        super().apply(updates, contributed=contributed, told=told)
        if contributed:
            self.book_counted()

    def adopt_outer(
        self, previous: Tensor | None, *, counted: Sequence[Slice] = (), told: Mapping[int, Tensor] | None = None
    ) -> None:
        super().adopt_outer(previous, counted=counted, told=told)
        if counted:
            self.book_counted()
        elif previous is None:
            self.book_dropped()

    def discard_progress(self) -> None:
        super().discard_progress()
        self.book_dropped()

    def freeze(self) -> dict[str, object]:
        return freeze_replica(self.replica) | self.book_freeze()

    def thaw(self, state: dict[str, object]) -> None:
        thaw_replica(self.replica, state)
        self.book_thaw(state)


class ReplicaLearner(BookedLearner[Replica], SwarmLearner):
    """What a node trains with, and the book that a judge wants to see."""

    def __init__(self, replica: Replica, dataset: Dataset, order: SampleOrder) -> None:
        SwarmLearner.__init__(self, replica, dataset, order)
        SampleBook.__init__(self)

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        report = super().train(numbers, global_step)
        self.book_step(numbers)
        return report

    def pass_over(self, numbers: Sequence[int]) -> None:
        self.book_step(numbers)


class SimStageLearner(BookedLearner[StageReplica], StageLearner):
    """What a peer of a pipeline trains with, and the same book."""

    def __init__(self, learner: StageLearner) -> None:
        StageLearner.__init__(self, learner.replica, learner.data)
        SampleBook.__init__(self)

    def step(self, accumulated: Accumulated, numbers: Sequence[int], global_step: int, *, loss: float) -> StepReport:
        report = super().step(accumulated, numbers, global_step, loss=loss)
        self.book_step(numbers)
        return report

    def freeze(self) -> dict[str, object]:
        return super().freeze() | {
            "made_of_others_at": self.made_of_others_at,
            "rises": self.rises,
            "layers_norm": self.layers_norm,
        }

    def thaw(self, state: dict[str, object]) -> None:
        super().thaw(state)
        match state:
            case {
                "made_of_others_at": int() | None as at,
                "rises": bool() as rises,
                "layers_norm": float() | None as norm,
            }:
                self.made_of_others_at, self.rises, self.layers_norm = at, rises, norm
            case _:
                raise ValueError("not what `freeze` gave")

    def begin_again(self) -> None:
        super().begin_again()
        self.book_dropped()  # which samples it was is known no more; the progress itself stays


def freeze_replica(replica: ModelState) -> dict[str, object]:
    """Its whole state, as copies."""
    return {
        "params": replica.outer.params.clone(),
        "momentum": replica.outer.momentum.clone(),
        "local": flatten(replica.layout, replica.parameters, torch.empty(replica.num_parameters)),
        "sent": None if replica.sent is None else replica.sent.clone(),
        "inner": {name: tensor.clone() for name, tensor in replica.optimizer.tensors().items()},
        "inner_steps": replica.optimizer.steps,
    }


def thaw_replica(replica: ModelState, state: dict[str, object]) -> None:
    """Back to what `freeze_replica` copied."""
    match state:
        case {
            "params": Tensor() as params,
            "momentum": Tensor() as momentum,
            "local": Tensor() as local,
            "sent": Offered() | None as sent,
            "inner": dict(inner),
            "inner_steps": int(inner_steps),
        }:
            replica.optimizer.load({name: tensor.clone() for name, tensor in inner.items()}, inner_steps)
            replica.outer.params.copy_(params)
            replica.outer.momentum.copy_(momentum)
            unflatten(replica.layout, local, replica.parameters)
            replica.sent, replica.offered = None if sent is None else sent.clone(), None
        case _:
            raise ValueError("not what `freeze_replica` gave")


class CostLearner(ToyLearner):
    """Moves once a step, whatever the number of samples: its numbers only have to differ."""

    def directions(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers[:1]
