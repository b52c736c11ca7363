"""One virtual peer's model and inner optimiser; its parameters are views of one flat vector."""

import copy
import math

import torch
from torch import Tensor, nn

from farflung.sims.quality_methods import Inner
from farflung.sims.quality_tiers import Tier
from farflung.training.errors import NonFinite
from farflung.training.flat import Layout
from farflung.training.inner import InnerConfig, precision
from farflung.training.model import Decoder, next_token_loss
from farflung.training.muon import Muon
from farflung.training.schedule import Schedule


class Worker:
    """See the module."""

    def __init__(self, tier: Tier, inner: Inner, *, seed: int) -> None:
        self.tier, self.inner, self.seed = tier, inner, seed
        self.device = torch.device("cuda" if tier.on_gpu else "cpu")
        self.autocast = torch.bfloat16 if tier.on_gpu else None
        self.config = InnerConfig(schedule=Schedule(peak=1.0, kind="constant"))  # all but the learning rate
        self.model = Decoder(tier.model, seed=seed).to(self.device)
        self.layout = Layout(self.model)
        self.parameters = list(self.model.parameters())
        self.flat = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        """fp32 [n]; the model computes with what stands here."""
        for parameter, view in zip(self.parameters, self.layout.views(self.flat).values(), strict=True):
            parameter.data = view
        self.optimisers = _optimisers(self.model, inner, self.config)

    def copy(self, inner: Inner) -> "Worker":
        """Another worker in the same state. It goes on with the optimiser `inner`, afresh where that is another one."""
        other = Worker(self.tier, inner, seed=self.seed)
        other.flat.copy_(self.flat)
        if inner == self.inner:
            for mine, its in zip(self.optimisers, other.optimisers, strict=True):
                its.load_state_dict(copy.deepcopy(mine.state_dict()))
        return other

    def step(
        self,
        tokens: Tensor,  # int64 [batch, seq_len + 1], on the CPU
        *,
        step: int,  # of the run, for the message when it fails
        lr: float,
    ) -> float:
        """One inner step. Returns the loss before it; raises NonFinite."""
        total = torch.zeros((), device=self.device)
        for piece in torch.split(tokens.to(self.device), self.tier.microbatch):
            with precision(self.device, self.autocast):
                loss = next_token_loss(self.model(piece[:, :-1]), piece[:, 1:])
            share = loss * (piece.shape[0] / tokens.shape[0])
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        loss_value, norm_value = float(total), float(norm)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise NonFinite(global_step=step, loss=loss_value, grad_norm=norm_value)
        if self.inner == "gradient":
            self._move_by_gradient()
        else:
            for optimiser in self.optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = lr
                optimiser.step()
        self.model.zero_grad()
        return loss_value

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


def _optimisers(model: Decoder, inner: Inner, config: InnerConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the hidden matrices where `inner` says so."""
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and not name.startswith(("model.embed_tokens", "lm_head"))
        (hidden if is_hidden and inner == "muon" else rest).append(parameter)
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps, fused=True)
    return [Muon(hidden, weight_decay=config.weight_decay), adamw] if hidden else [adamw]
