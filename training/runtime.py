"""How this peer computes: its own choice, and never part of what a swarm agrees on."""

from dataclasses import dataclass

import torch

from farflung.training.devices import has_bf16
from farflung.training.memory import PLAIN, MemoryOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """See the module."""

    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:1, mps."""
    autocast: torch.dtype | None = None
    """Precision of the matrix products; None is fp32. Parameters and moments are fp32 in any case."""
    microbatch: int | None = None
    """Sequences at a time; None takes what the memory allows, found at the first step and lowered when it gets short."""
    max_microbatch: int | None = None
    """The most that may be taken: for so many a forecast made before anything was allocated has room, rounds included. None where trials
    find out, and where nothing was forecast."""
    save: MemoryOptions = PLAIN
    """What memory is saved with; the gradients and, but for 8 bits, the parameters are the same to the bit."""
    memory_bytes: int | None = None
    """Most memory of the device that training shall use, on CUDA beside `memory.CUDA_BYTES`; None is all that is free when training begins."""
    compile: bool = False
    """Compile the model's layers with torch.compile: some waiting, then faster steps on some GPUs (not on an H100)."""

    def __post_init__(self) -> None:
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError("microbatch must be at least 1")
        if self.max_microbatch is not None and self.max_microbatch < 1:
            raise ValueError("max_microbatch must be at least 1")

    @property
    def compute_bytes(self) -> int:
        """Of one number in a matrix product."""
        return 4 if self.autocast is None else self.autocast.itemsize

    @classmethod
    def best(cls, device: str) -> "Runtime":
        """bf16 on GPUs that compute in it, fp32 elsewhere."""
        return cls(device=device, autocast=torch.bfloat16 if has_bf16(torch.device(device)) else None)
