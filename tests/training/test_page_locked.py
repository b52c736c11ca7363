"""What torch takes for page-locked memory, and that it is as much as is forecast."""

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from farflung.training import coupled, model_state
from farflung.training.flat import pinned_bytes
from farflung.training.memory import PLAIN, forecast
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer


def test_page_locked_blocks_are_powers_of_two() -> None:
    sizes = {0: 0, 1: 1, 2: 2, 3: 4, 4096: 4096, 4097: 8192, (1 << 32) - 4: 1 << 32, (1 << 32) + 4: 1 << 33}
    assert {size: pinned_bytes(size) for size in sizes} == sizes


class PinnedCache:
    """Page-locked buffers as torch gives them out: whole blocks, kept for the next of that size when they are free."""

    def __init__(self) -> None:
        self.taken, self._free = 0, Counter[int]()

    def __call__(self, num_elements: int, device: torch.device) -> torch.Tensor:
        size = pinned_bytes(4 * num_elements)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.taken += size
        buffer = torch.empty(num_elements)
        weakref.finalize(buffer, self._free.update, [size])
        return buffer


def test_page_locked_buffers_are_as_many_as_is_forecast(
    config: ModelConfig, make_replica: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds and evaluations in turn, of which the second finds the block of the first."""
    cache = PinnedCache()
    for module in (coupled, model_state):
        monkeypatch.setattr(module, "host_buffer", cache)
    replica = make_replica(microbatch=4)
    n = replica.num_parameters
    assert not math.log2(n).is_integer()
    for step in range(3):
        replica.train_step(batch(step), step)
        replica.apply([(0, n, replica.pseudo_gradient())], contributed=True)
        replica.evaluate(batch(9))
    needs = forecast(config, parse_optimizer("adamw"), PLAIN, pinned=True)
    pseudo_gradient = 4 * n  # is not page-locked
    assert cache.taken == needs.outer_bytes - pseudo_gradient + needs.pinned_bytes
