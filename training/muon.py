"""Muon: momentum whose matrices are orthogonalised, for the hidden matrices of a model.

With gradient G of a matrix W [rows, columns], learning rate lr and momentum mu:

    M <- mu * M + (1 - mu) * G
    O  = orthogonalise(mu * M + (1 - mu) * G)            (Nesterov)
    W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * O

Sources: Jordan et al. 2024 (Muon: an optimizer for hidden layers in neural networks) for the momentum and the
Newton-Schulz iteration; Liu et al. 2025 (2502.16982) for the factor 0.2 * sqrt(max(rows, columns)): all singular values of
O are near 1, so the root mean square of O is 1 / sqrt(max(rows, columns)), and the factor makes it AdamW's usual 0.2 whatever
the shape. One learning rate then serves matrices of all shapes, and AdamW for the rest. MuLoCo (2505.23725; digest 2.3) found
that rounds lose less with it than with AdamW: workers' pseudo-gradients agree better.

`torch.optim.Muon` does the same, one matrix at a time and always in bf16. This one takes all matrices of a shape in one batched
product, and computes in bf16 only where the device does (`devices.has_bf16`), because bf16 products are slow on most CPUs: for the 1.3 M parameters in hidden
matrices of the codec bench's model a step takes torch's 4.5 s of one core here and this one 0.13 s; for 0.2 M in 21 matrices
0.083 and 0.006 s. In bf16, which a test forces on the CPU, both take the same steps.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.training.devices import has_bf16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X <- aX + b(XX')X + c(XX')(XX')X: the steepest at zero that still end in about [0.7, 1.2]."""
RMS_OF_ADAMW = 0.2
MOMENTUM, ITERATIONS = 0.95, 5
"""Unless others are given."""
MAX_ITERATIONS = 64
"""Whoever joins a swarm makes as many as its manifest says, three products of matrices each."""


def orthogonalise(
    matrices: Tensor,  # [..., rows, columns]
    iterations: int = ITERATIONS,
    dtype: torch.dtype = torch.float32,  # of the products
) -> Tensor:  # the same shape, in `dtype`
    """Each matrix with its singular values replaced by values near 1; a zero matrix stays zero."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices  # so that the Gram matrix is the smaller of the two
    x = wide.to(dtype).reshape(-1, *wide.shape[-2:])
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # the largest singular value is at most 1
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.view(wide.shape)
    return x.mT if is_tall else x


def products_dtype(device: torch.device) -> torch.dtype:
    """Of the products there, unless another is asked for."""
    return torch.bfloat16 if has_bf16(device) else torch.float32


class Muon(torch.optim.Optimizer):
    """For matrices only: embeddings, heads and norms want AdamW (`inner.InnerOptimizer` divides them)."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float = 1e-3,
        *,
        momentum: float = MOMENTUM,
        weight_decay: float = 0.1,
        iterations: int = ITERATIONS,  # of Newton and Schulz
        dtype: torch.dtype | None = None,  # of the products; None is `products_dtype` of the device
    ) -> None:
        if not 0 <= momentum < 1 or weight_decay < 0 or not 1 <= iterations <= MAX_ITERATIONS:
            raise ValueError(
                f"momentum must lie in [0, 1), weight_decay be at least 0, iterations 1 to {MAX_ITERATIONS}"
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "iterations": iterations}
        super().__init__(matrices, defaults)
        self._dtype = dtype
        if wrong := [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.dim() != 2]:
            raise ValueError(f"Muon is for matrices, and there are parameters of the shapes {wrong}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient by one step."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._step_batch(group, matrices)

    def _step_batch(
        self,
        group: dict[str, Any],
        matrices: list[nn.Parameter],  # of one shape
    ) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix, requires_grad=False)
        mu, lr = group["momentum"], group["lr"]
        weights = [matrix.detach() for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - mu)
        ahead = torch.stack(torch._foreach_lerp(gradients, momenta, mu))  # [k, rows, columns]
        dtype = self._dtype or products_dtype(ahead.device)
        updates = orthogonalise(ahead, group["iterations"], dtype).to(ahead.dtype)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        scale = lr * RMS_OF_ADAMW * max(ahead.shape[1:]) ** 0.5
        torch._foreach_add_(weights, list(updates.unbind()), alpha=-scale)
