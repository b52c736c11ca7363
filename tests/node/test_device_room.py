"""What waits for room on the device waits for a while only."""

import asyncio

from farflung.node.device_room import LOOK_S, ROOM_S, with_room
from farflung.sims import clock
from farflung.training.errors import NoRoom


def waited(let_go_s: float, full_for: int) -> tuple[str | None, float, int]:
    """What came of it, after how long, and how many tries failed."""
    lacks: list[NoRoom] = []

    async def work() -> str:
        if len(lacks) < full_for:
            raise NoRoom("full")
        return "found"

    async def main() -> tuple[str | None, float, int]:
        now = asyncio.get_running_loop().time
        began = now()
        found = await with_room(work, lambda: asyncio.sleep(let_go_s), lacks.append)
        return found, now() - began, len(lacks)

    return clock.run(main())


def test_it_is_tried_until_there_is_room_or_for_so_long() -> None:
    assert waited(0.0, 0) == ("found", 0.0, 0)
    assert waited(0.0, 2) == ("found", 2 * LOOK_S, 2)
    found, seconds, tries = waited(0.0, 1000)
    assert found is None and seconds <= ROOM_S and tries == 1 + ROOM_S / LOOK_S


def test_it_does_not_wait_behind_a_long_pass_either() -> None:
    """Its sender would give us up for unreachable, and send all of it again."""
    assert waited(40.0, 1000) == (None, ROOM_S, 1)
