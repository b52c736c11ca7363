"""Sealed messages: what opens, what is refused and why, and that a refusal changes nothing."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.envelope import Envelope, Opened, Opener, seal
from farflung.protocol.errors import (
    BadSignature,
    LimitExceeded,
    LocalError,
    Malformed,
    Refused,
    RemoteError,
    Replayed,
    Stale,
    WrongSwarm,
    WrongVersion,
)
from farflung.protocol.keys import Ed25519Signer, domain, short
from farflung.protocol.limits import MAX_CLOCK_SKEW_S, MAX_CONTROL_BYTES, MAX_MESSAGE_LIFE_S
from farflung.protocol.replay import ReplayGuard
from farflung.protocol.versions import PROTOCOL_VERSION

ALICE, BOB = Ed25519Signer(b"a" * 32), Ed25519Signer(b"b" * 32)
SWARM = bytes(range(32))
NOW = 1_800_000_000.0


def sealed(
    *,
    signer: Ed25519Signer = ALICE,
    swarm: bytes = SWARM,
    seq: int = 7,
    life_s: float = 30,
    body: bytes = b"hi",
) -> bytes:
    return seal(signer, swarm, 3, seq, NOW + life_s, body)


def resigned(**changes: object) -> bytes:
    """A message with some fields changed, and well signed."""
    envelope = msgspec.msgpack.decode(sealed()[:-64], type=Envelope)
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(envelope, **changes))
    return encoded + ALICE.sign(domain("envelope") + encoded)


def refuse(data: bytes, expected: type[RemoteError], *, opener: Opener | None = None, now: float = NOW) -> str:
    """Open what must be refused; it must name the carrier and change nothing."""
    opener = opener or Opener(SWARM)
    before = opener.replay.snapshot()
    with pytest.raises(RemoteError) as caught:
        opener.open(data, now, ALICE.peer_id)
    assert type(caught.value) is expected
    assert caught.value.peer == ALICE.peer_id
    assert short(ALICE.peer_id) in str(caught.value)
    assert opener.replay.snapshot() == before
    return str(caught.value)


def test_opens() -> None:
    opened = Opener(SWARM).open(sealed(), NOW, ALICE.peer_id)
    assert opened == Opened(sender=ALICE.peer_id, kind=3, seq=7, body=b"hi")


def test_too_large_is_refused_unread() -> None:
    refuse(bytes(MAX_CONTROL_BYTES + 1), LimitExceeded)


def test_largest_opens_and_larger_is_not_sealed() -> None:
    overhead = len(sealed(body=b"")) + 3  # a long body has a longer length
    body = bytes(MAX_CONTROL_BYTES - overhead)
    assert len(sealed(body=body)) == MAX_CONTROL_BYTES
    assert Opener(SWARM).open(sealed(body=body), NOW, ALICE.peer_id).body == body
    with pytest.raises(LocalError):
        sealed(body=body + b"x")


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 64, b"\x90" + bytes(64), b"\x91" * 4000 + bytes(64), b"\x97\x01\xa2\xff\xfe" + bytes(64)],
)
def test_malformed(data: bytes) -> None:
    refuse(data, Malformed)


def test_field_too_many_is_malformed() -> None:
    fields = msgspec.msgpack.decode(sealed()[:-64])
    refuse(msgspec.msgpack.encode([*fields, 1]) + bytes(64), Malformed)


def test_wrong_version() -> None:
    later = PROTOCOL_VERSION + 1
    assert f"version {later}" in refuse(resigned(version=later), WrongVersion)


def test_later_version_of_another_shape_is_a_wrong_version() -> None:
    refuse(msgspec.msgpack.encode([PROTOCOL_VERSION + 1, "all", {"is": "new"}]) + bytes(64), WrongVersion)


def test_wrong_swarm() -> None:
    refuse(sealed(swarm=bytes(32)), WrongSwarm)


def test_another_sender_needs_a_relay() -> None:
    data = sealed(signer=BOB)
    assert short(BOB.peer_id) in refuse(data, Refused)
    assert Opener(SWARM).open(data, NOW, ALICE.peer_id, relayed=True).sender == BOB.peer_id


def test_expired_and_too_far_ahead() -> None:
    refuse(sealed(), Stale, now=NOW + 30)
    refuse(sealed(life_s=MAX_MESSAGE_LIFE_S + MAX_CLOCK_SKEW_S + 1), Stale)
    Opener(SWARM).open(sealed(life_s=MAX_MESSAGE_LIFE_S + MAX_CLOCK_SKEW_S), NOW, ALICE.peer_id)


def test_bad_signature_does_not_move_the_window() -> None:
    opener = Opener(SWARM)
    opener.open(sealed(seq=7), NOW, ALICE.peer_id)
    forged = bytearray(sealed(seq=1 << 40))
    forged[-1] ^= 1
    refuse(bytes(forged), BadSignature, opener=opener)
    opener.open(sealed(seq=8), NOW, ALICE.peer_id)


def test_signature_of_another_domain_is_bad() -> None:
    encoded = sealed()[:-64]
    refuse(encoded + ALICE.sign(domain("record") + encoded), BadSignature)


def test_replayed() -> None:
    opener = Opener(SWARM)
    opener.open(sealed(), NOW, ALICE.peer_id)
    refuse(sealed(), Replayed, opener=opener)
    refuse(sealed(body=b"other"), Replayed, opener=opener)


def test_too_many_senders() -> None:
    opener = Opener(SWARM, replay=ReplayGuard(max_senders=1))
    opener.open(sealed(signer=BOB), NOW, BOB.peer_id)
    refuse(sealed(), LimitExceeded, opener=opener)


@given(st.data())
def test_damage_is_a_remote_error_and_changes_nothing(data: st.DataObject) -> None:
    whole = sealed()
    opener = Opener(SWARM)
    opener.open(sealed(seq=1), NOW, ALICE.peer_id)
    before = opener.replay.snapshot()
    damaged = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole) - 1)))
    with pytest.raises(RemoteError):
        opener.open(bytes(damaged[:cut]), NOW, ALICE.peer_id)
    assert opener.replay.snapshot() == before


@given(st.binary(max_size=300))
def test_noise_is_a_remote_error(noise: bytes) -> None:
    with pytest.raises(RemoteError):
        Opener(SWARM).open(noise, NOW, ALICE.peer_id)


@given(st.binary(max_size=200), st.integers(0, (1 << 62) - 1), st.floats(0.001, 120))
def test_round_trip(body: bytes, seq: int, life_s: float) -> None:
    opened = Opener(SWARM).open(sealed(body=body, seq=seq, life_s=life_s), NOW, ALICE.peer_id)
    assert (opened.body, opened.seq) == (body, seq)
