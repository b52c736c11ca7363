"""The whole outer model, which no peer holds: got stage by stage from those who do, to be evaluated, and kept on disk to be exported.

A data node asks one holder per stage, or several, for the outer state, as a newcomer to that stage would (`statesync`), and believes it when it has the
digest that most of the stage's peers announce. The held-out samples go through the stages as they come, so memory holds one of them at a time; the
network carries the model once. How often that may be is the applier's business: a share of the time, and once at the end of the run.

All stages should be at the version of our own: rounds of the stages fall into one pause of the pipeline, so they are for most of the time. One that
has missed a round is taken as it is, and so are those that go on while we download (`borrow_moving`).
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import structlog
from torch import Tensor

from farflung.node.borrowing import Holders, Moving, borrow_moving
from farflung.node.door import Doors
from farflung.node.durable import writing
from farflung.node.network import Network
from farflung.node.paths import SwarmPaths
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.protocol.errors import DiskFull, RemoteError
from farflung.protocol.roll import Roll
from farflung.training.checkpoint import read_state, write_state
from farflung.training.errors import NotEnoughMemory
from farflung.training.stage_replica import pass_through

_log = structlog.get_logger(__name__)

WAIT_S = 10.0
"""For the other stages to commit the round that ours has committed."""

LOOK_S = 0.25

Versions = Mapping[int, tuple[int, int]]
"""Of each stage, those of its oldest and its newest part."""

KeepModel = Callable[[int, Mapping[int, Tensor], Versions], None]
"""Version of stage 0, the outer parameters of each stage, fp32 [n], and their versions: to be written to disk. Blocks."""

T = TypeVar("T")


class WholeModel:
    """See the module; at a data node."""

    def __init__(
        self,
        *,
        network: Network,
        roll: Roll,
        recipe: StageRecipe,
        learner: StageLearner,
        doors: Doors,
        refused: Callable[[RemoteError], None],
        version: Callable[[], int],  # of our own outer state
        keep: KeepModel,
    ) -> None:
        self._network = network
        self._roll = roll
        self._recipe = recipe
        self._learner = learner
        self._doors = doors
        self._refused = refused
        self._version = version
        self._keep = keep

    async def evaluate(self) -> float | None:
        """Held-out loss of the whole outer model, nats per token; it is kept, too. None when it cannot be had in one piece. Raises NotEnoughMemory
        when the device has no room for a part of it; kept it is all the same."""
        lack: str | None = None

        async def computed(work: Callable[..., T], *arguments: object) -> T | None:
            nonlocal lack
            try:
                return await self._doors.learner.run(work, *arguments) if lack is None else None
            except NotEnoughMemory as error:
                lack = str(error)
            return None

        version = self._version()
        own = await self._doors.learner.run(self._learner.outer.params.clone)
        outputs = await computed(self._learner.enter)
        stages: dict[int, Tensor] = {0: own}
        versions = {0: (version, version)}
        for stage in range(1, self._roll.stages):
            recipe = stage_recipe(self._recipe.whole, stage)
            found = await self._borrow(recipe, version)
            if found is None:
                return None
            params, versions[stage] = found.outer.params, (found.oldest, found.newest)
            model, runtime = self._recipe.whole.model, self._learner.replica.runtime
            outputs = await computed(pass_through, model, recipe.part, params, outputs, runtime)
            stages[stage] = params
        loss = await computed(self._learner.leave, outputs)
        if self._version() != version:
            return None  # a commit came in between, and the head may be of another version than the rest
        await self._doors.side.run(self._keep_model, version, stages, versions)
        if lack is not None:
            raise NotEnoughMemory(lack)
        return loss

    def _keep_model(self, version: int, stages: Mapping[int, Tensor], versions: Versions) -> None:
        try:
            self._keep(version, stages, versions)
        except DiskFull as error:
            # An earlier one is there; the next evaluation tries again, and this one's loss is known.
            _log.warning("no room for the whole model", error=str(error))

    async def _borrow(self, recipe: StageRecipe, version: int) -> Moving | None:
        """The outer state of another stage at a version or later ones, or what it has if it is behind for longer."""
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while (held := self._holders(recipe.stage)) is None or held[0] < version:
            if loop.time() >= until:
                break
            await asyncio.sleep(LOOK_S)
        look = partial(self._holders, recipe.stage)
        return await borrow_moving(self._network, look, recipe.own.num_parameters, refused=self._refused)

    def _holders(self, stage: int) -> Holders | None:
        return self._roll.holders(stage, asyncio.get_running_loop().time())


def save_model(swarm: SwarmPaths, version: int, stages: Mapping[int, Tensor], versions: Versions) -> None:
    """Keep the whole model for `farflung export`, in place of an earlier one. Raises LocalError where the disk does not take it."""
    tensors = {f"stage-{stage}": params for stage, params in stages.items()}
    facts = {"version": version}
    for stage, (oldest, newest) in versions.items():
        facts |= {f"oldest-{stage}": oldest, f"newest-{stage}": newest}
    with writing(folder := swarm.folder / "model"):
        write_state(folder, tensors, facts)


def saved_model(swarm: SwarmPaths) -> tuple[int, dict[int, Tensor], Versions] | None:
    """What `save_model` kept; None when it has not. Raises DamagedCheckpoint."""
    folder = swarm.folder / "model"
    if not folder.exists():
        return None
    tensors, facts = read_state(folder)
    stages = {int(name.removeprefix("stage-")): params for name, params in tensors.items()}
    versions = {stage: (int(facts[f"oldest-{stage}"]), int(facts[f"newest-{stage}"])) for stage in sorted(stages)}
    return int(facts["version"]), stages, versions
