"""This machine's identity in the shape that `protocol/` asks for."""

from farflung.node.identity import Identity
from farflung.protocol.keys import PeerId


class IdentitySigner:
    """Implements `protocol.keys.Signer`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @property
    def peer_id(self) -> PeerId:
        return self._identity.public_key

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)
