"""What trains on a peer of a pipeline goes on after a restart as if there had been none."""

import json
from pathlib import Path

import pytest
import torch

from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import stage_recipe
from farflung.sims.pipeline_small import recipe
from farflung.training.errors import DamagedCheckpoint
from farflung.training.pipeline_worker import Accumulated
from farflung.training.recovery_trial import TRIAL_STEPS
from farflung.training.runtime import Runtime


def learner() -> StageLearner:
    return stage_recipe(recipe(), 1).learner(None, Runtime())


def rate(one: StageLearner, step: int) -> float:
    """The learning rate of a step."""
    accumulated = Accumulated()
    for name, parameter in one.replica.model.named_parameters():
        accumulated.sums[1, name] = torch.ones_like(parameter)
    accumulated.visits[1] += 1
    return one.step(accumulated, [0], step, loss=float("nan")).lr


@pytest.mark.parametrize("made_at", [None, 10])
def test_a_stage_that_was_made_of_others_keeps_its_raised_rate(tmp_path: Path, made_at: int | None) -> None:
    before, after = learner(), learner()
    before.made_of_others_at = made_at
    before.save(tmp_path)
    after.load(tmp_path)
    assert after.made_of_others_at == made_at
    assert rate(after, 20) == rate(before, 20)
    assert (rate(after, 20) > rate(learner(), 20)) == (made_at is not None)


def test_a_stage_that_was_not_made_of_others_is_not_so_after_a_restart(tmp_path: Path) -> None:
    before, after = learner(), learner()
    before.save(tmp_path)
    after.made_of_others_at = 3
    after.load(tmp_path)
    assert after.made_of_others_at is None


def test_how_much_the_stage_changes_is_known_after_a_restart(tmp_path: Path) -> None:
    before, after = learner(), learner()
    before.save(tmp_path)
    after.load(tmp_path)
    assert after.layers_norm is None
    rate(before, 0)
    before.save(tmp_path)
    after.load(tmp_path)
    assert after.layers_norm == before.layers_norm is not None


def test_a_stage_that_was_begun_anew_is_on_trial_for_its_first_steps_also_after_a_restart(tmp_path: Path) -> None:
    before, after = learner(), learner()
    assert not before.is_new
    before.rises = True
    for step in range(TRIAL_STEPS):
        before.save(tmp_path)
        after.load(tmp_path)
        assert before.is_new and after.is_new
        rate(before, step)
    before.save(tmp_path)
    after.load(tmp_path)
    assert after.rises and not before.is_new and not after.is_new


def test_another_word_for_the_step_is_damage(tmp_path: Path) -> None:
    before = learner()
    before.made_of_others_at = 3
    before.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    state["facts"]["made_of_others_at"] = "soon"
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match="soon"):
        learner().load(tmp_path)
