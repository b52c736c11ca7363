"""Waiting for room on a full disk, and what a node says meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farflung.node.disk_room import RETRY_S, PatientDoor, Room
from farflung.node.events import TELL_AGAIN_S, Event, EventLog
from farflung.node.executor import STALE_S, Executor
from farflung.protocol.effects import SaveVote, Send
from farflung.protocol.errors import DiskFull
from farflung.protocol.saved_vote import SavedVote
from farflung.sims import clock
from farflung.sims.toy import VirtualDoor


class Lab:
    """A door to a disk that is full until somebody makes room."""

    def __init__(self) -> None:
        log = EventLog(None, swarm="s", peer="aa", clock=lambda: 0.0)
        self.told: list[Event] = []
        log.subscribe(self.told.append)
        self.door = PatientDoor(VirtualDoor(lambda _: 0.0), Room(log, "its votes"))
        self.full = True
        self.tries = 0

    def write(self, what: str) -> str:
        self.tries += 1
        if self.full:
            raise DiskFull(f"no room for {what}", remedy="free space in /s")
        return what

    @property
    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.told if event["event"] == "disk.full"]


def run(main: Callable[[Lab], Awaitable[None]]) -> None:
    async def within() -> None:
        await main(Lab())

    clock.run(within())


def test_a_write_waits_for_room_and_others_go_through_the_door_meanwhile() -> None:
    async def main(lab: Lab) -> None:
        async with asyncio.TaskGroup() as tasks:
            waits = tasks.create_task(lab.door.run(lab.write, "a vote"))
            also = tasks.create_task(lab.door.run(lab.write, "another"))
            await asyncio.sleep(TELL_AGAIN_S + RETRY_S)
            assert await lab.door.run(len, "abc") == 3
            assert lab.reasons == 2 * ["free space in /s"] and lab.tries > 20
            lab.full = False
        assert (waits.result(), also.result()) == ("a vote", "another")
        assert lab.reasons[2:] == [""]

    run(main)


def test_other_errors_are_not_waited_for_and_who_is_cancelled_waits_no_more() -> None:
    async def main(lab: Lab) -> None:
        with pytest.raises(ZeroDivisionError):
            await lab.door.run(divmod, 1, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await lab.door.run(lab.write, "a mean")
        await lab.door.run(len, "abc")
        assert lab.reasons == ["free space in /s"], "nobody waits, and whether there is room nobody knows"
        lab.full = False
        await lab.door.run(lab.write, "the next mean")
        assert lab.reasons == ["free space in /s", ""]

    run(main)


def test_what_a_node_would_say_after_a_long_wait_for_the_disk_is_not_said() -> None:
    async def main(lab: Lab) -> None:
        sent: list[str] = []
        mail = SimpleNamespace(send=lambda to, message, via: sent.append(message))
        storage = SimpleNamespace(save_vote=lambda vote: lab.write("a vote"))
        others: dict[str, Any] = dict.fromkeys(("member", "exchange", "means", "applier", "trainer", "log", "refused"))
        executor = Executor(mail=mail, storage=storage, journal=lab.door, **others)  # type: ignore[arg-type]

        def push(*effects: Any) -> None:
            executor.push(list(effects))

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(executor.run(tasks))
            vote = SaveVote(SavedVote(1, 0, None))
            push(Send(b"p", "before"), vote, Send(b"p", "the vote"))  # type: ignore[arg-type]
            await asyncio.sleep(STALE_S / 2)
            push(Send(b"p", "soon after"))  # type: ignore[arg-type]
            await asyncio.sleep(STALE_S)
            for _ in range(100):
                push(Send(b"p", "a heartbeat"), vote)  # type: ignore[arg-type]
            assert sent == ["before"]
            lab.full = False
            await asyncio.sleep(2 * STALE_S)  # idle most of the time
            push(Send(b"p", "now"))  # type: ignore[arg-type]
            await asyncio.sleep(1.0)
            running.cancel()
        assert sent == ["before", "the vote", "soon after", "now"]

    run(main)
