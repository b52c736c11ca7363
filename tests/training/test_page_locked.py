"""What torch takes for page-locked memory, and that it is as much as is forecast; and what is done where CUDA refuses it."""

import math
import re
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from farflung.training import coupled, flat, model_state, page_locked
from farflung.training.eight_bit import EightBit
from farflung.training.errors import NotEnoughMemory
from farflung.training.flat import pinned_bytes
from farflung.training.inner_optimizer import _Exact
from farflung.training.memory import PLAIN, forecast
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import half_made


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


# ---- where CUDA refuses it -----------------------------------------------------------------------------------------


CPU = torch.device("cpu")


class Refusing:
    """In the place of `torch.empty`."""

    def __init__(self, words: str) -> None:
        self.words, self.asked, self._empty = words, 0, torch.empty

    def __call__(self, *args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            self.asked += 1
            raise torch.AcceleratorError(self.words)
        return self._empty(*args, **more)


def refuse(monkeypatch: pytest.MonkeyPatch, words: str = "CUDA error: out of memory\nSearch for it") -> Refusing:
    refusing = Refusing(words)
    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr(page_locked, "_is_told", False)
    return refusing


class Waiting(TorchFunctionMode):
    """Whether each copy into a tensor was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.copy_:
            self.seen.append(not (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_ordinary_memory_takes_its_place_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks, and however often; what lies there is the same to the bit."""
    values = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    refusing = refuse(monkeypatch)
    with pytest.warns(UserWarning) as said:
        buffers = [flat.host_buffer(1000, torch.device("cuda")) for _ in range(2)]
        exact = _Exact(values, CPU, pinned=True)
        coded = EightBit(values, "exp_avg", CPU, pinned=True)
    assert refusing.asked == 5 and [buffer.shape for buffer in buffers] == [(1000,)] * 2
    words = [str(one.message) for one in said]
    assert len(words) == 1 and "\n" not in words[0]
    assert re.match(
        r"CUDA refuses .* \(CUDA error: out of memory\), of which WSL2 .* in the way of computing$", words[0]
    )
    exact.put(values, 0)
    coded.put(values, 0)
    assert torch.equal(exact.get(CPU), values)
    like = EightBit(values, "exp_avg", CPU, pinned=False)
    like.put(values, 0)
    assert torch.equal(coded.get(CPU), like.get(CPU))


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_into_ordinary_memory_are_waited_for(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may otherwise still be writing when that is read for the way back."""
    values = torch.randn(3, 300)
    rooms = [_Exact(values, CPU, pinned=False), EightBit(values, "exp_avg", CPU, pinned=False)]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    with Waiting() as waiting:
        for room in rooms:
            room.put(values, 0)
    assert waiting.seen == [not is_pinned] * 3  # the values; codes and scales


def test_where_there_is_no_room_at_all_it_is_said_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than to be killed for it. The optimiser's step says it in its own words, when some parameters have moved."""
    refuse(monkeypatch)
    monkeypatch.setattr(page_locked, "available_bytes", lambda: 3_999_999_999)
    with pytest.raises(
        NotEnoughMemory, match=r"refuses 4\.0 GB of page-locked host memory.*Free memory of this machine"
    ):
        flat.host_buffer(10**9, torch.device("cuda"))
    monkeypatch.setattr(page_locked, "available_bytes", lambda: 1199)
    with (
        pytest.raises(NotEnoughMemory, match="ran out of memory in the inner step, when some parameters had moved"),
        half_made("the inner step", CPU),
    ):
        _Exact(torch.zeros(300), CPU, pinned=True)


def test_other_faults_of_a_device_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        flat.host_buffer(1000, torch.device("cuda"))
