"""CheckFree's rules against straight references, and what they refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflung.training.errors import Unrecoverable
from farflung.training.flat import Layout, flatten
from farflung.training.model import Decoder, ModelConfig
from farflung.training.recovery_checkfree import CheckFree, Copy, Mean, lr_factor, made, order, rule, smoothed, twin_of
from farflung.training.recovery_fit import Fit, fit_, misfit
from farflung.training.recovery_rise import RISE_STEPS, risen
from farflung.training.recovery_rules import NORM_FLOOR, drawn, interpolated, weighted_mean

PLAIN, PLUS = CheckFree(), CheckFree(plus=True)
norms = st.floats(0.0, 1e3, width=32)


def vector(seed: int, numel: int = 37) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(norms, norms)
def test_the_weighted_mean_is_the_published_formula(before: float, after: float) -> None:
    a, b = vector(0), vector(1)
    left, right = before + NORM_FLOOR, after + NORM_FLOOR
    expected = (left * a.double() + right * b.double()) / (left + right)
    torch.testing.assert_close(weighted_mean(a, b, before, after).double(), expected, rtol=1e-6, atol=2e-6)


def test_the_mean_takes_the_norm_and_not_its_square() -> None:
    mean = weighted_mean(torch.zeros(1), torch.ones(1), 1.0, 3.0)
    assert float(mean) == pytest.approx(0.75, abs=1e-4)  # squares would give 0.9


def test_a_neighbour_whose_norm_nobody_knows_counts_as_much_as_the_other() -> None:
    for norms in ((None, 3.0), (3.0, None), (None, None)):
        assert float(weighted_mean(torch.zeros(1), torch.ones(1), *norms)) == 0.5


def test_the_mean_rounds_once_per_operation() -> None:
    """In numpy, operation by operation: the same bits, so no fused multiply-add on any machine."""
    a, b = vector(0, 1000).numpy(), vector(1, 1000).numpy()
    total = (0.3 + NORM_FLOOR) + (0.7 + NORM_FLOOR)
    expected = a * a.dtype.type((0.3 + NORM_FLOOR) / total) + b * b.dtype.type((0.7 + NORM_FLOOR) / total)
    found = weighted_mean(torch.from_numpy(a), torch.from_numpy(b), 0.3, 0.7)
    assert found.numpy().tobytes() == expected.tobytes()


def test_rules_make_new_vectors() -> None:
    stages = {0: vector(0), 1: vector(1), 3: vector(3)}
    before = {stage: one.clone() for stage, one in stages.items()}
    for new in (
        weighted_mean(stages[1], stages[3], 1.0, 1.0),
        interpolated(stages, 2),
        interpolated({3: stages[3]}, 0),
        made(Copy(of=0), stages, {}),
    ):
        new.fill_(7.0)
    assert all(torch.equal(stages[stage], before[stage]) for stage in stages)


def test_interpolation_is_linear_in_the_index() -> None:
    survivors = {1: torch.zeros(3), 4: torch.full((3,), 3.0)}
    assert interpolated(survivors, 2).tolist() == pytest.approx([1.0] * 3)
    assert interpolated(survivors, 3).tolist() == pytest.approx([2.0] * 3)
    assert torch.equal(interpolated(survivors, 0), survivors[1])
    assert torch.equal(interpolated(survivors, 5), survivors[4])
    with pytest.raises(Unrecoverable, match="draw it anew"):
        interpolated({}, 0)


def test_stages_of_other_sizes_are_refused() -> None:
    with pytest.raises(Unrecoverable, match="cut the model evenly"):
        weighted_mean(torch.zeros(2), torch.zeros(3), 1.0, 1.0)
    with pytest.raises(Unrecoverable):
        interpolated({0: torch.zeros(2), 2: torch.zeros(3)}, 1)


def test_a_drawn_stage_is_distributed_as_the_model_begins(config: ModelConfig) -> None:
    layers = nn.ModuleList(list(Decoder(config, seed=3).model.layers)[:1])
    layout = Layout(layers)
    begun = flatten(layout, layers.parameters(), torch.empty(layout.num_parameters))
    new = drawn(config, 1, seed=4)
    assert torch.equal(new, drawn(config, 1, seed=4)) and not torch.equal(new, begun)
    for slot in layout.slots:
        ours, theirs = new[slot.start : slot.stop], begun[slot.start : slot.stop]
        assert float(ours.std() - theirs.std()) == pytest.approx(0.0, abs=0.1 * float(theirs.std()) + 1e-9)
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.05)


@pytest.mark.parametrize(
    ("config", "stage", "expected"),
    [
        (PLAIN, 2, Mean(before=1, after=3)),
        (PLAIN, 0, Copy(of=1)),
        (PLAIN, 5, Copy(of=4)),
        (PLAIN, 1, Mean(before=0, after=2)),
        (PLUS, 0, Copy(of=1)),
        (PLUS, 1, Copy(of=0)),
        (PLUS, 4, Copy(of=5)),
        (PLUS, 5, Copy(of=4)),
        (PLUS, 3, Mean(before=2, after=4)),
    ],
)
def test_the_published_rule_of_each_stage(config: CheckFree, stage: int, expected: Mean | Copy) -> None:
    assert rule(config, stage, 6, frozenset({stage})) == expected


def test_adjacent_losses_are_beyond_the_published_rule() -> None:
    with pytest.raises(Unrecoverable, match="stage 3, which is lost too"):
        rule(PLAIN, 2, 6, frozenset({2, 3}))
    with pytest.raises(Unrecoverable):
        rule(PLUS, 0, 6, frozenset({0, 1}))
    assert rule(PLUS, 1, 6, frozenset({1, 2})) == Copy(of=0)


def test_twins_are_mutual() -> None:
    for num_stages in range(4, 9):
        for stage in range(num_stages):
            twin = twin_of(stage, num_stages)
            assert (twin is None) == (2 <= stage < num_stages - 2)
            assert twin is None or twin_of(twin, num_stages) == stage


def test_half_of_the_microbatches_swap_both_ends() -> None:
    assert order(PLAIN, 6, 1) == (0, 1, 2, 3, 4, 5)
    assert order(PLUS, 6, 0) == (0, 1, 2, 3, 4, 5)
    assert order(PLUS, 6, 1) == (1, 0, 2, 3, 5, 4)
    assert order(PLUS, 4, 3) == (1, 0, 3, 2)
    with pytest.raises(ValueError, match="at least 4"):
        order(PLUS, 3, 0)


def test_the_bump_falls_back_and_never_compounds() -> None:
    config = CheckFree(lr_bump=1.1, bump_steps=10)
    assert lr_factor(config, None) == 1.0
    assert lr_factor(config, 0) == pytest.approx(1.1)
    assert lr_factor(config, 5) == pytest.approx(1.05)
    assert lr_factor(config, 10) == lr_factor(config, 1000) == 1.0
    assert lr_factor(CheckFree(bump_steps=None), 10_000) == pytest.approx(1.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 1e6, allow_subnormal=False), min_size=1), st.floats(0.0, 0.99))
def test_the_average_of_norms_stays_among_them(seen: list[float], decay: float) -> None:
    average: float | None = None
    for norm in seen:
        average = smoothed(CheckFree(norm_decay=decay), average, norm)
    assert average is not None
    assert min(seen) * (1 - 1e-9) <= average <= max(seen) * (1 + 1e-9)
    assert smoothed(CheckFree(norm_decay=0.0), average, 3.0) == 3.0


@pytest.mark.parametrize("wrong", [{"lr_bump": 0.9}, {"norm_decay": 1.0}, {"bump_steps": 0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="lr_bump"):
        CheckFree(**wrong)  # type: ignore[arg-type]


def test_the_misfit_is_relative_to_leaving_the_stage_out() -> None:
    torch.manual_seed(0)
    stage, other = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = [torch.randn(1, 16, 8) for _ in range(3)]
    pairs = [(x, stage(x).detach()) for x in inputs]
    assert misfit(stage, pairs, torch.clone) == pytest.approx(0.0, abs=1e-6)
    assert misfit(lambda x: x, pairs, torch.clone) == pytest.approx(1.0)
    assert misfit(lambda x: 2 * x - stage(x), pairs, torch.clone) == pytest.approx(4.0)  # as far, the other way
    assert misfit(lambda x: x * torch.nan, pairs, torch.clone) == math.inf
    huge = (torch.full((1, 16, 8), 1e25), torch.full((1, 16, 8), -1e25))  # infinitely far from both
    assert misfit(other, [pairs[0], huge, pairs[2]], torch.clone) > 0.0
    assert misfit(stage, [huge], torch.clone) == math.inf
    pairs[1] = (inputs[1], other(inputs[1]).detach())  # somebody sent what was of another stage
    assert misfit(stage, pairs, torch.clone) == pytest.approx(0.0, abs=1e-6)


def test_a_fit_brings_a_stage_back_to_what_its_neighbours_saw() -> None:
    torch.manual_seed(0)
    lost, new = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = [torch.randn(2, 16, 8) for _ in range(2)]
    pairs = [(x, lost(x).detach()) for x in inputs]
    first, last = fit_(list(new.parameters()), new, pairs, Fit(steps=200, lr=1e-2))
    assert last < 0.05 * first
    assert all(parameter.grad is None for parameter in new.parameters())
    with pytest.raises(ValueError, match="no cached activations"):
        fit_(list(new.parameters()), new, [], Fit())


def test_with_fresh_moments_the_learning_rate_rises_to_that_of_the_others() -> None:
    factors = [risen(step) for step in range(2 * RISE_STEPS)]
    assert factors == sorted(factors) and 0.0 < factors[0] <= 1 / RISE_STEPS
    assert factors[RISE_STEPS - 1 :] == [1.0] * (RISE_STEPS + 1) and risen(None) == 1.0
