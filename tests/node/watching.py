"""Which files processes open: by a hook in each Python process, and by the kernel, which sees what other languages' code opens as well.

The hook knows who and how, but not of `safetensors`, which opens a state in Rust. inotify knows of every open in the folders that it watches, but not whose it was,
nor for what. So tests ask both.
"""

import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HOOK = """
import os, sys, time

_log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def _opened(event, arguments):
    if event == "open" and not isinstance(arguments[0], int):
        how = "r" if arguments[2] & os.O_ACCMODE == os.O_RDONLY else "w"
        path = os.path.abspath(os.fsdecode(arguments[0]))
        os.write(_log, f"{{time.time()}} {{how}} {{path}}\\n".encode())

sys.addaudithook(_opened)
"""
"""Python runs it before anything else, when it is called `sitecustomize`."""

IN_OPEN, IN_CREATE, IN_MOVED_TO, IN_Q_OVERFLOW, IN_ISDIR = 0x20, 0x100, 0x80, 0x4000, 0x40000000

_EVENT = struct.Struct("iIII")

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that a process has opened."""

    at: float
    """Unix seconds."""
    writes: bool
    path: Path


def read_hook(log: Path) -> list[Opened]:
    """What the hook of a process, and of those that it started, has seen."""
    lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
    return [Opened(float(at), how == "w", Path(path)) for at, how, path in lines]


@dataclass(slots=True)
class Folder:
    """What anybody opens in a folder and those below. A file in a folder that was made in the same moment may be missed."""

    opened: list[tuple[float, Path]] = field(default_factory=list)
    """Unix seconds, and the file."""
    overflown: bool = False
    """The kernel could not tell all of it, which fails the test in the end."""
    _paths: dict[int, Path] = field(default_factory=dict)


@contextmanager
def watched(folder: Path) -> Iterator[Folder]:
    """Watch a folder on Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor, (ends, end) = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), os.pipe()
    found = Folder()

    def watch(path: Path) -> None:
        mask = IN_OPEN | IN_CREATE | IN_MOVED_TO
        number = libc.inotify_add_watch(descriptor, os.fsencode(path), mask)
        if number < 0:
            return  # it is gone again
        found._paths[number] = path
        with suppress(FileNotFoundError):
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    watch(Path(entry.path))

    def look() -> None:
        while descriptor in select.select([descriptor, ends], [], [])[0]:
            data = os.read(descriptor, _BUFFER_BYTES)
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                _take(number, mask, os.fsdecode(name))

    def _take(number: int, mask: int, name: str) -> None:
        if mask & IN_Q_OVERFLOW:
            found.overflown = True
        elif number in found._paths and name:
            path = found._paths[number] / name
            if mask & IN_ISDIR and mask & (IN_CREATE | IN_MOVED_TO):
                watch(path)
            elif mask & IN_OPEN and not mask & IN_ISDIR:
                found.opened.append((time.time(), path))

    watch(folder)
    thread = threading.Thread(target=look, name="inotify")
    thread.start()
    try:
        yield found
    finally:
        os.write(end, b"e")
        thread.join()
        assert not found.overflown, "inotify could not tell all"
        for one in (descriptor, ends, end):
            os.close(one)
