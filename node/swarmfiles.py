"""Files of one swarm's folder that are written once: manifest, invitation secret, port, tokenizer, where its data lies here.

manifest         the signed manifest, as received
invite           the invitation's secret in hex, mode 0600; whoever has it can invite further
port             where this machine's node listens unless told otherwise: as the last time, and a founder's as the invitation says that was made at the founding
local            empty, of a swarm that was founded with `--local`: its node listens to this machine only
tokenizer.json   the swarm's tokenizer file, when it has one
data             spec of the data on this machine, when it lies elsewhere than the manifest says
claim            the founder's claim to the name, as it stands in the DHT
"""

import os
from pathlib import Path

from farflung.node.durable import UNFINISHED, sync_folder, write_atomically
from farflung.node.paths import SwarmPaths
from farflung.protocol.errors import ConfigError, RemoteError, WrongVersion
from farflung.protocol.keys import SEED_BYTES
from farflung.protocol.manifest import Manifest, open_manifest


def save_manifest(swarm: SwarmPaths, signed: bytes) -> None:
    """Keep the signed manifest, checked by the caller."""
    write_atomically(swarm.manifest, signed)


def load_manifest(swarm: SwarmPaths) -> Manifest | None:
    """The manifest on disk; None when there is none yet. Raises ConfigError when it is damaged, or of another version."""
    if not swarm.manifest.exists():
        return None
    try:
        return open_manifest(swarm.manifest.read_bytes(), swarm=bytes.fromhex(swarm.hash_hex), peer=None)
    except WrongVersion as error:
        raise ConfigError(
            f"{swarm.manifest} cannot be used: {error.reason}. Install the farflung that the swarm runs: its founder knows which"
        ) from error
    except RemoteError as error:
        raise ConfigError(
            f"{swarm.manifest} cannot be used ({error.reason}); remove it, and it is fetched from the swarm again"
        ) from error


def save_secret(swarm: SwarmPaths, seed: bytes) -> None:
    """Keep an invitation's secret where only this user can read it."""
    path = _secret(swarm)
    temporary = path.with_name(path.name + UNFINISHED)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(seed.hex() + "\n")
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)
    sync_folder(path.parent)


def load_secret(swarm: SwarmPaths) -> bytes:
    """The invitation's secret; empty when this machine has none. Raises ConfigError when it is damaged."""
    path = _secret(swarm)
    if not path.exists():
        return b""
    try:
        seed = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged; remove it and join with an invitation again") from error
    if len(seed) != SEED_BYTES:
        raise ConfigError(f"{path} is damaged; remove it and join with an invitation again")
    return seed


def save_port(swarm: SwarmPaths, port: int) -> None:
    """Keep the port that an invitation names."""
    write_atomically(_port(swarm), f"{port}\n".encode())


def load_port(swarm: SwarmPaths) -> int:
    """The port to listen on when nothing else is said; 0, any, when none is kept. Raises ConfigError when the file is damaged."""
    path = _port(swarm)
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isdecimal() and text.isascii() and 0 < int(text) < 65536):
        raise ConfigError(f"{path} is damaged; write a port into it, or remove it: then this node listens on any port")
    return int(text)


def save_local(swarm: SwarmPaths) -> None:
    """Keep that the swarm is one of nodes on this machine only."""
    write_atomically(_local(swarm), b"")


def is_local(swarm: SwarmPaths) -> bool:
    """Whether it was founded with `--local`: then its node listens to this machine only, whether it is told so again or not."""
    return _local(swarm).exists()


def tokenizer_file(swarm: SwarmPaths) -> Path:
    """Where the swarm's tokenizer file lies; it need not exist."""
    return swarm.folder / "tokenizer.json"


def save_tokenizer(swarm: SwarmPaths, file: Path) -> None:
    """Keep a copy of a tokenizer file. Raises ConfigError when it cannot be read."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {file}: {error.strerror}") from error
    write_atomically(tokenizer_file(swarm), data)


def data_file(swarm: SwarmPaths) -> Path:
    """A file that holds where the data lies here; it need not exist."""
    return swarm.folder / "data"


def data_here(swarm: SwarmPaths) -> str | None:
    """Where the data lies here, as `join --data` said; None when it is where the manifest says."""
    file = data_file(swarm)
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def claim_file(swarm: SwarmPaths) -> Path:
    """The founder's claim as last seen; it need not exist."""
    return swarm.folder / "claim"


def _local(swarm: SwarmPaths) -> Path:
    return swarm.folder / "local"


def _port(swarm: SwarmPaths) -> Path:
    return swarm.folder / "port"


def _secret(swarm: SwarmPaths) -> Path:
    return swarm.folder / "invite"
