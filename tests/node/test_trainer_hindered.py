"""The training loop while no step can be made: the device is full, or the data cannot be read."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from tests.node.test_trainer import Lab, holding, run, settle

from farflung.training.errors import NoRoom, NotEnoughMemory
from farflung.training.inner import StepReport


def full_device(lab: Lab, error: Exception, *, after: int) -> Callable[[], None]:
    """The learner's steps fail after so many of them, until what is returned is called."""
    usual, made = lab.learner.train, [0]

    def train(numbers: Sequence[int], global_step: int) -> StepReport:
        made[0] += 1
        if made[0] > after:
            raise error
        return usual(numbers, global_step)

    def over() -> None:
        lab.learner.train = usual

    lab.learner.train = train
    return over


@pytest.mark.parametrize("others_train", [False, True])
def test_a_step_that_cannot_be_made_now_is_made_later_and_meanwhile_a_round_may_take_the_others(
    others_train: bool,
) -> None:
    async def main(lab: Lab) -> None:
        lab.others_train = others_train
        over = full_device(lab, NoRoom("no room for 1 sequences"), after=2)
        await asyncio.sleep(4.5)
        assert lab.trainer.hindrance.reason == "the device is full: no room for 1 sequences"
        async with asyncio.timeout(0.1), lab.trainer.busy:
            pass  # a commit would be applied at once
        await asyncio.sleep(25.0)
        assert not lab.ready, "it may be for a moment only"
        await asyncio.sleep(15.0)
        assert [r.samples for r in lab.ready] == [4] * others_train
        if others_train:
            assert settle(lab, holding((4, 24)), 1, 4)
            lab.trainer.over()
        over()
        await asyncio.sleep(60.0)
        assert not lab.trainer.hindrance.reason
        assert [r.samples for r in lab.ready] == ([4, 6] if others_train else [6])
        assert lab.learner.trained[:6] == list(range(6)), "each once, and in order"

    run(main)


def test_what_missed_its_round_is_offered_again_by_a_peer_that_makes_no_steps() -> None:
    async def main(lab: Lab) -> None:
        lab.others_train = True
        full_device(lab, NoRoom("no room"), after=1)
        await asyncio.sleep(60.0)
        assert [r.samples for r in lab.ready] == [2]
        lab.trainer.over()
        await asyncio.sleep(5.0)
        assert [r.samples for r in lab.ready] == [2, 2]

    run(main)


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_between_rounds_that_it_misses_it_tries_whether_it_can_make_steps_again(delay_steps: int) -> None:
    """Each takes longer than the pause between two tries."""

    async def main(lab: Lab) -> None:
        lab.others_train = True
        over = full_device(lab, NoRoom("no room"), after=1)
        await asyncio.sleep(45.0)
        over()
        while lab.trainer.progress.steps == 1:
            assert asyncio.get_running_loop().time() < 300.0
            await asyncio.sleep(70.0)
            lab.trainer.over()
            await asyncio.sleep(3.0)
        assert not lab.trainer.hindrance.reason

    run(main, delay_steps=delay_steps)


def test_a_step_that_was_made_in_part_ends_training() -> None:
    async def main(lab: Lab) -> None:
        full_device(lab, NotEnoughMemory("some parameters had moved"), after=1)
        await asyncio.sleep(5.0)

    with pytest.raises(ExceptionGroup) as raised:
        run(main)
    assert raised.group_contains(NotEnoughMemory)
