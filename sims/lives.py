"""The processes of a simulated swarm: a task for each peer that runs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflung.protocol.keys import PeerId
from farflung.sims import clock


@dataclass(slots=True)
class Lives:
    """Who is started while the last life still says goodbye lives once more when that is over: a second process would find its lock taken."""

    live: Callable[[int], Coroutine[Any, Any, None]]
    """One life of a peer, by number."""
    ids: Sequence[PeerId]
    """Public keys, by number."""
    group: asyncio.TaskGroup
    tasks: dict[int, asyncio.Task[None]]
    """By peer, its last one."""
    _again: set[int] = field(default_factory=set)

    def start(self, peer: int) -> None:
        """Begin a life, or let one follow that ends."""
        task = self.tasks.get(peer)
        if task is not None and not (task.done() or task.cancelling()):
            self._again.add(peer)
            return
        context = clock.process_context(self.ids[peer])
        self.tasks[peer] = self.group.create_task(self._run(peer), context=context, name=f"peer {peer}")

    def take_back(self, peer: int) -> bool:
        """Whether there was a start to follow, which there is not any more."""
        waited = peer in self._again
        self._again.discard(peer)
        return waited

    def kill(self, peer: int) -> None:
        """End it at once, if it was ever started."""
        self._again.discard(peer)
        if peer in self.tasks:
            self.tasks[peer].cancel()

    async def _run(self, peer: int) -> None:
        await self.live(peer)
        while self.take_back(peer):
            await self.live(peer)
