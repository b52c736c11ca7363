"""Outer optimisers behind one interface: parameters, buffers and an update in; new parameters and buffers out.

With d the update (a mean pseudo-gradient: outer minus local, so it points uphill), theta the outer parameters:

    Sgd          theta <- theta - lr d                          lr = 1 is plain averaging, FedAvg; SparseLoCo's, whose
                                                                error feedback takes momentum's place (2508.15706)
    Nesterov     u <- mu u + d;  theta <- theta - lr (d + mu u)                             DiLoCo (2311.08105)
    HeavyBall    m <- mu m + d / (1 + penalty |g| / c);  s = lr clip(m);  theta <- theta - s       CO2 (2401.16265)
    Sign         theta <- theta - lr sign(d)                                               DeMo (2411.19870)

CO2's gap penalty: d was measured where theta stood one step ago, at a distance g, the last step s. c is the running
average of |s| with the momentum's own decay: c <- mu c + (1 - mu) |s|. The paper's exact penalty is not public
knowledge, and its code has the constant 1 (digest 3.1); this is the form that the digest suggests, element by element,
with penalty = 0 for the code's.

When an update is one round late it is given to these rules just the same; what stands in for the late mean is in
`training.late`. All peers must get the same bits, so everything is as in `training.outer`: fp32 on the CPU, element by
element, one rounding per operation. Hence any slice can be advanced alone, and is: `advance_`; by swarms, whose rules have one buffer at most, through
`training.outer.OuterState.advance_`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from farflung.training.fragments import Fragment

Buffers = tuple[Tensor, ...]

BLOCK_ELEMENTS = 1 << 20
"""Elements that a step works on at a time: temporaries stay in the cache, and in megabytes for any model."""

FEWEST_GROWN, MOST_GROWN = 2, 16
"""Contributors from which on an outer rate grows, and up to which: how many were measured."""


class OuterRule(Protocol):
    """An outer optimiser, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def lr(self) -> float:
        """What its steps are multiplied by."""

    @property
    def num_buffers(self) -> int:
        """Numbers that it keeps per parameter; all zero before the first step."""

    def step(
        self,
        params: Tensor,  # fp32 [k], CPU
        buffers: Sequence[Tensor],  # num_buffers of the same shape
        update: Tensor,  # same shape
    ) -> tuple[Tensor, Buffers]:
        """Parameters and buffers one step later, as new tensors: the same bits on every machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """See the module."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @property
    def num_buffers(self) -> int:
        return 0

    def step(self, params: Tensor, buffers: Sequence[Tensor], update: Tensor) -> tuple[Tensor, Buffers]:
        return params.sub(update.mul(self.lr)), ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Nesterov:
    """See the module."""

    lr: float = 0.7
    momentum: float = 0.9
    """0.9 for hundreds of rounds or more; 0.5 is better for toy runs (digest 7.2)."""

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_momentum(self.momentum)

    @property
    def num_buffers(self) -> int:
        return 1

    def step(self, params: Tensor, buffers: Sequence[Tensor], update: Tensor) -> tuple[Tensor, Buffers]:
        params, velocity = roll_forward(params, buffers[0], update, self.lr, self.momentum)
        return params, (velocity,)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeavyBall:
    """See the module."""

    lr: float = 1.0
    momentum: float = 0.5
    clip: float = 1.0
    """Largest magnitude of an element of the momentum that is applied; infinity for any."""
    penalty: float = 0.0
    """Of the staleness gap; 0 for none."""

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_momentum(self.momentum)
        if not self.clip > 0 or self.penalty < 0:
            raise ValueError(f"clip {self.clip} must be positive and penalty {self.penalty} at least 0")

    @property
    def num_buffers(self) -> int:
        return 1 if self.penalty == 0 else 3

    def step(self, params: Tensor, buffers: Sequence[Tensor], update: Tensor) -> tuple[Tensor, Buffers]:
        velocity = buffers[0].mul(self.momentum)
        if self.penalty == 0:
            velocity = velocity.add(update)
            return params.sub(velocity.clamp(-self.clip, self.clip).mul(self.lr)), (velocity,)
        gap, average = buffers[1], buffers[2]
        relative = gap.div(average.clamp(min=torch.finfo(torch.float32).tiny))  # 0 before the first step
        velocity = velocity.add(update.div(relative.mul(self.penalty).add(1.0)))
        moved = velocity.clamp(-self.clip, self.clip).mul(self.lr)
        gap = moved.abs()
        return params.sub(moved), (velocity, gap, average.mul(self.momentum).add(gap.mul(1 - self.momentum)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """See the module. An element whose update is zero stays."""

    lr: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @property
    def num_buffers(self) -> int:
        return 0

    def step(self, params: Tensor, buffers: Sequence[Tensor], update: Tensor) -> tuple[Tensor, Buffers]:
        return params.sub(update.sign().mul(self.lr)), ()


def roll_forward(
    params: Tensor,  # fp32, CPU
    momentum: Tensor,  # same shape
    mean: Tensor,  # same shape: mean pseudo-gradient
    lr: float,
    mu: float,
) -> tuple[Tensor, Tensor]:
    """The parameters and momentum one step of Nesterov's later, as new tensors. Same bits on every machine."""
    momentum = momentum.mul(mu).add(mean)
    update = momentum.mul(mu).add(mean).mul(lr)
    return params.sub(update), momentum


def empty_buffers(rule: OuterRule, params: Tensor) -> Buffers:
    """The buffers before the first step."""
    return tuple(torch.zeros_like(params) for _ in range(rule.num_buffers))


def advance_(
    rule: OuterRule,
    params: Tensor,  # fp32 [n], CPU
    buffers: Sequence[Tensor],  # [n] each
    fragment: Fragment,  # what moves; everything else stays
    update: Tensor,  # fp32 [fragment.numel], CPU
) -> None:
    """Take one outer step on one fragment, in place. Raises ValueError, with nothing changed, when `update` does not
    fit it."""
    if update.shape != (fragment.numel,) or update.dtype != torch.float32 or update.device.type != "cpu":
        raise ValueError(f"the update of a fragment of {fragment.numel} must be as many fp32 numbers on the CPU")
    offset = 0
    for start, stop in fragment.slices:
        for low in range(start, stop, BLOCK_ELEMENTS):
            high = min(stop, low + BLOCK_ELEMENTS)
            here = update[offset + low - start : offset + high - start]
            moved, changed = rule.step(params[low:high], [buffer[low:high] for buffer in buffers], here)
            params[low:high] = moved
            for buffer, values in zip(buffers, changed, strict=True):
                buffer[low:high] = values
        offset += stop - start


def grown(
    rule: OuterRule,  # for two contributors
    growth: float,  # exponent; 0: the same rule for any number
    tokens: Sequence[int],  # what each contributor has trained on
) -> OuterRule:
    """The rule for a round of so many: the mean of more pseudo-gradients is shorter, for what they differ in cancels out, and points more nearly where all of them go (digest of DiLoCo,
    2.2(4): the best outer rate grows with their number). Shares of which some are small count as fewer: as (sum w)^2 / sum w^2."""
    if not growth:
        return rule
    total, squares = sum(tokens), sum(count * count for count in tokens)
    number = min(max(total * total / squares, FEWEST_GROWN), MOST_GROWN) if squares else FEWEST_GROWN
    return replace(
        rule, lr=round(rule.lr * (number / FEWEST_GROWN) ** growth, 6)
    )  # rounded: the last bits of powers differ among machines


def halfway(rule: OuterRule) -> float:
    """The weight of a difference in an update with which the rule, momentum and all, takes outer parameters half of it on: of theta minus another's theta, to the middle between the
    two (NoLoCo mixes within momentum as well, 2506.10911)."""
    match rule:
        case Sgd(lr=lr):
            return 0.5 / lr
        case Nesterov(lr=lr, momentum=momentum) | HeavyBall(lr=lr, momentum=momentum):
            return 0.5 * (1.0 - momentum) / lr
    return 0.0


def _check_lr(lr: float) -> None:
    if lr <= 0:
        raise ValueError(f"outer lr {lr} must be positive")


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"outer momentum {momentum} must be in [0, 1)")
