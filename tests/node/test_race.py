"""Works that end together."""

import asyncio

import pytest

from farflung.node.race import until_first


async def sleep_for(seconds: float, seen: list[str]) -> None:
    try:
        await asyncio.sleep(seconds)
        seen.append(f"{seconds} slept")
    except asyncio.CancelledError:
        seen.append(f"{seconds} cancelled")
        raise


async def nothing() -> None:
    pass


@pytest.mark.parametrize("order", [(0.0, 60.0, 90.0), (90.0, 0.0, 60.0)])
def test_the_first_to_end_ends_the_others(order: tuple[float, ...]) -> None:
    seen: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(10.0):
            await until_first(*(sleep_for(seconds, seen) for seconds in order))

    asyncio.run(main())
    assert seen[0] == "0.0 slept" and sorted(seen[1:]) == ["60.0 cancelled", "90.0 cancelled"]


def test_one_that_ends_at_once_lets_nobody_wait() -> None:
    async def main() -> None:
        async with asyncio.timeout(10.0):
            await until_first(nothing(), nothing(), asyncio.sleep(60.0))

    asyncio.run(main())


def test_an_error_ends_all_and_is_raised() -> None:
    seen: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0.0)
        raise ValueError("it")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as found:
            await until_first(sleep_for(60.0, seen), fail())
        assert [type(error) for error in found.value.exceptions] == [ValueError]

    asyncio.run(main())
    assert seen == ["60.0 cancelled"]


def test_who_is_cancelled_cancels_all_and_stays_cancelled() -> None:
    seen: list[str] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(until_first(sleep_for(60.0, seen), sleep_for(90.0, seen)))
            await asyncio.sleep(0.0)
            await asyncio.sleep(0.0)
            task.cancel()
        assert task.cancelled()

    asyncio.run(main())
    assert sorted(seen) == ["60.0 cancelled", "90.0 cancelled"]
