"""One stage of a model on one peer: what `replica` is for the whole. The pipeline computes the gradients, this takes the inner steps.

    worker.forward, loss, backward ...      # as the microbatches of a step come by, summed up in an `Accumulated`
    replica.step(accumulated, step)         # one inner step with the mean over this peer's visits
    delta = replica.pseudo_gradient() ...   # and rounds, as in `replica`

The mean is over the visits of this peer alone: between two rounds peers of a stage train apart, as replicas do. Clipping is by the norm of the
stage's gradient, for nobody sees the whole one (Agora clips per stage too; digest, 5.3).
"""

import math

import torch

from farflung.training.errors import NonFinite
from farflung.training.inner import InnerConfig, StepReport
from farflung.training.model import ModelConfig
from farflung.training.outer import OuterConfig
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_worker import Accumulated, Worker, mean_gradients
from farflung.training.replica import Replica, Runtime


class StageReplica(Replica):
    """See the module. `train_step` and `evaluate` are not for it: they need the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        part: StageSlice,
        inner: InnerConfig,
        outer: OuterConfig,
        *,
        seed: int,  # of the initial parameters of the whole model
        runtime: Runtime | None = None,  # CPU in fp32 when not given
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
    ) -> None:
        super().__init__(model, inner, outer, seed=seed, runtime=runtime, chunk_bytes=chunk_bytes, held=part.holds)
        self.part = part
        self.worker = Worker(
            self.model,
            part.sizes,
            [part.stage],
            head=part.stage == 0,
            shared=True,
            z_loss=inner.z_loss,
            autocast=self.runtime.autocast,
        )

    def step(
        self,
        accumulated: Accumulated,  # of at least one visit
        global_step: int,  # of the run, for the learning rate
        *,
        loss: float,  # for the report; NaN where it is not known
        tokens: int,
    ) -> StepReport:
        """One inner step on the mean gradient. Raises NonFinite, with nothing changed."""
        lr = self.inner_config.schedule.at(global_step)
        means = mean_gradients([accumulated])
        for name, parameter in self.model.named_parameters():
            mean = means.get(name)
            parameter.grad = torch.zeros_like(parameter) if mean is None else mean.to(parameter.dtype)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.inner_config.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFinite(global_step=global_step, loss=loss, grad_norm=norm)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        return StepReport(loss=loss, tokens=tokens, grad_norm=norm, lr=lr)
