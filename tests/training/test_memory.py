"""The memory forecast against what torch really allocates, what is chosen from it, and that saving memory changes no bit."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thorough import further
from tests.training.allocations import peak_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel

from farflung.training import inner_optimizer, memory
from farflung.training.errors import NotEnoughMemory
from farflung.training.flat import pinned_bytes
from farflung.training.inner import InnerConfig, gradients, make_optimizer, precision, take_step
from farflung.training.inner_optimizer import StateHome
from farflung.training.memory import (
    BY_COST,
    CUDA_BYTES,
    RESERVE,
    Beside,
    MemoryOptions,
    activation_bytes,
    choose_microbatch,
    choose_options,
    even_microbatches,
    forecast,
    free_bytes,
    parse_options,
)
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.optimizers import parse_optimizer
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_worker import Accumulated
from farflung.training.presets import num_parameters, preset
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.stage_replica import StageReplica

SCHEDULE = Schedule(peak=1e-3, kind="constant")
SMALL = ModelConfig(vocab_size=512, dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=384, seq_len=64)
ADAMW, MUON = parse_optimizer("adamw"), parse_optimizer("muon")


def saved_bytes(config: ModelConfig, microbatch: int, autocast: torch.dtype | None, checkpointed: bool) -> int:
    """Bytes of distinct storages that the backward pass waits for, parameters and tables apart."""
    model = Decoder(config, seed=1)
    model.model.checkpoint_layers = checkpointed
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # keeps storages alive, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    tokens = torch.zeros(microbatch, config.seq_len + 1, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with precision(torch.device("cpu"), autocast):
            logits = model(tokens[:, :-1])
            next_token_loss(logits, tokens[:, 1:])
    casts = 0 if autocast is None or checkpointed else num_parameters(config) * autocast.itemsize  # counted apart
    return sum(seen.values()) - casts


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("name", ["tiny", "3m"])
def test_activations_are_forecast(name: str, qk_norm: bool, autocast: torch.dtype | None) -> None:
    config = replace(preset(name, seq_len=64), qk_norm=qk_norm)
    forecast_bytes = activation_bytes(config, 4, 4 if autocast is None else 2)
    saved = saved_bytes(config, 4, autocast, checkpointed=False)
    assert 0.95 < forecast_bytes / saved < 1.3  # rather too much than out of memory


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("name", "seq_len"), [("tiny", 64), ("3m", 64), ("3m", 256)])
def test_kept_scores_are_forecast(name: str, seq_len: int, qk_norm: bool, autocast: torch.dtype | None) -> None:
    """As on MPS: with attention made of plain products, of which torch casts what it takes to fp32."""
    config, compute_bytes = replace(preset(name, seq_len=seq_len), qk_norm=qk_norm), 4 if autocast is None else 2
    with sdpa_kernel(SDPBackend.MATH):
        saved = saved_bytes(config, 4, autocast, checkpointed=False)
    assert 1.0 <= activation_bytes(config, 4, compute_bytes, scores=True) / saved < 1.15
    assert activation_bytes(config, 4, compute_bytes) < 0.96 * saved


def test_repeated_keys_and_values_are_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA in fp32; on a CPU that is a little too much."""
    config = replace(preset("3m", seq_len=64), num_kv_heads=1)
    monkeypatch.setattr("farflung.training.model.can_share_keys", lambda device, dtype: False)
    assert 0.97 < activation_bytes(config, 4) / saved_bytes(config, 4, None, checkpointed=False) < 1.1


# ---- the peak of a step, as torch's allocator recorded it ----------------------------------------------------------


def one_step(
    config: ModelConfig,
    optimizer: str,
    options: MemoryOptions,
    autocast: torch.dtype | None,
    device: str = "cpu",
    z_loss: float = 0.0,
) -> Callable[[], object]:
    """A step of 4 sequences at a time, of a model whose inner state exists already."""
    model = Decoder(config, seed=1).to(device)
    model.model.checkpoint_layers = options.checkpoint_layers
    inner = InnerConfig(schedule=SCHEDULE, optimizer=optimizer, z_loss=z_loss)
    made = make_optimizer(model, inner, options.inner_state)
    tokens = torch.arange(8 * (config.seq_len + 1), device=device).view(8, -1) % config.vocab_size

    def step() -> object:
        found = gradients(model, inner, tokens, global_step=0, microbatch=4, autocast=autocast)
        return take_step(made, inner, found, global_step=0, tokens=tokens[:, 1:].numel())

    step()
    return step


@pytest.mark.parametrize(
    ("optimizer", "options", "autocast"),
    [
        ("adamw", "none", None),
        ("adamw", "none", torch.bfloat16),
        ("adamw", "checkpoint", None),
        ("adamw", "checkpoint", torch.bfloat16),
        ("adamw", "checkpoint,offload", None),
        ("adamw", "8bit", None),
        ("muon", "checkpoint", None),
        ("muon", "checkpoint,offload", None),
        ("torch.optim.Adagrad", "offload", None),
    ],
)
def test_the_peak_of_a_step_is_forecast(
    optimizer: str, options: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "CHUNK", 300_000)  # several, as in a large model
    chosen = parse_options(options)
    peak = peak_bytes(one_step(SMALL, optimizer, chosen, autocast))
    compute_bytes = 4 if autocast is None else 2
    needs = forecast(SMALL, parse_optimizer(optimizer), chosen, microbatch=4, compute_bytes=compute_bytes)
    resident = needs.parameter_bytes + needs.optimizer_bytes  # there before the step
    assert 0.97 < (needs.device_bytes - resident) / peak < 1.4


@pytest.mark.parametrize("seq_len", [512, *further(64, 256)])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("options", ["none", "checkpoint"])
def test_the_peak_of_a_step_that_keeps_scores_is_forecast(
    options: str, autocast: torch.dtype | None, seq_len: int
) -> None:
    config, chosen, compute_bytes = (
        replace(SMALL, seq_len=seq_len),
        parse_options(options),
        4 if autocast is None else 2,
    )
    with sdpa_kernel(SDPBackend.MATH):
        peak = peak_bytes(one_step(config, "adamw", chosen, autocast))
    needs = forecast(config, ADAMW, chosen, microbatch=4, compute_bytes=compute_bytes, scores=True)
    resident = needs.parameter_bytes + needs.optimizer_bytes  # there before the step
    assert 1.0 <= (needs.device_bytes - resident) / peak < 1.15


def work_bytes(config: ModelConfig, optimizer: str, options: MemoryOptions) -> int:
    """What a step of the optimiser takes beside gradients and state that exist, but for counters."""
    model = Decoder(config, seed=1)
    made = make_optimizer(model, InnerConfig(schedule=SCHEDULE, optimizer=optimizer), options.inner_state)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.step(1e-3)
    return peak_bytes(lambda: made.step(1e-3)) - 1000


@pytest.mark.parametrize("vocab_size", [512, 16_000])
@pytest.mark.parametrize("options", ["none", "offload", "8bit"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_work_of_the_optimizer_is_forecast(
    optimizer: str, options: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial leaves as much room as is forecast, and a step that has less is made in part."""
    monkeypatch.setattr(inner_optimizer, "CHUNK", 300_000)
    config, chosen = replace(SMALL, vocab_size=vocab_size), parse_options(options)
    needs = forecast(config, parse_optimizer(optimizer), chosen)
    assert work_bytes(config, optimizer, chosen) < needs.step_bytes


@pytest.mark.parametrize("options", ["none", "offload"])
def test_work_of_every_class_of_torch_is_forecast(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: all tensors of a chunk at once."""
    monkeypatch.setattr(inner_optimizer, "CHUNK", 300_000)
    share, chosen = dict[str, float](), parse_options(options)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ):
        decay = (
            "" if name == "Rprop" else ", weight_decay=0.1"
        )  # of its own, which takes memory as the swarm's does not
        optimizer = f"torch.optim.{name}(foreach=True{decay})"
        needs = forecast(SMALL, parse_optimizer(optimizer), chosen)
        share[name] = work_bytes(SMALL, optimizer, chosen) / needs.step_bytes
    assert 0.9 < max(share.values()) == share["Adadelta"] < 1, share


@pytest.mark.parametrize("z_loss", [1e-4, *further(0.0)])
@pytest.mark.parametrize("autocast", [torch.bfloat16, *further(None)])
@pytest.mark.parametrize("options", ["none", "checkpoint"])
def test_the_peak_of_a_large_vocabulary_is_forecast(options: str, autocast: torch.dtype | None, z_loss: float) -> None:
    """Where logits take more than the layers; what evaluates them, less."""
    config, chosen = replace(SMALL, vocab_size=16_000, seq_len=256), parse_options(options)
    peak = peak_bytes(one_step(config, "adamw", chosen, autocast, z_loss=z_loss))
    needs = forecast(config, ADAMW, chosen, microbatch=4, compute_bytes=4 if autocast is None else 2)
    resident = needs.parameter_bytes + needs.optimizer_bytes  # there before the step
    assert 1.0 <= (needs.device_bytes - resident) / peak < 1.3
    model, tokens = Decoder(config, seed=1), torch.zeros(4, 257, dtype=torch.int64)

    def evaluation() -> None:
        with torch.no_grad(), precision(torch.device("cpu"), autocast):
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    assert peak_bytes(evaluation) < needs.activation_bytes


@pytest.mark.parametrize("options", ["none", "checkpoint"])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_peak_of_a_stage_is_forecast(stage: int, options: str) -> None:
    """Two microbatches wait with their gradients while a third is computed, and the step begins while the sums are there."""
    part, waiting = StageSlice((1, SMALL.num_layers - 1), stage), 2
    inner, save = InnerConfig(schedule=SCHEDULE, optimizer="adamw"), parse_options(options)
    replica = StageReplica(SMALL, part, inner, Nesterov(), seed=1, runtime=Runtime(save=save))
    boundary = (4, SMALL.seq_len, SMALL.dim)

    def step() -> None:
        accumulated, tokens = Accumulated(), torch.zeros(boundary[:2], dtype=torch.int64)
        inputs = [tokens.clone() if stage == 0 else torch.randn(boundary) for _ in range(waiting + 1)]
        gradients = [torch.randn(boundary) for _ in range(waiting + 1)]
        while inputs:
            x, gradient = inputs.pop(), gradients.pop()
            if stage == 0:
                _, gradient = replica.worker.loss(gradient, tokens, accumulated)
            replica.worker.backward(stage, x, gradient, accumulated)
        replica.step(accumulated, 0, loss=1.0, tokens=len(tokens))

    step()
    peak = peak_bytes(step)
    shape = replace(SMALL, num_layers=len(part.layers), vocab_size=SMALL.vocab_size if stage == 0 else 2)
    beside = Beside(sums=1, kept_bytes=2 * waiting * 4 * math.prod(boundary))
    needs = forecast(shape, parse_optimizer("adamw"), save, microbatch=4, beside=beside)
    resident = needs.parameter_bytes + needs.optimizer_bytes  # there before the step
    assert 0.9 < (needs.device_bytes - resident) / peak < 1.5
    without = forecast(shape, parse_optimizer("adamw"), save, microbatch=4)
    assert without.device_bytes - resident < peak or stage == 0  # where the loss is computed there is room for them


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize(("name", "vocab_size"), [("60m", 264), ("350m", 32_000)])
@pytest.mark.parametrize("options", ["none", "checkpoint", "checkpoint,offload", "checkpoint,8bit"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_peak_on_a_gpu_is_forecast(optimizer: str, options: str, name: str, vocab_size: int, z_loss: float) -> None:
    config, chosen = preset(name, vocab_size=vocab_size), parse_options(options)
    needs = forecast(config, parse_optimizer(optimizer), chosen, microbatch=4, compute_bytes=2)
    if free_bytes(torch.device("cuda")) < 1.2 * needs.device_bytes:
        pytest.skip(f"needs {1.2 * needs.device_bytes / 1e9:.0f} GB of a GPU")
    before = torch.cuda.memory_allocated()
    step = one_step(config, optimizer, chosen, torch.bfloat16, "cuda", z_loss)
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.9 < needs.device_bytes / peak < 1.4


@pytest.mark.parametrize("options", ["none", "8bit", "offload"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "torch.optim.Adagrad"])
def test_sums_of_tensors_are_exact(optimizer: str, options: str) -> None:
    n, chosen = num_parameters(SMALL), parse_options(options)
    needs = forecast(SMALL, parse_optimizer(optimizer), chosen)
    model = Decoder(SMALL, seed=1)
    made = make_optimizer(model, InnerConfig(schedule=SCHEDULE, optimizer=optimizer), chosen.inner_state)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)
    counters = sum(tensor.nbytes for tensor in made.tensors().values() if tensor.dim() == 0)
    assert needs.optimizer_bytes + needs.offloaded_bytes == made.device_bytes() - counters
    assert (needs.parameter_bytes, needs.outer_bytes, needs.round_bytes) == (4 * n, 16 * n, 4 * n)
    fed_back = forecast(SMALL, parse_optimizer(optimizer), chosen, beside=Beside(copies=2))
    assert fed_back.outer_bytes == 24 * n and fed_back.device_bytes == needs.device_bytes
    assert needs.gradient_bytes == 4 * n + 4 * 512 * 128
    assert (needs.optimizer_bytes == 0) == chosen.inner_state.offload
    numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parked = [
        tensor.nbytes
        for name, tensor in made.tensors().items()
        if numel[name.split("/")[1]] >= inner_optimizer.MIN_PARKED and tensor.dim() > 0
    ]
    rounding = sum(map(pinned_bytes, parked)) - sum(parked) if chosen.inner_state.offload else 0
    beside_cuda = forecast(SMALL, parse_optimizer(optimizer), chosen, pinned=True)
    assert beside_cuda.pinned_bytes == 4 * pinned_bytes(4 * n) - 12 * n + rounding
    assert beside_cuda.host_bytes - needs.host_bytes == beside_cuda.pinned_bytes
    assert beside_cuda.device_bytes == needs.device_bytes


# ---- options and microbatches --------------------------------------------------------------------------------------


def choose(config: ModelConfig, gigabytes: float, host_gigabytes: float | None = 64.0, **more: Any) -> MemoryOptions:
    host = None if host_gigabytes is None else int(host_gigabytes * 1e9)
    options: dict[str, Any] = {"batch": 16, "compute_bytes": 2, "device_bytes": int(gigabytes * 1e9), **more}
    optimizer, pinned = options.pop("optimizer", ADAMW), host is not None
    return choose_options(config, optimizer, host_bytes=host, pinned=pinned, **options).options


@pytest.mark.parametrize("compute_bytes", [2, 4])
@pytest.mark.parametrize("vocab_size", [257, 32_000])
@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
def test_350m_fit_8_gb_and_1b_12_gb(optimizer: Any, vocab_size: int, compute_bytes: int) -> None:
    for name, gigabytes in (("350m", 8), ("1b", 12)):
        config = preset(name, vocab_size=vocab_size)
        chosen = choose(config, gigabytes - CUDA_BYTES / 1e9, optimizer=optimizer, compute_bytes=compute_bytes)
        assert chosen.inner_state.bits == 32  # nothing that changes the mathematics


def test_what_is_needed_is_chosen_from_cheap_to_dear() -> None:
    config = preset("350m")
    chosen = [str(choose(config, gigabytes)) for gigabytes in (80, 8, 6, 4)]
    assert chosen == ["none", "checkpoint", "offload", "checkpoint,offload"]
    assert str(choose(config, 6, host_gigabytes=15)) == "checkpoint,8bit"  # no room in the host
    assert str(choose(config, 13, host_gigabytes=None)) == "checkpoint,8bit"  # it is the host
    with pytest.raises(NotEnoughMemory, match=r"checkpoint,offload; .* usable are 1\.70 GB and 54\.40 GB"):
        choose(config, 2)
    only = (parse_options("none"),)
    with pytest.raises(NotEnoughMemory):
        choose(config, 8, allowed=only)


def test_host_memory_may_be_page_locked_and_the_devices_own() -> None:
    """As beside an integrated GPU."""
    config, only = preset("10m"), (parse_options("none"),)
    needs = forecast(config, ADAMW, only[0], pinned=True)

    def room(nbytes: int) -> int:
        return int(nbytes / (1 - RESERVE)) + 1

    both = needs.device_bytes + needs.host_bytes
    chosen = choose_options(config, ADAMW, batch=1, device_bytes=room(both), host_bytes=None, pinned=True, allowed=only)
    assert chosen.forecast == needs and needs.pinned_bytes > 0
    less = room(both - needs.pinned_bytes)
    with pytest.raises(NotEnoughMemory):
        choose_options(config, ADAMW, batch=1, device_bytes=less, host_bytes=None, pinned=True, allowed=only)
    choose_options(config, ADAMW, batch=1, device_bytes=less, host_bytes=None, allowed=only)


@settings(deadline=None)
@given(st.floats(0.01, 2), st.floats(0.01, 2), st.sampled_from([ADAMW, MUON]), st.integers(1, 64))
def test_what_is_chosen_fits_and_more_memory_is_never_dearer(
    small: float, more: float, optimizer: Any, batch: int
) -> None:
    config = preset("10m")

    def plan(gigabytes: float) -> tuple[int, int]:
        """(place in the order of cost, microbatch); the last place when nothing fits."""
        try:
            made = choose_options(
                config, optimizer, batch=batch, device_bytes=int(gigabytes * 1e9), host_bytes=int(1e9), pinned=True
            )
        except NotEnoughMemory:
            return len(BY_COST), 0
        assert made.forecast.device_bytes <= gigabytes * 1e9 * (1 - RESERVE)
        assert made.forecast == forecast(config, optimizer, made.options, microbatch=made.microbatch, pinned=True)
        return BY_COST.index(made.options), made.microbatch

    first, second = plan(small), plan(small + more)
    assert second[0] < first[0] or (second[0] == first[0] and second[1] >= first[1])


def test_options_are_read_and_written() -> None:
    for options in BY_COST:
        assert parse_options(str(options)) == options
    assert parse_options("8bit, offload") == MemoryOptions(inner_state=StateHome(offload=True, bits=8))
    with pytest.raises(ValueError, match="'4bit' saves no memory"):
        parse_options("offload,4bit")


@given(st.integers(1, 200))
def test_even_microbatches_divide_a_batch_evenly(batch: int) -> None:
    sizes = even_microbatches(batch)
    assert sizes[0] == batch and sizes[-1] == 1 and sizes == sorted(set(sizes), reverse=True)
    for size in sizes:
        pieces = -(-batch // size)
        assert size == -(-batch // pieces)  # no smaller size makes as few


def test_microbatches_are_few_and_even(config: ModelConfig) -> None:
    one = activation_bytes(config, 1)

    def room(sequences: int) -> int:
        return int((sequences + 0.5) * one / (1 - RESERVE))

    assert choose_microbatch(config, 16, room(100)) == 16
    assert choose_microbatch(config, 16, room(15)) == 8  # not 15 and 1
    assert choose_microbatch(config, 10, room(4)) == 4  # three microbatches
    assert choose_microbatch(config, 16, room(1)) == 1
    assert choose_microbatch(config, 16, room(1), checkpoint_layers=True) > 1
    assert choose_microbatch(config, 16, room(8)) == 8 > choose_microbatch(config, 16, room(8), scores=True)
    with pytest.raises(NotEnoughMemory, match="smaller model"):
        choose_microbatch(config, 16, one // 2)


def test_free_memory_of_the_host_is_known() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free > 0
    assert free_bytes(torch.device("cpu"), limit=1) == 0
    assert free_bytes(torch.device("cpu"), limit=1 << 60) > free / 2


def test_options_are_chosen_with_the_scores_that_are_kept() -> None:
    config = replace(preset("10m"), seq_len=4096)
    without = choose(config, 4, batch=1)
    with_them = choose(config, 4, batch=1, scores=True)
    assert (str(without), str(with_them)) == ("none", "checkpoint")


@pytest.mark.parametrize("is_integrated", [0, 1])
def test_free_memory_of_a_gpu_that_has_none_of_its_own_is_that_of_the_host_too(
    is_integrated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, gb = torch.device("cuda"), 10**9
    facts = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gb, 120 * gb))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * gb)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * gb)
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 * gb)
    assert free_bytes(gpu) == ((40 if is_integrated else 60) + 5 - 2) * gb
    assert free_bytes(gpu, limit=10 * gb) == 8 * gb
    monkeypatch.setattr(memory, "available_bytes", lambda: 90 * gb)
    assert free_bytes(gpu) == 63 * gb


# ---- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_checkpointed_layers_give_the_same_gradients(
    config: ModelConfig, batch: Any, qk_norm: bool, autocast: torch.dtype | None
) -> None:
    config = replace(config, qk_norm=qk_norm)
    tokens = torch.from_numpy(batch(0))
    gradients = []
    kept = []
    for checkpointed in (False, True):
        model = Decoder(config, seed=3)
        model.model.checkpoint_layers = checkpointed
        with precision(torch.device("cpu"), autocast):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append([loss.detach(), *[p.grad for p in model.parameters()]])
        kept.append(saved_bytes(config, 4, autocast, checkpointed))
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)
    assert kept[1] < 0.6 * kept[0]


def test_all_exact_options_together_change_no_bit(
    make_replica: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_optimizer, "MIN_PARKED", 1)
    plain, saving = make_replica(microbatch=2), make_replica(microbatch=2, save=parse_options("checkpoint,offload"))
    for step in range(4):
        assert plain.train_step(batch(step), step) == saving.train_step(batch(step), step)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters, saving.parameters, strict=True))
    assert plain.evaluate(batch(9)) == saving.evaluate(batch(9))
