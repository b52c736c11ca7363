"""What a founder gets of others (`renewal`), who may go, be slow, or send nothing: a few tries, until a moment, and no longer than its life counts."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from farflung.node.race import until_first
from farflung.protocol.errors import NetworkError, RemoteError

T = TypeVar("T")

LISTEN_S = 2.0
"""Until those who were asked have answered, and before they are asked again."""

TRIES = 3
"""To get something of somebody."""


class Unmade(Exception):
    """It came to nothing; says why."""


async def obtained(
    fetching: Callable[[], Awaitable[T]],  # raises NetworkError, and RemoteError for what is none
    *,
    is_there: Callable[[], bool],  # whether those are, of whom it is fetched
    counts: Callable[[], bool],  # whether our life of the stage is still the newest
    refused: Callable[[RemoteError], None],
    until: float,  # of the loop's clock
) -> T:
    """What is fetched. A link that breaks is no reason to do without, and a neighbour goes on while it sends. Raises Unmade when it cannot be had, is not here
    in time, or another life of the stage has been begun."""
    clock = asyncio.get_running_loop().time
    found, why = list[T](), "nobody who has it is heard any more"

    async def fetch_it() -> None:
        nonlocal why
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(LISTEN_S)
                if not is_there():
                    return
            try:
                found.append(await fetching())
                return
            except NetworkError as error:
                why = str(error)
            except RemoteError as error:
                refused(error)
                why = str(error)
                return

    async def give_up() -> None:
        nonlocal why
        began = clock()
        while True:
            if not counts():
                why = "another life of the stage has been begun"
                return
            if clock() >= until:
                why = f"not here after {until - began:.3g} s: what comes next may be sooner"
                return
            await asyncio.sleep(LISTEN_S)

    await until_first(fetch_it(), give_up())
    if not found:
        raise Unmade(why)
    return found[0]
