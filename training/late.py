"""Means that come late, and how local parameters follow outer ones that moved meanwhile.

**One whole round late.** At the synchronisation of round r only the mean of round r - 1 is there; D_m is peer m's own
pseudo-gradient, D their mean, w_m its weight in the mean (1/M):

    delayed    D(r-1)                                     a round stale; with Nesterov 0.9 loss 3.01 instead of 2.67
    eager      D(r-1) + w_m (D_m(r) - D_m(r-1))           the others' part stale, the own part fresh: 2.69 (2502.12996)

With equal pseudo-gradients in both rounds, or alone (w = 1), eager is the mean that is not late. Outer parameters then
differ between peers, each of which steps by itself. In the first round there is no D(r-1): D(0) = 0 = D_m(0), so a peer
steps by its own share.

**Where local parameters go** when the outer ones have moved from theta_old to theta, tau steps after local ones were
measured as sent:

    mix        local <- alpha local + (1 - alpha) theta       Streaming DiLoCo; alpha = 0.5; 0 takes theta
    rebase     local <- theta + (local - reference)           keeps what is not in theta yet; what `Coupled` does

The reference is what local parameters would be without the progress that still has to be reported: those that were
sent, if all of that was counted. Where a lossy codec left r out, it may be sent + gamma r: then a share gamma of r stays
in the local parameters, and is in the next pseudo-gradient by itself; error feedback remembers the rest. With gamma = 1
there is no memory at all, and a peer trains on *from* the progress that it could not send yet instead of making it
once more.

Local parameters are a peer's own, so nothing here needs the same bits everywhere; but alpha = 0 and rebasing without
progress give theta's.
"""

import torch
from torch import Tensor


def eager(
    late_mean: Tensor,  # fp32 [k]: D(r-1), zeros in the first round
    own: Tensor,  # same shape: D_m(r)
    late_own: Tensor,  # same shape: D_m(r-1), zeros in the first round
    weight: float,  # w_m in [0, 1]
) -> Tensor:
    """The update that stands in for the mean of round r on one peer, as a new tensor.

    Both own ones are as they were measured, before a codec: so what is added in one round is taken back in the next, and peers stay as near to each other as
    their last own shares. If the late one were what the late mean contains of it, all that a codec leaves out without error feedback would add up, and they would
    drift apart.
    """
    return late_mean.add(own.sub(late_own).mul(weight))


def mix_(
    local: Tensor,  # fp32 [k]; moved
    outer: Tensor,  # same shape
    alpha: float,  # share that local keeps, in [0, 1]
    *,
    scratch: Tensor | None = None,  # same shape; written over. May be `outer`; without one as much memory is taken
) -> None:
    """See the module."""
    if alpha == 0.0:
        local.copy_(outer)
    else:
        local.mul_(alpha).add_(torch.mul(outer, 1.0 - alpha, out=scratch))


def rebase_(
    local: Tensor,  # fp32 [k]; moved
    outer: Tensor,  # same shape
    reference: Tensor,  # same shape
) -> None:
    """See the module. The difference is taken first, so that without progress local is outer to the bit."""
    local.sub_(reference).add_(outer)
