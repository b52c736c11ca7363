"""Works that end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first(*works: Coroutine[Any, Any, object]) -> None:
    """Run all of them until one has ended, and cancel the others.

    They handle what they expect: before Python 3.13 a group that an error ends swallows that its own task is cancelled at that moment.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]

        def end_all(_: object) -> None:
            for task in tasks:
                task.cancel()  # does nothing to one that has ended

        for task in tasks:
            task.add_done_callback(end_all)
