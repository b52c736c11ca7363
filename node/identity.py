"""Who this node is: one Ed25519 key, made at the first run and kept in one file.

The public key (32 bytes) is the peer's id everywhere in farflung. libp2p names the same key `12D3KooW...`: base58 of an
identity multihash of the protobuf-encoded public key (libp2p specs, peer-ids), so both names convert without a lookup.

Trade-off: the file is plain PKCS8, protected by its mode only, because a daemon must start unattended; a backup can be
sealed with a passphrase. Losing the file loses the node's standing, hence `backup` and `restore`.
"""

import os
import secrets
import shlex
import stat
from pathlib import Path

import platformdirs
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farflung.protocol.errors import IdentityError

PUBLIC_KEY_BYTES = 32

# libp2p's protobufs in bytes: field 1 (key type) = 1 (Ed25519), field 2 (data), length.
_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
# Multihash "identity" (code 0) of the 36 bytes of the encoded public key.
_MULTIHASH_PREFIX = bytes([0x00, 0x24])

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_MAX_LIBP2P_TEXT = 64
_BACKUP_MARK = "farflung identity "
_MAX_BACKUP_CHARS = 4096
_REMEDY = "remove the file and restore your backup (farflung id restore). Without one, remove it as well: a new key is made, which to every swarm is another peer"


def default_path() -> Path:
    """Where the key lives unless the user says otherwise."""
    return platformdirs.user_config_path("farflung") / "identity.pem"


class Identity:
    """A node's key pair."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> "Identity":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path | None = None) -> "Identity":
        """The identity in `path`, made now when there is none. Raises IdentityError."""
        path = default_path() if path is None else path
        try:
            return cls.load(path)
        except FileNotFoundError:
            pass
        identity = cls.generate()
        try:
            identity.save(path)
        except FileExistsError:
            return cls.load(path)  # another process made it in the meantime; its key counts
        return identity

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read the key file. Raises FileNotFoundError when missing, IdentityError when unsafe or damaged."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise IdentityError(f"{path} is not a regular file; give the path of an identity file")
                if os.name == "posix" and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise IdentityError(f"{path} can be read by others; run: chmod 600 {shlex.quote(str(path))}")
                text = file.read(_MAX_BACKUP_CHARS + 1)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot read {path}: {error.strerror}; check its owner and mode") from error
        return cls(_parse_pem(text, None, str(path), remedy=_REMEDY))

    def save(self, path: Path) -> None:
        """Write the key file with mode 0600, whole or not at all.

        Raises FileExistsError when there is one (keys are never overwritten), IdentityError when it cannot be written.
        """
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self._pem(None))
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)  # unlike rename, fails when the target exists
            finally:
                temporary.unlink()
        except FileExistsError:
            raise
        except OSError as error:
            raise IdentityError(f"cannot write {path}: {error.strerror}; choose another path") from error

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self._key.sign(data)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """The key itself, for the TLS certificate."""
        return self._key

    @property
    def libp2p_id(self) -> str:
        """`12D3KooW...`."""
        return libp2p_text(self.public_key)

    def libp2p_private_key(self) -> bytes:
        """The key in libp2p's protobuf, as go-libp2p's daemon reads it."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self.public_key

    def backup(self, passphrase: str | None = None) -> str:
        """One text that restores this identity; encrypted when a passphrase is given.

        The first line names the identity and serves as the checksum: a mistyped key restores a different id.
        """
        return f"{_BACKUP_MARK}{self.libp2p_id}\n{self._pem(passphrase).decode('ascii')}"

    @classmethod
    def restore(cls, text: str, passphrase: str | None = None) -> "Identity":
        """The identity in a backup. Raises IdentityError for damaged text or a wrong passphrase."""
        name, _, pem = text.strip().partition("\n")
        if not name.startswith(_BACKUP_MARK) or len(text) > _MAX_BACKUP_CHARS:
            raise IdentityError(f"this is no identity backup: its first line must begin with '{_BACKUP_MARK}'")
        remedy = "take another copy of it" if passphrase is None else "give the right one, or take another copy"
        identity = cls(_parse_pem(pem.encode(), passphrase, "the backup", remedy=remedy))
        if identity.libp2p_id != name.removeprefix(_BACKUP_MARK).strip():
            raise IdentityError("the backup is damaged: its key does not fit the id in its first line")
        return identity

    def _pem(self, passphrase: str | None) -> bytes:
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            if not passphrase:
                raise IdentityError("the passphrase is empty; give one, or none at all")
            encryption = serialization.BestAvailableEncryption(passphrase.encode())
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _parse_pem(data: bytes, passphrase: str | None, where: str, *, remedy: str) -> Ed25519PrivateKey:
    if len(data) > _MAX_BACKUP_CHARS:
        raise IdentityError(f"{where} is too long for an identity; {remedy}")
    try:
        key = serialization.load_pem_private_key(data, passphrase.encode() if passphrase else None)
    except TypeError as error:
        raise IdentityError(f"{where}: a passphrase is needed for a sealed backup, and only there") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        why = "is damaged" if passphrase is None else "is damaged, or the passphrase is wrong"
        raise IdentityError(f"{where} {why}; {remedy}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{where} holds a key of another kind; an Ed25519 key is needed")
    return key


def verify(public_key: bytes, signature: bytes, data: bytes) -> None:
    """Check a signature. Raises cryptography's InvalidSignature, or ValueError for bytes that are no key."""
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)


def libp2p_bytes(public_key: bytes) -> bytes:
    """libp2p's binary peer id (38 bytes) of an Ed25519 public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return _MULTIHASH_PREFIX + _PUBLIC_PREFIX + public_key


def from_libp2p_bytes(peer_id: bytes) -> bytes:
    """The public key inside a binary libp2p peer id. Raises ValueError when it is no Ed25519 id."""
    prefix = _MULTIHASH_PREFIX + _PUBLIC_PREFIX
    if not peer_id.startswith(prefix) or len(peer_id) != len(prefix) + PUBLIC_KEY_BYTES:
        raise ValueError("not the libp2p id of an Ed25519 key")
    return peer_id[len(prefix) :]


def libp2p_text(public_key: bytes) -> str:
    """`12D3KooW...` of an Ed25519 public key."""
    data = libp2p_bytes(public_key)
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    zeros = len(data) - len(data.lstrip(b"\0"))
    return _BASE58[0] * zeros + digits


def from_libp2p_text(text: str) -> bytes:
    """The public key of a `12D3KooW...` id. Raises ValueError."""
    if len(text) > _MAX_LIBP2P_TEXT:
        raise ValueError("too long for a libp2p id")
    number = 0
    for character in text:
        digit = _BASE58.find(character)
        if digit < 0:
            raise ValueError(f"{character!r} is no base58 digit")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip(_BASE58[0]))
    return from_libp2p_bytes(bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big"))
