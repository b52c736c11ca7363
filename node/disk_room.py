"""Room on the disk, and waiting for it: what a full one does not take is tried again until it does, and meanwhile the node says so (`disk.full`).

Nothing that a node promises to others may be ahead of its disk (`executor`), so what follows from a write waits with it: the others may let the node
go until there is room. Training does not wait, and a file that could not be written is as it was before (`durable`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from farflung.node.door import Door, Doors
from farflung.node.events import TELL_AGAIN_S, EventLog
from farflung.protocol.errors import DiskFull

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 5.0
"""Between two tries."""


class Room:
    """Whether the disk takes something of a node, as its log tells it. Times are the loop's."""

    def __init__(self, log: EventLog, what: str) -> None:
        """`what`, in words for people: several."""
        self._log = log
        self._what = what
        self._told_at: float | None = None
        """When it was last said that there is none; None while there is."""

    def lacks(self, error: DiskFull) -> None:
        """The disk has refused a write."""
        now = asyncio.get_running_loop().time()
        if self._told_at is None or now >= self._told_at + TELL_AGAIN_S:
            self._told_at = now
            self._log.emit("disk.full", what=self._what, reason=error.remedy)

    def takes(self, write: Callable[[], None]) -> bool:
        """Call `write`, and say whether the disk has taken it."""
        try:
            write()
        except DiskFull as error:
            self.lacks(error)
            return False
        self.over()
        return True

    def over(self) -> None:
        """The disk has taken it."""
        if self._told_at is not None:
            self._told_at = None
            self._log.emit("disk.full", what=self._what, reason="")


class PatientDoor:
    """A door whose calls are made again while the disk is full: other calls go through it between two tries."""

    def __init__(self, door: Door, room: Room) -> None:
        self._door = door
        self._room = room
        self._writes: set[Callable[..., object]] = set()
        """What the disk has had no room for: one of them that it takes says that there is some again."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, again until it raises no DiskFull; raises what else it raises."""
        while True:
            try:
                done = await self._door.run(function, *args, **kwargs)
            except DiskFull as error:
                self._writes.add(function)
                self._room.lacks(error)
            else:
                if function in self._writes:
                    self._room.over()
                return done
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        self._door.close()


def patient(doors: Doors, log: EventLog) -> Doors:
    """The same, but that votes, commits and means wait for room. Not the learner's: a checkpoint is not worth a wait."""
    return replace(
        doors,
        journal=PatientDoor(doors.journal, Room(log, "its votes and commits")),
        side=PatientDoor(doors.side, Room(log, "the means of its rounds")),
    )
