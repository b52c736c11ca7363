"""Who comes next, and that no slot is lost."""

import asyncio

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
