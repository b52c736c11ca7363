"""Backup and restore of the identity between files, with no key ever overwritten."""

import os
from pathlib import Path

from farflung.node.identity import Identity
from farflung.protocol.errors import ConfigError, IdentityError


def backup_identity(path: Path, file: Path, passphrase: str | None) -> bytes:
    """Copy the identity in `path` to the new `file` (mode 0600); returns the public key.

    Raises IdentityError (no key here, or a damaged one), ConfigError (`file` exists or cannot be written).
    """
    try:
        identity = Identity.load(path)
    except FileNotFoundError as error:
        raise IdentityError(f"no key in {path} yet; `farflung id show` makes one") from error
    text = identity.backup(passphrase)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists; name a new file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as copy:
        copy.write(text)
    return identity.public_key


def is_sealed(file: Path) -> bool:
    """Whether a backup needs a passphrase. Raises ConfigError when it cannot be read."""
    return "BEGIN ENCRYPTED" in _read(file)


def restore_identity(path: Path, file: Path, passphrase: str | None, *, force: bool) -> tuple[bytes, Path | None]:
    """Make the identity in backup `file` the one in `path`.

    Returns the public key, and where another key that was in `path` lies now: it is put aside under `force`
    only. Raises IdentityError (bad backup, wrong passphrase), ConfigError (another key is here and not
    `force`).
    """
    identity = Identity.restore(_read(file), passphrase)
    aside: Path | None = None
    if path.exists():
        present = Identity.load(path).public_key
        if present == identity.public_key:
            return present, None
        if not force:
            raise ConfigError(
                f"this machine is {present.hex()[:12]} already; back that key up with `farflung id backup`, "
                "then repeat with --force"
            )
        aside = path.with_name(f"{path.name}.{present.hex()[:12]}")
        path.rename(aside)
    identity.save(path)
    return identity.public_key, aside


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the backup {file}: {error}") from error
