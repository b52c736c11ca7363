"""What one peer of a pipeline computes: forward and backward of its stages, and the loss; gradients are summed apart by stage.

A backward computes its forward again from the input, so nothing lives between the two but the input, and any peer of a stage can
do it. Sums are kept per stage, and for the head, with the number of microbatches in each: the mean of a stage is over its
visits. With skips that is the unbiased mean (digest, 4.2); when a peer is lost, so are its sums and its visits, and the mean
of the others stays unbiased (5.4). A tied head and the embedding are one parameter with two sums.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from farflung.training.errors import Overflow
from farflung.training.inner import precision
from farflung.training.model import Decoder, losses
from farflung.training.pipeline_stages import split

HEAD = -1
"""The place of norm, head and loss beside the stages' numbers."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both [B, T] int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """What one peer has summed up in one step, for one data node or for all of them."""

    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """By (stage or HEAD, the parameter's name in the whole model)."""
    visits: Counter[int] = field(default_factory=Counter)
    """By stage or HEAD: microbatches in the sums."""

    def add(self, other: "Accumulated") -> None:
        """What `other` has summed up, which may be shared with it from now on."""
        for key, total in other.sums.items():
            mine = self.sums.get(key)
            if mine is None:
                self.sums[key] = total
            else:
                mine.add_(total)
        self.visits.update(other.visits)


class Worker:
    """One peer: the stages that it holds, and norm and head if it computes losses; nothing else of the model."""

    def __init__(
        self,
        model: Decoder,  # may lack all that is not held
        layers: Sequence[int],
        held: Collection[int],
        *,
        head: bool,
        shared: bool = False,  # compute with the parameters of `model`; else with a copy of them
        z_loss: float = 0.0,  # weight of the penalty on the softmax's denominator, see `model.losses`
        autocast: torch.dtype | None = None,  # precision of the matrix products; None leaves fp32
    ) -> None:
        """Raises BadPlan when the layers are not all of the model's."""
        stages, its_head = split(model, layers)
        parts: dict[int, nn.Module] = {stage: stages[stage] for stage in sorted(held)}
        if head:
            parts[HEAD] = its_head
        names = {parameter: name for name, parameter in model.named_parameters()}
        # copied together, so that a tied table stays one
        self._parts: dict[int, nn.Module] = parts if shared else copy.deepcopy(parts)
        self._z_loss = z_loss
        self._autocast = autocast
        self._parameters = {
            part: [(names[old], new) for old, new in zip(parts[part].parameters(), module.parameters(), strict=True)]
            for part, module in self._parts.items()
        }
        self._later: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def stages(self) -> list[int]:
        return [part for part in self._parts if part != HEAD]

    @property
    def has_head(self) -> bool:
        return HEAD in self._parts

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All that are held, by their names in the whole model; a tied table once."""
        return {name: parameter for named in self._parameters.values() for name, parameter in named}

    def forward(self, stage: int, x: Tensor) -> Tensor:
        """`x`: tokens [B, T] for stage 0, [B, T, D] for others. Returns [B, T, D]."""
        with torch.no_grad():
            return self.run(stage, x)

    def loss(self, x_BTD: Tensor, targets_BT: Tensor, into: Accumulated) -> tuple[float, Tensor]:
        """The loss and the gradient of the last hop's output; the head's own is added. Raises Overflow."""
        x_BTD = x_BTD.detach().requires_grad_()
        with precision(x_BTD.device, self._autocast):
            loss, aim = losses(self._parts[HEAD](x_BTD), targets_BT, self._z_loss)
        gradient = self._differentiate(HEAD, aim, x_BTD, None, into)
        assert gradient is not None
        return loss.item(), gradient

    def backward(self, stage: int, x: Tensor, gradient: Tensor, into: Accumulated) -> Tensor | None:
        """The gradient of the stage's input, None of tokens; that of its parameters is added. Raises Overflow."""
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        return self._differentiate(stage, self.run(stage, x), x, gradient, into)

    def input_gradient(self, key: tuple[int, int], stage: int, x: Tensor, gradient: Tensor) -> Tensor | None:
        """As `backward`, but the parameters' part waits for `weight_gradient`."""
        self._later[key] = (x, gradient)
        if not x.is_floating_point():
            return None
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.run(stage, x), x, gradient)[0]

    def weight_gradient(self, key: tuple[int, int], stage: int, into: Accumulated) -> None:
        """Raises Overflow."""
        x, gradient = self._later.pop(key)
        self._differentiate(stage, self.run(stage, x), None, gradient, into)

    def run(self, stage: int, x: Tensor) -> Tensor:
        """As `forward`, to be differentiated."""
        with precision(x.device, self._autocast):
            output: Tensor = self._parts[stage](x)
        return output

    def _differentiate(
        self, part: int, output: Tensor, x: Tensor | None, gradient: Tensor | None, into: Accumulated
    ) -> Tensor | None:
        named = self._parameters[part]
        wanted: list[Tensor] = [parameter for _, parameter in named]
        if x is not None and x.requires_grad:
            wanted.append(x)
        found = torch.autograd.grad(output, wanted, gradient)
        # Their norm, not their elements: a step divides by it (clipping), and what we hand on is such a gradient of others.
        if not bool(torch.nn.utils.get_total_norm(found).isfinite()):
            raise Overflow(f"the norm of a gradient at {'the head' if part == HEAD else f'stage {part}'} is not finite")
        sums = {(part, name): one for (name, _), one in zip(named, found[: len(named)], strict=True)}
        into.add(Accumulated(sums=sums, visits=Counter({part: 1})))
        return found[-1] if len(found) > len(named) else None


def together(contributions: Iterable[Accumulated]) -> Accumulated:
    """The sums of all of them. They stay as they are; a tensor that only one of them has is shared with it."""
    found = Accumulated()
    for one in contributions:
        found.visits.update(one.visits)
        for key, total in one.sums.items():
            found.sums[key] = found.sums[key] + total if key in found.sums else total
    return found


def mean_gradients(contributions: Iterable[Accumulated]) -> dict[str, Tensor]:
    """By the model's parameter names: the sum of each stage over all peers, divided by its visits at all of them."""
    found = together(contributions)
    means: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for (part, name), total in found.sums.items():
        means[name] = means[name] + total / found.visits[part]
    return dict(means)
