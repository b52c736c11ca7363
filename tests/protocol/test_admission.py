"""Admission tokens admit one peer to one swarm."""

import pytest

from farflung.protocol.admission import admission_token, invite_key, verify_admission
from farflung.protocol.errors import BadSignature, IdentityError, Refused, RemoteError
from farflung.protocol.manifest import Manifest, manifest_hash
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, ModelSpec

SECRET, PEER = b"s" * 32, b"p" * 32


def manifest(name: str, admission: AdmissionSpec) -> Manifest:
    model = ModelSpec(vocab_size=256, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8, seq_len=8)
    data = DataSpec(spec="stdlib", content_hash=bytes(32), num_samples=1)
    return Manifest(
        name=name,
        founder=b"f" * 32,
        created=0,
        model=model,
        data=data,
        batch_tokens=8,
        total_steps=200,
        admission=admission,
    )


CLOSED = manifest("closed", AdmissionSpec(invite_key=invite_key(SECRET)))
SWARM = manifest_hash(CLOSED)


def test_invited() -> None:
    verify_admission(CLOSED, PEER, admission_token(SECRET, SWARM, PEER))


def test_open_swarm_asks_for_nothing() -> None:
    verify_admission(manifest("open", AdmissionSpec(rule="open")), PEER, b"")


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (b"", Refused),
        (b"x", BadSignature),
        (admission_token(b"x" * 32, SWARM, PEER), BadSignature),
        (admission_token(SECRET, bytes(32), PEER), BadSignature),
        (admission_token(SECRET, SWARM, b"q" * 32), BadSignature),
    ],
)
def test_refused(token: bytes, expected: type[RemoteError]) -> None:
    with pytest.raises(expected, match="closed") as caught:
        verify_admission(CLOSED, PEER, token)
    assert caught.value.peer == PEER


def test_secret_length() -> None:
    with pytest.raises(IdentityError):
        invite_key(b"short")
