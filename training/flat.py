"""One flat vector for all parameters of a model: in the model's order or in another one, tied ones once.

Outer state, pseudo-gradients, parts of a round and checkpoints are slices of this vector, so its layout is
part of what a swarm agrees on; it follows from the model's shape and the swarm's manifest alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.training.errors import NotEnoughMemory
from farflung.training.out_of_memory import is_lack
from farflung.training.page_locked import empty

PIECE_ELEMENTS = 1 << 24
"""Longest run that is moved to or from a device at once: 64 MB of fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one parameter lies: elements [start, start + numel) of the flat vector."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


def slots_of(shapes: Iterable[tuple[str, torch.Size]]) -> list[Slot]:
    """Slots of parameters with these names and shapes, one after another."""
    slots: list[Slot] = []
    start = 0
    for name, shape in shapes:
        slots.append(Slot(name=name, shape=shape, start=start))
        start += shape.numel()
    return slots


def reordered(
    slots: Sequence[Slot],
    flat: Tensor,  # [n], as the slots say
    names: Iterable[str],
) -> Tensor:  # [n], a copy
    """The same parameters in the order of `names`."""
    places = {slot.name: slot for slot in slots}
    return torch.cat([flat[places[name].start : places[name].stop] for name in names])


class Layout:
    """The slots of one model. Raises ValueError for an order that is not of its parameters' names."""

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[str] | None = None,  # names of all parameters, as they lie in the vector; None: the model's
    ) -> None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # a shared one once
        names = tuple(shapes) if order is None else order
        if sorted(names) != sorted(shapes):
            raise ValueError("an order of other parameters than the model's")
        self.slots = slots_of((name, shapes[name]) for name in names)
        self.num_parameters = self.slots[-1].stop if self.slots else 0

    def parameters(self, model: nn.Module) -> list[Tensor]:
        """Those of a model of the same shape, one per slot, without gradients."""
        named = dict(model.named_parameters())
        return [named[slot.name].detach() for slot in self.slots]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The slices of `flat` [n] by parameter name, in the parameters' shapes, without a copy."""
        return {slot.name: flat[slot.start : slot.stop].view(slot.shape) for slot in self.slots}

    def pieces(
        self,
        tensors: Iterable[Tensor],  # one per slot: the parameters, or anything else of their shapes
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(low, high, view): a tensor's view that is elements [low, high); together they fill [start, stop)."""
        stop = self.num_parameters if stop is None else stop
        for slot, tensor in zip(self.slots, tensors, strict=True):
            flat = tensor.detach().view(-1)
            for low in range(max(start, slot.start), min(stop, slot.stop), PIECE_ELEMENTS):
                high = min(stop, slot.stop, low + PIECE_ELEMENTS)
                yield low, high, flat[low - slot.start : high - slot.start]


def flatten(layout: Layout, tensors: Iterable[Tensor], out: Tensor, start: int | None = None) -> Tensor:
    """Copy one tensor per slot into `out` [n] on the CPU, or of them the elements from `start` on into `out` [k], and wait until they have arrived.
    Returns `out`. Raises ValueError where it has another size.
    """
    start, stop = _filled(layout, out, start)
    device = None
    for low, high, piece in layout.pieces(tensors, start, stop):
        device = piece.device
        out[low - start : high - start].copy_(piece, non_blocking=out.is_pinned())
    synchronize(device)
    return out


def unflatten(layout: Layout, flat: Tensor, tensors: Iterable[Tensor], start: int | None = None) -> None:
    """Copy `flat` [n] into one tensor per slot, or `flat` [k] into those elements of them from `start` on, and wait until it has been read. Raises ValueError,
    with nothing changed, where it has another size.
    """
    start, stop = _filled(layout, flat, start)
    device = None
    for low, high, piece in layout.pieces(tensors, start, stop):
        device = piece.device
        piece.copy_(flat[low - start : high - start], non_blocking=flat.is_pinned())
    synchronize(device)


def _filled(layout: Layout, flat: Tensor, start: int | None) -> tuple[int, int]:
    """Which elements `flat` is of. Told nothing, it is of all: what is too short is no part of them by mistake."""
    n, k = layout.num_parameters, flat.numel()
    if start is None and k == n:
        return 0, n
    if start is None or not 0 <= start <= start + k <= n:
        raise ValueError(f"{k} elements from {start or 0} on, of a model that has {n}")
    return start, start + k


def host_buffer(num_elements: int, device: torch.device) -> Tensor:
    """An fp32 buffer on the CPU, page-locked where `device` can copy to and from it in the background and CUDA gives as much (`page_locked`). Raises
    NotEnoughMemory where it does not, and the host has no other room."""
    try:
        return empty((num_elements,), torch.float32, torch.device("cpu"), pinned=device.type == "cuda")
    except RuntimeError as error:
        if not is_lack(error):
            raise
        raise NotEnoughMemory(
            f"CUDA refuses {4e-9 * num_elements:.1f} GB of page-locked host memory, and there is no room for ordinary memory; nothing has changed. Free "
            f"memory of this machine, or raise the limit of the container ({error})"
        ) from error


def pinned_bytes(nbytes: int) -> int:
    """What a page-locked block of so many bytes takes: torch rounds it up to a power of two (its CachingHostAllocator), and keeps it when it is
    free for the next one of that size. `pinned_max_round_threshold_mb` turns that off for large ones, but torch 2.10 does not know it, and later ones
    may hand out too small a block with it (pytorch #192722)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def synchronize(device: torch.device | None) -> None:
    """Wait for background copies: page-locked memory must not change, or be read, under them."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device is not None and device.type == "mps":
        torch.mps.synchronize()
