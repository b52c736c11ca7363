"""A step that comes to no number: what it costs, and when it ends the node."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.node.test_trainer import PACE, Lab, holding, run, settle

from farflung.protocol.lap import Laps
from farflung.sims import clock
from farflung.sims.pipeline_small import Counting, recipe
from farflung.sims.toy import ToyLearner
from farflung.training.errors import NonFinite
from farflung.training.inner import StepReport
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime


def fail_on(lab: Lab, *bad: int) -> list[list[int]]:
    """No number comes out of these samples. Returns the batches of all tries."""
    tries: list[list[int]] = []
    train = lab.learner.train

    def failing(numbers: Sequence[int], global_step: int) -> StepReport:
        tries.append(list(numbers))
        if set(numbers) & set(bad):
            raise NonFinite(global_step=global_step, loss=float("nan"))
        return train(numbers, global_step)

    lab.learner.train = failing  # type: ignore[method-assign]
    return tries


def test_a_step_without_a_number_costs_a_lap_and_its_samples_and_not_the_place() -> None:
    async def main(lab: Lab) -> None:
        tries = fail_on(lab, 3)
        await asyncio.sleep(20.0)
        assert tries == [[0, 1], [2, 3], [0, 1], [4, 5]], "what was trained before it is trained again"
        assert len(lab.given_up) == 1 and "no number" in lab.given_up[0]
        assert lab.learner.trained == list(range(6)), "as a judge sees it"
        alone = ToyLearner(8, Nesterov(lr=0.7, momentum=0.5))
        alone.train([0, 1, 4, 5], 0)
        assert torch.allclose(lab.learner.parameters[0], alone.parameters[0])
        assert [r.samples for r in lab.ready] == [6] and lab.trainer.progress.steps == 3, "counted, and not by others"
        assert settle(lab, holding((6, 18)), 1, 6)
        lab.trainer.over()
        await asyncio.sleep(20.0)
        assert tries[4:] == [[6, 7], [8, 9], [10, 11]] and [r.samples for r in lab.ready] == [6, 6]

    run(main)


def test_each_lap_may_have_its_bad_samples() -> None:
    async def main(lab: Lab) -> None:
        fail_on(lab, *range(1, 18, 6), *range(3, 18, 6))
        for round_ in range(1, 4):
            await asyncio.sleep(30.0)
            assert len(lab.given_up) == 2 * round_
            assert settle(lab, holding((6 * round_, 36)), round_, 6)
            lab.trainer.over()

    run(main)


def test_a_swarm_that_has_diverged_ends_the_node() -> None:
    """Also where some steps come out between those that do not, as with a rate that is too high."""

    async def body() -> list[list[int]]:
        lab = Lab(pace=replace(PACE, laps=Laps.fixed(9)))
        tries = fail_on(lab, *range(2, 18))
        with pytest.raises(NonFinite, match="step 4: loss nan"):
            await lab.trainer.run()
        return tries

    tries = clock.run(body())
    assert tries == [[0, 1], [2, 3], [0, 1], [4, 5], [0, 1], [6, 7], [0, 1], [8, 9]]


@pytest.mark.parametrize("lap", [1, 2, 3])
def test_rounds_that_count_nothing_but_what_was_passed_over_save_nobody(lap: int) -> None:
    """In laps of a few steps it went on for ever: all samples were counted, and none was trained."""

    async def body() -> int:
        lab = Lab(pace=replace(PACE, laps=Laps.fixed(lap)))
        tries, counted = fail_on(lab, *range(1000)), 0

        async def rounds() -> None:
            nonlocal counted
            for round_ in range(1, 10):
                await asyncio.sleep(30.0)
                samples = lab.ready[-1].samples
                counted += samples
                settle(lab, holding((counted, counted + 18)), round_, samples, lap=lap)
                lab.trainer.over()
            lab.trainer.finish()

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(lab.trainer.run())
                group.create_task(rounds())
        assert caught.group_contains(NonFinite) and len(tries) == 4
        return counted

    assert clock.run(body()) <= 6, "of three steps"


def test_who_starts_over_is_as_who_has_just_downloaded_the_state() -> None:
    """Also where what went wrong lies in parameters or moments."""
    torch.set_num_threads(1)
    one, newcomer = (recipe(stages=1).learner(Counting(), Runtime()) for _ in range(2))
    one.train(range(8), 5)
    with torch.no_grad():
        one.replica.parameters[0].view(-1)[3] = float("nan")
        for state in one.replica.optimizer.tensors().values():
            state.fill_(float("nan"))
    with pytest.raises(NonFinite):
        one.train(range(8), 6)
    one.start_over()
    assert one.replica.optimizer.steps == 0 and one.replica.offered is None
    for learner in (one, newcomer):
        learner.train(range(8, 16), 6)
    for mine, other in zip(one.replica.parameters, newcomer.replica.parameters, strict=True):
        assert torch.equal(mine, other)
