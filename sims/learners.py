"""Learners of scenarios: real mathematics with a small model, and none at all."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from farflung.node.learner import SwarmLearner
from farflung.sims.toy import ToyLearner, Witness, nobody
from farflung.training.coupled import Slice, Update
from farflung.training.flat import flatten, unflatten
from farflung.training.inner import StepReport


class ReplicaLearner(SwarmLearner):
    """What a node trains with, and the books that a judge wants to see."""

    def __init__(self, learner: SwarmLearner) -> None:
        self.__dict__.update(learner.__dict__)
        self.trained: list[int] = []
        self.witness: Witness = nobody
        self._offered: list[int] = []
        self._sent: list[int] = []

    def strayed(self) -> float:
        return 0.0  # where Adam should have gone nobody can say

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        report = super().train(numbers, global_step)
        self.trained.extend(numbers)
        return report

    def offer(self) -> None:
        super().offer()
        self._offered = list(self.trained)

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        self._sent = self._offered
        gradient = super().offered_gradient(start, stop)
        assert self.replica.sent is not None
        self.witness(tuple(self._sent), self.outer.params - self.replica.sent)
        return gradient

    def apply(self, updates: Sequence[Update], *, contributed: bool, told: Mapping[int, Tensor] | None = None) -> None:
        super().apply(updates, contributed=contributed, told=told)
        if contributed:
            del self.trained[: len(self._sent)]

    def adopt_outer(self, previous: Tensor | None, *, counted: Sequence[Slice] = ()) -> None:
        super().adopt_outer(previous, counted=counted)
        if counted:
            del self.trained[: len(self._sent)]
        elif previous is None:
            self.trained.clear()

    def discard_progress(self) -> None:
        super().discard_progress()
        self.trained.clear()

    def freeze(self) -> dict[str, object]:
        replica = self.replica
        return {
            "params": replica.outer.params.clone(),
            "momentum": replica.outer.momentum.clone(),
            "local": flatten(replica.layout, replica.parameters, torch.empty(replica.num_parameters)),
            "sent": None if replica.sent is None else replica.sent.clone(),
            "inner": {name: tensor.clone() for name, tensor in replica.optimizer.tensors().items()},
            "inner_steps": replica.optimizer.steps,
            "trained": tuple(self.trained),
            "sent_samples": tuple(self._sent),
        }

    def thaw(self, state: dict[str, object]) -> None:
        replica = self.replica
        match state:
            case {
                "params": Tensor() as params,
                "momentum": Tensor() as momentum,
                "local": Tensor() as local,
                "sent": sent,
                "inner": dict(inner),
                "inner_steps": int(inner_steps),
                "trained": tuple(trained),
                "sent_samples": tuple(sent_samples),
            }:
                replica.optimizer.load({name: tensor.clone() for name, tensor in inner.items()}, inner_steps)
                replica.outer.params.copy_(params)
                replica.outer.momentum.copy_(momentum)
                unflatten(replica.layout, local, replica.parameters)
                replica.sent, replica.offered = sent.clone() if isinstance(sent, Tensor) else None, None
                self.trained, self._sent = list(trained), list(sent_samples)
            case _:
                raise ValueError("not what `freeze` gave")


class CostLearner(ToyLearner):
    """Moves once a step, whatever the number of samples: its numbers only have to differ."""

    def directions(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers[:1]
