"""What computes where."""

import asyncio
import contextlib
import os
import sys
import threading

import pytest
import torch

from farflung.node.door import IDLE_NICENESS, Doors


def test_only_the_learner_has_worker_threads_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with contextlib.closing(Doors.threads()) as doors:

            async def main() -> list[int]:
                for door in (doors.side, doors.learner, doors.journal):  # in an order that is not theirs
                    await door.run(torch.ones, 1)
                return [await door.run(torch.get_num_threads) for door in (doors.learner, doors.side, doors.journal)]

            assert asyncio.run(main()) == [3, 1, 1]
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


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_only_the_idle_door_stands_back() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.closing(Doors.threads()) as doors:

        async def main() -> list[int]:
            four = (doors.learner, doors.side, doors.journal, doors.idle)
            return [await door.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) for door in four]

        assert asyncio.run(main()) == [before, before, before, min(19, before + IDLE_NICENESS)]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux only")
def test_whom_the_loop_wakes_does_not_take_its_processor() -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process has been given another policy")
    with contextlib.closing(Doors.threads()) as doors:

        async def main() -> list[int]:
            four = (doors.learner, doors.side, doors.journal, doors.idle)
            return [await door.run(os.sched_getscheduler, 0) for door in four]

        assert asyncio.run(main()) == [os.SCHED_BATCH] * 4
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
