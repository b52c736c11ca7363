"""Simulated signatures say yes and no where Ed25519 does."""

import pytest

from farflung.protocol import keys
from farflung.protocol.errors import BadSignature
from farflung.protocol.keys import Ed25519Signer, Signer
from farflung.sims.signing import SimSigner, check_of

SEEDS = [bytes([number]) * 32 for number in range(2)]


@pytest.mark.parametrize("kind", [Ed25519Signer, SimSigner])
def test_only_the_signer_s_own_signature_of_these_bytes_is_good(kind: type[Ed25519Signer] | type[SimSigner]) -> None:
    alice, bob = (kind(seed) for seed in SEEDS)
    assert alice.peer_id == Ed25519Signer(SEEDS[0]).peer_id
    with keys.checked_by(check_of([alice, bob])):
        signature = alice.sign(b"data")
        assert len(signature) == keys.SIGNATURE_BYTES
        for _ in range(2):  # the second time it is remembered
            keys.verify(alice.peer_id, signature, b"data")
        for peer, bad, data in (
            (bob.peer_id, signature, b"data"),
            (alice.peer_id, signature, b"Data"),
            (alice.peer_id, signature[:-1] + bytes([signature[-1] ^ 1]), b"data"),
            (alice.peer_id, b"", b"data"),
        ):
            with pytest.raises(BadSignature):
                keys.verify(peer, bad, data)


def test_outside_a_simulation_its_signatures_are_worth_nothing() -> None:
    signer: Signer = SimSigner(SEEDS[0])
    signature = signer.sign(b"data")
    with keys.checked_by(check_of([signer])):
        keys.verify(signer.peer_id, signature, b"data")
    with pytest.raises(BadSignature):
        keys.verify(signer.peer_id, signature, b"data")


def test_strangers_are_checked_by_ed25519() -> None:
    real = Ed25519Signer(SEEDS[1])
    with keys.checked_by(check_of([SimSigner(SEEDS[0])])):
        keys.verify(real.peer_id, real.sign(b"data"), b"data")
        with pytest.raises(BadSignature):
            keys.verify(real.peer_id, bytes(64), b"data")
