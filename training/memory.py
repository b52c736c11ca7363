"""How much memory training takes, before any of it is allocated; and the options and the microbatch that fit.

With n parameters, L layers, D dim, V vocabulary, K tokens of a microbatch, c bytes of a number in a matrix product (2 under
bf16 autocast, 4 without), bytes on the device at the peak of a step:

    parameters     4 n
    gradients      4 n + 4 * the largest parameter, whose gradient is made before it is added
    inner state    AdamW 8 n; Muon 4 for hidden matrices and 8 for the rest; in 8 bits a quarter (1 + 4/256 a number) of that, but
                   for tables and norms; nothing when it is offloaded
    and the larger of two, which come one after the other:
      activations  K * (L * layer + head) where the backward pass begins (`activation_bytes`), and casts of the matrices,
                   c n if c < 4; the head's are logits and their gradient, 2 c V, and work for a few rows of them
                   (`of_targets`), with and without z-loss; with checkpointed layers K * L * 4 D and the larger of layer
                   and head, and casts of one layer and the head. Where few tokens meet a large vocabulary the end of the
                   pass takes more: a tied table's gradient is made twice, and added in a third place in fp32.
                   Where attention keeps its scores (`model.keeps_scores`: MPS), with H heads and sequences of T tokens also
                   K * L * 4 H T, in fp32 as everything that attention takes there, and their gradients in one layer, K * 8 H T,
                   where the head's work is less; with checkpointed layers all of that for one
      step         the fp32 state of one chunk when it does not lie there, and the larger of two: work of the optimiser (of
                   Muon 16 bytes for each element that is orthogonalised at a time, of a class of torch 12 for each of a chunk;
                   AdamW is fused and has none) and of coding 8 bits

and in host memory 16 n of outer state (parameters, momentum, what was sent, one pseudo-gradient), 4 n for each
direction with error feedback and each copy for shadows, 4 n that a round decodes, and the inner state when it is offloaded. Where rounds are of fragments
the pseudo-gradient, what is decoded and, unless it is page-locked, what was sent are as much less until the last round, which moves everything. Beside CUDA most of that is page-locked (`page_locked`), for which torch takes the next power of two of each
block (`flat.pinned_bytes`): parameters, momentum and what was sent, each tensor of offloaded state, and a block of 4 n that an evaluation
takes and torch then keeps. On a CPU and a GPU without memory of its own (`devices.is_on_host`) both are one memory; on a CPU an evaluation finds
room where the gradients were. Sums of tensors are exact; activations are within
15 % of what is kept, the peak of a step within 30 % and on the safe side (the tests compare with the allocator's record). On a GPU peaks were 1 % below to 5 % above.
Workspaces of kernels and the allocator's fragmentation are covered by `RESERVE`. On the device evaluations have no term: they take no more sequences
at a time, without gradients, and keep nothing for a backward pass.
"""

from dataclasses import dataclass

import psutil
import torch

from farflung.training import eight_bit, inner_optimizer, of_targets
from farflung.training.devices import is_on_host
from farflung.training.errors import NotEnoughMemory
from farflung.training.flat import pinned_bytes
from farflung.training.host_memory import available_bytes
from farflung.training.inner_optimizer import ON_DEVICE, StateHome
from farflung.training.model import ModelConfig, parameter_shapes
from farflung.training.optimizers import TABLES, OptimizerSpec
from farflung.training.presets import num_parameters

RESERVE = 0.15
"""Share of the memory that is left alone: fragmentation, workspaces, the desktop."""
CUDA_BYTES = 800_000_000
"""What a process takes of a GPU beside what torch allocates there: context, kernels, libraries. 0.79 GB were seen on an H100."""

CODING_BYTES = 29
"""Work for each number that is coded in 8 bits at a time: places in the table, neighbours, shares."""

MUON_BYTES = 16
"""Work for each element that Muon orthogonalises at a time: what it looks at, three iterates, the update."""

FOREACH_BYTES = 12
"""Work for each element of a chunk that a class of torch steps on CUDA, all tensors at once: Adadelta with weight decay of its own, which takes most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """How a peer trades time for memory; its own choice."""

    checkpoint_layers: bool = False
    """Compute the activations of each layer again in the backward pass: a third more arithmetic."""
    inner_state: StateHome = ON_DEVICE
    """Where and in how many bits the inner optimiser's state lies between two steps."""

    def __str__(self) -> str:
        words = {
            "checkpoint": self.checkpoint_layers,
            "offload": self.inner_state.offload,
            "8bit": self.inner_state.bits == 8,
        }
        return ",".join(word for word, chosen in words.items() if chosen) or "none"


PLAIN = MemoryOptions()


def parse_options(text: str) -> MemoryOptions:
    """`none`, or any of `checkpoint`, `offload` and `8bit` with commas between. Raises ValueError."""
    words = set() if text == "none" else {word.strip() for word in text.split(",")}
    if unknown := words - {"checkpoint", "offload", "8bit"}:
        raise ValueError(
            f"{', '.join(sorted(unknown))!r} saves no memory; there are none, checkpoint, offload and 8bit"
        )
    state = StateHome(offload="offload" in words, bits=8 if "8bit" in words else 32)
    return MemoryOptions(checkpoint_layers="checkpoint" in words, inner_state=state)


BY_COST = tuple(
    map(
        parse_options,
        ("none", "checkpoint", "offload", "checkpoint,offload", "8bit", "checkpoint,8bit", "checkpoint,offload,8bit"),
    )
)
"""From cheap to dear. Checkpointing costs a third of the arithmetic, always. Offloading costs its copies once a step: less than
that on a fast bus with a large batch, more otherwise. Both leave the mathematics as it is to the bit; 8 bits do not,
so they come last: for where there is no other memory to move to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What a peer holds that a replica which trains alone does not."""

    copies: int = 0
    """Vectors of n in host memory: residuals of error feedback, shadows."""
    sums: int = 0
    """Vectors of n on the device: gradients that are summed up while others are computed."""
    kept_bytes: int = 0
    """On the device: what waits there to be computed with."""


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """What one replica will take, in bytes; the terms of the module's formula."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Inner state on the device."""
    activation_bytes: int
    """At the peak of one microbatch."""
    cast_bytes: int
    """Copies of matrices in the precision of the products, while they are kept for the backward pass."""
    kept_bytes: int
    """Inputs and gradients that wait to be computed with."""
    step_bytes: int
    """Work of the inner optimiser, when the activations are gone."""
    outer_bytes: int
    """In host memory."""
    round_bytes: int
    """What a round decodes, in host memory."""
    offloaded_bytes: int
    """Inner state in host memory."""
    pinned_bytes: int
    """What host memory takes beyond that when it is page-locked."""

    @property
    def device_bytes(self) -> int:
        resident = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.kept_bytes
        return resident + max(self.activation_bytes + self.cast_bytes, self.step_bytes)

    @property
    def host_bytes(self) -> int:
        return self.outer_bytes + self.round_bytes + self.offloaded_bytes + self.pinned_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """About what is written to the disk: the outer and the inner state, wherever they are kept."""
        return self.outer_bytes + self.optimizer_bytes + self.offloaded_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Options that fit, and why they were taken."""

    options: MemoryOptions
    microbatch: int
    forecast: MemoryForecast


def activation_bytes(
    config: ModelConfig,
    microbatch: int,  # sequences
    compute_bytes: int = 4,  # of one number in a matrix product: 2 under bf16 autocast, 4 without
    *,
    checkpoint_layers: bool = False,
    scores: bool = False,  # whether attention keeps them, see `model.keeps_scores`
) -> int:
    """Bytes where the backward pass of one microbatch begins: what autograd keeps, and what the loss takes for the logits' gradient."""
    d, kv, f, c = config.dim, config.kv_dim, config.ffn_dim, compute_bytes
    tokens = microbatch * config.seq_len
    # autocast casts the output of a norm anew for each of the five products that take it
    norm_outputs = 2 * d if c == 4 else 5 * d
    keys = d if c == 4 else kv  # on CUDA attention in fp32 takes them repeated, see `model.can_share_keys`
    # per layer and token: input and normalised value of the two norms, in fp32; then in compute precision the
    # norms' outputs, the attention's output, and four of the SwiGLU (gate, silu(gate), up, product)
    layer = 16 * d + c * (norm_outputs + d + 4 * f)
    # and what attention took: q, k, v, and the logarithm of each softmax's sum; as plain mathematics all in fp32, with keys and values repeated
    of_scores = 4 * config.num_heads * config.seq_len
    layer += 12 * d + of_scores if scores else c * (d + 2 * keys) + 4 * config.num_heads
    if config.qk_norm:  # what the norms of q and k take and their normalised values, in fp32
        layer += 8 * (d + kv)
    head = tokens * (4 * d + c * d) + of_targets.peak_bytes(tokens * config.vocab_size, c)
    gradients = 2 * of_scores if scores else 0  # of one layer's probabilities, and of its scores
    if checkpoint_layers:
        work = 2 * c * f + 4 * d  # gradients of activations, which without checkpoints find room in what has been freed
        work = max(work, gradients - 4 * c * f)  # at attention the SwiGLU's activations are gone
        return tokens * 4 * d * config.num_layers + max(tokens * (layer + work), head)
    return tokens * config.num_layers * layer + max(head, tokens * gradients)


def forecast(
    config: ModelConfig,
    optimizer: OptimizerSpec,
    options: MemoryOptions,
    *,
    microbatch: int = 1,
    compute_bytes: int = 4,
    beside: Beside = NOTHING_BESIDE,
    scores: bool = False,  # whether attention keeps them, see `model.keeps_scores`
    pinned: bool = False,  # whether host memory is page-locked, see `flat.host_buffer`
) -> MemoryForecast:
    """Memory of one replica that trains `microbatch` sequences at a time."""
    n = num_parameters(config)
    shapes = parameter_shapes(config)
    largest = max(shape.numel() for _, shape in shapes)
    state, rounding, fetched, coded = _state_bytes(shapes, optimizer, options.inner_state)
    if compute_bytes == 4:
        casts = 0
    elif options.checkpoint_layers:
        tables = config.vocab_size * config.dim
        layers = n - tables * (1 if config.tie_embeddings else 2)
        casts = compute_bytes * (layers // config.num_layers + tables)
    else:
        casts = compute_bytes * n
    again = 4 * config.vocab_size * config.dim * (2 if compute_bytes == 4 else 1) if config.tie_embeddings else 0
    coding = CODING_BYTES * min(coded, eight_bit.PIECE)
    kept = activation_bytes(
        config, microbatch, compute_bytes, checkpoint_layers=options.checkpoint_layers, scores=scores
    )
    return MemoryForecast(
        parameter_bytes=4 * n,
        gradient_bytes=4 * n * (1 + beside.sums) + 4 * largest,
        optimizer_bytes=0 if options.inner_state.offload else state,
        activation_bytes=max(kept, again),
        cast_bytes=casts,
        kept_bytes=beside.kept_bytes,
        step_bytes=fetched + max(_work_bytes(shapes, optimizer), coding),
        outer_bytes=(16 + 4 * beside.copies) * n,
        round_bytes=4 * n,
        offloaded_bytes=state if options.inner_state.offload else 0,
        pinned_bytes=4 * pinned_bytes(4 * n) - 12 * n + rounding if pinned else 0,
    )


def _state_bytes(
    shapes: tuple[tuple[str, torch.Size], ...], optimizer: OptimizerSpec, home: StateHome
) -> tuple[int, int, int, int]:
    """(all state as it is kept, what it takes beyond that when it is page-locked, fp32 state of the largest chunk that is fetched, numbers in the largest tensor
    that is coded in 8 bits)."""
    for_hidden, for_others = optimizer.state_tensors()
    kept = rounding = fetched = most = coded = 0
    for name, shape in shapes:
        numel, tensors = shape.numel(), for_hidden if _is_hidden(name, shape) else for_others
        lies = inner_optimizer.home_of(name, numel, home)
        blocks: tuple[int, ...] = (4 * numel,)
        if lies.bits == 8:
            blocks, coded = eight_bit.stored_bytes(numel), max(coded, numel)
        kept += tensors * sum(blocks)
        if lies.parks:  # as if every chunk had the most state a parameter can have
            most = max(most, numel)
            fetched += 4 * tensors * numel
            if lies.offload:
                rounding += tensors * sum(pinned_bytes(block) - block for block in blocks)
    chunk = max(inner_optimizer.CHUNK, most)
    return kept, rounding, min(fetched, 4 * max(for_hidden, for_others) * chunk), coded


def _work_bytes(shapes: tuple[tuple[str, torch.Size], ...], optimizer: OptimizerSpec) -> int:
    """What the optimiser takes beside gradients and state while it steps one chunk."""
    match optimizer.name:
        case "adamw":
            return 0
        case "muon":
            by_shape: dict[torch.Size, int] = {}
            for name, shape in shapes:
                if _is_hidden(name, shape):
                    by_shape[shape] = by_shape.get(shape, 0) + shape.numel()
            most = max(shape.numel() for shape in by_shape)
            return MUON_BYTES * min(max(by_shape.values()), max(inner_optimizer.CHUNK, most))
        case _:
            sizes = [shape.numel() for _, shape in shapes]
            return FOREACH_BYTES * min(sum(sizes), max(inner_optimizer.CHUNK, *sizes))


def _is_hidden(name: str, shape: torch.Size) -> bool:
    """Whether Muon orthogonalises it."""
    return len(shape) == 2 and not name.startswith(TABLES)


def choose_options(
    config: ModelConfig,
    optimizer: OptimizerSpec,
    *,
    batch: int,  # sequences in one inner step
    device_bytes: int,  # that training may use on the device, the reserve included
    host_bytes: int | None,  # the same in host memory; None when that is the device's
    compute_bytes: int = 4,
    beside: Beside = NOTHING_BESIDE,
    scores: bool = False,  # whether attention keeps them, see `model.keeps_scores`
    pinned: bool = False,  # whether host memory is page-locked, see `flat.host_buffer`
    allowed: tuple[MemoryOptions, ...] = BY_COST,  # from cheap to dear
    divisible: bool = True,  # whether the batch may be computed in pieces
) -> MemoryPlan:
    """The cheapest options that fit, and the largest microbatch that then fits. Raises NotEnoughMemory."""
    missing: list[str] = []
    for options in allowed:
        for microbatch in even_microbatches(batch) if divisible else [batch]:
            needs = forecast(
                config,
                optimizer,
                options,
                microbatch=microbatch,
                compute_bytes=compute_bytes,
                beside=beside,
                scores=scores,
                pinned=pinned,
            )
            if _fits(needs, device_bytes, host_bytes):
                return MemoryPlan(options=options, microbatch=microbatch, forecast=needs)
        missing.append(f"{needs.device_bytes / 1e9:.2f} GB and {needs.host_bytes / 1e9:.2f} GB with {options}")
    usable = f"{device_bytes * (1 - RESERVE) / 1e9:.2f} GB"
    if host_bytes is not None:
        usable += f" and {host_bytes * (1 - RESERVE) / 1e9:.2f} GB of host memory"
    raise NotEnoughMemory(
        f"{num_parameters(config) / 1e6:,.1f} M parameters and {'one sequence' if microbatch == 1 else f'{microbatch} sequences'} of "
        f"{config.seq_len} tokens need, on the device and "
        f"in host memory, {'; '.join(missing)}; usable are {usable}"
    )


def _fits(needs: MemoryForecast, device_bytes: int, host_bytes: int | None) -> bool:
    """Whether there is room, with the reserve left alone; `host_bytes` is None when the device has no memory of its own."""
    device, host = needs.device_bytes, needs.host_bytes
    if host_bytes is None:
        device, host = device + host, 0
    return device <= device_bytes * (1 - RESERVE) and host <= (host_bytes or 0) * (1 - RESERVE)


def choose_microbatch(
    config: ModelConfig,
    batch: int,  # sequences in one inner step
    free_bytes: int,  # for activations: what is left after everything else
    compute_bytes: int = 4,
    *,
    checkpoint_layers: bool = False,
    scores: bool = False,  # whether attention keeps them, see `model.keeps_scores`
) -> int:
    """Sequences at a time, in the fewest and evenest microbatches. Raises NotEnoughMemory if none fits."""
    usable = int(free_bytes * (1 - RESERVE))

    def needed(size: int) -> int:
        return activation_bytes(config, size, compute_bytes, checkpoint_layers=checkpoint_layers, scores=scores)

    for size in even_microbatches(batch):
        if needed(size) <= usable:
            return size
    one = needed(1)
    raise NotEnoughMemory(
        f"one sequence of {config.seq_len} tokens needs {one / 1e9:.2f} GB for activations and "
        f"{max(usable, 0) / 1e9:.2f} GB are usable: choose a smaller model or a shorter sequence"
    )


def even_microbatches(batch: int) -> list[int]:
    """Sequences at a time, from large to small: the sizes that divide a batch into 1, 2, 3, ... pieces as even as can be."""
    sizes = {-(-batch // pieces) for pieces in range(1, batch + 1)}
    return sorted(sizes, reverse=True)


def free_bytes(
    device: torch.device,
    limit: int | None = None,  # most that this process may use of it
) -> int:
    """Memory that this process can still take on the device; where that has none of its own, of the host or of its container there."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        if is_on_host(device):  # CUDA knows nothing of control groups
            free = min(free, available_bytes())
        used = torch.cuda.memory_allocated(device)
        available = int(free) + int(torch.cuda.memory_reserved(device)) - used
    else:
        used = psutil.Process().memory_info().rss
        available = available_bytes()
    return available if limit is None else min(available, max(0, limit - used))
