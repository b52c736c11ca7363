"""How long what goes through a door usually takes, by what it is."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from farflung.node.door import Door

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 0.2
"""Of the newest time in the exponential mean."""


class TimedDoor:
    """A door that keeps time; what waited for its turn counts with it, for that is how long others wait too."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._seconds: dict[str, float] = {}

    def seconds(self, name: str) -> float:
        """Exponential mean of a function's times; 0 before the first."""
        return self._seconds.get(name, 0.0)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await self._door.run(function, *args, **kwargs)
        name, took = getattr(function, "__name__", ""), loop.time() - began
        before = self._seconds.get(name, took)
        self._seconds[name] = before + SHARE * (took - before)
        return result

    def close(self) -> None:
        self._door.close()
