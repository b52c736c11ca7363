"""A few at a time, the others in an order: whoever has been served most comes first."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """See the module."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = most
        """So many there are at the moment."""
        self._held = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0

    @asynccontextmanager
    async def slot(
        self,
        served: int,  # how often whoever asks has been served
        *,
        within_s: float | None = None,
    ) -> AsyncIterator[None]:
        """Wait for one, at most so long, and hold it. Raises TimeoutError."""
        if self._held < self._number:
            self._held += 1
        else:
            self._count += 1
            granted = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-served, self._count, granted))
            try:
                async with asyncio.timeout(within_s):
                    await granted
            except (asyncio.CancelledError, TimeoutError):
                if granted.done() and not granted.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def fewer(self) -> None:
        """From now on there is one less, but for the last."""
        self._number = max(1, self._number - 1)

    def more(self) -> None:
        """There is one more again, up to as many as there were."""
        self._number = min(self._most, self._number + 1)
        self._grant()

    def _release(self) -> None:
        self._held -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._held < self._number:
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():  # whoever was cancelled does not wait any more
                self._held += 1
                granted.set_result(None)
