"""Memory of the host that a GPU copies to and from while both go on; and what there is where CUDA gives none.

CUDA locks pages as far as it is allowed to: under WSL2, and in some containers, that is little. Training is quicker with them and needs none: copies into the
host's memory are in the background only where that is page-locked (`is_pinned`), and waited for elsewhere; copies out of it are in the order of the stream, and
whoever writes there waits for them first.
"""

import math
import warnings

import torch
from torch import Tensor

from farflung.training.host_memory import available_bytes
from farflung.training.out_of_memory import is_lack

_is_told = False
"""Whether somebody has been warned in this process."""


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool,  # page-locked, if that may be had; then `device` is the CPU
) -> Tensor:
    """Memory for a tensor, as `torch.empty` gives it; not page-locked where CUDA refuses that and the host has room, with a warning, once. Raises RuntimeError."""
    try:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    except RuntimeError as error:
        nbytes = math.prod(shape) * dtype.itemsize
        if not pinned or not is_lack(error) or available_bytes() < nbytes:
            raise
        _tell(nbytes, error)
    return torch.empty(shape, dtype=dtype, device=device)


def _tell(nbytes: int, error: RuntimeError) -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        words = str(error).partition("\n")[0]
        warnings.warn(
            f"CUDA refuses {nbytes / 1e9:.2f} GB of page-locked host memory ({words}), of which WSL2 and the limits of containers allow little. Training "
            "goes on with ordinary memory; copies between it and the device are slower and stand in the way of computing",
            stacklevel=3,
        )
