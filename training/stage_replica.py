"""One stage of a model on one peer: what `replica` is for the whole. The pipeline computes the gradients, this takes the inner steps.

    worker.forward, loss, backward ...      # as the microbatches of a step come by, summed up in an `Accumulated`
    replica.step(accumulated, step)         # one inner step with the mean over this peer's visits
    delta = replica.pseudo_gradient() ...   # and rounds, as in `replica`

The mean is over the visits of this peer alone: between two rounds peers of a stage train apart, as replicas do. Clipping is by the norm of the
stage's gradient, for nobody sees the whole one (Agora clips per stage too; digest, 5.3).

The whole outer model is evaluated a stage at a time: `enter` and `leave` are what stage 0 does of it, `pass_through` what any other one does, for
whoever has got its outer parameters; so it never takes more memory than two stages. And a sequence at a time: where a microbatch is trained there is
room for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.training.errors import NonFinite, NoRoom, NotEnoughMemory, Unrecoverable
from farflung.training.flat import Layout, flatten, unflatten
from farflung.training.inner import InnerConfig, StepReport
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.model_state import ModelState
from farflung.training.out_of_memory import no_room
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_slice import StageSlice, is_of_layers
from farflung.training.pipeline_worker import HEAD, Accumulated, Worker, mean_gradients
from farflung.training.recovery_fit import Fit, Pair, fit_, misfit
from farflung.training.rules import OuterRule
from farflung.training.runtime import Runtime

EVALUATION = "an evaluation of the whole model, stage by stage"
"""For messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport(StepReport):
    """What one inner step of a stage did."""

    layers_norm: float
    """As `grad_norm`, of its layers alone: that of all stages is of the same parameters, and weighs them (`recovery_rules`)."""


class StageReplica(ModelState):
    """See the module."""

    def __init__(
        self,
        model: ModelConfig,
        part: StageSlice,
        inner: InnerConfig,
        outer: OuterRule,
        *,
        seed: int,  # of the initial parameters of the whole model
        runtime: Runtime | None = None,  # CPU in fp32 when not given
        mix: float | None = None,  # see `training.coupled`
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
    ) -> None:
        super().__init__(
            model, inner, outer, seed=seed, runtime=runtime, mix=mix, chunk_bytes=chunk_bytes, held=part.holds
        )
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
        lr_factor: float = 1.0,  # on the schedule's learning rate
    ) -> StageReport:
        """One inner step on the mean gradient. Raises NonFinite and NoRoom, with nothing changed, and NotEnoughMemory with some parameters moved
        (`out_of_memory`)."""
        lr = self.inner_config.schedule.at(global_step) * lr_factor
        try:
            with no_room(f"the mean gradient of {self.name}", self.device):
                layers_norm, norm = self._gradients(accumulated)
        except NoRoom:
            self.optimizer.zero_grad()
            raise
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFinite(global_step=global_step, loss=loss, grad_norm=norm)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        return StageReport(loss=loss, tokens=tokens, grad_norm=norm, lr=lr, layers_norm=layers_norm)

    def _gradients(
        self, accumulated: Accumulated
    ) -> tuple[float, float]:  # norms: of the layers, and of all; before clipping
        """Leave the clipped mean gradients in the parameters."""
        of_layers = list[Tensor]()
        means = mean_gradients([accumulated])
        for name, parameter in self.model.named_parameters():
            mean = means.get(name)
            parameter.grad = torch.zeros_like(parameter) if mean is None else mean.to(parameter.dtype)
            if is_of_layers(name):
                of_layers.append(parameter.grad)
        layers_norm = float(torch.nn.utils.get_total_norm(of_layers))
        return layers_norm, float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.inner_config.max_grad_norm)
        )

    @property
    def name(self) -> str:
        """For people."""
        return f"stage {self.part.stage}"

    def misfit(self, pairs: Sequence[Pair], boundary: Boundary) -> float:
        """Of a stage that begins anew, to inputs and outputs of the lost one that came through `boundary`; see `recovery_fit`."""
        with no_room(f"what neighbours remember of {self.name}", self.device):
            return misfit(self._run, self._here(pairs), boundary.carried)

    def fit(self, pairs: Sequence[Pair]) -> None:
        """Change it so that it does what the lost one did; local and outer parameters stay the same. Raises NotEnoughMemory, and Unrecoverable where no numbers come out, as from
        pairs that somebody has made up; with nothing changed."""
        try:
            with no_room(f"a fit of {self.name}", self.device):
                fit_(list(self.model.parameters()), self._run, self._here(pairs), Fit())
            if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
                raise Unrecoverable(f"a fit of {self.name} to {len(pairs)} kept inputs and outputs comes to no numbers")
        except (NotEnoughMemory, Unrecoverable):
            self.discard_progress()
            raise
        flatten(self.layout, self.parameters, self.outer.params)

    def _run(self, x: Tensor) -> Tensor:
        return self.worker.run(self.part.stage, x)

    def _here(self, pairs: Sequence[Pair]) -> list[Pair]:
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs]

    def enter(
        self,
        tokens: Tensor,  # int64 [k, seq_len + 1]
    ) -> list[Tensor]:  # of each sequence, [1, seq_len, D] on the CPU
        """The outputs of stage 0 with its outer parameters."""
        with no_room(EVALUATION, self.device), self.outer_parameters():
            return [self.worker.forward(0, one[:, :-1].to(self.device)).cpu() for one in torch.split(tokens, 1)]

    def leave(
        self,
        outputs: Sequence[Tensor],  # of the last stage, as `enter` gave those of stage 0
        tokens: Tensor,
    ) -> float:
        """Mean loss in nats per token, by the outer parameters of the head."""
        total = 0.0
        with no_room(EVALUATION, self.device), self.outer_parameters(), torch.no_grad():
            for x, targets in zip(outputs, torch.split(tokens[:, 1:], 1), strict=True):
                total += float(next_token_loss(self.worker.run(HEAD, x.to(self.device)), targets.to(self.device)))
        return total / tokens.shape[0]


def pass_through(
    model: ModelConfig,
    part: StageSlice,
    params: Tensor,  # fp32 [n], the parameters of the stage
    inputs: Sequence[Tensor],
    runtime: Runtime,
) -> list[Tensor]:
    """The outputs of a stage that is not ours, computed here with its parameters; as `StageReplica.enter` gives them."""
    device = torch.device(runtime.device)
    with no_room(EVALUATION, device):
        stage = Decoder(model, seed=None, held=part.holds).to(device)
        unflatten(Layout(stage), params, list(stage.parameters()))
        worker = Worker(stage, part.sizes, [part.stage], head=False, shared=True, autocast=runtime.autocast)
        return [worker.forward(part.stage, x.to(device)).cpu() for x in inputs]
