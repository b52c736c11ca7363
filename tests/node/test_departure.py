"""What a node that leaves still finishes, however long that takes, and what it gives up."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.node.applying import PACE, Applying, founded, hold, round_after
from tests.node.lab import CODEC, NUMEL, OUTER, Lab, in_lab
from tests.protocol.bus import rules

from farflung.compression.policy import uniform
from farflung.node.departure import STOP_S, Departure
from farflung.node.disk_room import patient
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.storage import Place
from farflung.node.terms import Terms
from farflung.node.trainer import Pace
from farflung.protocol import chain
from farflung.protocol.errors import DiskFull, NetworkError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.toy import MemoryStorage, ToyLearner, VirtualDoor

STEP_S = 10 * STOP_S
US = Ed25519Signer(b"u" * 32)
SETTINGS = rules(US.peer_id)


def full(*_: object) -> None:
    raise DiskFull("no room", remedy="free space in /s")


# ---- a node ----------------------------------------------------------------------------------------------------


class Life:
    """Of the only node of a swarm, whose steps are long."""

    def __init__(self, settings: Settings = SETTINGS, pace: Pace = PACE, step_s: float = STEP_S) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(latency_s=0.01, jitter_s=0.0, up_bytes_per_s=1e9))
        flat = uniform(CODEC, NUMEL)
        terms = Terms(settings=settings, pace=pace, uplink=flat, downlink=flat, feedback=FeedbackSpec(), outer=OUTER)
        self.events: list[dict[str, Any]] = []
        log = EventLog(None, swarm="test", peer="us", clock=loop.time)
        log.subscribe(self.events.append)
        self.disk = MemoryStorage()
        long = VirtualDoor(lambda name: step_s if name == "train" else 0.001)
        side, journal, digest = (VirtualDoor(lambda _: 0.001) for _ in range(3))
        facilities = Facilities(
            network=MemoryNetwork(hub, US.peer_id),
            signer=US,
            doors=patient(Doors(learner=long, side=side, journal=journal, digest=digest), log),
            storage=self.disk,
            log=log,
            facts=Facts(device="toy", pid=0),
        )
        self.peer = ReplicaPeer(terms, facilities, ToyLearner(NUMEL, OUTER))

    async def run(self) -> None:
        await self.peer.run(anchor=None, history=[chain.founded(SETTINGS.swarm, US, SETTINGS.rules)], known={})

    def named(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    @property
    def place(self) -> Place | None:
        return self.disk.load_place()


def live(body: Callable[[Life], Awaitable[None]]) -> None:
    """`body` does something to a node while it lives."""

    async def main() -> None:
        life = Life()
        async with asyncio.TaskGroup() as group:
            living = group.create_task(life.run())
            await body(life)
            await living

    clock.run(main(), start=START_UNIX_S)


def test_a_step_is_finished_and_saved_however_long_it_takes() -> None:
    """It was neither, after half a minute: what was trained since the last checkpoint was lost, and "stopped" was said while the step still ran."""

    async def body(life: Life) -> None:
        await asyncio.sleep(1.5 * STEP_S)  # in the middle of the second step
        life.peer.stop("asked to stop")
        await asyncio.sleep(0.4 * STEP_S)
        said = [event["reason"] for event in life.named("node.state") if event["state"] == "leaving"]
        assert said == ["the step under way is finished and saved before the node ends, however long it takes"]
        assert not life.named("node.stop")
        await asyncio.sleep(0.2 * STEP_S)
        (stopped,) = life.named("node.stop")
        assert life.place is not None and life.place.steps == stopped["step"] == 2

    live(body)


@pytest.mark.parametrize("asked", [False, True])
def test_without_a_network_there_is_a_place_to_go_on_from(asked: bool) -> None:
    """Of which no checkpoint was due: all since the last round was lost, and so was the end of a node that had been asked to leave."""

    async def main() -> None:
        life, raised = Life(), list[str]()

        async def lives() -> None:
            try:
                await life.run()
            except NetworkError as error:
                raised.append(str(error))

        async with asyncio.TaskGroup() as group:
            group.create_task(lives())
            await asyncio.sleep(1.5 * STEP_S)
            if asked:
                life.peer.stop("asked to stop")
            life.peer.cut_off(NetworkError("it is gone"))
        assert raised == ([] if asked else ["it is gone"])
        assert [event["reason"] for event in life.named("node.stop")] == (["asked to stop"] if asked else [])
        assert life.place is not None and life.place.steps == 2

    clock.run(main(), start=START_UNIX_S)


def rounds_of(step_s: float) -> Life:
    """One whose rounds are committed."""
    settings = rules(US.peer_id, cuts=(0, NUMEL))
    per_sample = settings.rules.tokens_per_sample
    return Life(settings, replace(PACE, laps=settings.rules.laps, tokens_per_sample=per_sample), step_s)


@pytest.mark.parametrize("moves_to", [None, 1])
def test_a_place_beyond_the_history_on_disk_is_not_saved(moves_to: int | None) -> None:
    """A commit that waits for room on the disk has been applied; the next start would find the history's end lost, and refuse to go on."""

    async def main() -> None:
        life = rounds_of(3.0)
        async with asyncio.TaskGroup() as group:
            living = group.create_task(life.run())
            while not life.named("round.commit"):
                await asyncio.sleep(1.0)
            await life.peer.applier.save_place()
            saved = life.place
            life.disk.append_commit = full  # type: ignore[method-assign]
            await asyncio.sleep(60.0)
            life.peer.stop("asked to stop")
            life.peer.moves_to = moves_to
            await living
        assert saved is not None and saved.height == life.disk.history[-1].certified.commit.height
        assert life.peer.applier.height == saved.height + 1 and life.place == saved
        assert [event["what"] for event in life.named("disk.full") if event["reason"]][-1] == "its votes and commits"

    clock.run(main(), start=START_UNIX_S)


@pytest.mark.parametrize("moves_to", [None, 1])
def test_who_moves_on_does_not_fail_of_a_checkpoint_without_room(moves_to: int | None) -> None:
    """Who leaves for good does, or nobody would hear that the last of it is not saved."""

    async def main() -> None:
        life = Life(step_s=3.0)
        life.disk.save_learner = full  # type: ignore[method-assign]

        def leaves() -> None:
            life.peer.stop("asked to stop")
            life.peer.moves_to = moves_to

        asyncio.get_running_loop().call_later(10.0, leaves)
        (raised,) = await asyncio.gather(life.run(), return_exceptions=True)
        if moves_to is None:
            assert isinstance(raised, ExceptionGroup) and isinstance(raised.exceptions[0], DiskFull)
        else:
            assert raised is None and life.named("node.stop")
            assert [event["what"] for event in life.named("disk.full")] == ["its checkpoints"]

    clock.run(main(), start=START_UNIX_S)


# ---- what it is busy with --------------------------------------------------------------------------------------


class Leaving(Applying):
    """One that is asked to leave."""

    def begin_step(self, lab: Lab, step_s: float) -> None:
        async def step() -> None:
            async with self.trainer.busy:
                await asyncio.sleep(step_s)

        self.training = lab.group.create_task(step())

    async def leave(self, *, alone: bool = False) -> float:
        """Seconds until its work is done."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.applier.finish()
        leaving = Departure(cast(Any, self.member), alone=alone)
        await leaving.work_done(self.applier, self.trainer, self.task, self.training, lambda reason: None)
        assert self.task.done() and self.training.done()
        return loop.time() - began


def test_a_commit_that_is_being_taken_is_finished() -> None:
    """After the step that it waits for."""

    async def main(lab: Lab) -> None:
        one = Leaving(lab, lab.nodes[0])
        first = round_after((await founded(one))[-1].commit)
        await hold(one.node, 1)
        one.begin_step(lab, STEP_S)
        one.member.history.append(first)
        one.applier.push(first)
        await asyncio.sleep(1.0)
        assert STEP_S - 2.0 < await one.leave() < STEP_S
        assert one.applier.version == 1 and one.applier.steady.is_set()

    in_lab(1, main)


@pytest.mark.parametrize("alone", [False, True])
def test_means_that_do_not_come_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    async def main(lab: Lab) -> None:
        one = Leaving(lab, lab.nodes[0])
        first = round_after((await founded(one))[-1].commit)

        async def collect(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(one.node.exchange, "collect", collect)
        one.begin_step(lab, 1.0)
        one.member.history.append(first)
        one.applier.push(first)
        await asyncio.sleep(2.0)
        assert await one.leave(alone=alone) == pytest.approx(0.0 if alone else STOP_S, abs=1.0)
        assert one.applier.version == 0 and one.applier.steady.is_set()

    in_lab(1, main)


@pytest.mark.parametrize("begun", [True, False])
def test_a_download_is_given_up_at_once(begun: bool) -> None:
    """Nobody has what it asks for."""

    async def main(lab: Lab) -> None:
        one = Leaving(lab, lab.nodes[0])
        later = round_after(round_after((await founded(one))[-1].commit).commit)  # a jump: its means do not help
        if not begun:
            one.begin_step(lab, 20.0)
        one.member.history.replace(None, [later])
        one.applier.push(later)
        if not begun:
            one.applier.finish()
        await asyncio.sleep(5.0)
        assert one.applier.downloading == begun
        if begun:
            one.begin_step(lab, 0.0)
        assert await one.leave() <= (1.0 if begun else 15.0)
        assert one.applier.steady.is_set() != begun and one.applier.version == 0

    in_lab(1, main)
