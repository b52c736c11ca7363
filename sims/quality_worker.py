"""One virtual peer's model and inner optimiser; its parameters are views of one flat vector."""

import torch
from torch import Tensor

from farflung.sims.quality_methods import Inner
from farflung.sims.quality_resume import State
from farflung.sims.quality_tiers import Tier
from farflung.training.flat import Layout
from farflung.training.inner import InnerConfig, gradients, make_optimizer, precision
from farflung.training.model import Decoder, next_token_loss
from farflung.training.schedule import Schedule


class Worker:
    """See the module."""

    def __init__(self, tier: Tier, inner: Inner, *, seed: int) -> None:
        self.tier, self.inner, self.seed = tier, inner, seed
        self.device = torch.device(tier.device)
        self.autocast = torch.bfloat16 if tier.bf16 else None
        self.config = InnerConfig(
            schedule=Schedule(peak=1.0, kind="constant"),  # `step` is given its rate
            optimizer="adamw" if inner == "gradient" else inner,
        )
        self.model = Decoder(tier.model, seed=seed).to(self.device)
        self.layout = Layout(self.model)
        self.parameters = list(self.model.parameters())
        self.flat = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        """fp32 [n]; the model computes with what stands here."""
        for parameter, view in zip(self.parameters, self.layout.views(self.flat).values(), strict=True):
            parameter.data = view
        self.optimizer = None if inner == "gradient" else make_optimizer(self.model, self.config)

    def copy(self, inner: Inner) -> "Worker":
        """Another worker in the same state. It goes on with the optimiser `inner`, afresh where that is another one."""
        other = Worker(self.tier, inner, seed=self.seed)
        other.flat.copy_(self.flat)
        if other.optimizer is not None and self.optimizer is not None and inner == self.inner:
            state = {name: tensor.clone() for name, tensor in self.optimizer.tensors().items()}
            other.optimizer.load(state, self.optimizer.steps)
        return other

    def state(self) -> State:
        """Everything that a step changes, as it is kept and not copied."""
        own: State = {"flat": self.flat}
        if self.optimizer is not None:
            own |= {"optimizer": self.optimizer.tensors(), "steps": self.optimizer.steps}
        return own

    def load(self, state: State) -> None:
        """Go on from what `state` gave."""
        self.flat.copy_(state["flat"])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"], state["steps"])

    def step(
        self,
        tokens: Tensor,  # int64 [batch, seq_len + 1], on the CPU
        *,
        step: int,  # of the run, for the message when it fails
        lr: float,
    ) -> float:
        """One inner step. Returns the loss before it. Raises NonFinite and NotEnoughMemory."""
        loss, _ = gradients(
            self.model,
            self.config,
            tokens.to(self.device),
            global_step=step,
            microbatch=self.tier.microbatch,
            autocast=self.autocast,
        )
        if self.optimizer is None:
            self._move_by_gradient()
        else:
            self.optimizer.step(lr)
        return loss

    def evaluate(
        self,
        params: Tensor,  # fp32 [n], CPU
        windows: Tensor,  # int64 [k, seq_len + 1], CPU
    ) -> float:
        """Mean loss of these parameters in nats per token; the worker's own stay."""
        own = self.flat.clone()
        self.flat.copy_(params)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for piece in torch.split(windows, self.tier.microbatch):
                here = piece.to(self.device)
                with precision(self.device, self.autocast):
                    loss = next_token_loss(self.model(here[:, :-1]), here[:, 1:])
                total += float(loss) * piece.shape[0]
        self.flat.copy_(own)
        return float(total) / windows.shape[0]

    def _move_by_gradient(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)
