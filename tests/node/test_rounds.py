"""Whose transfers are welcome, and how long an unknown plan is waited for."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.node.lab import Lab, in_lab

from farflung.node.rounds import KEPT_OVER, PLAN_WAIT_S, Round, Rounds, Traffic
from farflung.protocol.errors import Refused
from farflung.protocol.messages import Plan

PEER = b"p" * 32
PLAN_ID = b"i" * 32
PLAN = Plan(
    height=1,
    ballot=0,
    attempt=1,
    parent=b"h" * 32,
    members=(),
    contributors=(),
    parts=(),
    uplink="int8",
    downlink="int8",
    scatter_s=1.0,
    gather_s=1.0,
    reason="",
    made_ms=0,
)


def virtually(story: Callable[[Rounds], Awaitable[None]]) -> None:
    async def main(lab: Lab) -> None:
        await story(Rounds())

    in_lab(1, main)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_transfer_may_come_before_its_plan() -> None:
    async def story(rounds: Rounds) -> None:
        async with asyncio.TaskGroup() as group:
            early = [group.create_task(rounds.expected(PLAN_ID, PEER)) for _ in range(2)]
            await asyncio.sleep(PLAN_WAIT_S / 2)
            rounds.begin(PLAN_ID, PLAN)
        assert early[0].result() is early[1].result() is rounds.get(PLAN_ID)
        assert not rounds._awaited

    virtually(story)


def test_a_plan_that_never_comes_is_waited_for_only_so_long() -> None:
    async def story(rounds: Rounds) -> None:
        began = now()
        with pytest.raises(Refused, match="a plan that we do not know") as refused:
            await rounds.expected(PLAN_ID, PEER)
        assert refused.value.peer == PEER and now() - began == pytest.approx(PLAN_WAIT_S)
        assert not rounds._awaited

    virtually(story)


def test_a_plan_that_is_over_is_not_waited_for_until_it_begins_again() -> None:
    async def story(rounds: Rounds) -> None:
        rounds.begin(PLAN_ID, PLAN)
        rounds.end(PLAN_ID)
        began = now()
        with pytest.raises(Refused, match="a plan that is over"):
            await rounds.expected(PLAN_ID, PEER)
        assert now() == began and PLAN_ID not in rounds
        rounds.begin(PLAN_ID, PLAN)
        assert (await rounds.expected(PLAN_ID, PEER)).plan == PLAN

    virtually(story)


def test_only_the_last_plans_are_remembered_to_be_over() -> None:
    async def story(rounds: Rounds) -> None:
        for number in range(KEPT_OVER + 1):
            rounds.begin(bytes([number]) * 32, PLAN)
            rounds.end(bytes([number]) * 32)
        with pytest.raises(Refused, match="is over"):
            await rounds.expected(bytes([1]) * 32, PEER)
        with pytest.raises(Refused, match="do not know"):
            await rounds.expected(bytes([0]) * 32, PEER)

    virtually(story)


def test_the_end_of_a_round_ends_its_tasks_and_counts_what_was_moved() -> None:
    async def story(rounds: Rounds) -> None:
        rounds.begin(PLAN_ID, PLAN)
        round_ = await rounds.expected(PLAN_ID, PEER)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(60.0))
            round_.tasks.add(task)
            await asyncio.sleep(0.0)
            round_.sent_bytes, round_.received_bytes, round_.owed = 30, 20, 0.5
            round_.encoded_bytes, round_.encoded_numel = 10, 40
            traffic = rounds.end(PLAN_ID)
        assert task.cancelled()
        assert traffic == Traffic(sent_bytes=30, received_bytes=20, up_bits=2.0, owed=0.5)
        assert rounds.end(PLAN_ID) == Traffic() == Round(PLAN).traffic

    virtually(story)
