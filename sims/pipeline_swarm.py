"""The processes of one simulated swarm with a pipeline: peers as they are (`farflung.node.stage_peer.StagePeer`) on a modelled network.

What `swarm` is for replicas. Each peer's life is that of the daemon: the founder begins stage 0, others come in by the entrance, take the stage
that needs them (or the one that they were told to take), and keep stage, appointments and state on a disk that outlives them. A judge
(`judge.Judge`) looks at the chain of each stage as it looks at the one of a replica swarm, for it is the same chain, and another one
(`pipeline_judge.PipelineJudge`) at what they are together.
"""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from farflung.node.door import Doors
from farflung.node.entrance import Entrance
from farflung.node.events import Event, EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.outside import Outside
from farflung.node.recipe import Recipe
from farflung.node.remains import Remains, is_called, remains, spent
from farflung.node.renewal import Overtaken, Renewal
from farflung.node.sealed_mail import PipelineMail
from farflung.node.shadows import Shelf
from farflung.node.stage_peer import StagePeer
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.node.stage_self import OUTSIDE
from farflung.node.stage_start import SPENT
from farflung.node.storage import newest_history
from farflung.node.terms import Terms
from farflung.protocol import pipeline_messages
from farflung.protocol.appointment import Appointment
from farflung.protocol.chain import founded
from farflung.protocol.envelope import swarm_of
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import PeerId, Signer, short
from farflung.protocol.lives import Life, group_of
from farflung.protocol.pipeline_messages import UNKNOWN, Domains
from farflung.protocol.roll import Roll
from farflung.protocol.saved_vote import SavedVote
from farflung.sims import clock
from farflung.sims.audit import HONEST_REFUSALS
from farflung.sims.hub import MemoryHub
from farflung.sims.judge import Judge
from farflung.sims.learners import SimStageLearner
from farflung.sims.links import LinkModel
from farflung.sims.lives import Lives
from farflung.sims.lookups import Lookups
from farflung.sims.moved import LearnersDoor
from farflung.sims.network import MemoryNetwork
from farflung.sims.pipeline_judge import PipelineJudge, WatchedSteps
from farflung.sims.swarm import START_UNIX_S, Swarm
from farflung.sims.toy import MemoryStorage
from farflung.training.data import Dataset
from farflung.training.runtime import Runtime

LOOK_S = 2.0
"""Between two looks of the judges at what peers hold."""

HAND_S = 0.002
"""What takes no time worth modelling."""

BUILD_S = 3.0
"""What a peer that moves takes to build its learner."""

SECONDS = {"_forward": 0.2, "_backward": 0.5, "_loss": 0.05, "step": 0.1}
"""What computing takes at a peer of speed 1."""


@dataclass(slots=True)
class Disk:
    """What outlives a process."""

    storages: dict[Life, MemoryStorage] = field(default_factory=lambda: defaultdict[Life, MemoryStorage](MemoryStorage))
    """By life of a stage."""
    life: Life | None = None
    """Of its stage."""
    appointments: dict[int, Appointment] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)
    models: list[tuple[int, dict[int, torch.Tensor]]] = field(default_factory=list)
    """Version, and the outer parameters of all stages, each time that the whole model was evaluated here."""

    @property
    def stage(self) -> int | None:
        return None if self.life is None else self.life.stage

    def remains(self, stage: int) -> Remains | None:
        """What is left of a stage's lives; of one that has only just begun that is nothing yet."""
        held = sorted((life for life in self.storages if life.stage == stage), key=lambda life: -life.number)
        return remains(self.storages[life] for life in held)

    def is_called(self, me: PeerId, life: Life) -> bool:
        """See `remains.is_called`."""
        return is_called(life, me, self.storages.get(life))

    def spent(self, founder: PeerId, life: Life) -> bool:
        """See `remains.spent`."""
        return life.founder == founder and life in self.storages and spent(life, self.storages[life])

    def keep(self, roll: Roll) -> None:
        self.appointments.update(roll.appointments)
        self.lives.update(roll.renewed)


@dataclass(slots=True)
class StageView:
    """What a judge sees of the peers of one stage: the part of a `swarm.Swarm` that it asks for."""

    outfit: Any
    ids: list[PeerId]
    numbers: dict[PeerId, int]
    saved_votes: Callable[[int], Mapping[bytes, SavedVote]]
    peers: dict[int, StagePeer] = field(default_factory=dict)
    learners: dict[int, SimStageLearner] = field(default_factory=dict)
    attackers: frozenset[PeerId] = frozenset()


@dataclass(slots=True)
class PipelineSwarm:
    """See the module. Peers are numbers."""

    recipe: Recipe
    dataset: Dataset
    signers: Sequence[Signer]
    hub: MemoryHub
    group: asyncio.TaskGroup
    speeds: Mapping[int, float] = field(default_factory=dict)
    """By peer, how many times as fast as usual it computes."""
    seconds: Callable[[int, StageRecipe, str, float], float] = lambda peer, recipe, name, _: SECONDS.get(name, HAND_S)
    """What a call takes a peer at its usual speed, by the name of the function and the share of its stage's parameters that it goes through."""
    start_s: float = 0.0
    """From the start of a process to its node being up."""
    checkpoint_s: float | None = None
    """Between two checkpoints of a peer; None: what a node takes for a stage of its size, 0: after every round."""
    founder: int = 0
    wanted: Mapping[int, int] = field(default_factory=dict)
    """By peer, the stage that it is told to take; others take what is needed."""
    domains: Mapping[int, Domains] = field(default_factory=dict)
    """By peer, what its person tells of where it stands, and whose it is."""
    tied: bool = True
    """Whether those who were told stay there whatever is needed later."""
    known_means: bool = True
    """See `judge.Judge`."""
    peers: dict[int, StagePeer] = field(default_factory=dict)
    disks: list[Disk] = field(init=False)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    events: list[tuple[float, int, Event]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Invariants that a judge saw broken, and refusals that honest peers should not make. A peer that crashes ends the simulation."""
    slowness: dict[int, float] = field(default_factory=dict)
    """By peer, how many times as long as usual everything takes for now."""
    on_event: Callable[[int, Event], None] = lambda peer, event: None
    """Sees the events of all nodes, in the order in which they happen."""
    on_broken: Callable[[str], None] = lambda what: None
    """Told what goes to `broken`."""
    judge: PipelineJudge = field(init=False)
    _judges: dict[Life, Judge] = field(default_factory=dict)
    _views: dict[Life, StageView] = field(default_factory=dict)
    _groups: dict[bytes, Judge] = field(default_factory=dict)
    """By what the messages of a chain are bound to."""
    _heard: bytes = b""
    """The last message; a broadcast is heard once."""
    _lives: Lives = field(init=False)
    _lookups: Lookups = field(init=False)
    _rolls: dict[int, Roll] = field(default_factory=dict)
    """Of those who run."""

    def __post_init__(self) -> None:
        self.judge = PipelineJudge(self._broken, self.hub, self.ids, self.peers, self._judges)
        self.hub.on_message = self._on_message
        self.hub.on_delivery = self._on_delivery
        self.disks = [Disk() for _ in self.signers]
        self._lookups = Lookups(self.hub)
        self._lives = Lives(self._live, self.ids, self.group, self.tasks)
        self.disks[self.founder].life = Life(0, 0, self.signers[self.founder].peer_id)

    @property
    def ids(self) -> list[PeerId]:
        """Public keys, by number."""
        return [signer.peer_id for signer in self.signers]

    def happened(self, what: str, peer: int | None = None) -> list[Event]:
        """Events of one kind, in order."""
        return [event for _, who, event in self.events if event["event"] == what and peer in (None, who)]

    # ---- processes ---------------------------------------------------------------------------------------------

    def start(self, peer: int) -> None:
        self._lives.start(peer)

    def leave(self, peer: int) -> None:
        if self._lives.take_back(peer):
            return  # it is not up yet
        if peer in self.peers:
            self.peers[peer].stop("asked to leave")
        else:
            self.tasks[peer].cancel()  # it looks for a stage, or makes one: nobody needs a goodbye

    def slow(self, peer: int, factor: float) -> None:
        self.slowness[peer] = factor

    def kill(self, peer: int, *, reset: bool = True) -> None:
        """`reset`: its kernel still tells others that its connections are gone."""
        self.judge.read_lives()
        gone = self.peers.pop(peer, None)
        for view in self._views.values():
            if view.peers.get(peer) is gone:
                view.peers.pop(peer, None)
        if self.ids[peer] in self.hub.running():  # else whoever plays a schedule has done so
            self.hub.kill(self.ids[peer], reset=reset)
        self._lives.kill(peer)
        if not reset:
            for storage in self.disks[peer].storages.values():
                storage.lose_power()

    # ---- one life ----------------------------------------------------------------------------------------------

    async def _live(self, index: int) -> None:
        if self.start_s:
            await asyncio.sleep(self.start_s)
        signer, disk = self.signers[index], self.disks[index]
        network = MemoryNetwork(self.hub, signer.peer_id)
        log = EventLog(None, swarm="sim", peer=short(signer.peer_id), clock=self.hub.loop.time)
        log.subscribe(lambda event: self._on_event(index, event))
        manifest = self.recipe.manifest
        settings = self.recipe.settings()
        roll = Roll(self.recipe.swarm, manifest.founder, signer.peer_id, manifest.pipeline.stages, settings.heartbeat_s)
        roll.appointments.update(disk.appointments)
        roll.renewed.update(disk.lives)

        def refused(error: RemoteError) -> None:
            if type(error).__name__ not in HONEST_REFUSALS:
                said = f"{type(error).__name__}: {error.reason}"
                self._broken(f"invariant 8: peer {index} refused an honest message: {said}")

        mail = PipelineMail(network, signer, self.recipe.swarm, pipeline_messages.decode)
        self._rolls[index] = roll
        self._find_others(index)
        try:
            outside = Outside(
                network=network,
                mail=mail,
                roll=roll,
                shelf=Shelf(),
                admission=b"",
                domains=self.domains.get(index, UNKNOWN),
                admits=settings.admits,
                refused=refused,
            )
            is_spent = partial(disk.spent, signer.peer_id)
            lost = disk.life if disk.life is not None and is_spent(disk.life) else None
            if lost is not None:
                log.emit("stage.spent", stage=lost.stage, life=lost.number, reason=SPENT)
                disk.life = None
            serves: int | None = None
            goes_on = True
            while goes_on:
                if disk.life is None:
                    serves = None
                    told = self.wanted.get(index) if lost is None else lost.stage
                    lost = None
                    fits = range(manifest.pipeline.stages) if told is None else (told,)
                    found = {stage: disk.remains(stage) for stage in fits}
                    outside.kept = {stage: one.place.version for stage, one in found.items() if one is not None}
                    disk.life = await Entrance(outside, fits, spent=is_spent, say=lambda text: None).run()
                    disk.keep(roll)
                survives, serves = serves == disk.life.stage, disk.life.stage
                goes_on = await self._serve(index, disk.life, outside, mail, log, survives=survives)
        finally:
            self.peers.pop(index, None)
            if self._rolls.get(index) is roll:
                del self._rolls[index]
            await network.close()

    def _find_others(self, index: int) -> None:
        found = self._lookups.find(self.ids[index], most=len(self.ids))
        if index in self.peers:
            self.peers[index].found(dict.fromkeys(found))
            return
        for other in found:  # with the next that it says of itself they are told
            self._rolls[index].discover(other, self.hub.now())

    async def _serve(
        self,
        index: int,
        life: Life,
        outside: Outside,
        mail: PipelineMail,
        log: EventLog,
        *,
        survives: bool,  # it has served an earlier life of that stage until now
    ) -> bool:
        """One life; whether another follows it."""
        recipe, roll = stage_recipe(self.recipe, life.stage), outside.roll
        signer, disk = self.signers[index], self.disks[index]
        storage = disk.storages[life]
        learner = SimStageLearner(recipe.learner(self.dataset if recipe.stage == 0 else None, Runtime()))

        def seconds(name: str, share: float) -> float:
            usual_s = self.seconds(index, recipe, name, share)
            return usual_s / self.speeds.get(index, 1.0) * self.slowness.get(index, 1.0)

        def door() -> LearnersDoor:
            return LearnersDoor(seconds, learner.num_parameters)

        doors = Doors(learner=door(), side=door(), journal=door(), digest=door())
        made = disk.is_called(signer.peer_id, life)
        held = None
        if made:
            renewal = Renewal(outside, recipe, life, learner, disk.remains(life.stage), survives, doors, log)
            try:
                held = await renewal.run(signer, storage)
            except Overtaken:
                disk.life = None
                return True
            self.judge.on_made(index, life, learner)
        others = self._other_stages(index, recipe.stage)
        facilities = Facilities(
            network=outside.network,
            signer=signer,
            doors=doors,
            storage=storage,
            log=log,
            facts=Facts(device="simulated", pid=0, domains=self.domains.get(index, UNKNOWN)),
            checkpoint_s=recipe.own.checkpoint_s if self.checkpoint_s is None else self.checkpoint_s,
            held=held,
        )
        peer = StagePeer(
            recipe,
            facilities,
            learner,
            life=life,
            roll=roll,
            mail=mail,
            shelf=outside.shelf,
            keep=partial(disk.keep, roll),
            owed=[one for one in roll.decided if one.stage in others and disk.is_called(signer.peer_id, one)],
            fits=others,
            prepare=self._prepare,
            keep_model=lambda version, stages, versions: disk.models.append((version, dict(stages))),
        )
        peer._stage_trainer._steps = WatchedSteps(peer.pipeline, partial(self.judge.on_done, index))
        judge, view = self._judge(recipe, life)
        learner.witness = lambda samples, gradient: judge.on_gradient(index, samples, gradient)
        anchor, history = newest_history(storage.load_history())
        if not history and life.founder == signer.peer_id:
            history = [founded(peer.settings.swarm, signer, peer.settings.rules)]
            storage.append_commit(None, history[0])
        self.peers[index] = view.peers[index] = peer
        view.learners[index] = learner
        try:
            left = await peer.run(anchor=anchor, history=history, known=dict.fromkeys(roll.known))
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # killed while it ended: a task group that is ending forgets it (until Python 3.13)
        finally:
            self.judge.read_lives()
            for peers in (self.peers, view.peers):
                if peers.get(index) is peer:
                    del peers[index]
        if left.moves_to is None:
            return False
        disk.life = None if left.moves_to == OUTSIDE else roll.life(left.moves_to)
        outside.network.stop_serving()
        await asyncio.sleep(BUILD_S)
        return True

    def _other_stages(self, index: int, stage: int) -> frozenset[int]:
        """To which a peer may move."""
        stages = range(self.recipe.manifest.pipeline.stages)
        tied = index == self.founder or (self.tied and index in self.wanted)  # the founder's machine stays
        return frozenset() if tied else frozenset(stages) - {stage}

    async def _prepare(self, stage: int) -> None:
        """Data is opened at once here."""

    # ---- judges ------------------------------------------------------------------------------------------------

    def _judge(self, recipe: StageRecipe, life: Life) -> tuple[Judge, StageView]:
        """Of one life of a stage: a chain of its own."""
        if life not in self._judges:
            outfit = _Outfit(recipe.terms(life))
            numbers = {peer_id: number for number, peer_id in enumerate(self.ids)}
            self._views[life] = StageView(outfit, self.ids, numbers, lambda peer: self.disks[peer].storages[life].votes)
            where = f"stage {life.stage}" + (f", life {life.number}" if life.number else "")
            judge = Judge(
                broken=lambda which, what: self._broken(f"{where}, invariant {which}: {what}"),
                known_means=self.known_means,
            )
            judge.swarm = cast(Swarm, self._views[life])
            self._judges[life] = self._groups[group_of(self.recipe.swarm, life)] = judge
        return self._judges[life], self._views[life]

    def _broken(self, what: str) -> None:
        self.broken.append(what)
        self.on_broken(what)

    def _on_message(self, sender: PeerId, data: bytes) -> None:
        if data is self._heard:
            return
        self._heard = data
        judge = self._groups.get(swarm_of(data, sender))
        if judge is not None:
            judge.on_message(sender, data)

    def _on_delivery(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        for judge in self._judges.values():
            judge.on_delivery(sender, receiver, data)

    def _on_event(self, index: int, event: Event) -> None:
        self.events.append((self.hub.now() - START_UNIX_S, index, event))
        self.on_event(index, event)
        life = self.disks[index].life
        if life in self._judges and index in self._views[life].learners:
            self._judges[life].on_event(index, event)
            if event["event"] == "round.commit":
                self.judge.on_version(life, event["version"], self._views[life].learners[index])
        self.judge.on_event(index, event)

    async def watch(self) -> None:
        """Let the judges look, and peers for others, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lookups.go_on(self.ids, self._rolls, self._find_others))
            while True:
                await asyncio.sleep(LOOK_S)
                self.look()

    def look(self) -> None:
        for life, judge in self._judges.items():
            judge.look()
            for index, learner in self._views[life].learners.items():
                if index in self._views[life].peers:
                    self.judge.look_at_state(index, life, learner)
        self.judge.look()

    def lives_begun(self) -> list[Life]:
        """All that somebody has begun."""
        begun = (life for disk in self.disks for life, storage in disk.storages.items() if storage.load_history())
        return list(dict.fromkeys(begun))

    def rounds(self) -> dict[int, int]:
        """Newest version of the outer state, by stage, in its newest life."""
        lives = sorted(self._judges, key=lambda life: (life.stage, life.number))
        return {life.stage: self._judges[life].rounds for life in lives}

    def losses(self) -> list[float]:
        """Of data nodes' microbatches, in order."""
        found = [event["loss"] for event in self.happened("step")]
        return [loss for loss in found if loss is not None and not math.isnan(loss)]

    def digests(self) -> dict[int, set[tuple[int, bytes]]]:
        """By stage: (version, digest of the outer state) that its living peers really hold."""
        held = defaultdict[int, set[tuple[int, bytes]]](set)
        for number, peer in self.peers.items():
            if peer.applier.idle and peer.applier.version >= 0:
                held[peer.pipeline.life.stage].add((peer.applier.version, self.learner(number).outer.digest()))
        return dict(held)

    def learner(self, peer: int) -> SimStageLearner:
        """What a living peer trains with."""
        return self._views[self.peers[peer].pipeline.life].learners[peer]


@dataclass(frozen=True, slots=True)
class _Outfit:
    """What a judge asks of an outfit."""

    terms: Terms


Story = Callable[[PipelineSwarm], Any]
"""What happens: a coroutine function; the simulation ends when it returns."""


def simulate(
    recipe: Recipe, dataset: Dataset, signers: Sequence[Signer], story: Story, *, seed: int = 1, **options: Any
) -> PipelineSwarm:
    """Run a swarm under virtual time until the story is told. `options` are a swarm's, and `link`."""
    torch.set_num_threads(1)
    link = options.pop("link", LinkModel())

    async def main() -> PipelineSwarm:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(f"{seed}/network"), link)
        async with asyncio.TaskGroup() as group:
            swarm = PipelineSwarm(recipe, dataset, signers, hub, group, **options)
            watching = group.create_task(swarm.watch())
            await story(swarm)
            swarm.look()
            watching.cancel()
            for task in swarm.tasks.values():
                task.cancel()
        return swarm

    return clock.run(main(), start=START_UNIX_S)
