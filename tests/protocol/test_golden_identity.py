"""The bytes of envelopes, manifests, records and invitations, as committed in `golden_identity.json`.

Changed bytes mean a new protocol version. To write the file anew, on purpose: run this file as a program.
"""

import json
from pathlib import Path

import pytest

from farflung.protocol import records
from farflung.protocol.admission import admission_token, invite_key
from farflung.protocol.envelope import seal
from farflung.protocol.invitation import Invitation, encode_invitation
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.manifest import Manifest, encode_manifest, manifest_hash, sign_manifest
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, ModelSpec
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.replay import first_seq

GOLDEN = Path(__file__).parent / "golden_identity.json"
NOW = 1_800_000_000.0


def samples() -> dict[str, str]:
    """One sample of everything that travels or is stored, in hex (the invitation as its text)."""
    founder, peer, secret = Ed25519Signer(b"f" * 32), Ed25519Signer(b"p" * 32), b"i" * 32
    manifest = Manifest(
        name="golden",
        founder=founder.peer_id,
        created=int(NOW),
        model=ModelSpec(vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, seq_len=128),
        data=DataSpec(spec="stdlib", content_hash=b"d" * 32, num_samples=1000),
        batch_tokens=1024,
        total_steps=2000,
        admission=AdmissionSpec(invite_key=invite_key(secret)),
    )
    swarm, seq = manifest_hash(manifest), first_seq(NOW)
    address = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    said = PeerRecord(
        addresses=(address,),
        device="CPU",
        tokens_per_s=1500.0,
        up_bytes_per_s=1e6,
        down_bytes_per_s=5e6,
        stages=(0, 2),
        height=4,
        version=3,
        state_digest=b"s" * 32,
        agent="farflung 0.1.0",
        state="training",
        admission_token=admission_token(secret, swarm, peer.peer_id),
    )
    invitation = Invitation(
        name="golden", swarm=swarm, founder=founder.peer_id, invite_seed=secret, addresses=(address,)
    )
    return {
        "envelope": seal(peer, swarm, 3, seq, NOW + 30, b"body").hex(),
        "manifest": encode_manifest(manifest).hex(),
        "swarm": swarm.hex(),
        "signed manifest": sign_manifest(founder, manifest).encode().hex(),
        "admission token": said.admission_token.hex(),
        "claim": records.place_claim(founder, "golden", swarm, seq=seq, now=NOW, life_s=86400).value.hex(),
        "peer record": records.place_peer(peer, swarm, said, seq=seq, now=NOW, life_s=600).value.hex(),
        "invitation": encode_invitation(invitation),
    }


@pytest.mark.parametrize("name", samples())
def test_bytes_are_as_committed(name: str) -> None:
    assert samples()[name] == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(samples(), indent=1) + "\n")
