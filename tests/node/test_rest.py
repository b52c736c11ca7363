"""How a node sleeps: until something is due, sooner when that has become sooner, and at once when somebody says so."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from farflung.node.rest import Rest
from farflung.sims import clock

Due = dict[str, float]


def slept(due: Due, meanwhile: Callable[[Rest], Awaitable[None]], *, least_s: float = 0.25) -> float:
    """Seconds of one sleep, during which something happens."""

    async def body() -> float:
        loop = asyncio.get_running_loop()
        rest = Rest(lambda: due["at"])
        async with asyncio.TaskGroup() as group:
            group.create_task(_happens(meanwhile, rest))
            began = loop.time()
            await rest.sleep(least_s)
            return loop.time() - began

    return clock.run(body())


async def _happens(meanwhile: Callable[[Rest], Awaitable[None]], rest: Rest) -> None:
    await meanwhile(rest)


def at(
    seconds: float, due: Due, due_at: float, *, rouse: bool = False, look: bool = False
) -> Callable[[Rest], Awaitable[None]]:
    """After so long something is due at another time."""

    async def meanwhile(rest: Rest) -> None:
        await asyncio.sleep(seconds)
        due["at"] = due_at
        if rouse:
            rest.rouse()
        else:
            rest.reconsider(look=look)

    return meanwhile


@pytest.mark.parametrize(
    ("due_at", "happens", "then", "seconds"),
    [
        (10.0, 1.0, 10.0, 10.0),
        (10.0, 1.0, 3.0, 3.0),
        (10.0, 1.0, 20.0, 10.0),
        (10.0, 1.0, -math.inf, 1.0),
        (0.0, 0.3, 0.0, 0.25),
        (-math.inf, 0.1, -math.inf, 0.25),
    ],
    ids=["as it lay down", "sooner", "later", "busy", "at least", "busy before"],
)
def test_it_sleeps_until_something_is_due(due_at: float, happens: float, then: float, seconds: float) -> None:
    due = {"at": due_at}
    assert slept(due, at(happens, due, then)) == pytest.approx(seconds)


def test_whoever_rouses_it_is_not_kept_waiting() -> None:
    due = {"at": 10.0}
    assert slept(due, at(2.0, due, 10.0, rouse=True)) == pytest.approx(2.0)


def test_what_is_due_sooner_may_be_worth_a_look_at_once() -> None:
    due = {"at": 10.0}
    assert slept(due, at(2.0, due, 5.0, look=True)) == pytest.approx(2.0)
    due = {"at": 10.0}
    assert slept(due, at(2.0, due, 10.0, look=True)) == pytest.approx(10.0), "nothing is"
