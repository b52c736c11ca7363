"""Virtual time: fast, totally ordered, and loud when nothing can go on."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

import pytest

from farflung.sims import clock
from farflung.sims.clock import (
    COLLECT_AT,
    CallbackFailed,
    Deadlock,
    Livelock,
    ThreadsRefused,
    VirtualLoop,
    process_context,
    run,
)


def loop() -> VirtualLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def test_an_hour_of_timeouts_takes_no_time() -> None:
    async def one(queue: asyncio.Queue[int]) -> None:
        for second in range(3600):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.Event().wait()
            await queue.put(second)

    async def main() -> float:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(one(queue))
            for second in range(3600):
                assert await queue.get() == second
        return loop().time()

    began = time.perf_counter()
    assert run(main(), start=1_700_000_000.0) == 1_700_003_600.0
    assert time.perf_counter() - began < 5.0  # about 0.1 s on an idle machine


def test_the_clock_lands_on_the_timer_exactly() -> None:
    async def main() -> list[float]:
        seen = []
        for delay in (1e-9, 0.1, 86_400 * 365.0, 0.0):
            due = loop().time() + delay
            await asyncio.sleep(delay)
            seen.append(loop().time() - due)
        return seen

    assert run(main()) == [0.0] * 4


def test_ties_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(1000):
            loop().call_at(5.0, order.append, number)
            loop().call_at(9.0 - number / 1000, lambda: None)  # stirs the heap
        loop().call_at(5.0, order.append, -1).cancel()
        await asyncio.sleep(10.0)
        return order

    assert run(main()) == list(range(1000))


def test_a_group_cancels_its_tasks_in_the_same_order_each_time() -> None:
    async def child(number: int, order: list[int]) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            order.append(number)

    async def main() -> list[int]:
        order: list[int] = []
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(200):
                    group.create_task(child(number, order))
                await asyncio.sleep(1.0)
                raise ValueError("stop")
        return order

    first = run(main())
    ballast = [object() for _ in range(10_000)]  # moves later objects to other addresses
    assert sorted(first) == list(range(200))
    assert run(main()) == first
    assert len(ballast) == 10_000


def test_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            await asyncio.sleep(7.0)
            group.create_task(waits_for_godot(), name="estragon")

    with pytest.raises(Deadlock, match=r"after 7\.000000 s; 2 tasks wait") as caught:
        run(main())
    assert any(line.startswith("estragon in Event.wait (asyncio/locks.py:") for line in caught.value.tasks)


def test_a_timer_at_infinity_is_no_hope() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.sleep(float("inf")))


def test_not_a_number_is_no_time() -> None:
    async def main() -> None:
        loop().call_at(float("nan"), print)

    with pytest.raises(ValueError, match="NaN"):
        run(main())


def test_livelock_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MAX_PASSES_PER_INSTANT", 1000)

    async def main() -> None:
        loop().call_later(1.0, print)
        while loop().time() < 1.0:
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(ThreadsRefused, match="monotonic"):
        run(main())

    async def outside() -> None:
        running = loop()
        running._own_thread = -1
        running.call_soon_threadsafe(print)

    with pytest.raises(ThreadsRefused):
        run(outside())


def test_names_are_not_resolved() -> None:
    with pytest.raises(ThreadsRefused):
        run(asyncio.open_connection("localhost", 1))


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        loop().call_later(3.0, divmod, 1, 0)
        await asyncio.sleep(10.0)

    with pytest.raises(CallbackFailed, match=r"at 3\.0") as caught:
        run(main())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_left_over_is_cancelled_oldest_first_and_its_errors_show() -> None:
    order: list[str] = []

    async def left_over(name: str, error: Exception | None) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1.0)  # cleaning up may take virtual time
            order.append(name)
            if error is not None:
                raise error

    async def main(error: Exception | None) -> str:
        main.tasks = [  # type: ignore[attr-defined]
            loop().create_task(left_over(name, error if name == "b" else None)) for name in "abc"
        ]
        await asyncio.sleep(1.0)
        return "result"

    assert run(main(None)) == "result"
    assert order == ["a", "b", "c"]
    with pytest.raises(CallbackFailed) as caught:
        run(main(ValueError("unseen")))
    assert isinstance(caught.value.__cause__, ValueError)


def test_async_generators_are_closed() -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    async def main() -> int:
        main.kept = numbers()  # type: ignore[attr-defined]
        return await anext(main.kept)  # type: ignore[attr-defined]

    assert run(main()) == 1
    assert closed == [True]


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        for _ in range(10_000):
            async with asyncio.timeout(1000.0):
                await asyncio.sleep(0)
        return len(loop()._timers)

    assert run(main()) < 1000


def test_a_frozen_process_stands_still_and_then_catches_up() -> None:
    log: list[tuple[str, float]] = []

    async def ticks(name: str) -> None:
        async with asyncio.TaskGroup() as group:  # children belong to the same process
            group.create_task(tick(name))

    async def tick(name: str) -> None:
        for _ in range(4):
            await asyncio.sleep(1.0)
            log.append((name, loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ticks("a"), context=process_context("a"))
            group.create_task(ticks("b"), context=process_context("b"))
            await asyncio.sleep(1.5)
            loop().freeze("a")
            await asyncio.sleep(10.0)
            loop().thaw("a")

    run(main())
    assert [at for name, at in log if name == "b"] == [1.0, 2.0, 3.0, 4.0]
    assert [at for name, at in log if name == "a"] == [1.0, 11.5, 12.5, 13.5]


def test_a_closed_loop_takes_no_timers() -> None:
    closed = VirtualLoop()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.call_at(1.0, print)


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_is_as_it_was_when_a_run_is_over(fails: bool) -> None:
    async def main() -> None:
        inside.append((gc.get_threshold(), gc.get_freeze_count() > frozen))
        if fails:
            raise KeyError

    usual, frozen, inside = gc.get_threshold(), gc.get_freeze_count(), list[tuple[tuple[int, int, int], bool]]()
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        run(main())
    assert inside == [((COLLECT_AT, *usual[1:]), True)]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (usual, 0)
