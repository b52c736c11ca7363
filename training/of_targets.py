"""What a loss needs of the logits: of each token the target's logit and its log-probability, a few rows of logits at a time.

    log p = logit - log Z                Z is the softmax's denominator, so both together give log Z as well

In one piece the cross-entropy of bf16 logits takes 12 bytes a logit at its peak, and with a penalty on log Z 20: with a vocabulary of
32,000 that is more than the layers of a small model keep. Here it takes the logits and their gradient, 4 bytes a logit in bf16, and work
for `PIECE` of them. For that the backward pass computes the log-probabilities again.

All kernels are torch's, so values and gradients are those of `F.log_softmax` to the bit. With many logits it is also faster on a CPU, by
a half and more: what it works on stays in the caches. The idea is Liger Kernel's (2410.10989), which wants Triton and takes the gradient
in the forward pass.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 1 << 22
"""Most logits that are worked on at a time: 16 MB of fp32. With much fewer a GPU would wait for its kernels to be launched."""

FEWEST = 8
"""Pieces, so that what is worked on is little beside what is there."""

WORK_BYTES = 12
"""For each logit that is worked on, in fp32: its log-probability, the gradient of that, and its own."""


def of_targets(
    logits_KV: Tensor,
    targets_K: Tensor,  # int64
) -> tuple[Tensor, Tensor]:  # fp32 [K] each: the target's logit, its log-probability
    """See the module."""
    found: tuple[Tensor, Tensor] = _OfTargets.apply(logits_KV, targets_K[:, None])  # type: ignore[no-untyped-call]
    return found


def peak_bytes(
    num_logits: int,
    compute_bytes: int,  # of one logit
) -> int:
    """Most that a loss takes in both passes, the logits included; of so many or fewer, of which `PIECE` may be in one piece (`model.losses`)."""
    in_pieces = 2 * compute_bytes * num_logits + WORK_BYTES * min(PIECE, num_logits // FEWEST)
    return max(in_pieces, WORK_BYTES * min(PIECE, num_logits))


class _OfTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_KV: Tensor, targets_K1: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_KV, targets_K1)
        ctx.set_materialize_grads(False)
        log_p = [_log_p(logits).gather(1, targets) for logits, targets in _pieces(logits_KV, targets_K1)]
        return logits_KV.gather(1, targets_K1)[:, 0].float(), torch.cat(log_p)[:, 0]

    @staticmethod
    def backward(ctx: Any, of_logit_K: Tensor | None, of_log_p_K: Tensor) -> tuple[Tensor, None]:
        logits_KV, targets_K1 = ctx.saved_tensors
        gradient_KV = torch.empty_like(logits_KV)
        columns = [column[:, None] for column in (of_log_p_K, of_logit_K) if column is not None]
        for logits, gradient, *of_piece in _pieces(logits_KV, gradient_KV, targets_K1, *columns):
            gradient.copy_(_gradient(logits, *of_piece))
        return gradient_KV, None


def _gradient(logits: Tensor, targets: Tensor, of_log_p: Tensor, of_logit: Tensor | None = None) -> Tensor:
    log_p = _log_p(logits)
    found: Tensor = torch.zeros_like(log_p).scatter_(1, targets, of_log_p)
    found = torch.ops.aten._log_softmax_backward_data(found, log_p, -1, torch.float32)
    return found if of_logit is None else found.scatter_add_(1, targets, of_logit)


def _log_p(logits: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), dim=-1)


def _pieces(logits_KV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all of them together."""
    num_tokens, vocab_size = logits_KV.shape
    rows = max(1, min(PIECE // vocab_size, -(-num_tokens // FEWEST)))
    return zip(*(torch.split(one, rows) for one in (logits_KV, *others)), strict=True)
