"""The whole outer model, evaluated a stage and a sequence at a time, has the loss that one peer with all of it finds."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from farflung.training import stage_replica
from farflung.training.errors import NotEnoughMemory, Unrecoverable
from farflung.training.flat import Layout, flatten
from farflung.training.inner import InnerConfig
from farflung.training.left_out import heldout_loss
from farflung.training.model import Decoder, ModelConfig
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_stages import Head, Stage
from farflung.training.pipeline_worker import Accumulated
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.stage_replica import EVALUATION, StageReplica, pass_through

CONFIG = ModelConfig(vocab_size=32, dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=24, seq_len=8)
INNER = InnerConfig(schedule=Schedule(peak=1e-2, kind="constant"), z_loss=1e-3)
SIZES = (1, 2)


def test_the_norm_of_a_stage_that_weighs_it_is_of_its_layers() -> None:
    """Embedding, last norm and head are in no other stage's, and a mean of two stages is of layers only."""
    for stage, others in ((0, True), (1, False)):
        one = StageReplica(CONFIG, StageSlice(SIZES, stage), INNER, Nesterov(), seed=3)
        accumulated, squares = Accumulated(), {True: 0.0, False: 0.0}
        for name, parameter in one.model.named_parameters():
            gradient = torch.full_like(parameter, 2.0)
            accumulated.sums[stage, name] = gradient
            squares["layers" in name] += float(gradient.square().sum())
        accumulated.visits[stage] += 1
        report = one.step(accumulated, 0, loss=1.0, tokens=8)
        assert report.layers_norm == pytest.approx(squares[True] ** 0.5)
        assert report.grad_norm == pytest.approx(sum(squares.values()) ** 0.5)
        assert (report.layers_norm < report.grad_norm) == others


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
def test_the_layers_of_a_stage_compile_as_those_of_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, backend = [], torch._dynamo.lookup_backend("aot_eager")

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted, fullgraph=True))
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(2, 8, 16, generator=generator) for _ in range(2))
    found = []
    for compiled in (False, True):
        runtime = Runtime(compile=compiled)
        one = StageReplica(CONFIG, StageSlice(SIZES, 1), INNER, Nesterov(), seed=3, runtime=runtime)
        into = Accumulated()
        output, back = one.worker.forward(1, x), one.worker.backward(1, x, gradient, into)
        assert bool(graphs) == compiled and back is not None
        found.append([output, back, *into.sums.values()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_stages_are_evaluated_a_sequence_at_a_time(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without gradients: there is room for that wherever a microbatch is trained."""
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 32, (5, 9)))
    runtime = Runtime(autocast=autocast, microbatch=1)
    whole = Replica(CONFIG, INNER, Nesterov(), seed=3, runtime=runtime)
    loss = whole.evaluate(tokens)
    ends = StageReplica(CONFIG, StageSlice(SIZES, 0), INNER, Nesterov(), seed=3, runtime=runtime)
    layers = Decoder(CONFIG, seed=3, held=StageSlice(SIZES, 1).holds)
    params = flatten(Layout(layers), list(layers.parameters()), torch.empty(Layout(layers).num_parameters))
    parts = list[type]()
    for part in (Stage, Head):

        def cramped(self: Stage | Head, x: torch.Tensor, forward: Any = part.forward) -> torch.Tensor:
            parts.append(type(self))
            if len(x) > 1 or torch.is_grad_enabled():
                raise torch.OutOfMemoryError("no room")
            output: torch.Tensor = forward(self, x)
            return output

        monkeypatch.setattr(part, "forward", cramped)
    outputs = pass_through(CONFIG, StageSlice(SIZES, 1), params, ends.enter(tokens), runtime)
    assert ends.leave(outputs, tokens) == pytest.approx(loss, rel=1e-6)
    assert parts == [Stage] * 10 + [Head] * 5
    stages = {0: ends.outer.params, 1: params}
    assert heldout_loss(CONFIG, SIZES, stages, tokens, (), runtime) == pytest.approx(loss, rel=1e-6)


def test_a_full_device_is_said_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StageReplica(CONFIG, StageSlice(SIZES, 0), INNER, Nesterov(), seed=3)
    tokens, x = torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 8, 16)
    before = one.outer.params.clone()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    for part in (Stage, Head):
        monkeypatch.setattr(part, "forward", full)
    monkeypatch.setattr(stage_replica, "mean_gradients", full)
    for said, work in (
        ("what neighbours remember of stage 0", lambda: one.misfit([(tokens[:, 1:], x)], Boundary.parse("fp32", 16))),
        ("a fit of stage 0", lambda: one.fit([(tokens[:, 1:], x)])),
        ("the mean gradient of stage 0", lambda: one.step(Accumulated(), 0, loss=1.0, tokens=8)),
        (EVALUATION, lambda: one.enter(tokens)),
        (EVALUATION, lambda: one.leave([x], tokens)),
        (EVALUATION, lambda: pass_through(CONFIG, one.part, before, [tokens[:, 1:]], one.runtime)),
    ):
        with pytest.raises(NotEnoughMemory, match=f"cpu has no room for {said}.*2.00 GiB"):
            work()
    torch.testing.assert_close(one.outer.params, before)


def test_a_fit_for_which_there_is_no_room_in_the_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StageReplica(CONFIG, StageSlice(SIZES, 1), INNER, Nesterov(), seed=3)
    before = one.outer.params.clone()
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(1, 8, 16, generator=generator), torch.randn(1, 8, 16, generator=generator)) for _ in range(2)]
    run, passes = one._run, 0

    def full(x: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes == 4:  # in the second step
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return run(x)

    monkeypatch.setattr(one, "_run", full)
    with pytest.raises(NotEnoughMemory, match="no room for a fit of stage 1"):
        one.fit(pairs)
    assert passes == 4 and all(p.grad is None for p in one.model.parameters())
    torch.testing.assert_close(flatten(one.layout, one.parameters, torch.empty(one.num_parameters)), before)
    torch.testing.assert_close(one.outer.params, before)
    one.fit(pairs)
    assert not torch.equal(one.outer.params, before)


def test_a_fit_that_comes_to_no_numbers_changes_nothing() -> None:
    one = StageReplica(CONFIG, StageSlice(SIZES, 1), INNER, Nesterov(), seed=1)
    before = one.outer.params.clone()
    torch.manual_seed(0)
    pairs = [(torch.randn(1, 8, CONFIG.dim), torch.randn(1, 8, CONFIG.dim)) for _ in range(3)]
    with pytest.raises(Unrecoverable, match="comes to no numbers"):
        one.fit([*pairs, (torch.full((1, 8, CONFIG.dim), 3e38), torch.ones(1, 8, CONFIG.dim))])
    assert torch.equal(one.outer.params, before)
    assert torch.equal(flatten(one.layout, one.parameters, torch.empty_like(before)), before)
    one.fit(pairs)
    assert bool(one.outer.params.isfinite().all()) and not torch.equal(one.outer.params, before)
