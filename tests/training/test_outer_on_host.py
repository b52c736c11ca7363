"""The outer state lies in host memory: a round takes less of the device than one fragment, over a plain loop of the inner optimiser."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from farflung.training import flat
from farflung.training.fragments import cut
from farflung.training.inner import InnerConfig, gradients, make_optimizer, take_step
from farflung.training.memory import PLAIN, MemoryForecast, MemoryOptions, forecast, free_bytes, parse_options
from farflung.training.model import Decoder, ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.presets import num_parameters, preset
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

INNER = InnerConfig(schedule=Schedule(peak=1e-3, kind="constant"), z_loss=1e-4)
LARGE = preset("350m", vocab_size=32_000)
SMALL = ModelConfig(vocab_size=264, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=176, seq_len=32)


class ToDevice(TorchFunctionMode):
    """Notes the bytes of each tensor that is moved to a device, wherever it is already."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and any(isinstance(argument, torch.device) for argument in args[1:]):
            self.nbytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def a_round(replica: Replica, fragments: int) -> None:
    """Offer, and apply a mean, fragment by fragment."""
    for fragment in cut(replica.layout.slots, fragments, "sequential"):
        replica.offer()
        updates = [(start, stop, replica.offered_gradient(start, stop)) for start, stop in fragment.slices]
        replica.apply(updates, contributed=True)


def test_a_round_moves_pieces_to_the_device_and_never_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "PIECE_ELEMENTS", 4096)
    replica = Replica(SMALL, INNER, Nesterov(), seed=1)
    replica.train_step(torch.arange(4 * 33).view(4, 33) % 256, 0)
    with ToDevice() as seen:
        a_round(replica, 3)
    # of each element the outer parameter and the reference, once
    assert sum(seen.nbytes) == 2 * 4 * replica.num_parameters
    assert max(seen.nbytes) <= 4 * 4096


def with_room(
    config: ModelConfig,
    save: MemoryOptions = PLAIN,
) -> MemoryForecast:
    """What two sequences at a time take of a GPU and beside it. Skips the test where there is less."""
    needs = forecast(config, parse_optimizer("adamw"), save, microbatch=2, compute_bytes=2, pinned=True)
    for device, wanted in (("cuda", needs.device_bytes), ("cpu", needs.host_bytes)):
        if free_bytes(torch.device(device)) < 1.2 * wanted:
            pytest.skip(f"needs {1.2 * wanted / 1e9:.0f} GB of {device}")
    return needs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", [preset("150m"), LARGE])
@pytest.mark.parametrize("fragments", [1, 3])
def test_the_peak_on_a_gpu_is_that_of_a_plain_loop_and_less_than_a_fragment(
    fragments: int, config: ModelConfig
) -> None:
    with_room(config)
    tokens = torch.arange(2 * (config.seq_len + 1), device="cuda").view(2, -1) % config.vocab_size

    def peak_of(make: Callable[[], Callable[[], None]]) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        work = make()
        work()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before

    def plain() -> Callable[[], None]:
        model = Decoder(config, seed=1).to("cuda")
        optimizer = make_optimizer(model, INNER)

        def work() -> None:
            found = gradients(model, INNER, tokens, global_step=0, microbatch=2, autocast=torch.bfloat16)
            take_step(optimizer, INNER, found, global_step=0, tokens=tokens[:, 1:].numel())

        return work

    def with_rounds() -> Callable[[], None]:
        runtime = Runtime(device="cuda", autocast=torch.bfloat16, microbatch=2)
        replica = Replica(config, INNER, Nesterov(), seed=1, runtime=runtime)
        assert replica.outer.params.is_pinned() and replica.outer.momentum.is_pinned()

        def work() -> None:
            replica.train_step(tokens, 0)
            a_round(replica, fragments)

        return work

    more = peak_of(with_rounds) - peak_of(plain)
    assert more <= 4 * num_parameters(config) // fragments


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", ["none", "offload", "checkpoint,offload,8bit"])
def test_the_page_locked_peak_beside_a_gpu_is_forecast(options: str) -> None:
    """Of rounds and evaluations, with torch's rounding of each block."""
    save = parse_options(options)
    needs = with_room(LARGE, save)
    tokens = torch.arange(2 * (LARGE.seq_len + 1)).view(2, -1) % LARGE.vocab_size
    gc.collect()
    torch.cuda.init()
    torch.cuda.synchronize()  # blocks that copies still read count as used, of earlier tests too
    torch._C._host_emptyCache()  # type: ignore[attr-defined]
    before = torch.cuda.host_memory_stats()
    if "active_bytes.peak" not in before:
        pytest.skip(f"torch {torch.__version__} does not tell what is page-locked")
    torch.cuda.reset_peak_host_memory_stats()
    runtime = Runtime(device="cuda", autocast=torch.bfloat16, microbatch=2, save=save)
    replica = Replica(LARGE, INNER, Nesterov(), seed=1, runtime=runtime)
    for step in range(2):
        replica.train_step(tokens, step)
        a_round(replica, 1)
        replica.evaluate(tokens)
    peak = torch.cuda.host_memory_stats()["active_bytes.peak"] - before["active_bytes.current"]
    pageable = needs.round_bytes + 4 * replica.num_parameters  # what is decoded, and the pseudo-gradient
    assert 0.95 < (needs.host_bytes - pageable) / peak < 1.05
