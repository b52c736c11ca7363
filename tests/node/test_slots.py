"""Who comes next, and that no slot is lost."""

import asyncio

import pytest
from tests.node.lab import Lab, in_lab

from farflung.node.slots import Slots


def test_a_slot_that_somebody_no_longer_waits_for_goes_to_the_next() -> None:
    async def main(lab: Lab) -> None:
        slots, order = Slots(1), list[str]()

        async def take(name: str, served: int) -> None:
            async with slots.slot(served):
                order.append(name)
                await asyncio.sleep(1.0)

        tasks = {}
        for name, served in (("a", 0), ("b", 1), ("c", 5), ("d", 3), ("e", 3)):
            tasks[name] = lab.group.create_task(take(name, served))
            await asyncio.sleep(0.01)
        tasks["d"].cancel()
        await asyncio.sleep(0.94)
        lab.group.create_task(take("f", 9))
        await asyncio.sleep(0.5)
        tasks["c"].cancel()
        await asyncio.sleep(10.0)
        assert order == ["a", "f", "e", "b"]
        await take("g", 0)

    in_lab(1, main)


def test_a_slot_that_came_at_the_moment_of_a_cancel_is_passed_on() -> None:
    async def main(lab: Lab) -> None:
        slots, order = Slots(1), list[str]()

        async def take(name: str) -> None:
            async with slots.slot(0):
                order.append(name)

        async with slots.slot(0):
            first, _ = (lab.group.create_task(take(name)) for name in "ab")
            await asyncio.sleep(1.0)
        first.cancel()  # it has been granted the slot, and does not know yet
        await asyncio.sleep(1.0)
        assert order == ["b"]
        await take("c")

    in_lab(1, main)


def test_there_may_be_fewer_for_a_while_but_one() -> None:
    async def main(lab: Lab) -> None:
        slots, running, most = Slots(3), 0, 0

        async def take() -> None:
            nonlocal running, most
            async with slots.slot(0):
                running += 1
                most = max(most, running)
                await asyncio.sleep(1.0)
                running -= 1

        async def at_once() -> int:
            nonlocal most
            most = 0
            async with asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(take())
            return most

        assert await at_once() == 3
        for left in (2, 1, 1):
            slots.fewer()
            assert await at_once() == left
        for there in (2, 3, 3):
            slots.more()
            assert await at_once() == there
        slots.fewer()
        async with slots.slot(0):
            slots.fewer()
            late = lab.group.create_task(take())
            await asyncio.sleep(1.0)
            assert running == 0
            slots.more()
            await asyncio.sleep(0.1)
            assert running == 1 and not late.done(), "it need not wait until another is given back"

    in_lab(1, main)


def test_nobody_waits_longer_than_it_would() -> None:
    async def main(lab: Lab) -> None:
        slots = Slots(1)
        async with slots.slot(0):
            with pytest.raises(TimeoutError):
                async with slots.slot(0, within_s=2.0):
                    raise AssertionError("it was not free")
        async with slots.slot(0, within_s=2.0):
            await asyncio.sleep(3.0)

    in_lab(1, main)
