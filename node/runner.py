"""One asyncio loop for a whole command: uvloop's where there is one. And errors out of task groups as one error."""

import asyncio
import errno
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from farflung.node.durable import not_taken
from farflung.node.storage import LOST_STATE
from farflung.protocol.errors import FarflungError, LocalError
from farflung.training.errors import DamagedCheckpoint, NonFinite, TrainingError
from farflung.training.out_of_memory import empty_caches

T = TypeVar("T")

WANTED_FILES = 1 << 16
"""Open at once, sockets among them."""


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. Of errors made on purpose that come in a group, the first is raised alone."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(main)
        except (BaseExceptionGroup, TrainingError, OSError) as error:
            said = on_purpose(error)
            if said is None:
                raise
            raise said from error


def loop_factory() -> asyncio.AbstractEventLoop:
    """The loop that nodes run in."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def more_files() -> None:
    """As many files and sockets as the system lets this process have: by default it is 1024, which a swarm of 64 members fills."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS calls its limit infinite, and takes less
            wanted //= 2
        else:
            return


def freeze_imports() -> None:
    """Tell the garbage collector that what exists now stays: modules, classes, the model.

    With torch loaded these are half a million objects. A full collection visits all of them, and nothing else of this process
    runs meanwhile, heartbeats included.
    """
    gc.collect()
    gc.freeze()


def free_the_last_life() -> None:
    """After `freeze_imports`: what nobody refers to any more goes, frozen or not. A node's objects are full of circles."""
    gc.unfreeze()
    gc.collect()
    empty_caches()  # the next life has tensors of other sizes
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch._C._host_emptyCache()


def on_purpose(error: BaseException) -> FarflungError | None:
    """The error to show: of a group the first, when every one in it was made on purpose; None when there is a bug among them."""
    errors: list[BaseException] = []
    _collect(error, errors)
    said = [known for one in errors if (known := no_bug(one)) is not None]
    return said[0] if len(said) == len(errors) else None


def no_bug(error: BaseException) -> FarflungError | None:
    """What to show of an error that is no bug; None when it may be one."""
    match error:
        case FarflungError():
            return error
        case TrainingError():
            return _as_local(error)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS):
            return not_taken(error.filename or "a file of this node", error)
        case PermissionError(filename=str() as path):  # not of a socket; reading may have been refused, or writing
            return LocalError(f"{path} cannot be used ({error.strerror}): let this user read and write it")
        case OSError(errno=errno.EIO, filename=str() as path):
            return not_taken(path, error)
        case OSError(
            errno=errno.ENAMETOOLONG | errno.ELOOP | errno.ENOTDIR | errno.EISDIR | errno.EEXIST, filename=str() as path
        ):
            return LocalError(
                f"{path} cannot be used ({error.strerror}): give another path, or move away what is there"
            )
    return None


def _as_local(error: TrainingError) -> LocalError:
    if isinstance(error, NonFinite):
        return LocalError(
            f"training diverged at {error}; this node has left the swarm. If it happens to others too, the swarm's learning "
            "rate is too high"
        )
    if isinstance(error, DamagedCheckpoint):
        return LocalError(f"{error}; {LOST_STATE}")
    return LocalError(str(error))


def _collect(error: BaseException, into: list[BaseException]) -> None:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            _collect(one, into)
    else:
        into.append(error)
