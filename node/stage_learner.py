"""What trains on a peer of a pipeline, as `learner.SwarmLearner` does on a replica: one stage, and at a data node the data.

A step is not computed here alone: `worker` computes visits as they come (`stage_server`), `step` takes the inner step with what they add up to.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.node.learner import HELDOUT_SAMPLES, LearnerOf
from farflung.training.data import Dataset
from farflung.training.errors import DamagedCheckpoint
from farflung.training.flat import flatten
from farflung.training.inner import StepReport
from farflung.training.order import SampleOrder
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_worker import Accumulated, Batch, Worker
from farflung.training.recovery_checkfree import CheckFree, lr_factor, smoothed
from farflung.training.recovery_fit import Pair
from farflung.training.recovery_rise import risen
from farflung.training.recovery_trial import TRIAL_STEPS
from farflung.training.stage_replica import StageReplica

MADE_OF_OTHERS_AT = "made_of_others_at"
"""In a saved learner's facts."""
RISES = "rises"
"""In the same facts."""
LAYERS_NORM = "layers_norm"
"""In the same facts."""


class StageLearner(LearnerOf[StageReplica]):
    """See the module."""

    def __init__(self, replica: StageReplica, data: tuple[Dataset, SampleOrder] | None) -> None:
        """`data`: at data nodes only."""
        super().__init__(replica)
        self.data = data
        self.made_of_others_at: int | None = None
        """The step of the pipeline at which our stage was made of its neighbours: its learning rate is raised for a while."""
        self.rises = False
        """Its learning rate does, over the first steps with these moments (`recovery_rise`)."""
        self.layers_norm: float | None = None
        """Of the gradient of our layers, of late, before clipping; None before the first step.

        How much our stage still changes, which weighs it when a neighbour is made of it.
        """
        self._heldout = None if data is None else torch.from_numpy(data[0].heldout(HELDOUT_SAMPLES)).long()

    @property
    def stage(self) -> int:
        return self.replica.part.stage

    @property
    def worker(self) -> Worker:
        return self.replica.worker

    @property
    def is_new(self) -> bool:
        """Whether it was begun anew here with what had to be made, and is on trial yet (`recovery_trial`)."""
        return self.rises and self.replica.optimizer.steps < TRIAL_STEPS

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The samples with these numbers: tokens and targets, both int64 [len(numbers), seq_len] on the CPU."""
        assert self.data is not None, "only data nodes have samples"
        dataset, order = self.data
        tokens = torch.from_numpy(np.stack([dataset.tokens(order.index(number)) for number in numbers]))
        return tokens[:, :-1].long(), tokens[:, 1:].long()

    def step(self, accumulated: Accumulated, numbers: Sequence[int], global_step: int, *, loss: float) -> StepReport:
        """One inner step with what so many samples (or tickets) have added up to. Raises NonFinite, with nothing changed."""
        tokens = len(numbers) * self.replica.model.config.seq_len
        since = None if self.made_of_others_at is None else max(0, global_step - self.made_of_others_at)
        factor = lr_factor(CheckFree(), since) * risen(self.replica.optimizer.steps if self.rises else None)
        report = self.replica.step(accumulated, global_step, loss=loss, tokens=tokens, lr_factor=factor)
        self.layers_norm = smoothed(CheckFree(), self.layers_norm, report.layers_norm)
        return report

    def save(self, folder: Path) -> None:
        facts = {
            MADE_OF_OTHERS_AT: self.made_of_others_at,
            RISES: self.rises,
            LAYERS_NORM: self.layers_norm,
        }
        self.replica.save(folder, {name: fact for name, fact in facts.items() if fact is not None})

    def load(self, folder: Path) -> None:
        facts = self.replica.load(folder)
        match facts.get(MADE_OF_OTHERS_AT), facts.get(RISES, False), facts.get(LAYERS_NORM):
            case (int() | None as at, bool() as rises, float() | None as norm):
                self.made_of_others_at, self.rises, self.layers_norm = at, rises, norm
            case at, rises, norm:
                raise DamagedCheckpoint(
                    f"{folder} says that the stage was made of others at step {at!r}, and has a gradient of norm {norm!r}, and of its learning rate that it rises: {rises!r}"
                )

    def local_params(self) -> Tensor:
        """What it trains, fp32 [n] on the CPU; the caller's to keep."""
        replica = self.replica
        return flatten(replica.layout, replica.parameters, torch.empty(replica.num_parameters))

    def begin_with(self, layers: Tensor) -> None:
        """The outer parameters of a stage that begins anew, fp32 [n]; without momentum and moments, and nothing of ours in them."""
        self.outer.params.copy_(layers)
        self.outer.momentum.zero_()
        self.replica.optimizer.load({}, 0)
        self.replica.discard_progress()
        self.made_of_others_at = self.layers_norm = None
        self.rises = False

    def fit(self, pairs: Sequence[Pair]) -> None:
        """After `begin_with`: towards what the lost stage has made of its inputs."""
        self.replica.fit(pairs)

    def misfit(self, pairs: Sequence[Pair], boundary: Boundary) -> float:
        """How far the stage is from that: 0 not at all, 1 as far as no stage."""
        return self.replica.misfit(pairs, boundary)

    def begin_again(self) -> None:
        """What was loaded goes on in another life of the stage: nothing is in flight, and no round has counted what was trained since the last one."""
        self.replica.sent = self.replica.offered = None

    def enter(self) -> list[Tensor]:
        """The held-out samples after stage 0, by its outer parameters; with `leave`, evaluates the whole model (`whole_model`)."""
        assert self._heldout is not None, "only data nodes have samples"
        return self.replica.enter(self._heldout)

    def leave(self, outputs: Sequence[Tensor]) -> float:
        """Held-out loss in nats per token, from the outputs of the last stage."""
        assert self._heldout is not None
        return self.replica.leave(outputs, self._heldout)
