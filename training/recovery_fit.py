"""Fitting a rebuilt stage to what its neighbours still hold: inputs and outputs of the stage that is gone.

Until a gradient comes back, every hop keeps its output (digest, 5.4). So when stage i dies, stage i - 1 holds what it
sent to it last and stage i + 1 what it got from it: pairs of the lost stage's function. A few steps of Adam on

    mean squared error of stage(input) against output, over all pairs

start from any of `recovery_rules` and need no forward or backward of anybody else. In the digest's small model (6.3)
20 steps take a quarter off what the weighted mean loses. The authors of CheckFree have such a fit in their code, with
a cache that is never filled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How long and how fast."""

    steps: int = 20
    lr: float = 1e-3
    """Of Adam."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0:
            raise ValueError("a fit has at least one step and a positive learning rate")


def fit_(
    parameters: Sequence[nn.Parameter],
    forward: Callable[[Tensor], Tensor],  # the stage: [B, T, D] -> [B, T, D]
    pairs: Sequence[tuple[Tensor, Tensor]],  # cached (input, output), each [B, T, D], at least one
    config: Fit,
) -> tuple[float, float]:  # mean squared error before the first step, and before the last one
    """Change the parameters in place. Gradients are left empty. Raises ValueError without pairs."""
    if not pairs:
        raise ValueError("there are no cached activations to fit to; leave the stage as its rule made it")
    optimizer = torch.optim.Adam(parameters, lr=config.lr)
    errors = []
    for _ in range(config.steps):
        error = torch.stack([F.mse_loss(forward(x), y) for x, y in pairs]).mean()
        error.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        errors.append(float(error.detach()))
    return errors[0], errors[-1]
