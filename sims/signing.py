"""Signatures of simulated peers: SHA-512 over a secret and the data, in the place of Ed25519.

Every simulated peer lives in this process, so whoever checks can ask for what the signer would have signed: the same answers as those of a public key,
a wrong or borrowed signature is refused like any other, at a fiftieth of the time (1.5 µs; signing with Ed25519 takes 70). Keys and the length of
signatures are those of Ed25519, so that sizes, orders and logs are the same. What a simulation cannot find thereby are errors in Ed25519 itself.
"""

import hashlib
from collections.abc import Iterable

from farflung.protocol.errors import BadSignature
from farflung.protocol.keys import Check, Ed25519Signer, PeerId, Signer, check_ed25519


class SimSigner:
    """A signer from a 32-byte seed, with the public key that `Ed25519Signer` has."""

    def __init__(self, seed: bytes) -> None:
        """Raises IdentityError when `seed` is not 32 bytes long."""
        self.peer_id: PeerId = Ed25519Signer(seed).peer_id
        self._secret = hashlib.sha512(seed)

    def sign(self, data: bytes) -> bytes:
        """64 bytes that nobody finds who lacks the seed."""
        signature = self._secret.copy()
        signature.update(data)
        return signature.digest()


def check_of(signers: Iterable[Signer]) -> Check:
    """What checks the signatures of these; those of all others are Ed25519."""
    simulated = {signer.peer_id: signer for signer in signers if isinstance(signer, SimSigner)}

    def check(peer_id: PeerId, signature: bytes, data: bytes) -> None:
        signer = simulated.get(peer_id)
        if signer is None:
            check_ed25519(peer_id, signature, data)
        elif signer.sign(data) != signature:
            raise BadSignature("the signature does not fit the key and the bytes", peer=peer_id)

    return check
