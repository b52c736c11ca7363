"""A TaskGroup for objects that outlive the function which made them.

`asyncio.TaskGroup` must be entered and left by one task, but a network is opened in one place and closed in another. A
`TaskScope` keeps one task of its own that holds the group, so every task still has a parent that awaits it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskScope:
    """Tasks that live until `close`. A task that raises ends the whole scope: its tasks handle what they expect."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._root: asyncio.Task[None] | None = None

    async def open(self) -> None:
        ready = asyncio.Event()
        # The one task without a group of its own; `close` awaits it and so sees every error.
        self._root = asyncio.get_running_loop().create_task(self._hold(ready), name="task scope")
        await ready.wait()

    async def _hold(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                ready.set()
                await self._stop.wait()
                for task in tuple(self._tasks):
                    task.cancel()
        finally:
            self._group = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
        """Run `work` in the scope; None (and `work` is dropped) once the scope is closing or has failed."""
        if self._group is None or self._stop.is_set():
            work.close()
            return None
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._group = None  # which cancels the others now, and takes no more

    @property
    def failed(self) -> bool:
        """Whether a task raised, and so ended all."""
        return self._group is None and not self._stop.is_set()

    async def wait(self) -> None:
        """Until the scope ends; raises what made it fail."""
        assert self._root is not None
        await asyncio.shield(self._root)

    async def close(self) -> None:
        """Cancel what still runs and wait for it. Raises the error of a failed scope. Not to be called from inside it."""
        if self._root is None:
            return
        self._stop.set()
        await self._root
