"""Who may join: tokens made with an invitation's secret.

The manifest holds the public half of one invitation key; the secret half travels in invitations. A token is
that key's signature over swarm and peer, so it can be published in peer records: it admits nobody else, and
nowhere else. Whoever holds the secret can invite further; a secret cannot be withdrawn, nor a member that
lives be removed.
"""

from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.keys import Ed25519Signer, PeerId, domain, verify
from farflung.protocol.manifest import Manifest, manifest_hash


def invite_key(invite_seed: bytes) -> bytes:
    """The public key of an invitation's secret, 32 bytes, for `AdmissionSpec.invite_key`. Raises
    IdentityError.
    """
    return Ed25519Signer(invite_seed).peer_id


def admission_token(invite_seed: bytes, swarm: bytes, peer_id: PeerId) -> bytes:
    """The 64-byte token that admits `peer_id` to `swarm`. Raises IdentityError for a seed that is not 32
    bytes long.
    """
    return Ed25519Signer(invite_seed).sign(_statement(swarm, peer_id))


def verify_admission(manifest: Manifest, peer_id: PeerId, token: bytes) -> None:
    """Check that `peer_id` may join: any peer under `open`, else one whose token the invitation's key signed.

    Raises Refused (no token), BadSignature (made with another secret, or for another peer or swarm); both
    name the peer.
    """
    if manifest.admission.rule == "open":
        return
    if not token:
        raise Refused(f"no admission token: {manifest.name!r} is by invitation only", peer=peer_id)
    try:
        verify(manifest.admission.invite_key, token, _statement(manifest_hash(manifest), peer_id))
    except BadSignature:
        raise BadSignature(
            f"the admission token is not from an invitation to {manifest.name!r} for this peer", peer=peer_id
        ) from None


def _statement(swarm: bytes, peer_id: PeerId) -> bytes:
    return domain("admission") + swarm + peer_id
