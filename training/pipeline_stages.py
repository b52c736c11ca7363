"""A model cut into stages of consecutive layers; stage 0 has the embedding, and whoever computes the loss has norm and head.

Modules are shared with the whole model, not copied, so parameters keep their names and gradients land where a
single process would have them.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from farflung.training.model import Decoder, Rotary, run_layers
from farflung.training.pipeline_plan import BadPlan


class Stage(nn.Module):
    """Layers [first, last) of a decoder, with the embedding before them in stage 0."""

    def __init__(self, model: Decoder, first: int, last: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(list(model.model.layers)[first:last])
        self.rotary: Rotary = model.model.rotary
        self.checkpoint_layers = model.model.checkpoint_layers

    def forward(
        self,
        x: Tensor,  # stage 0: tokens [B, T]; others: [B, T, D]
    ) -> Tensor:  # [B, T, D]
        if self.embed is not None:
            x = self.embed(x)
        return run_layers(self.layers, x, self.rotary, checkpointed=self.checkpoint_layers)


class Head(nn.Module):
    """Final norm and logits."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.table = model.model.embed_tokens if model.lm_head is None else model.lm_head

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(self.norm(x_BTD), self.table.weight)


def split(model: Decoder, layers: Sequence[int]) -> tuple[list[Stage], Head]:
    """Stages with so many layers each, which share the model's parameters. Raises BadPlan unless they are all of them."""
    if sum(layers) != model.config.num_layers or min(layers) < 1:
        raise BadPlan(f"stages of {list(layers)} layers do not make up the model's {model.config.num_layers}")
    ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    return [Stage(model, end - size, end) for end, size in zip(ends, layers, strict=True)], Head(model)
