"""Lets the blows of a scene (`stage_losses`) fall on a swarm: finds who is hit, makes faults of it, and undoes what is over."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from itertools import count

from farflung.protocol.accord import FEWEST, enough
from farflung.protocol.keys import PeerId
from farflung.protocol.lives import Life
from farflung.protocol.quorum import is_quorum
from farflung.sims.fault_playing import OnFault, Player
from farflung.sims.faults import (
    Delay,
    Drop,
    Duplicate,
    Fault,
    Heal,
    Kill,
    Leave,
    Partition,
    Pause,
    Resume,
    Slow,
    Start,
    Window,
)
from farflung.sims.pipeline_swarm import PipelineSwarm
from farflung.sims.stage_losses import Blow, Scene, What, Whom

CALL_S = 150.0
"""How long it is waited for somebody to be called."""

RESTART_S = 5.0
"""Nobody who has just been killed starts again sooner."""

LOOK_S = 0.25
"""Between two looks for one."""


class Misfortune:
    """See the module."""

    def __init__(self, scene: Scene, swarm: PipelineSwarm, on_fault: OnFault) -> None:
        self._scene = scene
        self._swarm = swarm
        self._player = Player(swarm.hub, swarm.ids, swarm, on_fault)
        self._began = swarm.hub.now()
        self._numbers = count()
        self._cut = False
        self._windows: dict[int, Window] = {}
        """What is wrong with the network or machines for a while, by number."""
        self._pauses: dict[int, list[int]] = {}
        """By peer, numbers of those that it stands still for; it goes on after the last of them."""
        self._fresh = list(range(len(scene.placed), scene.num_peers))

    async def run(self) -> None:
        """All blows, until each is over."""
        async with asyncio.TaskGroup() as group:
            for blow in self._scene.blows:
                group.create_task(self._fall(blow), name=f"blow: {blow.what}")

    async def darken(self, after_s: float, away_s: float) -> None:
        """Blows for so long, or until all are over. Then everybody loses power at one moment, whatever else was wrong is over, and later all come back that were ever there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await self.run()
        for peer in self._running():
            self._begin(Kill(at=self._now(), peer=peer, reset=False))
        for number, window in self._windows.items():
            self._player.end(number, window)
        if self._cut:
            self._begin(Heal(at=self._now()))
        await asyncio.sleep(away_s)
        for peer in sorted(self._swarm.tasks):
            self._begin(Start(at=self._now(), peer=peer))

    async def end(self) -> None:
        """Those come back without whom no stages are enough to decide; newcomers come, and after the last of them others come back, until there is one more
        than stages."""
        await asyncio.sleep(RESTART_S)
        for stage in range(self._scene.stages):
            if enough(self._scene.stages, self._deciding()):
                break
            for peer, disk in enumerate(self._swarm.disks):
                if disk.stage == stage and not self._runs(peer):
                    self._begin(Start(at=self._now(), peer=peer))
        # where all others keep to their stages, only newcomers can take one
        while self._fresh and (self._scene.tied or len(self._running()) <= self._scene.stages):
            self._come()
        if self._scene.tied:
            self._bring_back()
            return
        for peer in range(self._scene.num_peers):  # newcomers may have been hit, too
            if len(self._running()) <= self._scene.stages and not self._runs(peer):
                self._begin(Start(at=self._now(), peer=peer))

    def _deciding(self) -> set[int]:
        """Stages whose chains have a quorum among the machines that run, in their newest life."""
        swarm = self._swarm
        found: set[int] = set()
        for stage in range(self._scene.stages):
            number = swarm.judge.newest(stage)
            begun = [life for life in swarm.lives_begun() if (life.stage, life.number) == (stage, number)]
            if not begun:
                continue  # its newest life may never be
            newest = begun[0]
            storages = [disk.storages[newest] for disk in swarm.disks if newest in disk.storages]
            heads = [history[-1].certified.commit for storage in storages if (history := storage.load_history())]
            there = [swarm.ids[peer] for peer in self._running() if self._has(peer, newest)]
            if heads and is_quorum(max(heads, key=lambda commit: commit.height).view, there):
                found.add(stage)
        return found

    def _has(self, peer: int, life: Life) -> bool:
        """Whether a machine that runs serves a life and has its state, or will have it as soon as it is up."""
        disk, node = self._swarm.disks[peer], self._swarm.peers.get(peer)
        if disk.life != life:
            return False
        if node is not None:
            return bool(node.holds[1])
        return life.number == 0 or disk.storages[life].load_place() is not None

    def _bring_back(self) -> None:
        """A machine of each stage that has none left, but for as many stages as there are newcomers who have none."""
        disks, running = self._swarm.disks, self._running()
        kept = {disks[peer].stage for peer in running}
        newcomers = sum(disks[peer].stage is None for peer in running)
        first = 0 if self._scene.stages >= FEWEST else 1
        deserted = [stage for stage in range(first, self._scene.stages) if stage not in kept]
        for stage in deserted[newcomers:]:
            peer = next(peer for peer, disk in enumerate(disks) if disk.stage == stage and not self._runs(peer))
            self._begin(Start(at=self._now(), peer=peer))

    # ---- blows -------------------------------------------------------------------------------------------------

    async def _fall(self, blow: Blow) -> None:
        await asyncio.sleep(blow.at)
        if blow.whom is Whom.CALLED:
            await self._call()
        if blow.what is What.COME:
            self._come()
            return
        until, lives = self._now() + (blow.for_s or 0.0), dict(self._swarm.tasks)
        faults = [(fault, self._begin(fault)) for fault in self._faults(blow, until)]
        if blow.for_s is None:
            return
        await asyncio.sleep(blow.for_s)
        for fault, number in faults:
            await self._undo(fault, number, lives)

    def _faults(self, blow: Blow, until: float) -> Sequence[Fault]:
        """What it comes to now."""
        now, swarm = self._now(), self._swarm
        hit = [peer for peer in self._hit(blow) if self._runs(peer)]
        up = [peer for peer in hit if swarm.ids[peer] in swarm.hub.running()]
        awake = [peer for peer in up if not swarm.hub.is_paused(swarm.ids[peer])]
        match blow.what:
            case What.KILL | What.POWER:
                return [Kill(at=now, peer=peer, reset=blow.what is What.KILL) for peer in hit]
            case What.PAUSE:
                return [Pause(at=now, peer=peer) for peer in up]
            case What.LEAVE:
                return [Leave(at=now, peer=peer) for peer in awake if peer in swarm.peers]
            case What.CUT:
                return [] if self._cut or not hit else [Partition(at=now, groups=(tuple(hit),))]
            case What.DELAY:
                return [Delay(at=now, until=until, extra_s=blow.much, peer=peer) for peer in hit]
            case What.SLOW:
                return [Slow(at=now, until=until, peer=peer, factor=blow.much) for peer in hit]
            case What.DROP:
                return [Drop(at=now, until=until, probability=blow.much)]
            case What.DUPLICATE:
                return [Duplicate(at=now, until=until, probability=blow.much)]
            case What.COME:
                raise AssertionError("nobody is hit by that")

    def _begin(self, fault: Fault) -> int:
        self._cut = self._cut or isinstance(fault, Partition)
        number = next(self._numbers)
        if isinstance(fault, Pause):
            if self._swarm.hub.is_paused(self._swarm.ids[fault.peer]):
                self._pauses[fault.peer].append(number)
                return number
            self._pauses[fault.peer] = [number]  # those of a life that was killed meanwhile are over
        self._player.begin(number, fault)
        if isinstance(fault, Window):
            self._windows[number] = fault
        return number

    async def _undo(self, fault: Fault, number: int, lives: Mapping[int, asyncio.Task[None]]) -> None:
        """`lives`: of all peers when it began."""
        match fault:
            case Kill(peer=peer) | Leave(peer=peer):
                if isinstance(fault, Leave):
                    # the life that says goodbye: the peer may have been killed and started since then
                    await asyncio.wait([lives[peer]])
                if not self._runs(peer):  # nobody else has started it
                    self._begin(Start(at=self._now(), peer=peer))
            case Pause(peer=peer) if number in self._pauses[peer]:
                self._pauses[peer].remove(number)
                if not self._pauses[peer] and self._swarm.hub.is_paused(self._swarm.ids[peer]):
                    self._begin(Resume(at=self._now(), peer=peer))
            case Pause():
                pass  # whom it hit was killed and started again, and stands still for another one
            case Partition():
                self._cut = False
                self._begin(Heal(at=self._now()))
            case Drop() | Duplicate() | Delay() | Slow():
                self._player.end(number, self._windows.pop(number))
            case _:
                raise AssertionError(f"no blow makes this: {fault}")

    def _come(self) -> None:
        if self._fresh:
            self._begin(Start(at=self._now(), peer=self._fresh.pop(0)))

    # ---- who ---------------------------------------------------------------------------------------------------

    def _hit(self, blow: Blow) -> list[int]:
        swarm, running = self._swarm, self._running()
        serving = {peer: node.pipeline.recipe.stage for peer, node in sorted(swarm.peers.items())}
        match blow.whom:
            case Whom.STAGES | Whom.FIRST:
                stages = {stage % self._scene.stages for stage in blow.which}
                members = [peer for peer, stage in serving.items() if stage in stages]
                return members if blow.whom is Whom.STAGES else sorted(members, key=swarm.ids.__getitem__)[:1]
            case Whom.REGION:
                return [peer for peer in running if self._scene.regions[peer] in blow.which]
            case Whom.LEADER:
                return [peer for peer, node in sorted(swarm.peers.items()) if node.pipeline.leads][:1]
            case Whom.PROPOSER:
                homes = [swarm.peers[peer].member for peer, stage in serving.items() if stage == 0]
                turns = {member.consensus.proposer_now() for member in homes if member.started}
                return [peer for peer in running if swarm.ids[peer] in turns][:1]
            case Whom.CALLED:
                called = self._called()
                return [peer for peer in running if swarm.ids[peer] in called]
            case Whom.ANYBODY:
                return list(dict.fromkeys(running[which % len(running)] for which in blow.which if running))

    def _called(self) -> set[PeerId]:
        """Founders of lives whose state nobody has yet."""
        now = self._swarm.hub.now()
        found: set[PeerId] = set()
        for node in self._swarm.peers.values():
            roll = node.pipeline.roll
            if node.pipeline.recipe.stage == 0 or (roll.number(0) > 0 and not roll.training(0, now)):
                found |= {life.founder for life in roll.renewed.values() if roll.holders(life.stage, now) is None}
        return found

    async def _call(self) -> None:
        """Wait until somebody is called."""
        for _ in range(int(CALL_S / LOOK_S)):
            if self._called():
                return
            await asyncio.sleep(LOOK_S)

    def _running(self) -> list[int]:
        return [peer for peer in range(self._scene.num_peers) if self._runs(peer)]

    def _runs(self, peer: int) -> bool:
        task = self._swarm.tasks.get(peer)
        return task is not None and not task.done()

    def _now(self) -> float:
        """Seconds since it began."""
        return self._swarm.hub.now() - self._began
