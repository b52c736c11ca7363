"""What comes over the network for a device that is full waits here a while: its bytes have come already, and would only have to come again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from farflung.training.errors import NoRoom

T = TypeVar("T")

ROOM_S = 5.0
"""So long: less than its sender waits for an answer (`courier.REACH_S`), and than a step can be held up for."""

LOOK_S = 1.0
"""Between two tries."""


async def with_room(
    work: Callable[[], Awaitable[T]],  # raises NoRoom
    let_go: Callable[[], Awaitable[None]],  # of what is kept of the device for later
    lacks: Callable[[NoRoom], None],  # told of each try that failed
) -> T | None:
    """What it returns, once there is room for it; None when there is none for ROOM_S."""
    clock = asyncio.get_running_loop().time
    until = clock() + ROOM_S
    while True:
        try:
            return await work()
        except NoRoom as error:
            lacks(error)
        try:  # not where that error is handled, which holds what the try had got
            async with asyncio.timeout_at(until):
                await let_go()
        except TimeoutError:
            return None  # it is behind a pass that takes longer
        if clock() + LOOK_S > until:
            return None
        await asyncio.sleep(LOOK_S)
