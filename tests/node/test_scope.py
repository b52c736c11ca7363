"""Tasks that outlive the function which made them: all end with the scope, and the scope with the first that fails."""

import asyncio

import pytest

from farflung.node.scope import TaskScope
from farflung.protocol.errors import NetworkError


async def forever() -> None:
    await asyncio.Event().wait()


def test_close_ends_all_and_nothing_starts_afterwards() -> None:
    async def main() -> None:
        scope = TaskScope()
        await scope.open()
        task = scope.start(forever(), "forever")
        await asyncio.sleep(0)
        await scope.close()
        assert task is not None and task.cancelled()
        assert not scope.failed and scope.start(forever(), "late") is None

    asyncio.run(main())


def test_while_a_failure_ends_the_others_nothing_starts_either() -> None:
    """Whoever sends at that moment is not told of the scope's troubles: who waits for it is."""
    late: list[object] = []

    async def main() -> None:
        scope = TaskScope()
        await scope.open()

        async def fails() -> None:
            raise NetworkError("the daemon ended")

        async def sends_once_more() -> None:
            try:
                await forever()
            finally:
                late.append(scope.start(forever(), "late"))

        scope.start(sends_once_more(), "sends")
        scope.start(fails(), "fails")
        with pytest.raises(ExceptionGroup) as caught:
            await scope.wait()
        assert [type(error) for error in caught.value.exceptions] == [NetworkError]
        assert scope.failed and late == [None]
        with pytest.raises(ExceptionGroup):
            await scope.close()

    asyncio.run(main())
