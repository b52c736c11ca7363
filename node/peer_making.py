"""What a daemon does between knowing its swarm and having a peer: data, learner, and, of a pipeline, the stage that it takes."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from farflung.node import disk, founding
from farflung.node.discovery import Finder
from farflung.node.disk_room import patient
from farflung.node.door import Doors
from farflung.node.engine import Engine
from farflung.node.events import EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.machine import describe_device
from farflung.node.options import JoinOptions
from farflung.node.paths import SwarmPaths
from farflung.node.peer import Peer
from farflung.node.peerbook import PeerBook
from farflung.node.recipe import Recipe, swarm_dataset, swarm_tokenizer
from farflung.node.refusals import Refusals
from farflung.node.rehearsal import Rehearsal
from farflung.node.renewal import Overtaken
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.runner import free_the_last_life
from farflung.node.stage_recipe import StageRecipe
from farflung.node.stage_self import OUTSIDE
from farflung.node.stage_start import Stage, StageStart, stage_storage
from farflung.node.storage import FileStorage, Held
from farflung.node.swarmfiles import data_file, data_here, save_tokenizer, tokenizer_file
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Signer
from farflung.protocol.pipeline_messages import Domains
from farflung.training.data import Dataset
from farflung.training.runtime import Runtime


@dataclass(kw_only=True, slots=True)
class PeerMaking:
    """See the module."""

    engine: Engine
    signer: Signer
    swarm: SwarmPaths
    recipe: Recipe
    options: JoinOptions
    runtime: Runtime
    doors: Doors
    log: EventLog
    book: PeerBook
    admission: bytes
    rehearsal: Rehearsal | None
    say: Callable[[str], None]
    _start: StageStart = field(init=False)
    _data: Dataset | None = None
    """Opened for a stage that we are about to take."""

    async def make(self) -> tuple[Peer, FileStorage]:
        """The peer, and its disk. Raises ConfigError for what a person can change."""
        if self.recipe.manifest.pipeline.stages > 1:
            return await self._of_a_stage()
        return await self._of_a_replica()

    async def anew(self) -> tuple[Peer, FileStorage]:
        """The peer of a machine that goes to another group, when nobody refers to the last one any more."""
        await self.engine.finish_serving()
        free_the_last_life()
        return await self._of_a_replica()

    async def _of_a_replica(self) -> tuple[Peer, FileStorage]:
        """A peer that holds the whole model."""
        recipe = self.recipe
        if self.options.stage is not None:
            raise ConfigError(
                f"swarm {self.swarm.name} has no stages: every peer holds the whole model; leave out --stage"
            )
        dataset = await self._dataset()
        learner = await self.doors.learner.run(recipe.learner, dataset, self.runtime, self.options.save_memory)
        if self.rehearsal is not None:
            learner = self.rehearsal.learner(learner)
        self._say_what_it_takes(recipe, learner.replica.runtime)
        storage = FileStorage(self.swarm.checkpoint)
        storage.sweep()
        peer = ReplicaPeer(recipe.terms(), self._facilities(storage, recipe.checkpoint_s), learner)
        return peer, storage

    async def _of_a_stage(self) -> tuple[Peer, FileStorage]:
        """A peer that holds one stage of the model."""
        refused = Refusals(self.log)
        start = self._start = StageStart(
            self.engine,
            self.signer,
            self.swarm,
            self.recipe,
            admission=self.admission,
            domains=self._domains,
            refused=refused,
            log=self.log,
        )
        finder = Finder(
            self.engine,
            self.recipe.swarm,
            self.book,
            admits=self.recipe.settings().admits,
            met=start.found,
            refused=refused,
            heard=lambda: (),
        )
        async with asyncio.TaskGroup() as tasks:
            finding = tasks.create_task(finder.run())
            known = [peer for peer in self.book.peers() if peer != self.engine.peer_id]
            stage = await start.take(self.runtime, self.options.save_memory, self.options.stage, known, self.say)
            finding.cancel()
        return await self._serve(stage)

    async def move(self, stage: int) -> tuple[Peer, FileStorage]:
        """The peer for another stage, when ours has left its own and nobody refers to it any more."""
        await self.engine.finish_serving()
        free_the_last_life()
        start = self._start
        return await self._serve(await start.enter(self.say) if stage == OUTSIDE else start.move(stage, self.say))

    async def _serve(self, stage: Stage) -> tuple[Peer, FileStorage]:
        storage = stage_storage(self.swarm, stage.life)
        async with self._start.called(stage):  # to open the data may take minutes
            if stage.recipe.stage == 0 and self._data is None:
                await self._prepare(0)
            dataset, self._data = self._data, None
            learner = await self.doors.learner.run(stage.recipe.learner, dataset, stage.runtime)
        if self.rehearsal is not None:
            learner = self.rehearsal.stage_learner(learner)
        self._say_what_it_takes(stage.recipe, stage.runtime)
        overtaken = False
        try:
            held = await self._start.begin(stage, learner, storage, self.doors)
        except Overtaken:
            overtaken = True
        if overtaken:  # out of the handler, and without the learner: its memory is wanted
            del learner
            return await self.move(OUTSIDE)
        facilities = self._facilities(storage, stage.recipe.own.checkpoint_s, held)
        return self._start.peer(stage, learner, facilities, self._prepare), storage

    async def _prepare(self, stage: int) -> None:
        """Data nodes need the data. Raises ConfigError when it cannot be had."""
        self._data = await self._dataset() if stage == 0 else None

    async def _dataset(self) -> Dataset:
        spec = self.recipe.manifest.data.spec
        self.say(f"opening the data ({spec}) ...")
        self.log.emit("data.opening", spec=spec)
        return await self.doors.side.run(self._open_data)

    def _open_data(self) -> Dataset:
        """The data set; what `--data` and `--tokenizer` say is remembered for the next start."""
        options, swarm, manifest = self.options, self.swarm, self.recipe.manifest
        if options.tokenizer is not None:
            swarm_tokenizer(manifest, options.tokenizer)
            save_tokenizer(swarm, options.tokenizer)
        tokenizer = swarm_tokenizer(manifest, tokenizer_file(swarm))
        spec = data_here(swarm) if options.data is None else founding.data_spec(options.data)
        dataset = swarm_dataset(manifest, tokenizer, spec)
        if spec is not None:
            data_file(swarm).write_text(spec + "\n", encoding="utf-8")
        return dataset

    def _facilities(self, storage: FileStorage, checkpoint_s: float, held: Held | None = None) -> Facilities:
        return Facilities(
            network=self.engine,
            signer=self.signer,
            doors=patient(self.doors, self.log),
            storage=storage,
            log=self.log,
            facts=Facts(
                device=describe_device(self.runtime),
                pid=os.getpid(),
                admission=self.admission,
                domains=self._domains,
            ),
            checkpoint_s=checkpoint_s,
            held=held,
            exit_when_done=self.options.exit_when_done,
        )

    @property
    def _domains(self) -> Domains:
        return Domains(region=self.options.region, owner=self.options.owner)

    def _say_what_it_takes(self, recipe: Recipe | StageRecipe, runtime: Runtime) -> None:
        if (saving := str(runtime.save)) != "none":
            self.say(f"saving memory by: {saving}")
        folder, needed = self.swarm.folder, recipe.disk_bytes(runtime.save)
        if (lacks := disk.lacks(needed, disk.kept_bytes(folder), disk.free_bytes(folder))) is not None:
            self.say(lacks)  # and go on: it is a forecast, and whoever runs here may make room
