"""Writes that are on the disk when they return, and that a crash in the middle of does not show.

A file that is replaced takes two syncs, its own and its folder's, and each waits for the file system's journal. A vote is waited for by
everybody, so it has a file of two `Slots`, which are written in turn and in place: one sync of data, three to five times as quick.
"""

import hashlib
import os
import struct
import sys
from pathlib import Path

from farflung.protocol.errors import LocalError

UNFINISHED = ".new"
"""End of the name of a file until it is whole."""

_SLOT_HEADER = struct.Struct(">QI16s")
"""Of a slot: number of its write, length, and the beginning of the sha256 of both and the value."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + UNFINISHED)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)  # or the rename itself may be lost with the power


def sync_folder(folder: Path) -> None:
    """What was renamed or made in it survives."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Slots:
    """One value that is replaced often. A crash leaves the old one or the new one."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """`max_bytes`: of the value. The file is twice as long, and takes what the two values take."""
        self._path = path
        self._max_bytes = max_bytes
        self._writes: int | None = None
        """None before we have looked."""

    def save(self, value: bytes) -> None:
        """Raises ValueError for one that is too long, LocalError where the file is damaged."""
        if len(value) > self._max_bytes:
            raise ValueError(f"a value of {len(value)} bytes for a slot of {self._max_bytes}")
        if self._writes is None:
            self._writes = self._newest()[0]
        number = self._writes + 1
        entry = _SLOT_HEADER.pack(number, len(value), _digest(number, value)) + value
        if number == 1:
            write_atomically(self._path, entry)
            os.truncate(self._path, 2 * self._slot_bytes)  # of one length from now on: its journal has nothing to do
        else:
            with self._path.open("r+b") as file:
                file.seek((number - 1) % 2 * self._slot_bytes)
                file.write(entry)
                file.flush()
                _sync_data(file.fileno())
        self._writes = number

    def load(self) -> bytes | None:
        """What was saved last; None when nothing was. Raises LocalError where the file is damaged."""
        return self._newest()[1]

    def _newest(self) -> tuple[int, bytes | None]:
        """Number of the last write, and its value."""
        if not self._path.exists():
            return 0, None
        found: list[tuple[int, bytes]] = []
        with self._path.open("rb") as file:
            for slot in range(2):
                file.seek(slot * self._slot_bytes)
                header = file.read(_SLOT_HEADER.size)
                if len(header) == _SLOT_HEADER.size:
                    number, length, digest = _SLOT_HEADER.unpack(header)
                    value = file.read(min(length, self._max_bytes))
                    if digest == _digest(number, value):
                        found.append((number, value))
        if not found:  # one of them is whole at any moment
            raise LocalError(f"{self._path} is damaged; remove the swarm's folder and join again")
        return max(found)

    @property
    def _slot_bytes(self) -> int:
        return _SLOT_HEADER.size + self._max_bytes


def _digest(number: int, value: bytes) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big") + value).digest()[:16]


def _sync_data(descriptor: int) -> None:
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)
