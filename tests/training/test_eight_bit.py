"""State in 8 bits: how near it is, and that it has no bias over time."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from farflung.training import eight_bit
from farflung.training.eight_bit import BLOCK, EightBit, stored_bytes

CPU = torch.device("cpu")


def coded(values: Tensor, key: str = "exp_avg", step: int = 0) -> Tensor:
    room = EightBit(values, key, CPU, pinned=False)
    room.put(values, step)
    assert (room.codes.nbytes, room.scales.nbytes) == stored_bytes(values.numel())
    return room.get(CPU)


def sample(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 1000), st.integers(0, 5), st.floats(1e-12, 1e12), st.integers(0, 1000))
def test_within_a_step_of_the_table(numel: int, seed: int, size: float, step: int) -> None:
    values = sample(numel, seed) * size
    largest = torch.cat([block.abs().max().expand(len(block)) for block in values.split(BLOCK)])
    assert float(((coded(values, step=step) - values).abs() / largest).max()) < 2.1 / 127
    squares = values.square()
    roots, of_code = squares.sqrt(), coded(squares, "exp_avg_sq", step).sqrt()
    error = (of_code / roots - 1).abs()
    assert float(error[roots > largest * 0.01].max()) < 0.07  # coarser below, where it matters less
    assert bool((of_code > 0).all())


def test_special_values() -> None:
    assert not coded(torch.zeros(300)).any()
    assert not coded(torch.zeros(300), "exp_avg_sq").any()
    extremes = torch.tensor([-3.0, 0.0, 3.0])
    assert torch.equal(coded(extremes), extremes)
    assert coded(torch.full((2, 3, 5), 7.0)).shape == (2, 3, 5)
    assert coded(torch.zeros(0, 3)).shape == (0, 3)


class Doubles(TorchFunctionMode):
    """Counts tensors in double precision that are made on a device other than the CPU, as Apple's GPUs have none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in (made if isinstance(made, tuple | list) else [made]) if isinstance(one, Tensor)]
        self.seen += sum(one.dtype == torch.float64 and one.device.type != "cpu" for one in tensors)
        return made


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_device_need_not_have_double_precision(key: str) -> None:
    meta = torch.device("meta")
    values = torch.empty(1000, device=meta)
    room = EightBit(values, key, meta, pinned=False)
    with Doubles() as doubles:
        room.put(values, 3)
        assert room.get(meta).device == meta
    assert doubles.seen == 0


class Copies(TorchFunctionMode):
    """Counts what takes a tensor on the CPU and gives one elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_elsewhere = isinstance(made, Tensor) and made.device.type != "cpu"
        self.seen += is_elsewhere and any(isinstance(one, Tensor) and one.device.type == "cpu" for one in args)
        return made


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_nothing_is_copied_to_a_device_but_once(key: str) -> None:
    """For each such copy the host would wait until the device has done all that is queued."""
    eight_bit._on.cache_clear()
    meta = torch.device("meta")
    values, seen = torch.empty(1000, device=meta), list[int]()
    for step in range(3):
        room = EightBit(values, key, meta, pinned=False)
        with Copies() as copies:
            room.put(values, step)
            room.get(meta)
        seen.append(copies.seen)
    assert seen == [3, 0, 0]  # two tables and thresholds


def test_thresholds_are_as_in_double_precision() -> None:
    for step in (0, 1, 1000, 10**6, 10**7):
        exact = torch.frac(torch.arange(BLOCK, dtype=torch.float64) * 0.7548776662466927 + step * 0.6180339887498949)
        ours = eight_bit._thresholds(step, CPU)
        assert ours.dtype == torch.float32 and 0 <= float(ours.min()) and float(ours.max()) < 1
        apart = (ours - exact).abs()
        assert float(torch.minimum(apart, 1 - apart).max()) < 1e-6


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_over_steps_there_is_no_bias(key: str) -> None:
    values = sample(BLOCK).abs() + 0.1
    mean = torch.stack([coded(values, key, step) for step in range(2000)]).mean(dim=0)
    torch.testing.assert_close(mean, values, rtol=2e-3, atol=2e-4)


def test_a_slow_average_falls_as_it_should() -> None:
    """Gradients that have become zero: rounding to nearest would leave the second moment where it was."""
    exact = sample(BLOCK).square() + 0.01
    kept = exact.clone()
    for step in range(300):
        exact = exact * 0.99
        kept = coded(kept * 0.99, "exp_avg_sq", step)
    assert 0.8 < float((kept / exact).mean()) < 1.25
