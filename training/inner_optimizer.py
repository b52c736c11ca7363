"""The inner optimiser of one replica: every parameter stepped by its optimiser, and the state kept where this peer wants it.

Parameters are stepped in chunks of at most `CHUNK` elements, one `torch.optim` optimiser each, one after another. Between
two steps the state of a chunk (momenta, second moments) lies

    on the device in fp32       as torch leaves it; the default
    in host memory              page-locked if it may be (`page_locked`); it comes to the device for the chunk's step and goes back (`offload`)
    in 8 bits                   a quarter of the bytes, on the device or in host memory (`bits=8`, see `eight_bit.py`); not that of tables

so the device holds the fp32 state of one chunk at a time in the last two. Chunks are the same in all cases, hence the same
products and the same bits with and without `offload`. Copies are queued on the stream that steps: in order without any
waiting of the host (but for those into memory that is not page-locked), one direction at a time. With PCIe 4 at 20 GB/s the
state of a 1 B model with AdamW (8 GB there, 8 GB back) takes 0.8 s per step, and a second stream could halve that at most.

A peer may change its mind: state that was saved in one form is loaded in any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from farflung.training.eight_bit import EightBit
from farflung.training.errors import DamagedCheckpoint
from farflung.training.flat import synchronize
from farflung.training.optimizers import TABLES, Group, Parameters
from farflung.training.out_of_memory import half_made
from farflung.training.page_locked import empty

CHUNK = 1 << 24
"""Elements stepped at a time: 64 MB of fp32 for each state tensor; a larger parameter is a chunk of its own."""

MIN_PARKED = 4096
"""State of smaller parameters (norms) stays on the device in fp32: there is nothing to gain."""

PREFIX = "inner/"
"""Of the names of state tensors in a checkpoint: `inner/PARAMETER/KEY`, in 8 bits with `/codes` and `/scales` after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHome:
    """Where and how the state lies between two steps; this peer's own choice."""

    offload: bool = False
    """In host memory instead of on the device; beside CUDA page-locked, where that may be had."""
    bits: Literal[8, 32] = 32

    @property
    def parks(self) -> bool:
        return self.offload or self.bits == 8


ON_DEVICE = StateHome()


def home_of(name: str, numel: int, home: StateHome) -> StateHome:
    """Where the state of this parameter lies when that of a model is to lie at `home`.

    Tables keep 32 bits, as in bitsandbytes: what a rare token's row averages is far less than its neighbours', with whom it may share a block and its scale.
    Below the finest step, a 16,000th of the block's largest, momentum is dithered between nothing and that, which over a second moment that is right makes
    steps of many times the learning rate.
    """
    if numel < MIN_PARKED:
        return ON_DEVICE
    return replace(home, bits=32) if name.startswith(TABLES) else home


class _Exact:
    """Room for one tensor in host memory."""

    def __init__(self, like: Tensor, device: torch.device, *, pinned: bool) -> None:
        self.values = empty(tuple(like.shape), like.dtype, device, pinned=pinned)

    def put(self, values: Tensor, step: int) -> None:
        # into ordinary memory it is waited for: for the next `get` CUDA may read that before copies into it that are queued
        self.values.copy_(values, non_blocking=self.values.is_pinned())

    def get(self, device: torch.device) -> Tensor:
        return torch.empty_like(self.values, device=device).copy_(self.values, non_blocking=True)


class _Chunk:
    """Some parameters, the optimiser that steps them, and its state where it lies."""

    def __init__(self, group: Group, parameters: Parameters, home: StateHome) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.optimizer = group.make(self.parameters)
        self._lr_ratio, self._weight_decay = group.lr_ratio, group.weight_decay
        self._homes = [home_of(name, parameter.numel(), home) for name, parameter in parameters]
        self._parked: list[dict[str, _Exact | EightBit]] = [{} for _ in parameters]  # by key of the state

    def step(self, lr: float, step: int) -> None:
        for parameter, rooms in zip(self.parameters, self._parked, strict=True):
            for key, room in rooms.items():
                self.optimizer.state[parameter][key] = room.get(parameter.device)
        rate = lr * self._lr_ratio
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._weight_decay:
            with torch.no_grad():
                torch._foreach_mul_(list[Tensor](self.parameters), 1 - rate * self._weight_decay)
        self.optimizer.step()
        self.park(step)

    def park(self, step: int) -> None:
        """Move the state to where it shall lie."""
        for parameter, rooms, home in zip(self.parameters, self._parked, self._homes, strict=True):
            if not home.parks:
                continue
            state = self.optimizer.state[parameter]
            for key, value in list(state.items()):
                if value is not None and value.shape == parameter.shape:
                    if key not in rooms:
                        rooms[key] = _room(key, value, home)
                    rooms[key].put(state.pop(key), step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, rooms in zip(self.names, self.parameters, self._parked, strict=True):
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:
                    yield f"{PREFIX}{name}/{key}", value
            for key, room in rooms.items():
                if isinstance(room, EightBit):
                    yield f"{PREFIX}{name}/{key}/codes", room.codes
                    yield f"{PREFIX}{name}/{key}/scales", room.scales
                else:
                    yield f"{PREFIX}{name}/{key}", room.values

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """`tensors` by parameter's name and key."""
        self._parked = [{} for _ in self.parameters]
        state: dict[int, dict[str, Tensor]] = {}
        packed: list[tuple[int, str, EightBit]] = []
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            for full_key, value in tensors.get(name, {}).items():
                key, _, form = full_key.partition("/")
                if form == "codes":
                    room = EightBit(parameter, key, value.device, pinned=False)
                    room.codes, room.scales = value, tensors[name][f"{key}/scales"]
                    packed.append((index, key, room))
                    value = room.get(parameter.device)
                if form != "scales":
                    state.setdefault(index, {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.park(step)
        synchronize(self.parameters[0].device)  # or what was parked arrives after what follows, and stays
        for index, key, room in packed:
            kept = self._parked[index].get(key)
            if isinstance(kept, EightBit):  # the very codes, not codes of what they mean
                kept.codes.copy_(room.codes)
                kept.scales.copy_(room.scales)


def _room(key: str, like: Tensor, home: StateHome) -> _Exact | EightBit:
    device = torch.device("cpu") if home.offload else like.device
    pinned = home.offload and like.device.type == "cuda"
    if home.bits == 8:
        return EightBit(like, key, device, pinned=pinned)
    return _Exact(like, device, pinned=pinned)


class InnerOptimizer:
    """Steps all parameters of a model. Make it with `inner.make_optimizer`."""

    def __init__(self, groups: list[Group], home: StateHome = ON_DEVICE) -> None:
        self._chunks = [_Chunk(group, part, home) for group in groups for part in _parts(group.parameters)]
        self.steps = 0
        """Taken so far."""

    def step(self, lr: float) -> None:
        """Move every parameter by its gradient; `lr` is the schedule's learning rate. Raises NotEnoughMemory, with some of them moved."""
        with half_made("the inner step", self.parameters[0].device):
            for chunk in self._chunks:
                chunk.step(lr, self.steps)
        self.steps += 1

    def zero_grad(self) -> None:
        """Give the gradients' memory back."""
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are stepped."""
        return [parameter for chunk in self._chunks for parameter in chunk.parameters]

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name, as it is kept and not copied; ready to be read by the CPU."""
        found = {name: tensor for chunk in self._chunks for name, tensor in chunk.tensors()}
        synchronize(self.parameters[0].device)
        return found

    def device_bytes(self) -> int:
        """Of the state that lies on the parameters' device between two steps."""
        device = self.parameters[0].device
        return sum(tensor.nbytes for tensor in self.tensors().values() if tensor.device == device)

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `tensors()` gave, in whatever form. Raises DamagedCheckpoint, with nothing changed, when it is of
        other parameters.
        """
        by_name: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix(PREFIX).partition("/")
            by_name.setdefault(name, {})[key] = tensor
        known = {name for chunk in self._chunks for name in chunk.names}
        if not set(by_name) <= known:
            raise DamagedCheckpoint(f"inner state of unknown parameters: {', '.join(sorted(set(by_name) - known))}")
        self.steps = steps
        for chunk in self._chunks:
            chunk.load(by_name, steps)
        synchronize(self.parameters[0].device)


def _parts(parameters: Parameters) -> Iterator[Parameters]:
    """Runs of at most CHUNK elements, or of one parameter."""
    part: Parameters = []
    numel = 0
    for name, parameter in parameters:
        if part and numel + parameter.numel() > CHUNK:
            yield part
            part, numel = [], 0
        part.append((name, parameter))
        numel += parameter.numel()
    yield part
