"""Laps of the swarm that have ended without this peer: what they are worth for the learning rate, and when it offers again."""

import asyncio

import pytest
from tests.node.test_trainer import Lab, holding, run, settle

from farflung.node.trainer import Progress


def test_laps_that_ended_without_us_are_counted_once() -> None:
    """Of the learning rate: whoever misses a round has made no more steps than the swarm."""

    async def main(lab: Lab) -> None:
        steps = []
        for version in (1, 2, 3):
            await asyncio.sleep(10.0)  # it offers after three steps, and makes two more
            steps.append(lab.trainer.global_step)
            assert settle(lab, holding((0, 40)), version, 0)
            steps.append(lab.trainer.global_step)
            lab.trainer.over()
        assert steps == [5, 5, 8, 8, 11, 11]
        await asyncio.sleep(10.0)
        assert settle(lab, holding((24, 40)), 4, 24)
        assert lab.trainer.progress.steps == 2 and lab.trainer.global_step == 12 + 2
        lab.trainer.drop()
        await asyncio.sleep(1.5)
        assert lab.trainer.global_step == 12 + lab.trainer.progress.steps

    run(main, window=40, delay_steps=2)


def test_who_is_slower_than_the_swarm_does_not_lag_behind_it() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(2.5)
        assert lab.trainer.progress.steps == 2
        assert settle(lab, holding((0, 18)), 1, 0)
        assert lab.trainer.global_step == 3
        await asyncio.sleep(1.0)
        assert lab.trainer.progress.steps == 3 and lab.trainer.global_step == 4

    run(main)


@pytest.mark.parametrize(("delay_steps", "offers"), [(2, [10]), (0, [6])])
def test_what_a_checkpoint_brought_makes_no_round_due_after_a_lap_that_missed_it(
    delay_steps: int, offers: list[int]
) -> None:
    """The others, whose lap has just begun, would offer what they have. Where they stand for rounds they offer nothing early, and it need not wait."""

    async def main(lab: Lab) -> None:
        lab.trainer.progress = Progress(((0, 4),), 2, restored=2)  # and a third step would be a lap
        assert settle(lab, holding((0, 40)), 1, 0)
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == offers

    run(main, window=40, delay_steps=delay_steps)


def test_who_is_started_again_after_its_round_was_missed_offers_when_the_next_is_due() -> None:
    """Its checkpoint is of after that round, and no lap has ended since."""

    async def main(lab: Lab) -> None:
        lab.trainer.progress = Progress(((0, 6),), 3, restored=3, missed=3)
        lab.trainer.counted_steps = 3
        assert settle(lab, holding((0, 40)), 1, 0)
        assert lab.trainer.global_step == 3
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == [12]

    run(main, window=40, delay_steps=2)


def test_what_a_checkpoint_brought_comes_into_the_round_that_is_due() -> None:
    async def main(lab: Lab) -> None:
        lab.trainer.progress = Progress(((0, 6),), 3, restored=3)
        assert settle(lab, holding((0, 40)), 1, 0)
        lab.due_after_s = 1.5
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == [8]

    run(main, window=40, delay_steps=2)
