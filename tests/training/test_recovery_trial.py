"""A data node's trial of a stage that was begun anew, by the loss of the whole model."""

import math

import pytest

from farflung.training.recovery_trial import MARGIN, RECENT, TRIAL_STEPS, LossTrial, Tried, counting

BOTH = {0: {0, 1, 2}, 1: {0, 1, 2}}
"""Two microbatches through three stages."""


def look(trial: LossTrial, loss: float, *, life: int = 0, other: int = 0) -> list[Tried]:
    """A step with that mean loss, in these lives of stages 1 and 2."""
    return trial.look({0: loss - 0.1, 1: loss + 0.1}, BOTH, {1: life, 2: other})


def settled(loss: float = 3.0) -> LossTrial:
    """That has seen one step."""
    trial = LossTrial()
    assert look(trial, loss) == []
    return trial


def test_a_new_life_is_tried_for_so_many_steps_and_no_longer() -> None:
    trial = settled()
    found = [look(trial, 3.1, life=1) for _ in range(TRIAL_STEPS + 2)]
    assert [len(one) for one in found] == [1] * TRIAL_STEPS + [0, 0]
    assert [(one.stage, one.life, one.number, one.passes) for (one,) in found[:TRIAL_STEPS]] == [
        (1, 1, number, True) for number in range(1, TRIAL_STEPS + 1)
    ]
    assert counting(found[0], 3) == {0, 1, 2}


def test_what_is_worse_by_more_than_the_margin_counts_at_the_new_stage_only() -> None:
    trial = settled()
    (worse,) = look(trial, 3.0 + MARGIN + 0.01, life=1)
    assert not worse.passes and counting([worse], 3) == {1} and "worse by more than 0.5" in worse.why
    (better,) = look(trial, 3.0 + MARGIN - 0.01, life=1)
    assert better.passes and better.usual == pytest.approx(3.0), "a broken model's loss is not usual"
    assert counting([better], 3) == {0, 1, 2} and "the step counts" in better.why
    (last,) = look(trial, 30.0, life=1)
    assert not last.passes and look(trial, 30.0, life=1) == []  # for good


def test_a_loss_that_is_no_number_does_not_pass_and_is_not_remembered() -> None:
    trial = settled()
    (one,) = look(trial, math.nan, life=1)
    assert not one.passes
    without = settled()
    assert look(without, math.nan) == []
    (one,) = look(without, 3.0, life=1)
    assert one.usual == pytest.approx(3.0) and one.passes


def test_the_usual_loss_follows_the_run() -> None:
    trial = settled(9.0)
    for loss in (4.0, 3.0, 2.0, 1.0):
        look(trial, loss)
    (one,) = look(trial, 2.0, life=1)
    assert one.usual == pytest.approx(2.5) and RECENT == 4


def test_two_stages_are_tried_apart_by_the_microbatches_that_visited_them() -> None:
    trial = settled()
    found = trial.look({0: 3.0, 1: 5.0}, {0: {0, 1}, 1: {0, 2}}, {1: 1, 2: 1})
    assert [(one.stage, one.loss, one.passes) for one in found] == [(1, 3.0, True), (2, 5.0, False)]
    assert counting(found, 3) == {2}
    found = trial.look({0: 3.0}, {0: {0, 2}, 1: {0, 1}}, {1: 1, 2: 1})  # the other did not come home
    assert [(one.stage, one.number) for one in found] == [(2, 2)]
    (one,) = trial.look({1: 3.0}, {0: {0, 2}, 1: {0, 1}}, {1: 1, 2: 1})
    assert (one.stage, one.number) == (1, 2), "a step without it does not count"


def test_who_has_not_seen_the_loss_before_tries_nothing() -> None:
    trial = LossTrial()
    assert look(trial, 9.0, life=3) == [] and look(trial, 9.0, life=3) == []
    assert len(look(trial, 9.0, life=4)) == 1


def test_another_life_begins_another_trial() -> None:
    trial = settled()
    look(trial, 3.0, life=1)
    (one,) = look(trial, 3.0, life=2)
    assert (one.life, one.number) == (2, 1)


def test_who_is_new_compares_with_what_others_say() -> None:
    trial = LossTrial()
    assert trial.usual == 0.0
    trial.begin(3.0, ())
    assert trial.usual == 3.0 and trial.has_begun
    assert look(trial, 3.2, life=3) == []  # the life that was there when it came
    (one,) = look(trial, 3.1, life=4)
    assert one.usual == pytest.approx(3.1)


def test_who_is_new_tries_what_others_try() -> None:
    trial = LossTrial()
    trial.begin(3.0, {2})
    assert trial.tries == (2,)
    (one,) = look(trial, 4.0, other=7)
    assert (one.stage, one.life, one.number, one.passes) == (2, 7, 1, False)


def of_home(trial: LossTrial, loss: float, other: int = 0) -> list[Tried]:
    """A step in the second life of stage 0."""
    return trial.look({0: loss, 1: loss}, BOTH, {0: 2, 1: 0, 2: other})


def test_a_new_stage_0_is_tried_from_its_first_step_and_meanwhile_learns_alone() -> None:
    trial = LossTrial()
    trial.begin(3.0, {0})
    (worse,) = of_home(trial, 4.0)
    assert (worse.stage, worse.life, worse.number, worse.usual) == (0, 2, 1, 3.0) and not worse.passes
    assert counting([worse], 3) == {0}
    (better,) = of_home(trial, 3.4)
    assert better.passes and better.usual == 3.0 and counting([better], 3) == {0, 1, 2}
    assert len(of_home(trial, 9.0)) == 1 and of_home(trial, 9.0) == []


def test_what_goes_through_a_bad_stage_0_says_nothing_of_others() -> None:
    trial = LossTrial()
    trial.begin(3.0, {0, 2})
    (home,) = of_home(trial, 9.0)
    assert (home.stage, counting([home], 3)) == (0, {0})
    assert [(one.stage, one.number) for one in of_home(trial, 3.0)] == [(0, 2), (2, 1)]


def test_a_stage_0_that_nobody_tells_a_loss_is_not_tried() -> None:
    trial = LossTrial()
    trial.begin(0.0, {0})
    assert of_home(trial, 9.0) == []
