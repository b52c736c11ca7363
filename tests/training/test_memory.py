"""The memory forecast against what autograd really keeps, and the microbatch chosen from it."""

import pytest
import torch

from farflung.training.errors import NotEnoughMemory
from farflung.training.memory import RESERVE, activation_bytes, choose_microbatch, forecast, free_bytes
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.presets import num_parameters, preset


def saved_bytes(config: ModelConfig, microbatch: int, autocast: torch.dtype | None) -> int:
    """Bytes of distinct storages that the backward pass waits for, parameters and tables apart."""
    model = Decoder(config, seed=1)
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
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = model(tokens[:, :-1])
            next_token_loss(logits, tokens[:, 1:])
    casts = 0 if autocast is None else num_parameters(config) * autocast.itemsize  # counted apart
    return sum(seen.values()) - casts


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny", "3m"])
def test_activations_are_forecast(name: str, autocast: torch.dtype | None) -> None:
    config = preset(name, seq_len=64)
    forecast_bytes = activation_bytes(config, 4, 4 if autocast is None else 2)
    saved = saved_bytes(config, 4, autocast)
    assert 0.95 < forecast_bytes / saved < 1.3  # rather too much than out of memory


def test_the_rest_is_exact() -> None:
    config = preset("1m")
    n = num_parameters(config)
    memory = forecast(config)
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (4 * n, 4 * n, 8 * n)
    assert memory.device_bytes == 16 * n + memory.activation_bytes
    assert forecast(config, compute_bytes=2).parameter_bytes == 6 * n
    assert forecast(config, residuals=2).outer_bytes == memory.outer_bytes + 8 * n == 24 * n


def test_microbatches_are_few_and_even(config: ModelConfig) -> None:
    one = activation_bytes(config, 1)

    def room(sequences: int) -> int:
        return int((sequences + 0.5) * one / (1 - RESERVE))

    assert choose_microbatch(config, 16, room(100)) == 16
    assert choose_microbatch(config, 16, room(15)) == 8  # not 15 and 1
    assert choose_microbatch(config, 10, room(4)) == 4  # three microbatches
    assert choose_microbatch(config, 16, room(1)) == 1
    with pytest.raises(NotEnoughMemory, match="smaller model"):
        choose_microbatch(config, 16, one // 2)


def test_free_memory_of_the_host_is_known() -> None:
    assert free_bytes(torch.device("cpu")) > 0
