"""Identities: Ed25519 keys, signatures bound to what they sign, and how keys are shown to people.

A peer *is* its 32-byte public key. Every signature covers a domain prefix, so that the bytes of one kind of
statement can never pass as another kind (a vote as a manifest, say).
"""

import base64
import hashlib
from collections.abc import Iterable
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from farflung.protocol.errors import BadSignature, IdentityError

PeerId = bytes
"""A peer's Ed25519 public key, 32 bytes."""

PUBLIC_KEY_BYTES = 32
SEED_BYTES = 32
SIGNATURE_BYTES = 64

FINGERPRINT_CHARS = 12
"""Base32 characters of a shown fingerprint: 60 bits, so finding another key with the same one takes 2^60 key
pairs.
"""


REMEMBERED_SIGNATURES = 8192
"""Good signatures that are not checked again: a vote comes alone, then in its certificate, and in every history that carries it; our own we made
ourselves; and where many nodes share a process, as in simulations, each of them hears the same heartbeat. Bad ones are checked each time."""


class Signer(Protocol):
    """Who holds a private key. `node/` keeps it in a file; tests and simulations derive it from a seed."""

    @property
    def peer_id(self) -> PeerId:
        """The public key."""

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature over `data`. Callers prefix `domain(...)`."""


class Ed25519Signer:
    """A signer from a 32-byte seed. Ed25519 is deterministic: same seed and data, same signature."""

    def __init__(self, seed: bytes) -> None:
        """Raises IdentityError when `seed` is not 32 bytes long."""
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"an identity seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._peer_id = self._key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> PeerId:
        """The public key, 32 bytes."""
        return self._peer_id

    def sign(self, data: bytes) -> bytes:
        """The 64-byte signature over `data`."""
        signature = self._key.sign(data)
        _remember(_mark(self._peer_id, signature, data))
        return signature

    def __repr__(self) -> str:
        return f"Ed25519Signer({short(self._peer_id)})"


def domain(what: str) -> bytes:
    """The prefix that separates signatures and hashes of one kind of statement from all others."""
    return f"farflung/{what}/1\0".encode("ascii")


def verify(peer_id: PeerId, signature: bytes, data: bytes) -> None:
    """Check that `peer_id` signed `data` (with its domain prefix). Raises BadSignature naming the peer."""
    try:
        mark = _mark(peer_id, signature, data)
        if mark not in _good:
            Ed25519PublicKey.from_public_bytes(peer_id).verify(signature, data)
        _remember(mark)
    except InvalidSignature:
        raise BadSignature("the signature does not fit the key and the bytes", peer=peer_id) from None
    except ValueError as err:  # a key that is not 32 bytes long or no point of the curve
        raise BadSignature(f"no Ed25519 public key: {err}", peer=peer_id) from None


Mark = tuple[PeerId, bytes, bytes]
"""Of a signature: whose it is, its bytes, and a hash of what it is over, which may be long."""

_good: dict[Mark, None] = {}
"""Signatures made or checked here, those that were asked for last at the end."""


def _mark(peer_id: PeerId, signature: bytes, data: bytes) -> Mark:
    return peer_id, signature, hashlib.sha256(data).digest()


def _remember(mark: Mark) -> None:
    _good.pop(mark, None)
    if len(_good) >= REMEMBERED_SIGNATURES:
        del _good[next(iter(_good))]
    _good[mark] = None


def digest(what: str, data: bytes) -> bytes:
    """SHA-256 of `data` within a domain, 32 bytes."""
    return hashlib.sha256(domain(what) + data).digest()


def short(peer_id: PeerId) -> str:
    """A peer for people and logs: the first 12 hex digits, as errors show it."""
    return peer_id.hex()[:12]


MOST_NAMES = 4
"""Of peers in a sentence."""


def names_of(peers: Iterable[PeerId]) -> str:
    """Several for people and logs: the first few, and how many more."""
    named = [short(peer) for peer in peers]
    return ", ".join(named[:MOST_NAMES]) + (f" and {len(named) - MOST_NAMES} more" if len(named) > MOST_NAMES else "")


def fingerprint(key: PeerId) -> str:
    """The whole fingerprint of a founder's key: base32 in lower case, 52 characters. People see the first
    few.
    """
    return base64.b32encode(digest("fingerprint", key)).decode("ascii").rstrip("=").lower()
