"""What computes where."""

import asyncio
import contextlib
import threading

import torch

from farflung.node.door import Doors


def test_only_the_learner_has_worker_threads_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.closing(Doors.threads()) as doors:

            async def main() -> list[int]:
                for door in (doors.side, doors.learner, doors.journal, doors.digest):  # in an order that is not theirs
                    await door.run(torch.ones, 1)
                four = (doors.learner, doors.side, doors.journal, doors.digest)
                return [await door.run(torch.get_num_threads) for door in four]

            assert asyncio.run(main()) == [3, 1, 1, 1]
            assert torch.get_num_threads() == 3, "the caller keeps its own"
    finally:
        torch.set_num_threads(before)


def test_a_door_is_one_thread() -> None:
    with contextlib.closing(Doors.threads()) as doors:

        async def main() -> list[int]:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(doors.side.run(threading.get_ident)) for _ in range(8)]
            return [call.result() for call in calls]

        assert len(set(asyncio.run(main()))) == 1


def test_the_loop_lives_while_a_call_is_finished() -> None:
    over, seen = threading.Event(), list[bool]()

    async def main() -> None:
        doors = Doors.threads()
        async with asyncio.TaskGroup() as group:
            group.create_task(doors.learner.run(lambda: seen.append(over.wait(10))))
            await asyncio.sleep(0)
            group.create_task(doors.join())
            await asyncio.sleep(0.1)
            over.set()
        assert seen == [True]

    asyncio.run(main())
