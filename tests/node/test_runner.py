"""What a command ends with when something in its task groups fails."""

import asyncio
import errno
import os

import pytest
import torch

from farflung.node.runner import free_the_last_life, run_loop
from farflung.protocol.errors import LocalError
from farflung.training.errors import DamagedCheckpoint, DataError


async def _in_a_group(error: Exception) -> None:
    async def read() -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(read())


def test_data_that_cannot_be_read_ends_a_node_with_what_to_do() -> None:
    with pytest.raises(LocalError, match=r"^hf:some/set cannot be read; check the network$"):
        run_loop(_in_a_group(DataError("hf:some/set cannot be read; check the network")))


def test_who_has_a_damaged_checkpoint_is_not_told_to_remove_its_votes() -> None:
    with pytest.raises(
        LocalError, match=r"^x differs; remove `learner-a`, `learner-b` and `current` of that folder, and nothing else"
    ):
        run_loop(_in_a_group(DamagedCheckpoint("x differs")))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"^a file of this node cannot be written \(No space left"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), r"^/x/y cannot be written \(Read-only"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/y"),
            r"^/x/y cannot be used \(Permission denied\): let this user read",
        ),
        *(
            (
                OSError(number, os.strerror(number), "/x/y"),
                rf"^/x/y cannot be used \({os.strerror(number)}\): give another path",
            )
            for number in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
        ),
        (OSError(errno.EIO, "I/O error: No space left", "/x/y"), r"^/x/y cannot be written \(I/O error: No space left"),
    ],
)
def test_what_a_disk_refuses_is_no_bug(error: Exception, said: str) -> None:
    async def alone() -> None:
        raise error

    for ending in (_in_a_group(error), alone()):
        with pytest.raises(LocalError, match=said):
            run_loop(ending)


BUGS = [
    ZeroDivisionError(),
    ConnectionResetError(),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "I/O error"),
    FileExistsError(errno.EEXIST, "File exists"),
]


@pytest.mark.parametrize("error", BUGS)
def test_a_bug_stays_a_group_with_its_traceback(error: Exception) -> None:
    with pytest.raises(ExceptionGroup):
        run_loop(_in_a_group(error))


def test_what_the_last_life_left_on_an_apple_gpu_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 1 << 20)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    free_the_last_life()
    assert emptied == ["mps"]
