"""How a daemon becomes a peer of a pipeline: which stage it takes, what it remembers of that, and the peer made from it.

    stage           in the swarm's folder: the stage of this machine and its life, the appointments and later lives known
    checkpoint/     votes, chain and state of stage 0; of another stage, in `stage-N/`, and of later lives in `stage-N-life-M/`

A machine keeps its stage over restarts: it has the state of it. `--stage` makes it take another one, and stay there. Any other machine but the
founder's may move to a stage that needs it more (`balance.py`). What it had of the old stage stays on its disk: its votes, which it must not forget if it
ever comes back, and a state that may be the last copy.

A machine that has begun a life of its stage, and was ended before the state of that was on its disk, comes in again as a newcomer of that stage: to
download the state, should somebody else have it, with the chain and the votes that it still has; or else to have part in the next life.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from farflung.node.balance import Prepare
from farflung.node.door import Doors
from farflung.node.durable import write_atomically
from farflung.node.engine import Engine
from farflung.node.entrance import Entrance
from farflung.node.events import EventLog
from farflung.node.facilities import Facilities
from farflung.node.network import PeerId
from farflung.node.outside import Outside
from farflung.node.paths import SwarmPaths
from farflung.node.recipe import HEARTBEAT_S, Recipe
from farflung.node.remains import Remains, is_called, remains, spent
from farflung.node.renewal import Renewal
from farflung.node.sealed_mail import PipelineMail
from farflung.node.shadows import Shelf
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_peer import StagePeer
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.node.storage import FileStorage, Held
from farflung.node.whole_model import save_model
from farflung.protocol import pipeline_messages
from farflung.protocol.appointment import Appointment
from farflung.protocol.chain import founded
from farflung.protocol.errors import ConfigError, RemoteError
from farflung.protocol.keys import Signer
from farflung.protocol.lives import Life
from farflung.protocol.neighbours import Found
from farflung.protocol.pipeline_messages import Domains
from farflung.protocol.roll import Roll
from farflung.training.runtime import Runtime

SPENT = (
    "this machine began it, and was ended before its state was on disk; it comes in again as a newcomer, and the next life of the stage begins unless "
    "somebody else has that state"
)
"""For people."""


class SavedStage(msgspec.Struct, frozen=True, array_like=True):
    """What a machine remembers of its place in a pipeline."""

    life: Life
    """Of its stage."""
    appointments: tuple[Appointment, ...]
    lives: tuple[Life, ...] = ()
    """Of stages that were begun anew, as far as is known here."""


def saved_stage(swarm: SwarmPaths) -> SavedStage | None:
    """None when there is none yet. Raises ConfigError when it is damaged."""
    path = swarm.folder / "stage"
    if not path.exists():
        return None
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=SavedStage)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: remove it, and this machine asks the swarm for a stage again") from error


def save_stage(swarm: SwarmPaths, saved: SavedStage) -> None:
    """On disk when this returns."""
    write_atomically(swarm.folder / "stage", msgspec.msgpack.encode(saved))


def stage_storage(swarm: SwarmPaths, life: Life) -> FileStorage:
    """Where the state of a stage lies."""
    return FileStorage(swarm.stage(life.stage, life.number))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage that was taken."""

    recipe: StageRecipe
    life: Life
    runtime: Runtime
    roll: Roll
    mail: PipelineMail
    others: frozenset[int]
    """Stages to which this machine may move."""
    survives: bool = False
    """It has served an earlier life of the stage until now."""


class StageStart:
    """Takes a stage, and makes the peer for it."""

    def __init__(
        self,
        engine: Engine,
        signer: Signer,
        swarm: SwarmPaths,
        recipe: Recipe,
        *,
        admission: bytes,
        domains: Domains,
        refused: Callable[[RemoteError], None],
        log: EventLog,
    ) -> None:
        manifest = recipe.manifest
        self._log = log
        self._engine = engine
        self._signer = signer
        self._swarm = swarm
        self._recipe = recipe
        self._roll = Roll(recipe.swarm, manifest.founder, signer.peer_id, manifest.pipeline.stages, HEARTBEAT_S)
        self._mail = PipelineMail(engine, signer, recipe.swarm, pipeline_messages.decode)
        self._outside = Outside(
            network=engine,
            mail=self._mail,
            roll=self._roll,
            shelf=Shelf(),
            admission=admission,
            domains=domains,
            admits=recipe.settings().admits,
            refused=refused,
        )
        self._serves: int | None = None
        """The stage that was taken last."""
        self._fits: dict[int, tuple[StageRecipe, Runtime]] = {}
        """Stages that this machine may take: those that it holds, or the one that a person wants."""

    def found(self, peers: Found) -> None:
        """Records tell of peers."""
        for peer in peers:  # stages are not divided
            self.discovered(peer)

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer."""
        self._roll.discover(peer, asyncio.get_running_loop().time())

    def _is_called(self, life: Life) -> bool:
        """See `remains.is_called`."""
        folder = self._swarm.stage(life.stage, life.number)
        return is_called(life, self._signer.peer_id, FileStorage(folder) if folder.exists() else None)

    @asynccontextmanager
    async def called(self, taken: Stage) -> AsyncIterator[None]:
        """While we get ready for what we were called for, others hear that we are at it; else nobody hears anything."""
        if not self._is_called(taken.life):
            yield
            return
        async with asyncio.TaskGroup() as tasks:
            saying = tasks.create_task(self._outside.make(taken.life))
            yield
            saying.cancel()

    async def begin(self, taken: Stage, learner: StageLearner, storage: FileStorage, doors: Doors) -> Held | None:
        """Before there is a peer: begin the stage anew, if that is what we were called for. What the learner has then; None where its state is on the
        disk, or at other peers. Raises Overtaken when somebody else has been called since."""
        if not self._is_called(taken.life):
            return None
        mine = self._remains(taken.life.stage, taken.life.number - 1)
        renewal = Renewal(self._outside, taken.recipe, taken.life, learner, mine, taken.survives, doors, self._log)
        return await renewal.run(self._signer, storage)

    def _remains(self, stage: int, newest: int) -> Remains | None:
        """What is on this machine's disk of a stage, of its lives up to `newest`."""
        folders = [self._swarm.stage(stage, number) for number in range(newest, -1, -1)]
        return remains(FileStorage(folder) for folder in folders if folder.exists())

    def fitting(self, runtime: Runtime, save_memory: str, wanted: int | None) -> dict[int, tuple[StageRecipe, Runtime]]:
        """The stages that this machine can hold, and how. Raises ConfigError when there is none, or not the one that is wanted."""
        stages = range(self._recipe.manifest.pipeline.stages) if wanted is None else (wanted,)
        fits: dict[int, tuple[StageRecipe, Runtime]] = {}
        refusal: ConfigError | None = None
        for stage in stages:
            recipe = stage_recipe(self._recipe, stage)
            try:
                fits[stage] = recipe, recipe.fit(runtime, save_memory)
            except ConfigError as error:
                refusal = refusal or error
        if not fits and refusal is not None:
            raise refusal
        return fits

    async def take(
        self,
        runtime: Runtime,
        save_memory: str,
        wanted: int | None,
        known: Iterable[PeerId],
        say: Callable[[str], None],
    ) -> Stage:
        """The stage of this machine: that of the last time, the one that a person wants, or the neediest that fits. Raises ConfigError."""
        self.found(dict.fromkeys(known))
        saved = saved_stage(self._swarm)
        is_founder = self._signer.peer_id == self._recipe.manifest.founder
        if saved is None and is_founder:
            saved = SavedStage(Life(0, 0, self._signer.peer_id), ())
        if saved is not None:
            self._roll.appointments.update({one.stage: one for one in saved.appointments})
            self._roll.renewed.update({one.stage: one for one in saved.lives})
        stays = is_founder or wanted is not None
        if saved is not None and wanted in (None, saved.life.stage):
            life = saved.life
            self._fits = self.fitting(runtime, save_memory, life.stage)
            self._fits |= {} if stays else self.fitting(runtime, save_memory, None)
            if self._spent(life):
                self._log.emit("stage.spent", stage=life.stage, life=life.number, reason=SPENT)
                say(f"stage {life.stage}, life {life.number}: {SPENT}")
                return await self._enter({life.stage}, say)
        elif is_founder:
            raise ConfigError("the founder's machine serves stage 0, for it began it; leave out --stage")
        else:
            self._fits = self.fitting(runtime, save_memory, wanted)
            return await self.enter(say)
        return self._taken(life, say)

    async def enter(self, say: Callable[[str], None]) -> Stage:
        """The neediest of the stages that fit."""
        return await self._enter(set(self._fits), say)

    async def _enter(self, stages: set[int], say: Callable[[str], None]) -> Stage:
        say("asking the swarm which stage needs a peer ...")
        found = {stage: self._remains(stage, self._roll.number(stage)) for stage in stages}
        self._outside.kept = {stage: one.place.version for stage, one in found.items() if one is not None}
        return self._taken(await Entrance(self._outside, stages, spent=self._spent, say=say).run(), say)

    def _spent(self, life: Life) -> bool:
        """See `remains.spent`."""
        folder = self._swarm.stage(life.stage, life.number)
        return life.founder == self._signer.peer_id and folder.exists() and spent(life, FileStorage(folder))

    def move(self, stage: int, say: Callable[[str], None]) -> Stage:
        """Take another of those that fit; from now on a restart takes it, too."""
        life = self._roll.life(stage)
        assert life is not None, "whoever moves knows where to"
        return self._taken(life, say, survives=self._serves == stage)

    def _taken(self, life: Life, say: Callable[[str], None], *, survives: bool = False) -> Stage:
        recipe, runtime = self._fits[life.stage]
        taken = Stage(
            recipe=recipe,
            life=life,
            runtime=runtime,
            roll=self._roll,
            mail=self._mail,
            others=frozenset(self._fits) - {life.stage},
            survives=survives,
        )
        self._serves = life.stage
        self._keep(taken)
        layers = recipe.part.layers
        say(
            f"this node serves stage {life.stage} of {len(recipe.part.sizes)}: layers {layers.start} to {layers.stop - 1}"
            f"{', the embedding and the head' if life.stage == 0 else ''}, {recipe.own.num_parameters / 1e6:,.1f} M parameters"
        )
        return taken

    def _keep(self, taken: Stage) -> None:
        roll = self._roll
        appointments = tuple(roll.appointments[stage] for stage in sorted(roll.appointments))
        lives = tuple(roll.renewed[stage] for stage in sorted(roll.renewed))
        save_stage(self._swarm, SavedStage(taken.life, appointments, lives))

    def peer(self, taken: Stage, learner: StageLearner, facilities: Facilities, prepare: Prepare) -> StagePeer:
        """The peer; who was appointed begins the chain here."""
        peer = StagePeer(
            taken.recipe,
            facilities,
            learner,
            life=taken.life,
            roll=taken.roll,
            mail=taken.mail,
            shelf=self._outside.shelf,
            keep=lambda: self._keep(taken),
            owed=[life for life in self._roll.decided if life.stage in taken.others and self._is_called(life)],
            keep_model=partial(save_model, self._swarm),
            fits=taken.others,
            prepare=prepare,
        )
        storage = facilities.storage
        if taken.life.founder == self._signer.peer_id and not (storage.load_history() or storage.load_votes()):
            storage.append_commit(None, founded(peer.settings.swarm, self._signer, peer.settings.rules))
        return peer
