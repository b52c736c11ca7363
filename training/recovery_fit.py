"""Fitting a rebuilt stage to what its neighbours still hold: inputs and outputs of the stage that is gone.

Until a gradient comes back, every hop keeps its output (digest, 5.4). So when stage i dies, stage i - 1 holds what it
sent to it last and stage i + 1 what it got from it: pairs of the lost stage's function. A few steps of Adam on

    mean squared error of stage(input) against output, over all pairs

start from any of `recovery_rules` and need no forward or backward of anybody else. In the digest's small model (6.3)
20 steps take a quarter off what the weighted mean loses. The authors of CheckFree have such a fit in their code, with
a cache that is never filled.

The same pairs tell how much of that function a rebuilt stage has, before anybody computes with it: its *misfit* is the squared error of its outputs,
relative to those of leaving the stage out. After 600 steps of a model of six stages (docs/experiments.md) it is 0.2 for a copy 50 steps old and 0.4 for one
200 steps old, 0.8 for the neighbour mean and 0.4 after its fit, 1.0 for new weights, and 4 for the stage's own weights with the wrong sign. Within the first
100 steps a copy has less than 1 as well, be it of the initial weights, and new weights up to 2 before they are fitted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.compression.codec import CodecError

Pair = tuple[Tensor, Tensor]
"""Input and output of a stage, each [B, T, D]."""

MISFIT_OF_NONE = 1.0
"""Of leaving the stage out. What was made of others and is not below has nothing of the lost stage: new weights that are fitted, which everybody can make, are better."""


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
    pairs: Sequence[Pair],  # cached, at least one
    config: Fit,
) -> tuple[float, float]:  # mean squared error before the first step, and before the last one
    """Change the parameters in place. Gradients are left empty. Raises ValueError without pairs."""
    if not pairs:
        raise ValueError("there are no cached activations to fit to; leave the stage as its rule made it")
    optimizer = torch.optim.Adam(parameters, lr=config.lr, fused=True)  # which needs no room beside its moments
    errors = []
    try:
        for _ in range(config.steps):
            error = 0.0
            for x, y in pairs:  # one after another: the activations of all would take that much more room
                share = F.mse_loss(forward(x), y) / len(pairs)
                share.backward()  # type: ignore[no-untyped-call]
                error += float(share.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            errors.append(error)
    finally:
        optimizer.zero_grad(set_to_none=True)
    return errors[0], errors[-1]


def misfit(
    forward: Callable[[Tensor], Tensor],  # the stage: [B, T, D] -> [B, T, D]
    pairs: Sequence[Pair],  # cached, at least one
    carried: Callable[[Tensor], Tensor],  # what arrives of an output where the pairs come from; may raise CodecError
) -> float:
    """See the module; the median over the pairs, for each comes from other peers, and one of them may be wrong. Infinite where an output is not finite."""
    found = list[float]()
    for x, y in pairs:
        with torch.no_grad():
            output = forward(x)
        try:
            error = float((carried(output) - y).square().sum() / (x - y).square().sum())
        except CodecError:  # not finite, or beyond what the codec has numbers for
            error = math.inf
        found.append(error if math.isfinite(error) else math.inf)
    return median(found)
