"""DHT records: what a store takes, what it refuses and whom it names."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol import records
from farflung.protocol.errors import (
    BadSignature,
    ConfigError,
    LimitExceeded,
    Malformed,
    Refused,
    RemoteError,
    Stale,
    WrongSwarm,
    WrongVersion,
)
from farflung.protocol.keys import Ed25519Signer, domain
from farflung.protocol.limits import MAX_CLAIM_LIFE_S, MAX_RECORD_BYTES, MAX_RECORD_LIFE_S
from farflung.protocol.manifest import Manifest, sign_manifest
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, ModelSpec
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import (
    Placed,
    Record,
    open_claim,
    open_peer,
    place_of,
    refreshed,
    validate_record,
)
from farflung.protocol.replay import first_seq
from farflung.protocol.versions import PROTOCOL_VERSION

NOW = 1_800_000_000.0
SEQ = first_seq(NOW)
FOUNDER, PEER = Ed25519Signer(b"f" * 32), Ed25519Signer(b"p" * 32)
SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32
SAID = PeerRecord(
    addresses=("/ip4/203.0.113.7/tcp/1", "tls://203.0.113.7:2"),
    device="NVIDIA RTX 3060, 12 GiB",
    tokens_per_s=5000.0,
    stages=(0, 12),
    height=3,
    state_digest=b"d" * 32,
    agent="farflung 0.1.0",
    admission_token=b"t" * 64,
)
MANIFEST = Manifest(
    name="tiny",
    founder=FOUNDER.peer_id,
    created=0,
    model=ModelSpec(vocab_size=256, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8, seq_len=8),
    data=DataSpec(spec="stdlib", content_hash=bytes(32), num_samples=1),
    batch_tokens=8,
    total_steps=200,
    admission=AdmissionSpec(rule="open"),
)
SIGNED = sign_manifest(FOUNDER, MANIFEST)
CLAIM = records.place_claim(FOUNDER, "tiny", SWARM, seq=SEQ, now=NOW, life_s=86400)
ANNOUNCED = records.place_peer(PEER, SWARM, SAID, seq=SEQ, now=NOW, life_s=600)
STORED = records.place_manifest(SIGNED, now=NOW)
ALL = [CLAIM, ANNOUNCED, STORED]


def validate(placed: Placed, now: float = NOW) -> None:
    validate_record(placed.key, placed.subkey, placed.value, placed.expires_at, now)


def changed(placed: Placed, **changes: Any) -> Placed:
    """A placed value with other fields in its record, well signed by `signer`."""
    signer = changes.pop("by", PEER if placed is ANNOUNCED else FOUNDER)
    record = msgspec.msgpack.decode(placed.value[:-64], type=Record)
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(record, **changes))
    return at(placed, value=encoded + signer.sign(domain("record") + encoded))


def at(placed: Placed, **changes: Any) -> Placed:
    fields = {
        "key": placed.key,
        "subkey": placed.subkey,
        "value": placed.value,
        "expires_at": placed.expires_at,
    }
    return Placed(**{**fields, **changes})


def refuse(placed: Placed, expected: type[RemoteError], peer: bytes | None, *, now: float = NOW) -> None:
    with pytest.raises(RemoteError) as caught:
        validate(placed, now)
    assert type(caught.value) is expected, caught.value
    assert caught.value.peer == peer


@pytest.mark.parametrize("placed", ALL)
def test_good_ones_pass_and_know_their_place(placed: Placed) -> None:
    validate(placed)
    assert place_of(placed.value) == (placed.key, placed.subkey)
    assert len(placed.value) < MAX_RECORD_BYTES


def test_reading() -> None:
    claim = open_claim("tiny", CLAIM.subkey, CLAIM.value, NOW)
    assert (claim.founder, claim.swarm, claim.seq, claim.expires_at) == (
        FOUNDER.peer_id,
        SWARM,
        SEQ,
        NOW + 86400,
    )
    peer = open_peer(SWARM, ANNOUNCED.subkey, ANNOUNCED.value, NOW)
    assert (peer.peer, peer.swarm, peer.seq, peer.record) == (PEER.peer_id, SWARM, SEQ, SAID)
    assert records.open_manifest_record(SIGNED.swarm, STORED.value) == MANIFEST


def test_members_keep_a_claim_alive_until_it_expires() -> None:
    assert CLAIM.expires_at == NOW + MAX_RECORD_LIFE_S
    later = refreshed(CLAIM, NOW + 5000)
    assert later == at(CLAIM, expires_at=NOW + 5000 + MAX_RECORD_LIFE_S)
    validate(later, NOW + 5000)
    last = refreshed(CLAIM, NOW + 86000)
    assert last is not None and last.expires_at == NOW + 86400
    assert refreshed(CLAIM, NOW + 86400) is None


def test_other_programs_keys_pass() -> None:
    validate_record("somebody/else", "", b"\xff", 0.0, NOW)


@pytest.mark.parametrize(
    "key",
    ["farflung/", "farflung/1/", "farflung/1/name", "farflung/1/name/", "farflung/2/name/tiny", "farflung/1/news/x",
     "farflung/1/peers/12", "farflung/1/manifest/" + "G" * 64, "farflung/1/peers/" + "AB" * 32],
)  # fmt: skip
def test_unknown_places(key: str) -> None:
    refuse(at(CLAIM, key=key), Refused, None)


@pytest.mark.parametrize("subkey", ["", "x", "ab" * 31, "AB" * 32, "\udcff", "ab" * 32 + "\n"])
def test_unknown_subkeys(subkey: str) -> None:
    for placed in ALL:
        refuse(at(placed, subkey=subkey), Refused, None)


def test_too_large() -> None:
    for placed in ALL:
        refuse(at(placed, value=bytes(MAX_RECORD_BYTES + 1)), LimitExceeded, None)


@pytest.mark.parametrize(("placed", "owner"), [(CLAIM, FOUNDER), (ANNOUNCED, PEER)])
def test_signed_records(placed: Placed, owner: Ed25519Signer) -> None:
    who = owner.peer_id
    max_life_s = MAX_CLAIM_LIFE_S if placed is CLAIM else MAX_RECORD_LIFE_S
    thief = Ed25519Signer(b"x" * 32)
    refuse(at(placed, value=b"\xc1" + placed.value), Malformed, who)
    refuse(changed(placed, version=PROTOCOL_VERSION + 1), WrongVersion, who)
    refuse(
        at(placed, value=msgspec.msgpack.encode([PROTOCOL_VERSION + 1, {"new": "shape"}]) + bytes(64)),
        WrongVersion,
        who,
    )
    refuse(changed(placed, kind=3 - (1 if placed is CLAIM else 2)), Refused, who)
    refuse(changed(placed, by=thief), BadSignature, who)
    refuse(changed(placed, by=thief, signer=thief.peer_id), Refused, who)
    refuse(at(placed, subkey=thief.peer_id.hex()), Refused, thief.peer_id)
    refuse(at(placed, value=placed.value[:-1] + bytes([placed.value[-1] ^ 1])), BadSignature, who)
    refuse(changed(placed, expires_at=int(NOW)), Stale, who)
    refuse(changed(placed, expires_at=int(NOW + max_life_s + 61)), Stale, who)
    refuse(changed(placed, seq=first_seq(NOW + 61)), Stale, who)
    refuse(changed(placed, expires_at=int(placed.expires_at) - 2), Stale, who)


def test_moved_to_another_key() -> None:
    refuse(at(CLAIM, key=records.name_key("other")), Refused, FOUNDER.peer_id)
    refuse(at(ANNOUNCED, key=records.peers_key(OTHER_SWARM)), WrongSwarm, PEER.peer_id)
    refuse(changed(ANNOUNCED, swarm=OTHER_SWARM), WrongSwarm, PEER.peer_id)
    refuse(at(STORED, key=records.manifest_key(OTHER_SWARM)), WrongSwarm, None)
    refuse(at(CLAIM, key=ANNOUNCED.key), Refused, FOUNDER.peer_id)


@pytest.mark.parametrize("payload", [b"", b"\xff", b"Tiny", b"x" * 65])
def test_claims_to_no_name(payload: bytes) -> None:
    refuse(changed(CLAIM, payload=payload), Malformed, FOUNDER.peer_id)


@pytest.mark.parametrize("expires_at", [NOW, NOW - 1, NOW + MAX_RECORD_LIFE_S + 61, float("inf"), float("nan")])
def test_held_too_long_or_not_at_all(expires_at: float) -> None:
    for placed in ALL:
        refuse(at(placed, expires_at=expires_at), Stale, None)


def test_manifest_by_another() -> None:
    forged = msgspec.structs.replace(SIGNED, signature=PEER.sign(domain("manifest") + SIGNED.manifest))
    refuse(at(STORED, value=forged.encode()), BadSignature, None)
    refuse(at(STORED, value=b"\xc1"), Malformed, None)


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ("tls://a:1",) * 17}, {"addresses": ("nowhere",)}, {"device": "x\x1b[2J"}, {"device": "x" * 513},
        {"tokens_per_s": float("nan")}, {"up_bytes_per_s": -1.0}, {"down_bytes_per_s": float("inf")}, {"stages": (3, 2)},
        {"stages": (-1, 2)}, {"height": -1}, {"version": 1 << 54}, {"state_digest": b"x"}, {"protocol_versions": ()},
        {"protocol_versions": (0,)}, {"agent": "x" * 65}, {"state": "Not a word"}, {"admission_token": b"x"},
    ],
)  # fmt: skip
def test_values_of_peer_records(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="peer record"):
        msgspec.structs.replace(SAID, **change)
    names = [field.name for field in msgspec.structs.fields(PeerRecord)]
    values = msgspec.structs.asdict(SAID) | change
    payload = msgspec.msgpack.encode([values[name] for name in names])
    refuse(changed(ANNOUNCED, payload=payload), Refused, PEER.peer_id)


@pytest.mark.parametrize("payload", [b"", b"\x80", msgspec.msgpack.encode([1]), b"\x9d" + b"\xc0" * 13])
def test_malformed_peer_records(payload: bytes) -> None:
    refuse(changed(ANNOUNCED, payload=payload), Malformed, PEER.peer_id)


def test_lives_of_our_own_records() -> None:
    with pytest.raises(ConfigError, match="life of a claim"):
        records.place_claim(FOUNDER, "tiny", SWARM, seq=1, now=NOW, life_s=MAX_CLAIM_LIFE_S + 1)
    with pytest.raises(ConfigError, match="life of a peer record"):
        records.place_peer(PEER, SWARM, SAID, seq=1, now=NOW, life_s=MAX_RECORD_LIFE_S + 1)
    with pytest.raises(ConfigError, match="swarm name"):
        records.place_claim(FOUNDER, "Tiny", SWARM, seq=1, now=NOW, life_s=60)


@given(st.sampled_from(ALL), st.data())
def test_damage_is_a_remote_error(placed: Placed, data: st.DataObject) -> None:
    damaged = bytearray(placed.value)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(damaged) - 1)))
    with pytest.raises(RemoteError):
        validate(at(placed, value=bytes(damaged[:cut])))
    try:
        place_of(bytes(damaged[:cut]))
    except RemoteError:
        pass  # damage that still parses has a place, only not a valid value


@given(st.text(), st.text(), st.binary(max_size=200))
def test_noise_is_a_remote_error(key: str, subkey: str, value: bytes) -> None:
    for kind in (
        "",
        "1/",
        "1/name/",
        "1/peers/",
        "1/manifest/",
        f"1/peers/{SWARM.hex()}",
        f"1/manifest/{SWARM.hex()}",
    ):
        with pytest.raises(RemoteError):
            validate_record(f"farflung/{kind}{key}", subkey, value, NOW + 60, NOW)
    with pytest.raises(RemoteError):
        validate_record(CLAIM.key, CLAIM.subkey, value, NOW + 60, NOW)
    with pytest.raises(RemoteError):
        place_of(value)
