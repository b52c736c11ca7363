"""Encoded means on disk: one file for each plan, to which its means are appended as they come.

    header      part u32 | bytes u64 | CRC-32 of these two u32, big-endian
    payload     the encoded mean

Of a part there may be several entries: an early mean and one that takes its place, or what came again after a restart. One file for all of a plan, for a file of its own for every mean takes an inode, a name and a
sync each. A kill can break off the last entry only: it is cut off before the next is appended. Payloads have no
checksum of their own: whoever reads one knows its digest, and what a power failure has torn is passed over for what was written before it.
"""

import os
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import BinaryIO

from farflung.compression.codec import Payload
from farflung.compression.digest import digest_of
from farflung.node.durable import sync_folder, writing

PLAN_BYTES = 16
"""Of a plan's hash that are in file names: 128 bits."""

_NAME = re.compile(rf"[0-9a-f]{{{2 * PLAN_BYTES}}}")
_ABOUT = struct.Struct(">IQ")
_COPY_BYTES = 1 << 20
_HEADER_BYTES = _ABOUT.size + 4


class MeanFiles:
    """All methods block, and raise LocalError where the disk does not take what is written. One thread may append at a time."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder when there is none."""
        self._folder = folder
        self._ends: dict[str, int] = {}
        """Where the last whole entry of a file ends, of those to which this process has appended."""
        self._synced: dict[str, int] = {}
        """And where the last one ended when the file was last written to the disk itself."""
        self._unsure: set[str] = set()
        """Files of which the disk has refused something that the system had taken: a second sync says that all is well, and does not write that again."""
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, plan: bytes, part: int, payload: Payload) -> None:
        """What is killed after this loses nothing."""
        # No fsync: a killed process loses nothing that the system has taken, and once in a round is enough (`sync`).
        path = self._path(plan)
        if path.name not in self._ends:
            self._ends[path.name] = _end(path)
        end = self._ends[path.name]
        with writing(path), path.open("ab") as file:
            if file.tell() != end:  # a kill or a full disk has left some of another one
                file.truncate(end)
            file.write(_header(part, len(payload)))
            file.write(payload)
        self._ends[path.name] = end + _HEADER_BYTES + len(payload)

    def load(self, plan: bytes, part: int, digest: bytes) -> bytes | None:
        """The entry of that part with this digest; None when there is none, or not all of it."""
        try:
            file = self._path(plan).open("rb")
        except FileNotFoundError:  # perhaps dropped just now: a checkpoint is written by another thread
            return None
        with file:
            for of, start, num_bytes in reversed(_entries(file)):
                if of == part:
                    file.seek(start)
                    payload = file.read(num_bytes)
                    if digest_of(payload) == digest:
                        return payload
        return None

    def sync(self, plan: bytes) -> None:
        """What has been appended survives a power failure from now on. Nothing is done where that is so already."""
        path = self._path(plan)
        end = self._ends.get(path.name)
        if end is not None and end == self._synced.get(path.name):
            return
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            return
        with writing(path), file:
            if again := path.name in self._unsure:
                _write_again(file, _end(path) if end is None else end)
            try:
                os.fsync(file.fileno())
            except OSError:
                self._unsure.add(path.name)
                raise
            if again:
                self._unsure.discard(path.name)
            if sys.platform == "linux":  # read again only after a restart: it need not fill the system's cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        sync_folder(self._folder)
        if end is not None:
            self._synced[path.name] = end

    def drop(self, plan: bytes) -> None:
        """Forget all means of the plan; `plan` may be the first PLAN_BYTES of it."""
        path = self._path(plan)
        self._ends.pop(path.name, None)
        self._synced.pop(path.name, None)
        self._unsure.discard(path.name)
        path.unlink(missing_ok=True)

    def plans(self) -> set[bytes]:
        """The first PLAN_BYTES of each plan that has a file. Other files are not ours to touch."""
        return {bytes.fromhex(path.name) for path in self._folder.iterdir() if _NAME.fullmatch(path.name)}

    def take(self, plan: bytes, folder: Path) -> None:
        """Those of a plan that another folder has, if any."""
        path = folder / self._path(plan).name
        if path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            path.rename(self._path(plan))
            sync_folder(self._folder)

    def _path(self, plan: bytes) -> Path:
        return self._folder / plan[:PLAN_BYTES].hex()


def _header(part: int, num_bytes: int) -> bytes:
    about = _ABOUT.pack(part, num_bytes)
    return about + zlib.crc32(about).to_bytes(4, "big")


def _write_again(file: BinaryIO, end: int) -> None:
    """The whole entries, in their place: another thread may append meanwhile."""
    for start in range(0, end, _COPY_BYTES):
        file.seek(start)
        data = file.read(min(_COPY_BYTES, end - start))
        file.seek(start)
        file.write(data)
    file.flush()


def _end(path: Path) -> int:
    """Of the last whole entry; 0 where there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        return max((start + num_bytes for _, start, num_bytes in _entries(file)), default=0)


def _entries(file: BinaryIO) -> list[tuple[int, int, int]]:
    """Part, begin and bytes of each payload, up to the first entry that is not whole."""
    found: list[tuple[int, int, int]] = []
    position, size = 0, os.fstat(file.fileno()).st_size
    file.seek(0)
    while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
        part, num_bytes = _ABOUT.unpack(header[: _ABOUT.size])
        start, position = position + _HEADER_BYTES, position + _HEADER_BYTES + num_bytes
        if header != _header(part, num_bytes) or position > size:
            break
        found.append((part, start, num_bytes))
        file.seek(position)
    return found
