"""The outer parameters that this machine has on its disk: a replica's last checkpoint, or of a pipeline the stages that its node put together when
it last evaluated the whole model (`whole_model`). Read beside a running node or after it.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farflung.node.control import runs
from farflung.node.machine import choose_runtime
from farflung.node.paths import SwarmPaths
from farflung.node.recipe import Recipe, read_recipe
from farflung.node.storage import FileStorage
from farflung.node.swarmfiles import load_manifest
from farflung.node.whole_model import Versions, saved_model
from farflung.protocol.errors import ConfigError, LocalError
from farflung.training.checkpoint import read_state
from farflung.training.errors import DamagedCheckpoint
from farflung.training.flat import reordered, slots_of
from farflung.training.model import parameter_shapes
from farflung.training.pipeline_slice import StageSlice, assemble
from farflung.training.runtime import Runtime

ATTEMPTS = 3
"""A running node may replace the checkpoint while it is being read."""


@dataclass(frozen=True, slots=True)
class KeptModel:
    """See the module."""

    recipe: Recipe
    version: int
    """Of the outer state."""
    stages: dict[int, Tensor]
    """Outer parameters of each in the model's order, fp32 [n]; a replica is stage 0 of one."""
    versions: Versions
    """Of the stages of a pipeline; a replica is of one version, and has none here."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.recipe.manifest.pipeline.sizes(self.recipe.model.num_layers)

    def whole(self) -> Tensor:
        """The flat vector [n] of the whole model."""
        return self.stages[0] if len(self.sizes) == 1 else assemble(self.recipe.model, self.sizes, self.stages)


def kept_model(swarm: SwarmPaths) -> KeptModel:
    """Blocks. Raises ConfigError when there is none, LocalError when it cannot be read."""
    manifest = load_manifest(swarm)
    if manifest is None:
        raise ConfigError(f"this machine has no manifest of {swarm.name}: it has never reached the swarm")
    recipe = read_recipe(manifest)
    folder, version, stages, versions = _assembled(swarm) if manifest.pipeline.stages > 1 else _checkpoint(swarm)
    kept = KeptModel(recipe, version, stages, versions)
    for stage in range(len(kept.sizes)):
        wanted = sum(shape.numel() for _, shape in StageSlice(kept.sizes, stage).shapes(recipe.model))
        if stage not in stages or stages[stage].shape != (wanted,):
            raise LocalError(
                f"{folder} holds another model than the manifest of {swarm.name} says: stage {stage} has {wanted:,} parameters; "
                "remove it, and the node brings it again"
            )
    names = tuple(name for name, _ in parameter_shapes(recipe.model))
    if recipe.order == names:
        return kept
    return KeptModel(recipe, version, {0: reordered(slots_of(recipe.tensors), stages[0], names)}, versions)


_Read = tuple[Path, int, dict[int, Tensor], Versions]
"""Folder, version, stages, and theirs."""


def _checkpoint(swarm: SwarmPaths) -> _Read:
    """The model as one stage."""
    for attempt in range(ATTEMPTS):
        saved = FileStorage(swarm.checkpoint).saved_learner()
        if saved is None:
            raise ConfigError(
                f"there is no checkpoint of {swarm.name} on this machine yet; a node writes one after its first rounds and "
                "when it leaves"
            )
        folder, place = saved
        try:
            return folder, place.version, {0: read_state(folder)[0]["outer.params"]}, {}
        except (DamagedCheckpoint, KeyError) as error:
            if attempt + 1 == ATTEMPTS:
                raise LocalError(f"the checkpoint of {swarm.name} cannot be read: {error}") from error
    raise AssertionError("unreachable")


def _assembled(swarm: SwarmPaths) -> _Read:
    """The model as its stages."""
    folder = swarm.folder / "model"
    for attempt in range(ATTEMPTS):
        try:
            saved = saved_model(swarm)
        except DamagedCheckpoint as error:
            if attempt + 1 == ATTEMPTS:
                raise LocalError(
                    f"the model of {swarm.name} cannot be read: {error}; remove {folder}, and the next evaluation brings it again"
                ) from error
            continue
        if saved is None:
            raise ConfigError(
                f"this machine has no whole model of {swarm.name}: data nodes (stage 0) put it together when they evaluate it, now "
                "and then and at the end of the run; go to the machine of one, the founder's for example"
            )
        return folder, *saved
    raise AssertionError("unreachable")


def runtime_beside(
    swarm: SwarmPaths,
    device: str,  # as `--device` has it
    dtype: str,
) -> Runtime:
    """How to look at the swarm's model here. `auto` is the CPU while its node runs: that may need what it leaves free of a GPU. Raises ConfigError."""
    return choose_runtime("cpu" if device == "auto" and runs(swarm) else device, dtype, compiled=False)
