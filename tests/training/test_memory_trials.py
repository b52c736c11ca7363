"""The microbatch by trial: what a trial takes and leaves behind, and what happens when memory gets short later."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thorough import further
from tests.training.allocations import peak_bytes
from torch import nn

from farflung.training import coupled, inner_optimizer
from farflung.training.coupled import Coupled
from farflung.training.errors import NoRoom, NotEnoughMemory, NotNow
from farflung.training.inner import InnerConfig
from farflung.training.late import mix_
from farflung.training.memory import (
    PLAIN,
    RESERVE,
    MemoryOptions,
    activation_bytes,
    even_microbatches,
    forecast,
    parse_options,
)
from farflung.training.microbatch import RAISE_AFTER_S
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import half_made, let_go, no_room
from farflung.training.probe import largest_that_fits
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

SCHEDULE = Schedule(peak=1e-3, kind="constant")


def make(config: ModelConfig, microbatch: int | None = None, save: MemoryOptions = PLAIN) -> Replica:
    runtime = Runtime(microbatch=microbatch, save=save)
    return Replica(config, InnerConfig(schedule=SCHEDULE), Nesterov(), seed=7, runtime=runtime)


@pytest.mark.thorough
@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 200))
def test_trials_find_the_largest(batch: int, fits: int) -> None:
    sizes, tried = even_microbatches(batch), list[int]()

    def trial(size: int) -> None:
        tried.append(size)
        if size > fits:
            raise torch.OutOfMemoryError

    if fits == 0:
        with pytest.raises(NotEnoughMemory, match="--save-memory"):
            largest_that_fits(sizes, trial)
    else:
        assert largest_that_fits(sizes, trial) == max(size for size in sizes if size <= fits)
    assert len(tried) <= len(sizes).bit_length()


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasLtCreate(&handle)`"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB, max allowed: 9.07 GB)."), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA driver error: invalid argument"), False),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), False),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb)`"),
            False,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
            False,
        ),
        (RuntimeError("out of memory"), False),
        (RuntimeError("expected scalar type Float but found BFloat16"), False),
    ],
)
def test_what_says_that_a_device_has_no_room(error: RuntimeError, lacks: bool) -> None:
    def trial(size: int) -> None:
        if size > 1:
            raise error

    if lacks:
        assert largest_that_fits([4, 2, 1], trial) == 1
        with pytest.raises(NotEnoughMemory, match="cpu has no room for a pass"), no_room("a pass", torch.device("cpu")):
            raise error
    else:
        with pytest.raises(type(error)) as raised:
            largest_that_fits([4, 2, 1], trial)
        assert raised.value is error
        with pytest.raises(type(error)) as raised, half_made("a step", torch.device("cpu")):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("held_bytes", [None, 0, 1 << 20])
def test_what_is_let_go_goes_back_to_an_apple_gpu(held_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is used: None where there is none."""
    emptied: list[str] = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: held_bytes is not None)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: held_bytes)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    let_go()
    assert emptied == (["mps"] if held_bytes else [])


def test_other_errors_are_no_lack_of_memory() -> None:
    def trial(size: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        largest_that_fits([4, 2, 1], trial)


class Cramped:
    """A forward pass that runs out of memory beyond so many sequences."""

    def __init__(self, replica: Replica, fits: int) -> None:
        self.forward, self.fits, self.seen = replica.model.forward, fits, list[int]()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(tokens))
        logits: torch.Tensor = self.forward(tokens)
        if len(tokens) > self.fits:
            raise torch.OutOfMemoryError("no room")
        return logits


@pytest.mark.parametrize("options", ["none", "checkpoint", "offload", "8bit"])
def test_a_trial_leaves_nothing_behind(
    options: str, config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 1)
    save = parse_options(options)
    tried, plain = make(config, save=save), make(config, microbatch=2, save=save)
    tokens = torch.from_numpy(batch(0))
    cramped = Cramped(tried, fits=2)
    monkeypatch.setattr(tried.model, "forward", cramped)

    def trials() -> int:
        return largest_that_fits(even_microbatches(4), lambda size: tried._trial(tokens[:size]))

    assert trials() == 2
    assert cramped.seen == [2, 2, 4]  # two passes where they fit
    assert all(p.grad is None for p in tried.model.parameters()) and not tried.optimizer.tensors()
    tried._microbatch.size = 2
    assert tried.train_step(batch(0), 0) == plain.train_step(batch(0), 0)
    assert trials() == 2  # of a replica that goes on
    for k in range(1, 3):
        assert tried.train_step(batch(k), k) == plain.train_step(batch(k), k)
    assert all(torch.equal(a, b) for a, b in zip(tried.parameters, plain.parameters, strict=True))


def cramp_steps(monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    """The optimiser runs out of memory after so many chunks."""
    chunk, taken = inner_optimizer._Chunk, list[int]()
    real = chunk.step

    def step(self: inner_optimizer._Chunk, lr: float, number: int) -> None:
        if len(taken) == fits:
            raise torch.OutOfMemoryError("no room")
        taken.append(number)
        real(self, lr, number)

    monkeypatch.setattr(chunk, "step", step)


def test_a_trial_leaves_room_for_the_step(config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save = parse_options("8bit")
    replica = make(config, save=save)
    tokens, real = torch.from_numpy(batch(0)), Replica._ballast
    of_step, room = forecast(config, parse_optimizer("adamw"), save).step_bytes, False

    def ballast(self: Replica, nbytes: int) -> torch.Tensor:
        if nbytes == of_step and not room:
            raise torch.OutOfMemoryError("no room")
        return real(self, nbytes)

    monkeypatch.setattr(Replica, "_ballast", ballast)
    with pytest.raises(NotEnoughMemory, match="--save-memory"):
        largest_that_fits([4], lambda size: replica._trial(tokens[:size]))
    assert not replica.optimizer.tensors() and all(p.grad is None for p in replica.model.parameters())
    room = True
    assert largest_that_fits([4], lambda size: replica._trial(tokens[:size])) == 4


@pytest.mark.parametrize(("microbatch", "autocast"), [(1, None), (1, torch.bfloat16), *further((4, None))])
@pytest.mark.parametrize("options", ["none", "checkpoint,offload", "8bit", *further("checkpoint", "offload")])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "torch.optim.Adagrad"])
def test_a_trial_takes_what_is_forecast(
    optimizer: str, options: str, microbatch: int, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it does not refuse what was chosen by forecast; and not less than the first step, with a vocabulary whose table is most of the model."""
    monkeypatch.setattr(inner_optimizer, "CHUNK", 300_000)
    config = ModelConfig(vocab_size=8_000, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=384, seq_len=32)
    save, tokens = parse_options(options), torch.zeros(microbatch, 33, dtype=torch.int64)
    runtime = Runtime(microbatch=microbatch, autocast=autocast, save=save)
    replica = Replica(config, InnerConfig(schedule=SCHEDULE, optimizer=optimizer), Nesterov(), seed=7, runtime=runtime)
    spec, compute_bytes = parse_optimizer(optimizer), runtime.compute_bytes
    needs = forecast(config, spec, save, microbatch=microbatch, compute_bytes=compute_bytes)
    missing = needs.optimizer_bytes - replica.optimizer.device_bytes()  # Adagrad makes its state at once
    rest = needs.device_bytes - needs.parameter_bytes - needs.optimizer_bytes
    trial, few = peak_bytes(lambda: replica._trial(tokens)), 10_000  # counters, the loss
    assert trial < rest + max(0, missing) + few
    if optimizer != "torch.optim.Adagrad":
        step = peak_bytes(lambda: replica.train_step(tokens, 0))
        assert trial + needs.offloaded_bytes + few >= step  # what is offloaded lies in the same memory here
    else:
        replica.train_step(tokens, 0)
    assert peak_bytes(lambda: replica._trial(tokens)) < rest + few


def test_a_step_that_was_made_in_part_is_not_made_again(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller microbatch, say: the parameters are no longer those of before."""
    cramp_steps(monkeypatch, fits=1)
    replica = make(config)
    cramped = Cramped(replica, fits=4)
    monkeypatch.setattr(replica.model, "forward", cramped)
    with pytest.raises(NotEnoughMemory, match=r"^cpu ran out of memory in the inner step, .* last checkpoint.*no room"):
        replica.train_step(batch(0), 0)
    assert cramped.seen == [4] and replica.optimizer.steps == 0


@pytest.mark.parametrize("mix", [None, 0.5])
def test_a_round_that_moves_a_part_ends_training(
    mix: float | None, config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cramped(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    replica = Replica(config, InnerConfig(schedule=SCHEDULE), Nesterov(), seed=7, mix=mix)
    replica.train_step(batch(0), 0)
    update = (0, replica.num_parameters, replica.pseudo_gradient())
    monkeypatch.setattr(coupled, "rebase_" if mix is None else "mix_", cramped)
    with pytest.raises(NotEnoughMemory, match=r"^cpu ran out of memory in a round, .* last checkpoint"):
        replica.apply([update], contributed=True)


def test_when_memory_gets_short_the_microbatch_does(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a change of state: the step is that of a replica that knew from the start."""
    replica, plain = make(config), make(config, microbatch=1)
    for step in range(2):
        replica.train_step(batch(step), step)
        plain._microbatch.size = 4
        plain.train_step(batch(step), step)
    cramped = Cramped(replica, fits=1)
    monkeypatch.setattr(replica.model, "forward", cramped)
    plain._microbatch.size = 1
    assert replica.train_step(batch(2), 2) == plain.train_step(batch(2), 2)
    assert cramped.seen == [4, 2, 1, 1, 1, 1]
    cramped.fits = 0
    with pytest.raises(NotEnoughMemory, match=r"cpu has no room for 1 sequences at a time: close .* \(no room"):
        replica.train_step(batch(3), 3)
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, plain.parameters, strict=True))


def test_a_full_device_is_waited_for_where_steps_have_fitted_before(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has changed, and nothing of the failed passes is held meanwhile. A first step that does not fit may never do."""
    replica, plain = make(config), make(config)
    cramped = Cramped(replica, fits=0)
    with monkeypatch.context() as full:
        full.setattr(replica.model, "forward", cramped)
        with pytest.raises(NotEnoughMemory) as raised:
            replica.train_step(batch(0), 0)
        assert not isinstance(raised.value, NotNow)
    assert replica.train_step(batch(0), 0) == plain.train_step(batch(0), 0)
    with monkeypatch.context() as full:
        full.setattr(replica.model, "forward", cramped)
        for _ in range(2):
            with pytest.raises(NoRoom, match=r"^cpu has no room for 1 sequences at a time: close .* \(no room"):
                replica.train_step(batch(1), 1)
            assert all(parameter.grad is None for parameter in replica.model.parameters())
    assert cramped.seen == [4, 2, 1] * 3, "the microbatch is found anew each time"
    assert replica.train_step(batch(1), 1) == plain.train_step(batch(1), 1)
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, plain.parameters, strict=True))


def test_after_a_lack_the_optimisers_step_is_not_begun_without_room_for_it(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, plain = make(config), make(config, microbatch=4)
    of_step = forecast(config, parse_optimizer("adamw"), PLAIN).step_bytes
    asked, room, now = list[int](), [True], [0.0]

    def ballast(self: Replica, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if nbytes == of_step and not room[0]:
            raise torch.OutOfMemoryError("no room")
        return torch.empty(0)

    replica._microbatch._now = lambda: now[0]
    monkeypatch.setattr(Replica, "_ballast", ballast)
    replica._microbatch.found(4)
    monkeypatch.setattr(Replica, "_is_tried", True)
    assert replica.train_step(batch(0), 0) == plain.train_step(batch(0), 0) and not asked, "no step pays without a lack"
    room[0] = False
    with monkeypatch.context() as full:
        full.setattr(replica.model, "forward", Cramped(replica, fits=2))
        with pytest.raises(NoRoom, match=r"^cpu has no room for the optimiser's step"):
            replica.train_step(batch(1), 1)
    now[0] += RAISE_AFTER_S
    for _ in range(2):  # the larger one has room again
        with pytest.raises(NoRoom, match=r"^cpu has no room for the optimiser's step"):
            replica.train_step(batch(1), 1)
        now[0] += RAISE_AFTER_S / 2
    assert all(parameter.grad is None for parameter in replica.model.parameters())
    room[0] = True
    assert replica.train_step(batch(1), 1) == plain.train_step(batch(1), 1)
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, plain.parameters, strict=True))


def test_a_microbatch_that_was_lowered_is_raised_again(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, now = make(config), [0.0]
    replica._microbatch._now = lambda: now[0]
    assert replica.train_step(batch(0), 0).microbatch == 4
    with monkeypatch.context() as full:
        full.setattr(replica.model, "forward", cramped := Cramped(replica, fits=2))
        assert replica.train_step(batch(1), 1).microbatch == 2
        now[0] += RAISE_AFTER_S
        assert replica.train_step(batch(2), 2).microbatch == 2, "it does not fit yet"
        assert cramped.seen == [4, 2, 2, 4, 2, 2]
    now[0] += RAISE_AFTER_S
    assert replica.train_step(batch(3), 3).microbatch == 4


def test_a_round_moves_parameters_on_the_host_where_the_device_is_full(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits."""

    def full(self: Coupled, pieces: Any) -> None:
        return None

    for mix in (None, 0.5):
        found = []
        for is_full in (False, True):
            replica = Replica(config, InnerConfig(schedule=SCHEDULE), Nesterov(), seed=7, mix=mix)
            replica.train_step(batch(0), 0)
            update = (0, replica.num_parameters, replica.pseudo_gradient())
            replica.train_step(batch(1), 1)
            with monkeypatch.context() as patch:
                if is_full:
                    patch.setattr(Coupled, "_copies", full)
                replica.apply([update], contributed=True)
            found.append([parameter.clone() for parameter in replica.parameters])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_round_that_mixes_takes_no_more_of_the_device_than_a_copy_of_the_outer_parameters(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no room for more, when the local ones have moved already. On the CPU there is no copy, and the outer state stays what it is."""

    def copies(self: Coupled, pieces: Any) -> Any:
        return [piece.clone() for piece in pieces] if on_device else pieces

    def mixed(local: torch.Tensor, outer: torch.Tensor, alpha: float, *, scratch: torch.Tensor | None = None) -> None:
        seen.append(scratch is outer)
        mix_(local, outer, alpha, scratch=scratch)

    replica = Replica(config, InnerConfig(schedule=SCHEDULE), Nesterov(), seed=7, mix=0.5)
    monkeypatch.setattr(coupled, "mix_", mixed)
    monkeypatch.setattr(Coupled, "_copies", copies)
    for on_device in (True, False):
        seen = list[bool]()
        replica.train_step(batch(0), 0)
        update = (0, replica.num_parameters, replica.pseudo_gradient())
        replica.apply([update], contributed=True)
        assert seen and all(in_place == on_device for in_place in seen)


def test_what_failed_is_gone_when_it_is_tried_again_with_less(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch has activations of a failed pass in cycles: 2.2 GB of a 350 M model, which then failed with one sequence as well."""

    class Activations(list[Any]):
        pass

    held: list[weakref.ref[Activations]] = []
    seen: list[list[bool]] = []
    replica = make(config)
    forward = replica.model.forward

    def cramped(tokens: torch.Tensor) -> torch.Tensor:
        logits = forward(tokens)
        if len(tokens) > 1:
            activations = Activations([logits])
            activations.append(activations)  # nothing but the collector finds that
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("no room")
        seen.append([ref() is None for ref in held])
        return logits

    monkeypatch.setattr(replica.model, "forward", cramped)
    gc.disable()
    try:
        replica.train_step(batch(0), 0)
    finally:
        gc.enable()
    assert seen == [[True, True]] * 4


def test_a_microbatch_that_was_asked_for_is_kept(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make(config, microbatch=4)
    monkeypatch.setattr(replica.model, "forward", Cramped(replica, fits=2))
    with pytest.raises(NotEnoughMemory):
        replica.train_step(batch(0), 0)


def test_a_microbatch_that_was_planned_is_lowered_and_never_exceeded(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(config, InnerConfig(schedule=SCHEDULE), Nesterov(), seed=7, runtime=Runtime(max_microbatch=2))
    assert replica.train_step(batch(0), 0).microbatch == 2
    monkeypatch.setattr(replica.model, "forward", Cramped(replica, fits=1))
    assert replica.train_step(batch(1), 1).microbatch == 1


def test_an_evaluation_fits_where_training_does(config: ModelConfig, batch: Any) -> None:
    replica, heldout, fits, seen = make(config), np.concatenate([batch(7), batch(8)]), 4, list[int]()
    loss = make(config, microbatch=1).evaluate(heldout)

    def look(model: nn.Module, args: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        seen.append(len(args[0]))
        if len(args[0]) > fits:
            raise torch.OutOfMemoryError("no room")

    replica.model.register_forward_hook(look)
    assert replica.evaluate(heldout) == loss
    assert seen == [1] * 8 and replica._microbatch.size is None  # which training will find
    replica.train_step(batch(0), 0)
    trained = [parameter.clone() for parameter in replica.parameters]
    seen.clear()
    assert replica.evaluate(heldout) == pytest.approx(loss, rel=1e-6) and seen == [4, 4]
    fits = 1
    seen.clear()
    assert replica.evaluate(heldout) == loss and seen == [4, 3, 2, *[1] * 8]
    assert replica._microbatch.size == 4, "an evaluation's lack is its own"
    fits = 0
    with pytest.raises(
        NotEnoughMemory, match=r"cpu has no room for an evaluation of 1 sequences at a time: close .* \(no room"
    ):
        replica.evaluate(heldout)
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, trained, strict=True))


def test_a_limit_lowers_the_microbatch(config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = forecast(config, parse_optimizer("adamw"), PLAIN)
    room = needs.gradient_bytes + needs.optimizer_bytes + activation_bytes(config, 2) / (1 - RESERVE) + 100
    monkeypatch.setattr("farflung.training.replica.free_bytes", lambda device, limit: int(room))
    replica = make(config)
    replica.train_step(batch(0), 0)
    assert replica._microbatch.size == 2


def test_scores_that_are_kept_lower_the_microbatch(
    config: ModelConfig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an Apple GPU, where nothing is tried."""
    needs = forecast(config, parse_optimizer("adamw"), PLAIN)
    room = needs.gradient_bytes + needs.optimizer_bytes + activation_bytes(config, 4) / (1 - RESERVE) + 100
    monkeypatch.setattr("farflung.training.replica.free_bytes", lambda device, limit: int(room))
    monkeypatch.setattr("farflung.training.replica.keeps_scores", lambda device: True)
    replica = make(config)
    assert replica._forecast() == forecast(config, parse_optimizer("adamw"), PLAIN, scores=True)
    replica.train_step(batch(0), 0)
    assert replica._microbatch.size == 2
