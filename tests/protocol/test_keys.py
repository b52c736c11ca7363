"""Keys, signatures, domains, versions."""

import pytest

from farflung.protocol import keys
from farflung.protocol.errors import BadSignature, IdentityError, WrongVersion
from farflung.protocol.keys import Ed25519Signer, domain, fingerprint, short, verify
from farflung.protocol.versions import PROTOCOL_VERSION, check_version, negotiate

ALICE, BOB = Ed25519Signer(b"a" * 32), Ed25519Signer(b"b" * 32)


def test_rfc_8032_vector() -> None:
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    signer = Ed25519Signer(seed)
    assert signer.peer_id.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert signer.sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )


def test_verify() -> None:
    verify(ALICE.peer_id, ALICE.sign(b"data"), b"data")


def test_what_was_signed_here_is_not_checked_however_long_and_nothing_else_passes_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signer = Ed25519Signer(bytes(32))
    data = domain("tests") + bytes(5000)
    signature = signer.sign(data)
    good, whose = bytes(64), signer.peer_id
    checked = []
    real = keys.Ed25519PublicKey

    class Watched:
        @staticmethod
        def from_public_bytes(peer_id: bytes) -> object:
            checked.append(peer_id)
            return real.from_public_bytes(peer_id)

    monkeypatch.setattr(keys, "Ed25519PublicKey", Watched)
    verify(whose, signature, data)
    assert checked == []
    # The same bytes, cut elsewhere: no key, and no signature of anybody.
    wrong = ((whose + signature[:1], signature[1:], data), (whose, signature + data[:1], data[1:]), (whose, good, data))
    for peer_id, other, said in wrong:
        with pytest.raises(BadSignature):
            verify(peer_id, other, said)
    assert checked == [one[0] for one in wrong]


@pytest.mark.parametrize(
    ("key", "signature", "data"),
    [
        (ALICE.peer_id, ALICE.sign(b"data"), b"date"),
        (BOB.peer_id, ALICE.sign(b"data"), b"data"),
        (ALICE.peer_id, b"", b"data"),
        (ALICE.peer_id, bytes(63), b"data"),
        (ALICE.peer_id[:31], ALICE.sign(b"data"), b"data"),
        (b"", ALICE.sign(b"data"), b"data"),
        (b"\xff" * 32, bytes(64), b"data"),
    ],
)
def test_bad_signatures_name_the_peer(key: bytes, signature: bytes, data: bytes) -> None:
    with pytest.raises(BadSignature) as caught:
        verify(key, signature, data)
    assert caught.value.peer == key


@pytest.mark.parametrize("length", [0, 31, 33])
def test_seed_length(length: int) -> None:
    with pytest.raises(IdentityError):
        Ed25519Signer(bytes(length))


def test_names_for_people() -> None:
    assert domain("vote") == b"farflung/vote/1\0"
    assert short(ALICE.peer_id) == ALICE.peer_id.hex()[:12]
    assert len(fingerprint(ALICE.peer_id)) == 52
    assert fingerprint(ALICE.peer_id) != fingerprint(BOB.peer_id)
    assert "61" * 32 not in repr(ALICE)


def test_versions() -> None:
    assert negotiate([3, 1, 2], ours=[1, 2], peer=None) == 2
    with pytest.raises(WrongVersion, match=rf"\[1007, 1009\], we speak \[{PROTOCOL_VERSION}\]") as caught:
        negotiate([1009, 1007], peer=ALICE.peer_id)
    assert caught.value.peer == ALICE.peer_id
    check_version(PROTOCOL_VERSION, what="message", peer=None)
    for other in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        with pytest.raises(WrongVersion):
            check_version(other, what="message", peer=None)
