"""The inner step: one batch, in as many microbatches as memory asks for, and one step of the inner optimiser.

The optimiser's state stays with the peer for the whole run; it is neither reset nor averaged between rounds
(digest 1.1). Weight decay touches matrices only. Gradients that go wrong change nothing.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.training.errors import NonFinite
from farflung.training.inner_optimizer import ON_DEVICE, InnerOptimizer, StateHome
from farflung.training.model import losses
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import no_room
from farflung.training.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerConfig:
    """The inner optimiser, the same for all peers of a swarm."""

    schedule: Schedule
    optimizer: str = "adamw"
    """As `optimizers` reads it: `adamw`, `muon`, or a class of torch.optim."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only; decoupled, times the learning rate, whatever the optimiser."""
    max_grad_norm: float = 1.0
    """Gradients of a greater norm are scaled down to this."""
    z_loss: float = 0.0
    """Weight of the mean squared log of the softmax's denominator, which keeps logits from drifting; 1e-4 is usual."""

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        if self.eps <= 0 or self.weight_decay < 0 or self.max_grad_norm <= 0 or self.z_loss < 0:
            raise ValueError("eps and max_grad_norm must be positive, weight_decay and z_loss at least 0")
        parse_optimizer(self.optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one inner step did."""

    loss: float
    """Mean cross-entropy over the batch before the step, nats per token; without the z-loss."""
    tokens: int
    """Tokens trained on."""
    grad_norm: float
    """Before clipping."""
    lr: float
    microbatch: int | None = None
    """Sequences that went through the model at a time; None where that is not this peer's to choose."""


def make_optimizer(model: nn.Module, config: InnerConfig, home: StateHome = ON_DEVICE) -> InnerOptimizer:
    """The optimiser of `model`'s parameters where they are now; its state lies at `home`."""
    groups = parse_optimizer(config.optimizer).groups(
        model.named_parameters(),
        lr=config.schedule.peak,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    return InnerOptimizer(groups, home)


def take_step(
    optimizer: InnerOptimizer,
    config: InnerConfig,
    found: tuple[float, float],  # what `gradients` returned
    *,
    global_step: int,
    tokens: int,  # trained on
) -> StepReport:
    """The optimiser's step with the gradients that lie in the parameters. Raises NotEnoughMemory when it was made in part."""
    lr, (loss, norm) = config.schedule.at(global_step), found
    optimizer.step(lr)
    optimizer.zero_grad()
    return StepReport(loss=loss, tokens=tokens, grad_norm=norm, lr=lr)


def gradients(
    model: nn.Module,  # tokens [B, T] -> logits [B, T, V]
    config: InnerConfig,
    tokens: Tensor,  # int64 [batch, seq_len + 1], on the model's device
    *,
    global_step: int,  # for the message when it fails
    microbatch: int,  # sequences at a time
    autocast: torch.dtype | None,  # precision of the matrix products; None leaves fp32
) -> tuple[float, float]:  # mean cross-entropy in nats per token, gradient norm before clipping
    """Leave the clipped gradients of the batch's mean loss in the parameters, in the place of any that are there.

    Raises NonFinite or NotEnoughMemory, with gradients that must not be used and all else as it was.
    """
    model.zero_grad()
    total = torch.zeros((), device=tokens.device)
    with no_room(f"{microbatch} sequences at a time", tokens.device):
        for piece in torch.split(tokens, microbatch):
            share = piece.shape[0] / tokens.shape[0]
            total += backward_pass(model, piece, config.z_loss, share, autocast)  # no .item(): a GPU would wait
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    loss, norm_value = float(total), float(norm)
    if not (math.isfinite(loss) and math.isfinite(norm_value)):
        raise NonFinite(global_step=global_step, loss=loss, grad_norm=norm_value)
    return loss, norm_value


def backward_pass(
    model: nn.Module,  # tokens [B, T] -> logits [B, T, V]
    tokens: Tensor,  # int64 [microbatch, seq_len + 1]
    z_loss: float,
    share: float,  # of this microbatch in its batch
    autocast: torch.dtype | None,
) -> Tensor:  # scalar: cross-entropy times share
    """Add the gradients of one microbatch to the parameters'."""
    with precision(tokens.device, autocast):
        loss, aim = losses(model(tokens[:, :-1]), tokens[:, 1:], z_loss)
    (aim * share).backward()  # type: ignore[no-untyped-call]
    return loss.detach() * share


def precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The context in which matrix products are done in `autocast`, or left in fp32."""
    if autocast is None:
        return nullcontext()
    # every matrix is used once in a pass, so a cache of their casts would only keep them longer than needed
    return torch.autocast(device.type, autocast, cache_enabled=False)
