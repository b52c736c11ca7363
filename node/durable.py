"""Writes that are on the disk when they return, and that a crash in the middle of does not show.

A file that is replaced takes two syncs, its own and its folder's, and each waits for the file system's journal. A vote is waited for by
everybody, so it has a file of two `Slots`, which are written in turn and in place: one sync of data, three to five times as quick.

What a crash does not do, as a flipped bit, is never taken for a write that was broken off: it is a LocalError, with the remedy that belongs to the file.
So is what the disk refuses to take; of a full one a DiskFull.
"""

import contextlib
import errno
import hashlib
import os
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from farflung.protocol.errors import DiskFull, LocalError

UNFINISHED = ".new"
"""End of the name of a file until it is whole."""

_SLOT_HEADER = struct.Struct(">QI16s")
"""Of a slot: number of its write, length, and the beginning of the sha256 of both and the value."""

_ENTRY_HEADER = struct.Struct(">III")
"""Of an entry of a journal: its length, its CRC-32, and that of these two, or a wrong length would look like an entry that was broken off."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file, or files in a folder: raises LocalError, of a full disk DiskFull, with the path, which the system does not tell for a full disk."""
    try:
        yield
    except OSError as error:
        raise not_taken(path, error) from error


def not_taken(path: Path | str, error: OSError) -> LocalError:
    """What to say when the disk refuses what is written to `path`."""
    said = f"{path} cannot be written ({error.strerror or error})"
    reason = f"{said}: make room on its disk, or let this user write there; then start again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = Path(path)
        return DiskFull(
            reason, remedy=f"{where.name} cannot be written ({error.strerror or error}): free space in {where.parent}"
        )
    return LocalError(reason)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old one or the new one. Raises LocalError where the disk does not take it."""
    temporary = path.with_name(path.name + UNFINISHED)
    with writing(path):
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

    def __init__(self, path: Path, max_bytes: int, remedy: str) -> None:
        """`max_bytes`: of the value. The file is twice as long, and takes what the two values take."""
        self._path = path
        self._max_bytes = max_bytes
        self._remedy = remedy
        self._writes: int | None = None
        """None before we have looked."""

    def save(self, value: bytes) -> None:
        """Raises ValueError for one that is too long, LocalError where the file is damaged or the disk does not take it."""
        if len(value) > self._max_bytes:
            raise ValueError(f"a value of {len(value)} bytes for a slot of {self._max_bytes}")
        if self._writes is None:
            self._writes = self._newest()[0]
        number = self._writes + 1
        entry = _SLOT_HEADER.pack(number, len(value), _digest(number, value)) + value
        if number == 1:
            write_atomically(self._path, entry)
            with writing(self._path):  # of one length from now on: its journal has nothing to do
                os.truncate(self._path, 2 * self._slot_bytes)
        else:
            with writing(self._path), self._path.open("r+b") as file:
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
            raise LocalError(f"{self._path} is damaged; {self._remedy}")
        return max(found)

    @property
    def _slot_bytes(self) -> int:
        return _SLOT_HEADER.size + self._max_bytes


class Journal:
    """Entries, appended one by one. A crash can break off the last one only, and that is dropped."""

    def __init__(self, path: Path, remedy: str) -> None:
        self._path = path
        self._remedy = remedy
        self._whole: tuple[int, int] | None = None
        """How many entries there are, and where the last one ends; None before we have looked."""

    def append(self, entry: bytes) -> None:
        """Raises LocalError where the file is damaged or the disk does not take it."""
        data, (count, end) = _framed(entry), self._look()
        with writing(self._path), self._path.open("ab") as file:
            file.truncate(end)  # what a kill or a full disk has left of another one
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._whole = count + 1, end + len(data)

    def replace(self, entries: Sequence[bytes]) -> None:
        """Keep these and no others. A crash leaves the old file or the new one."""
        data = b"".join(map(_framed, entries))
        write_atomically(self._path, data)
        self._whole = len(entries), len(data)

    def load(self) -> list[bytes]:
        """All entries. Raises LocalError where the file is damaged."""
        return self._read()[0]

    def count(self) -> int:
        """How many entries there are. Raises LocalError where the file is damaged."""
        return self._look()[0]

    def _look(self) -> tuple[int, int]:
        if self._whole is None:
            entries, end = self._read()
            self._whole = len(entries), end
        return self._whole

    def _read(self) -> tuple[list[bytes], int]:
        """The whole entries, and where the last one ends."""
        data = self._path.read_bytes() if self._path.exists() else b""
        written = len(data.rstrip(b"\0"))  # a power failure can leave zeros where data was to come
        entries: list[bytes] = []
        position = 0
        while position < len(data):
            entry, end = _entry_at(data, position)
            if entry is None:
                if end <= written:
                    raise LocalError(f"{self._path} is damaged at byte {position} of {len(data)}; {self._remedy}")
                break
            entries.append(entry)
            position = end
        return entries, position


def _framed(entry: bytes) -> bytes:
    """As it lies in a journal."""
    about = struct.pack(">II", len(entry), zlib.crc32(entry))
    return about + zlib.crc32(about).to_bytes(4, "big") + entry


def _entry_at(data: bytes, position: int) -> tuple[bytes | None, int]:
    """The entry that begins there, None when it is not whole; and where it ends, as far as that can be known."""
    begin = position + _ENTRY_HEADER.size
    if begin > len(data):
        return None, begin
    length, of_entry, of_header = _ENTRY_HEADER.unpack_from(data, position)
    if of_header != zlib.crc32(data[position : begin - 4]):
        return None, begin
    entry = data[begin : begin + length]
    return (entry if len(entry) == length and zlib.crc32(entry) == of_entry else None), begin + length


def _digest(number: int, value: bytes) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big") + value).digest()[:16]


def _sync_data(descriptor: int) -> None:
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)
