"""What cannot be taken back when a device runs out of memory in the middle of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from farflung.training.errors import NotEnoughMemory


@contextmanager
def half_made(
    what: str,  # for the message
    device: torch.device,
) -> Iterator[None]:
    """Around what moves parameters one after another. Raises NotEnoughMemory when there is no room for that: some have moved then and others have
    not, and a smaller microbatch would not help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"{device} ran out of memory in {what}, when some parameters had moved and others had not, and nobody can go on from that. "
            "Nothing of it is saved: started again, training goes on from the last checkpoint. Give it room first: close what else uses "
            f"the device, or save more with `--save-memory checkpoint,offload` ({error})"
        ) from error
