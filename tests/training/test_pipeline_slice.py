"""The slices of a model's stages: together they are the model, and each begins as it does in the whole."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.training.errors import NonFinite
from farflung.training.flat import Layout, flatten
from farflung.training.inner import InnerConfig
from farflung.training.model import Decoder, ModelConfig, parameter_shapes
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import BadPlan
from farflung.training.pipeline_slice import (
    StageSlice,
    assemble,
    ends_of,
    even_sizes,
    layers_of,
    num_ends,
    stage_weights,
    with_ends,
    with_layers,
)
from farflung.training.pipeline_worker import Accumulated
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.schedule import Schedule
from farflung.training.stage_replica import StageReplica

CONFIG = ModelConfig(vocab_size=32, dim=16, num_layers=5, num_heads=2, num_kv_heads=2, ffn_dim=24, seq_len=8)
INNER = InnerConfig(schedule=Schedule(peak=1e-2, warmup_steps=0, total_steps=10))
OUTER = Nesterov(lr=0.7, momentum=0.9)


def flat(model: Decoder) -> torch.Tensor:
    layout = Layout(model)
    return flatten(layout, list(model.parameters()), torch.empty(layout.num_parameters))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_takes_other_layers_and_keeps_its_ends(stage: int) -> None:
    part = StageSlice((2, 3), stage)
    numel = sum(shape.numel() for _, shape in part.shapes(CONFIG))
    mine, other = torch.arange(float(numel)), -torch.arange(1.0, numel + 1.0)
    made = with_layers(CONFIG, part, mine, layers_of(CONFIG, part, other))
    assert torch.equal(layers_of(CONFIG, part, made), layers_of(CONFIG, part, other))
    ends = made >= 0.0
    assert torch.equal(made[ends], mine[ends]) and bool(ends.any()) == (stage == 0)
    back = with_ends(CONFIG, part, made, ends_of(CONFIG, part, other))
    assert torch.equal(back, other) and ends.sum() == (0 if stage else num_ends(CONFIG))


def stage_replica(sizes: Sequence[int], stage: int, config: ModelConfig = CONFIG) -> StageReplica:
    return StageReplica(config, StageSlice(tuple(sizes), stage), INNER, OUTER, seed=3)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans())
def test_slices_make_up_the_model(sizes: list[int], tied: bool) -> None:
    config = replace(CONFIG, num_layers=sum(sizes), tie_embeddings=tied)
    parts = [StageSlice(tuple(sizes), stage) for stage in range(len(sizes))]
    names = [name for part in parts for name, _ in part.shapes(config)]
    assert sorted(names) == sorted(name for name, _ in parameter_shapes(config))
    flats = {part.stage: flat(Decoder(config, seed=3, held=part.holds)) for part in parts}
    assert torch.equal(assemble(config, sizes, flats), flat(Decoder(config, seed=3)))


def test_a_part_takes_no_memory_for_the_rest() -> None:
    part = StageSlice((2, 3), 1)
    model = Decoder(CONFIG, seed=3, held=part.holds)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in part.shapes(CONFIG)]
    assert all(part.holds(name) for name, _ in model.named_parameters())


def test_what_is_missing_is_said() -> None:
    with pytest.raises(BadPlan, match="stage 1 is missing"):
        assemble(CONFIG, (2, 3), {0: flat(Decoder(CONFIG, seed=3, held=StageSlice((2, 3), 0).holds))})
    with pytest.raises(BadPlan, match="no stage 2"):
        StageSlice((2, 3), 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_all_stages_is_a_step_of_the_whole(tied: bool) -> None:
    """Without clipping, for that is by stage."""
    config = replace(CONFIG, tie_embeddings=tied)
    inner = replace(
        INNER, max_grad_norm=1e9, z_loss=1e-3, eps=1e-6
    )  # AdamW makes a step of a gradient that is only rounding
    sizes = (2, 3)
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1))
    whole = Replica(config, inner, OUTER, seed=3)
    report = whole.train_step(tokens, 0)

    stages = [StageReplica(config, StageSlice(sizes, stage), inner, OUTER, seed=3) for stage in range(2)]
    sums = [Accumulated(), Accumulated()]
    total = 0.0
    for piece in tokens.split(2):
        first = stages[0].worker.forward(0, piece[:, :-1])
        last = stages[1].worker.forward(1, first)
        loss, gradient = stages[0].worker.loss(last, piece[:, 1:], sums[0])
        back = stages[1].worker.backward(1, first, gradient, sums[1])
        assert back is not None
        stages[0].worker.backward(0, piece[:, :-1], back, sums[0])
        total += loss / 2
    for stage, accumulated in zip(stages, sums, strict=True):
        stage.step(accumulated, 0, loss=total, tokens=32)
    assert total + 0.0 == pytest.approx(report.loss, rel=1e-5)
    own = assemble(config, sizes, {stage.part.stage: flat(stage.model) for stage in stages})
    torch.testing.assert_close(own, flat(whole.model), rtol=1e-4, atol=1e-6)
    # and rounds are those of replicas: what it learnt is in its pseudo-gradient
    delta = stages[1].pseudo_gradient()
    assert torch.equal(delta, stages[1].outer.params - flat(stages[1].model)) and delta.abs().max() > 0


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    stage = stage_replica((2, 3), 1)
    before = flat(stage.model)
    accumulated = Accumulated()
    x = torch.ones(1, 4, 16)
    stage.worker.backward(1, x, x, accumulated)
    for total in accumulated.sums.values():
        total.fill_(torch.nan)
    with pytest.raises(NonFinite):
        stage.step(accumulated, 0, loss=1.0, tokens=4)
    assert torch.equal(flat(stage.model), before) and stage.optimizer.steps == 0


@pytest.mark.parametrize("spec", ["fp32", "tokenint8(width=16)", "subspace(width=16,rank=4)"])
def test_a_copy_fits_whatever_its_neighbours_saw_of_the_outputs(spec: str) -> None:
    """Subspace leaves out more of an output than the stage has added to it."""
    lost, boundary = stage_replica((2, 3), 1), Boundary.parse(spec, 16)
    x = boundary.carried(torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(2)))
    pairs = [(x, boundary.carried(lost.worker.forward(1, x)))]
    assert lost.misfit(pairs, boundary) < 1e-3
    if spec.startswith("subspace"):
        assert lost.misfit(pairs, Boundary.parse("fp32", 16)) > 1.0
    with torch.no_grad():
        for parameter in lost.model.parameters():
            parameter.fill_(1e30)
    assert lost.misfit(pairs, boundary) == math.inf  # beyond what codecs have numbers for; no error


def test_a_fit_changes_outer_and_local_parameters_alike() -> None:
    """Nothing of it is progress that a round would count, and no moments are left of it."""
    lost, new = stage_replica((2, 3), 1), StageReplica(CONFIG, StageSlice((2, 3), 1), INNER, OUTER, seed=4)
    with torch.no_grad():
        for parameter in lost.model.parameters():
            parameter.mul_(1.5)  # so that it does something
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(2))
    pairs = [(x, lost.worker.forward(1, x))]
    boundary = Boundary.parse("fp32", 16)
    before = new.misfit(pairs, boundary)
    new.fit(pairs)
    assert lost.misfit(pairs, boundary) == pytest.approx(0.0, abs=1e-6)
    assert new.misfit(pairs, boundary) < 0.7 * before
    assert torch.equal(new.outer.params, flat(new.model)) and new.optimizer.steps == 0
    assert all(parameter.grad is None for parameter in new.model.parameters())


@pytest.mark.parametrize("vocab_size", [32, 1000, 20_000])
@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (7, 3), (8, 4), (9, 4), (5, 5)])
def test_layers_are_as_even_by_cost_as_whole_ones_can_be(vocab_size: int, layers: int, stages: int) -> None:
    """Against all ways to deal them."""
    model = ModelConfig(
        vocab_size=vocab_size, dim=16, num_layers=layers, num_heads=2, num_kv_heads=2, ffn_dim=24, seq_len=8
    )
    dealt = [sizes for sizes in product(range(1, layers + 1), repeat=stages) if sum(sizes) == layers]
    sizes = even_sizes(model, stages)
    assert sizes in dealt
    assert max(stage_weights(model, sizes)) == min(max(stage_weights(model, other)) for other in dealt)


def test_there_are_layers_for_all_stages() -> None:
    with pytest.raises(BadPlan, match="1 to 5 stages, not 6"):
        even_sizes(CONFIG, 6)
