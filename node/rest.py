"""How a node sleeps between two looks at its deadlines."""

import asyncio
import math
from collections.abc import Callable


class Rest:
    """Until something is due, which may be sooner than it was when the node lay down."""

    def __init__(self, due_at: Callable[[], float]) -> None:
        """`due_at`: when to look next, as things stand, seconds of the loop's clock; minus infinity while anything is under way."""
        self._due_at = due_at
        self._until = -math.inf
        """Of the present sleep; past while awake."""
        self._woken: asyncio.Future[None] | None = None
        """Of the present sleep."""
        self._is_roused = False

    async def sleep(self, least_s: float) -> None:
        """Until it is time to look, and so many seconds at least, unless that has changed meanwhile; so many while anything is under way."""
        loop = asyncio.get_running_loop()
        due_at = self._due_at()
        if due_at == -math.inf:
            await asyncio.sleep(least_s)
            return
        self._is_roused, self._until = False, max(loop.time() + least_s, due_at)
        while not self._is_roused and loop.time() < self._until:
            self._woken = loop.create_future()
            timer = loop.call_at(self._until, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
            if loop.time() < self._until:
                self._until = self._due_at()
        self._until = -math.inf

    def reconsider(self, *, look: bool = False) -> None:
        """Something has happened: if anything is due sooner by now, sleep until then, or `look` at once."""
        if self._until > -math.inf and self._due_at() < self._until:
            self._is_roused |= look
            self._wake()

    def rouse(self) -> None:
        """Look at once."""
        self._is_roused = True
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
