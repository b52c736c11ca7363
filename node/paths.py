"""Where a node keeps its files, and how a command finds the swarm that a person names.

Folders are the platform's own (platformdirs): configuration holds the key, state holds one folder per swarm,
data and cache what is large and can be made again. One folder can replace them all: `--home`, or the
environment variable FARFLUNG_HOME, which is read here and nowhere else. The argument wins over the
environment.

```
config/identity.pem            the Ed25519 key, mode 0600
state/swarms/<manifest hash>/  name  manifest  port  peers.json  events.jsonl  events.older.jsonl  lock  checkpoint/
state/swarms/<manifest hash>.new/  a swarm that is being founded, or whose founding was cut short; nothing looks into it
state/run/<16 hex>.sock        control socket of a running node; in the temporary folder when this is too long
```

A Unix socket's path holds at most 104 bytes on macOS and 108 on Linux, and a manifest hash alone takes 64; so
sockets have a folder and a short name of their own. Both sides of a socket compute its path from the home, so
nothing needs to be announced.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from farflung.node.durable import UNFINISHED, sync_folder, write_atomically
from farflung.protocol.errors import ConfigError

APP = "farflung"
HOME_VARIABLE = "FARFLUNG_HOME"

MAX_SOCKET_PATH_BYTES = 100
"""Longest path given to a socket: 104 on macOS with its closing zero byte, and some room."""

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmPaths:
    """Files of one swarm on this machine. Nothing exists before `Paths.add_swarm` or `Paths.new_swarm`."""

    name: str
    """Name of the swarm for people, as this machine knows it."""
    hash_hex: str
    """Hash of the manifest in hex: the swarm's id."""
    folder: Path
    """Everything below, except the socket."""
    socket: Path
    """Control socket of the running node; its path fits MAX_SOCKET_PATH_BYTES."""

    @property
    def manifest(self) -> Path:
        """The signed manifest, as received."""
        return self.folder / "manifest"

    @property
    def checkpoint(self) -> Path:
        """Folder of outer and inner state, votes and ledger."""
        return self.folder / "checkpoint"

    def stage(self, stage: int, life: int) -> Path:
        """The same of a stage of a pipeline, by the number of its life."""
        if life:
            return self.folder / f"stage-{stage}-life-{life}"
        return self.folder / f"stage-{stage}" if stage else self.checkpoint

    @property
    def events(self) -> Path:
        """What the node did: one JSON object per line (docs/events.md)."""
        return self.folder / "events.jsonl"

    @property
    def peers(self) -> Path:
        """Cache of known peers and their addresses, so that joining works with the seeds dead."""
        return self.folder / "peers.json"

    @property
    def lock(self) -> Path:
        """Held by the one node of this swarm that runs here."""
        return self.folder / "lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Folders of farflung for this user."""

    config: Path
    """Small files a person may want to keep: the key."""
    data: Path
    """Large files that cost time to make again: tokenised shards."""
    state: Path
    """Swarms: manifests, checkpoints, events."""
    cache: Path
    """What can be thrown away."""

    @property
    def identity(self) -> Path:
        """The Ed25519 key file."""
        return self.config / "identity.pem"

    def swarm(self, hash_hex: str, name: str = "") -> SwarmPaths:
        """Paths of the swarm with this manifest hash (hex), which need not exist yet."""
        folder = self.state / "swarms" / hash_hex
        return SwarmPaths(
            name=name or _read_name(folder) or hash_hex[:12],
            hash_hex=hash_hex,
            folder=folder,
            socket=_socket_path(self.state, hash_hex),
        )

    def add_swarm(self, hash_hex: str, name: str) -> SwarmPaths:
        """Make the folder of a swarm and remember its name. Harmless when it is there already."""
        swarm = self.swarm(hash_hex, name)
        swarm.folder.mkdir(parents=True, exist_ok=True)
        _save_name(swarm)
        return swarm

    @contextmanager
    def new_swarm(self, hash_hex: str, name: str) -> Iterator[SwarmPaths]:
        """The folder of a swarm that this machine founds, under a passing name until the block ends: whatever cuts it short, no
        swarm is known that lacks something. Raises OSError.
        """
        swarm = self.swarm(hash_hex, name)
        unfinished = replace(swarm, folder=swarm.folder.with_name(hash_hex + UNFINISHED))
        unfinished.folder.mkdir(parents=True)
        with ExitStack() as undoing:
            undoing.callback(shutil.rmtree, unfinished.folder)
            _save_name(unfinished)
            yield unfinished
            sync_folder(unfinished.folder)
            unfinished.folder.rename(swarm.folder)
            undoing.pop_all()
        sync_folder(swarm.folder.parent)

    def swarms(self) -> list[SwarmPaths]:
        """Every swarm this machine knows, by name: whose folder is there, whatever has become of the files in it."""
        folder = self.state / "swarms"
        if not folder.is_dir():
            return []
        found = [self.swarm(child.name) for child in folder.iterdir() if _HASH.fullmatch(child.name)]
        return sorted(found, key=lambda swarm: (swarm.name, swarm.hash_hex))

    def find_swarm(self, wanted: str | None = None) -> SwarmPaths:
        """The swarm a person means by a name (full or bare) or by the beginning of a manifest hash.

        None means the only one there is. A full name's fingerprint is not looked at: of two swarms with one
        name, which only a person who knows both founders can have, the hash tells them apart.

        Raises ConfigError when none or several fit; the message lists what there is.
        """
        known = self.swarms()
        if not known:
            raise ConfigError(
                f"this machine knows no swarm yet, for there is none in {self.state}: found one with `farflung create NAME`, or join one with "
                "`farflung join INVITATION`"
            )
        fit = [s for s in known if wanted is None or s.name == wanted.partition("@")[0]]
        if not fit and wanted is not None and len(wanted) >= 6:
            fit = [s for s in known if s.hash_hex.startswith(wanted.lower())]
        if len(fit) == 1:
            return fit[0]
        listed = ", ".join(f"{s.name} ({s.hash_hex[:12]})" for s in (fit or known))
        if not fit:
            from farflung.protocol.checks import nearest  # cryptography comes with it, which `status` does without

            near = nearest(wanted or "", [s.name for s in known])
            raise ConfigError(f"this machine knows no swarm {wanted!r}{near or ';'} it knows {listed}")
        raise ConfigError(f"say which swarm: {listed}")


def resolve_paths(home: Path | None = None, environ: Mapping[str, str] = os.environ) -> Paths:
    """Folders under `home`, else under FARFLUNG_HOME, else the platform's own. Makes nothing on disk."""
    if home is None and environ.get(HOME_VARIABLE):
        home = Path(environ[HOME_VARIABLE])
    if home is not None:
        home = home.expanduser().absolute()
        return Paths(config=home / "config", data=home / "data", state=home / "state", cache=home / "cache")
    return Paths(
        config=platformdirs.user_config_path(APP, appauthor=False),
        data=platformdirs.user_data_path(APP, appauthor=False),
        state=platformdirs.user_state_path(APP, appauthor=False),
        cache=platformdirs.user_cache_path(APP, appauthor=False),
    )


def _read_name(folder: Path) -> str:
    file = folder / "name"
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def _save_name(swarm: SwarmPaths) -> None:
    write_atomically(swarm.folder / "name", f"{swarm.name}\n".encode())


def _socket_path(state: Path, hash_hex: str) -> Path:
    path = state / "run" / f"{hash_hex[:16]}.sock"
    if _fits(path):
        return path
    # The name depends on the whole path, so that two homes with the same swarm do not share a socket.
    short = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    beside = f"{APP}-{user}/{short}.sock"
    return socket_folder(beside) / beside


def socket_folder(name: str) -> Path:
    """The temporary folder, if a socket of this name in it has a path that fits; else /tmp, for that of a job may be as deep as a home."""
    own = Path(tempfile.gettempdir())
    return own if _fits(own / name) else Path("/tmp")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
