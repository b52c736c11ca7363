"""The outer state of a swarm, how a rule of `training.rules` moves it, and its chunks. The rule of the default is SGD with Nesterov momentum.

Source: DiLoCo (2311.08105); the formulas are those of torch.optim.SGD(nesterov=True, dampening=0) without
weight decay. With d the mean of outer minus local parameters, u the momentum and theta the outer parameters:

    u     <- mu * u + d
    theta <- theta - lr * (d + mu * u)

Every peer takes this step for itself and must get the same bits. So the state is fp32 on the CPU, and each
operation is elementwise and rounds once: multiplications and additions are separate calls. A fused
multiply-add rounds once where these round twice, and which of the two one gets from `add(alpha=...)`,
`addcmul`, a compiled kernel or a GPU depends on the machine. Being elementwise it can be done on any slice
alone.

PyTorch needs eight passes over memory for a step; outer.c, once `compression.kernels.prepare` has run, does the same operations in one.
"""

from ctypes import c_float, c_size_t, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.compression import kernels
from farflung.compression.digest import digest_of
from farflung.training.errors import BadChunk
from farflung.training.rules import BLOCK_ELEMENTS, Nesterov, OuterRule, roll_forward

BYTES_PER_ELEMENT = 8
"""One parameter and its momentum, fp32 each."""

_STEP = (c_void_p, c_void_p, c_void_p, c_size_t, c_float, c_float)  # params, momentum, mean, numel, lr, mu


NESTEROV = Nesterov()


class OuterState:
    """Outer parameters and momentum, both fp32 [n] on the CPU; identical on all peers at the same version.

    The momentum is the one buffer that rules of swarms may have. One that has none leaves it as it is: zeros, in chunks as well.
    """

    def __init__(
        self,
        params: Tensor,  # fp32 [n], CPU, contiguous; kept, not copied
        momentum: Tensor | None = None,  # same; zeros when not given
        *,
        rule: OuterRule = NESTEROV,  # by which `advance_` moves it
        chunk_bytes: int = 1 << 20,  # of one chunk of a state transfer
    ) -> None:
        momentum = torch.zeros_like(params) if momentum is None else momentum
        for tensor in (params, momentum):
            if tensor.dim() != 1 or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError("outer state must be flat fp32 on the CPU")
            if not tensor.is_contiguous():
                raise ValueError("outer state must lie in one piece")
        if params.shape != momentum.shape:
            raise ValueError(f"{params.numel()} parameters and {momentum.numel()} momenta")
        if chunk_bytes < BYTES_PER_ELEMENT:
            raise ValueError(f"a chunk must have at least {BYTES_PER_ELEMENT} bytes")
        self.params = params
        self.momentum = momentum
        self.rule = rule
        """Of the next step: of a run's last round there may be another."""
        self.chunk_elements = chunk_bytes // BYTES_PER_ELEMENT

    @property
    def num_parameters(self) -> int:
        return self.params.numel()

    @property
    def num_chunks(self) -> int:
        return -(-self.num_parameters // self.chunk_elements)

    def advance_(
        self,
        start: int,
        stop: int,  # elements [start, stop) move
        mean: Tensor,  # fp32 [stop - start], CPU: mean pseudo-gradient
    ) -> None:
        """Advance one slice by one step of `rule`, in place. Raises ValueError, with nothing changed, when `mean` does not fit it, or the rule
        has more than one buffer."""
        rule = self.rule
        if rule.num_buffers > 1:
            raise ValueError(f"{rule} has {rule.num_buffers} buffers; outer state holds one")
        if isinstance(rule, Nesterov):
            self.step_(start, stop, mean, rule.lr, rule.momentum)
            return
        self.check_update(start, stop, mean)
        for low in range(start, stop, BLOCK_ELEMENTS):
            high = min(stop, low + BLOCK_ELEMENTS)
            params, buffers = self.params[low:high], [self.momentum[low:high]][: rule.num_buffers]
            moved, changed = rule.step(params, buffers, mean[low - start : high - start])
            params.copy_(moved)
            for buffer, values in zip(buffers, changed, strict=True):
                buffer.copy_(values)

    def step_(
        self,
        start: int,
        stop: int,  # elements [start, stop) move
        mean: Tensor,  # fp32 [stop - start], CPU: mean pseudo-gradient
        lr: float,
        momentum: float,
    ) -> None:
        """Advance one slice by one step of Nesterov's, in place. Raises ValueError when `mean` does not fit it."""
        self.check_update(start, stop, mean)
        native = kernels.find("outer_step", *_STEP)
        if native is not None:
            mean = mean.contiguous()
            places = (self.params[start:stop].data_ptr(), self.momentum[start:stop].data_ptr(), mean.data_ptr())
            native(*places, stop - start, lr, momentum)
            return
        for low in range(start, stop, BLOCK_ELEMENTS):
            high = min(stop, low + BLOCK_ELEMENTS)
            params, velocity = self.params[low:high], self.momentum[low:high]
            new_params, new_velocity = roll_forward(params, velocity, mean[low - start : high - start], lr, momentum)
            params.copy_(new_params)
            velocity.copy_(new_velocity)

    def check_update(self, start: int, stop: int, mean: Tensor) -> None:
        """Raise ValueError unless `mean` is a mean pseudo-gradient for elements [start, stop)."""
        if not 0 <= start <= stop <= self.num_parameters:
            raise ValueError(f"slice [{start}, {stop}) is outside of {self.num_parameters} parameters")
        if mean.shape != (stop - start,) or mean.dtype != torch.float32 or mean.device.type != "cpu":
            raise ValueError(f"the mean of [{start}, {stop}) must be {stop - start} fp32 numbers on the CPU")

    def chunk_range(self, index: int) -> tuple[int, int]:
        """The elements [start, stop) of one chunk. Raises BadChunk when there is no such chunk."""
        if not 0 <= index < self.num_chunks:
            raise BadChunk(f"chunk {index} of {self.num_chunks}")
        start = index * self.chunk_elements
        return start, min(self.num_parameters, start + self.chunk_elements)

    def chunk_bytes(self, index: int) -> bytes:
        """The chunk's parameters, then its momentum, each as little-endian fp32."""
        start, stop = self.chunk_range(index)
        return b"".join(
            tensor[start:stop].numpy().astype("<f4", copy=False).tobytes() for tensor in (self.params, self.momentum)
        )

    def load_chunk(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Replace one chunk. A wrong index, size or non-finite value raises BadChunk and changes nothing."""
        start, stop = self.chunk_range(index)
        params, momentum = parse_chunk(data, stop - start)
        self.params[start:stop] = params
        self.momentum[start:stop] = momentum

    def chunk_digests(self) -> list[bytes]:
        """Of each chunk's bytes."""
        params: Any  # numpy declares no buffer protocol before 3.12
        momentum: Any
        params, momentum = (tensor.numpy().astype("<f4", copy=False) for tensor in (self.params, self.momentum))
        digests = []
        for index in range(self.num_chunks):
            start, stop = self.chunk_range(index)
            pieces = (values[start:stop].view(np.uint8) for values in (params, momentum))
            digests.append(digest_of(*pieces))  # as it lies there: a copy of everything would cost more
        return digests

    def digest(self) -> bytes:
        """Of the chunk digests: equal exactly when the states are (for one chunk size)."""
        return digest_of(*self.chunk_digests())


def parse_chunk(data: bytes | bytearray | memoryview, num_elements: int) -> tuple[Tensor, Tensor]:
    """A chunk's parameters and momentum, fp32 [num_elements] each, as copies of their own.

    Raises BadChunk when the size is wrong or a value is not finite.
    """
    size = memoryview(data).nbytes
    if size != num_elements * BYTES_PER_ELEMENT:
        raise BadChunk(f"a chunk of {num_elements} elements has {num_elements * BYTES_PER_ELEMENT} bytes, not {size}")
    values = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise BadChunk("a chunk with a value that is not finite")
    both = torch.from_numpy(values)
    return both[:num_elements], both[num_elements:]
