"""A device that runs out of memory, said for people: where everything is as it was, and where something cannot be taken back."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from farflung.training.errors import NoRoom, NotEnoughMemory

MAKE_ROOM = "close what else uses the device, or save more with `--save-memory checkpoint,offload`"
"""What helps, for messages."""


_LACKS = re.compile(
    r"MPS backend out of memory"
    r"|(?:CUDA|HIP) driver error: out of memory"  # of memory that is mapped piece by piece (expandable segments)
    r"|Triton Error \[(?:CUDA|HIP)\].*out of memory"
    r"|(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED"
    # a library that cannot even begin; in other calls the same status means a device that broke before
    r"|(?:CU|HIP)BLAS_STATUS_NOT_INITIALIZED when calling `(?:cu|hip)blas(?:Lt)?Create\("
)
"""What says it in a plain RuntimeError."""


def is_lack(error: RuntimeError) -> bool:
    """Whether it says that a device has no room: torch's own allocator on CUDA does by its class, everybody else only by their words: CUDA (page-locked
    memory, a context, a kernel that is loaded), its driver, cuBLAS (its handle, its workspace), Triton, and torch's allocator on MPS."""
    words = str(error)
    by_cuda = isinstance(error, torch.AcceleratorError) and "out of memory" in words
    return isinstance(error, torch.OutOfMemoryError) or by_cuda or _LACKS.search(words) is not None


def let_go() -> None:
    """Of what a failed pass has allocated, once nobody handles its error any more: on a GPU torch has activations in cycles, 2.2 GB of a 350 M model."""
    gc.collect()
    empty_caches()


def empty_caches() -> None:
    """Give back what torch keeps of a GPU for later, where this process uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available() and torch.mps.driver_allocated_memory() > 0:
        torch.mps.empty_cache()


@contextmanager
def half_made(
    what: str,  # for the message
    device: torch.device,
) -> Iterator[None]:
    """Around what moves parameters one after another. Raises NotEnoughMemory when there is no room for that: some have moved then and others have
    not, and a smaller microbatch would not help."""
    try:
        yield
    except RuntimeError as error:
        if not is_lack(error):
            raise
        raise NotEnoughMemory(
            f"{device} ran out of memory in {what}, when some parameters had moved and others had not, and nobody can go on from that. "
            f"Nothing of it is saved: started again, training goes on from the last checkpoint. Give it room first: {MAKE_ROOM} ({error})"
        ) from error


@contextmanager
def no_room(
    what: str,  # for the message
    device: torch.device,
) -> Iterator[None]:
    """Around what changes nothing that is kept. Raises NoRoom: whoever can may try it in smaller pieces, or later."""
    try:
        yield
    except RuntimeError as error:
        if not is_lack(error):
            raise
        raise NoRoom(f"{device} has no room for {what}: {MAKE_ROOM} ({error})") from error
