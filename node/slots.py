"""A few at a time, the others in an order: whoever has been served most comes first."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """See the module."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    @asynccontextmanager
    async def slot(
        self,
        served: int,  # how often whoever asks has been served
    ) -> AsyncIterator[None]:
        """Wait for one, and hold it."""
        if self._free:
            self._free -= 1
        else:
            self._count += 1
            granted = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-served, self._count, granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():  # whoever was cancelled does not wait any more
                granted.set_result(None)
                return
        self._free += 1
