"""What of a model a stage holds: its layers, and with stage 0 the embedding, the last norm and the head.

A slice is given by names of parameters, as in `Decoder.named_parameters`, so the flat vector of a slice (`training.flat`) is what is left of
the model's when all other parameters are taken out, and the slices of all stages together are the model, each parameter once. A tied
head has no parameter of its own and comes with the embedding.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.training.flat import slots_of
from farflung.training.model import ModelConfig, parameter_shapes
from farflung.training.pipeline_plan import BadPlan

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StageSlice:
    """One stage of a model. Raises BadPlan when there is no such stage."""

    sizes: tuple[int, ...]
    """Layers of each stage."""
    stage: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < len(self.sizes) or min(self.sizes) < 1:
            raise BadPlan(f"there is no stage {self.stage} among those with {list(self.sizes)} layers")

    @property
    def layers(self) -> range:
        """Numbers of its layers in the model."""
        first = sum(self.sizes[: self.stage])
        return range(first, first + self.sizes[self.stage])

    def holds(self, name: str) -> bool:
        """Whether the stage has the parameter, or what lies under the prefix, of this name."""
        layer = _LAYER.match(name)
        return self.stage == 0 if layer is None else int(layer[1]) in self.layers

    def shapes(self, config: ModelConfig) -> list[tuple[str, torch.Size]]:
        """Name and shape of its parameters, in the order of its flat vector."""
        return [(name, shape) for name, shape in parameter_shapes(config) if self.holds(name)]


def is_of_layers(name: str) -> bool:
    """Whether the parameter of this name is of a layer, not of the embedding, the last norm or the head."""
    return _LAYER.match(name) is not None


def layers_of(config: ModelConfig, part: StageSlice, flat: Tensor) -> Tensor:
    """The elements of a stage's flat vector [n] that are of its layers, in their order: without embedding, last norm and head."""
    return _taken(config, part, flat, of_layers=True)


def ends_of(config: ModelConfig, part: StageSlice, flat: Tensor) -> Tensor:
    """The others: embedding, last norm and head of stage 0, nothing of any other stage."""
    return _taken(config, part, flat, of_layers=False)


def num_ends(config: ModelConfig) -> int:
    """Elements of embedding, last norm and head."""
    return sum(shape.numel() for name, shape in parameter_shapes(config) if not is_of_layers(name))


def with_layers(config: ModelConfig, part: StageSlice, flat: Tensor, layers: Tensor) -> Tensor:
    """A stage's flat vector [n] with other layers, [m] as of `layers_of`."""
    return _with(config, part, flat, layers, of_layers=True)


def with_ends(config: ModelConfig, part: StageSlice, flat: Tensor, ends: Tensor) -> Tensor:
    """A stage's flat vector [n] with other ends, [m] as of `ends_of`."""
    return _with(config, part, flat, ends, of_layers=False)


def _taken(config: ModelConfig, part: StageSlice, flat: Tensor, *, of_layers: bool) -> Tensor:
    slots = slots_of(part.shapes(config))
    found = [flat[slot.start : slot.stop] for slot in slots if is_of_layers(slot.name) == of_layers]
    return torch.cat(found) if found else flat.new_empty(0)


def _with(config: ModelConfig, part: StageSlice, flat: Tensor, others: Tensor, *, of_layers: bool) -> Tensor:
    whole, position = flat.clone(), 0
    for slot in slots_of(part.shapes(config)):
        if is_of_layers(slot.name) == of_layers:
            length = slot.stop - slot.start
            whole[slot.start : slot.stop] = others[position : position + length]
            position += length
    return whole


def assemble(config: ModelConfig, sizes: Sequence[int], flats: Mapping[int, Tensor]) -> Tensor:
    """The flat vector [n] of the whole model from those of its stages. Raises BadPlan when one is missing or has another size."""
    places = slots_of(parameter_shapes(config))
    whole = torch.empty(places[-1].stop)
    for stage in range(len(sizes)):
        part = StageSlice(tuple(sizes), stage)
        own = slots_of(part.shapes(config))
        flat = flats.get(stage)
        if flat is None or flat.shape != (own[-1].stop,):
            raise BadPlan(f"stage {stage} is missing, or is of another model: {own[-1].stop} parameters are needed")
        for place, slot in zip((one for one in places if part.holds(one.name)), own, strict=True):
            whole[place.start : place.stop] = flat[slot.start : slot.stop]
    return whole


def stage_weights(model: ModelConfig, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Products of one token in each stage's layers, and in stage 0 the head: what a visit computes, attention to other tokens apart."""
    weights = []
    for stage in range(len(sizes)):
        tables = [(name, shape) for name, shape in StageSlice(sizes, stage).shapes(model) if len(shape) > 1]
        looked_up = [] if model.tie_embeddings else ["model.embed_tokens.weight"]
        weights.append(float(sum(shape.numel() for name, shape in tables if name not in looked_up)))
    return tuple(weights)


def even_sizes(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each stage, such that the stage that computes most computes as little as whole layers allow. Every stage has at least one layer.

    Stage 0 has the head besides, which with a large vocabulary is worth several layers; so it gets fewer of them. What is left over goes to the last
    stages. Raises BadPlan when there are fewer layers than stages.
    """
    if not 1 <= stages <= model.num_layers:
        raise BadPlan(f"a model of {model.num_layers} layers has 1 to {model.num_layers} stages, not {stages}")
    if stages == 1:
        return (model.num_layers,)
    (with_head, layer), sizes = stage_weights(replace(model, num_layers=2), (1, 1)), [1] * stages
    costs = [with_head, *[layer] * (stages - 1)]
    for _ in range(model.num_layers - stages):
        # one by one to whoever has least: as all layers are alike, nothing has a smaller maximum
        least = min(range(stages), key=lambda stage: (costs[stage], -stage))
        sizes[least] += 1
        costs[least] += layer
    return tuple(sizes)
