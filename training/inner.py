"""The inner step: AdamW on one batch, in as many microbatches as memory asks for.

The moments stay with the peer for the whole run; they are neither reset nor averaged between rounds
(digest 1.1). Weight decay is decoupled and touches matrices only. A step that goes wrong changes nothing.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.training.errors import NonFinite
from farflung.training.model import next_token_loss
from farflung.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerConfig:
    """The inner optimiser, the same for all peers of a swarm."""

    schedule: Schedule
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled, times the learning rate, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients of a greater norm are scaled down to this."""

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        if self.eps <= 0 or self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise ValueError("eps and max_grad_norm must be positive, weight_decay at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one inner step did."""

    loss: float
    """Mean over the batch before the step, nats per token."""
    tokens: int
    """Tokens trained on."""
    grad_norm: float
    """Before clipping."""
    lr: float


def make_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.AdamW:
    """AdamW over `model`'s parameters where they are now; fused, which CPUs, CUDA and MPS all have."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.schedule.peak, betas=config.betas, eps=config.eps, fused=True)


def train_step(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],  # the model, or its compiled form: tokens [B, T] -> logits [B, T, V]
    optimizer: torch.optim.AdamW,
    config: InnerConfig,
    tokens: Tensor,  # int64 [batch, seq_len + 1], on the model's device
    *,
    global_step: int,
    microbatch: int,  # sequences at a time
    autocast: torch.dtype | None,  # precision of the matrix products; None leaves fp32
) -> StepReport:
    """One step of AdamW on the mean loss of the batch. Raises NonFinite, with nothing changed."""
    optimizer.zero_grad()  # what a step that broke off, out of memory say, has left
    batch = tokens.shape[0]
    lr = config.schedule.at(global_step)
    total = torch.zeros((), device=tokens.device)
    for piece in torch.split(tokens, microbatch):
        with precision(tokens.device, autocast):
            loss = next_token_loss(forward(piece[:, :-1]), piece[:, 1:])
        share = loss * (piece.shape[0] / batch)
        share.backward()  # type: ignore[no-untyped-call]
        total += share.detach()  # no .item() here: a GPU would wait for every microbatch
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    loss_value, norm_value = float(total), float(norm)
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise NonFinite(global_step=global_step, loss=loss_value, grad_norm=norm_value)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return StepReport(loss=loss_value, tokens=batch * (tokens.shape[1] - 1), grad_norm=norm_value, lr=lr)


def precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The context in which matrix products are done in `autocast`, or left in fp32."""
    return nullcontext() if autocast is None else torch.autocast(device.type, autocast)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its two moments."""


def read_moments(optimizer: torch.optim.AdamW, model: nn.Module) -> tuple[int, dict[str, list[Tensor]]]:
    """(steps taken, moments by name, one tensor per parameter); (0, {}) before the first step."""
    states = [optimizer.state[parameter] for parameter in model.parameters() if parameter in optimizer.state]
    if not states:
        return 0, {}
    return int(states[0]["step"]), {name: [state[name] for state in states] for name in MOMENTS}


def reset_moments(
    optimizer: torch.optim.AdamW, model: nn.Module, steps: int
) -> dict[str, list[Tensor]]:  # for the caller to fill
    """Forget the moments and make room for those after `steps` steps; none when `steps` is 0."""
    optimizer.state.clear()
    if steps == 0:
        return {}
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps), device=parameter.device),  # fused AdamW keeps it on the device
            **{name: torch.empty_like(parameter, requires_grad=False) for name in MOMENTS},
        }
    return read_moments(optimizer, model)[1]
