"""How much memory of the host this process can still take: what is available there, and what its container lets it have.

On Linux a process belongs to control groups, of version 2 or 1, one in another, and is killed when it takes more than the
tightest of their limits, whatever the host has left. What a group uses contains its cache of files. That part of it which has not
been read for a while is given back when memory gets short, so it counts as free, as container runtimes have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Where one version of control groups keeps its figures."""

    limit: str
    used: str
    idle_cache: str
    """The line of `memory.stat`."""


_V2 = _Version(limit="memory.max", used="memory.current", idle_cache="inactive_file")
# The line without `total_` leaves out the groups within.
_V1 = _Version(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", idle_cache="total_inactive_file")


def available_bytes() -> int:
    """Bytes that this process can still take."""
    on_host = int(psutil.virtual_memory().available)
    room = room_in_groups()
    return on_host if room is None else min(on_host, room)


def room_in_groups(process: Path = Path("/proc/self")) -> int | None:
    """Bytes to the nearest limit of the control groups of a process; None where there is no limit, or no such groups."""
    rooms = (_room(folder, version) for folder, version in _groups(process))
    return min((room for room in rooms if room is not None), default=None)


def _groups(process: Path) -> Iterator[tuple[Path, _Version]]:
    """The folders of a process's groups, each before the one that it is in."""
    paths: dict[_Version, PurePosixPath] = {}
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[_V1] = PurePosixPath(path)
    for line in _read(process / "mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        root, point = mount.split()[3:5]
        # Of version 1 each controller has a mount of its own, and only one of them has files of memory.
        version = {"cgroup2": _V2, "cgroup": _V1}.get(system.split()[0])
        if version in paths:
            inside = _below(paths[version], root)
            for folder in (inside, *inside.parents):
                yield Path(point) / folder, version


def _below(path: PurePosixPath, root: str) -> PurePosixPath:
    """The way from the root of what is mounted to a group; the root itself for a group that lies elsewhere, and is not seen."""
    if path.is_relative_to(root) and ".." not in path.parts:
        return path.relative_to(root)
    return PurePosixPath()


def _room(folder: Path, version: _Version) -> int | None:
    limit, used = _read(folder / version.limit).strip(), _read(folder / version.used).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # `max`, or the group of all groups, which has no such files
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return max(0, int(limit) - int(used) + int(stat.get(version.idle_cache, 0)))


def _read(file: Path) -> str:
    """What stands in a file of the system; nothing where it is not there or not for us: then no limit is known."""
    try:
        return file.read_text()
    except OSError:
        return ""
