"""Muon, for the pseudo-gradients that `farflung bench codec` makes: momentum whose matrices are orthogonalised.

With gradient G of a matrix W [rows, columns], learning rate lr and momentum mu:

    M <- mu * M + (1 - mu) * G
    O  = orthogonalise(mu * M + (1 - mu) * G)
    W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * O

Sources: Jordan et al. 2024 (Muon: an optimizer for hidden layers in neural networks) for the momentum and the
Newton-Schulz iteration; Liu et al. 2025 (2502.16982) for the factor 0.2 * sqrt(max(rows, columns)), which gives an
update the root mean square of AdamW's, so that one learning rate serves both; MuLoCo (2505.23725) uses it inside DiLoCo.

`torch.optim.Muon` does the same in bf16, which its CPU kernels are slow at: with 1.7 M parameters 4.2 s of one core for
a step, against 0.13 s for this one in fp32. Hence these few lines.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X <- aX + b(XX')X + c(XX')(XX')X: the steepest at zero that still end in about [0.7, 1.2]."""
NEWTON_SCHULZ_STEPS = 5
RMS_OF_ADAMW = 0.2


def orthogonalise(matrix: Tensor) -> Tensor:
    """The matrix [m, n] with its singular values replaced by values near 1; zero stays zero."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)  # the largest singular value is at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    orthogonal: Tensor = x if wide is matrix else x.T
    return orthogonal


class Muon:
    """The optimiser of hidden matrices; embeddings, heads and norms want AdamW."""

    def __init__(self, matrices: Sequence[nn.Parameter], *, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        self._matrices = list(matrices)
        self._momenta = [torch.zeros_like(matrix, requires_grad=False) for matrix in matrices]
        self._momentum, self._weight_decay = momentum, weight_decay

    def step(self, lr: float) -> None:
        """Move every matrix by one step along its gradient."""
        with torch.no_grad():
            for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
                assert matrix.grad is not None
                momentum.lerp_(matrix.grad, 1 - self._momentum)
                update = orthogonalise(matrix.grad.lerp(momentum, self._momentum))
                matrix.mul_(1 - lr * self._weight_decay)
                matrix.sub_(update, alpha=lr * RMS_OF_ADAMW * max(matrix.shape) ** 0.5)
