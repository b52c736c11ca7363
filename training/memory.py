"""How much memory training takes, before any of it is allocated, and the microbatch that fits.

The parts that are sums of tensors (parameters, gradients, moments, outer state) are exact. Activations are
a count of what autograd keeps per token, where attention keeps no score matrix: within 10 % of what is
really kept, and on the safe side (the tests compare). Workspaces of kernels and the allocator's
fragmentation are covered by `RESERVE`.
"""

from dataclasses import dataclass

import psutil
import torch

from farflung.training.errors import NotEnoughMemory
from farflung.training.model import ModelConfig
from farflung.training.presets import num_parameters

RESERVE = 0.15
"""Share of the free memory that is left alone: fragmentation, workspaces, the desktop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """What one replica will take, in bytes."""

    parameter_bytes: int
    """Live parameters, fp32, on the device; with autocast also their casts, which live as long as a step."""
    gradient_bytes: int
    optimizer_bytes: int
    """Two Adam moments, fp32."""
    activation_bytes: int
    """At the peak of one microbatch."""
    outer_bytes: int
    """In host memory: outer parameters, outer momentum, the snapshot of what was sent, one
    pseudo-gradient, and what error feedback keeps."""

    @property
    def device_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def activation_bytes(
    config: ModelConfig,
    microbatch: int,  # sequences
    compute_bytes: int = 4,  # of one number in a matrix product: 2 under bf16 autocast, 4 without
) -> int:
    """Bytes that autograd keeps for the backward pass of one microbatch, logits included."""
    d, kv, f, c = config.dim, config.kv_dim, config.ffn_dim, compute_bytes
    # autocast casts the output of a norm anew for each of the five products that take it
    norm_outputs = 2 * d if c == 4 else 5 * d
    # per layer and token: input and normalised value of the two norms, in fp32; then in compute precision the
    # norms' outputs, q, k, v, the attention's output, and four of the SwiGLU (gate, silu(gate), up, product)
    layer = 16 * d + c * (norm_outputs + 2 * d + 2 * kv + 4 * f) + 4 * config.num_heads
    head = 4 * d + c * d + config.vocab_size * (c + 8)
    return microbatch * config.seq_len * (config.num_layers * layer + head)


def forecast(
    config: ModelConfig,
    *,
    microbatch: int = 1,
    compute_bytes: int = 4,
    residuals: int = 0,  # directions, of two, in which there is error feedback
) -> MemoryForecast:
    """Memory of one replica that trains `microbatch` sequences at a time."""
    n = num_parameters(config)
    return MemoryForecast(
        parameter_bytes=4 * n + (compute_bytes * n if compute_bytes < 4 else 0),
        gradient_bytes=4 * n,
        optimizer_bytes=8 * n,
        activation_bytes=activation_bytes(config, microbatch, compute_bytes),
        outer_bytes=(16 + 4 * residuals) * n,
    )


def choose_microbatch(
    config: ModelConfig,
    batch: int,  # sequences in one inner step
    free_bytes: int,  # for activations: what is left after parameters, gradients and moments
    compute_bytes: int = 4,
) -> int:
    """Sequences at a time, in the fewest and evenest microbatches. Raises NotEnoughMemory if none fits."""
    one = activation_bytes(config, 1, compute_bytes)
    usable = int(free_bytes * (1 - RESERVE))
    if one > usable:
        raise NotEnoughMemory(
            f"one sequence of {config.seq_len} tokens needs {one / 1e9:.2f} GB for activations and "
            f"{max(usable, 0) / 1e9:.2f} GB are usable: choose a smaller model or a shorter sequence"
        )
    num_microbatches = -(-batch // min(batch, usable // one))
    return -(-batch // num_microbatches)


def free_bytes(device: torch.device) -> int:
    """Memory free on the device now; for anything but CUDA, of the host."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(cached)
    return int(psutil.virtual_memory().available)
