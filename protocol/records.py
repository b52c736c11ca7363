"""Records in the DHT: names, manifests, peers. Each is checked by whoever stores it and by whoever reads it.

    farflung/1/name/<name>          subkey <founder key, hex>    a founder's claim to a name
    farflung/1/manifest/<hash, hex> subkey `manifest`            the manifest, signed by its founder
    farflung/1/peers/<swarm, hex>   subkey <peer key, hex>       where a peer is and what it does

Claims and peer records are `msgpack(Record) || Ed25519 signature (64 bytes)` over `farflung/record/1\\0` and
the bytes as stored. A record names kind, swarm, signer, sequence and expiry, so it cannot be moved to another
key or subkey, or outlive what its signer meant. A manifest needs no further signature: its key is its hash,
and any member may keep it alive. Members also keep a founder's claim alive until the claim itself expires.

The DHT hashes keys before validators see them; `place_of` gives the key and subkey that a value belongs to,
to be hashed and compared. Only the stateless part is here: that a stored record is not replaced by an older
one is up to the store.
"""

import contextlib
import math
import re
from dataclasses import dataclass

import msgspec

from farflung.protocol.checks import check_range
from farflung.protocol.errors import (
    BadSignature,
    ConfigError,
    LocalError,
    Malformed,
    Refused,
    Stale,
    WrongSwarm,
    WrongVersion,
)
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, Signer, domain, short, verify
from farflung.protocol.limits import (
    MAX_CLAIM_LIFE_S,
    MAX_CLOCK_SKEW_S,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFE_S,
    MAX_TEXT,
)
from farflung.protocol.manifest import Manifest, SignedManifest, open_manifest
from farflung.protocol.naming import NameClaim, check_name
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.replay import seq_unix_s
from farflung.protocol.types import Count, Digest, Key
from farflung.protocol.versions import PROTOCOL_VERSION, check_version, decode_versioned
from farflung.protocol.wire import Small, check_size, decode

PREFIX = "farflung/1/"
"""All our keys begin with this; 1 is the version of the key scheme."""

MANIFEST_SUBKEY = "manifest"
CLAIM_KIND = 1
PEER_KIND = 2

_CALLED = {"name": "claim to a name", "manifest": "manifest", "peers": "peer record"}
"""What is kept under our keys, by their first part."""

_DOMAIN = domain("record")
_HEX32 = re.compile(r"[0-9a-f]{64}")


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the signature of a claim or peer record covers."""

    version: Small
    """Protocol version; it decides how the rest is read."""
    kind: Small
    """CLAIM_KIND or PEER_KIND."""
    swarm: Digest
    """The manifest's hash."""
    signer: Key
    """The founder of a claim, the peer of a peer record."""
    seq: Count
    """Of one signer's records under one key the highest counts; see `replay.first_seq`."""
    expires_at: Count
    """Unix seconds; not valid from this second on."""
    payload: bytes
    """For a claim the name as ASCII, for a peer record the `PeerRecord`."""


_ENCODER = msgspec.msgpack.Encoder()
_RECORD_DECODER = msgspec.msgpack.Decoder(Record)
_PEER_DECODER = msgspec.msgpack.Decoder(PeerRecord)
_MANIFEST_DECODER = msgspec.msgpack.Decoder(SignedManifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A value with its place in the DHT: the arguments of `Network.put_record`."""

    key: str
    subkey: str
    value: bytes
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncedPeer:
    """A verified peer record with what its envelope says."""

    peer: PeerId
    swarm: bytes
    seq: int
    expires_at: float
    record: PeerRecord


def name_key(name: str) -> str:
    """Key of all claims to a name; the subkey is the founder's key in hex."""
    return f"{PREFIX}name/{name}"


def manifest_key(swarm: bytes) -> str:
    """Key of a manifest; the subkey is MANIFEST_SUBKEY."""
    return f"{PREFIX}manifest/{swarm.hex()}"


def peers_key(swarm: bytes) -> str:
    """Key of all peers of a swarm; the subkey is the peer's key in hex."""
    return f"{PREFIX}peers/{swarm.hex()}"


def called(key: str) -> str:
    """What is kept under a key that one of these three gave, for people."""
    return _CALLED[key.removeprefix(PREFIX).partition("/")[0]]


def place_claim(signer: Signer, name: str, swarm: bytes, *, seq: int, now: float, life_s: float) -> Placed:
    """Claim `name` for the manifest `swarm`; the claim is valid for `life_s`, at most MAX_CLAIM_LIFE_S.

    The DHT holds it for at most MAX_RECORD_LIFE_S; any member may put the same value again (`refreshed`).
    Raises ConfigError for a bad name or life.
    """
    check_name(name)
    check_range("life of a claim", life_s, 1.0, MAX_CLAIM_LIFE_S)
    value = _sign(signer, CLAIM_KIND, swarm, seq, now + life_s, name.encode("ascii"))
    until = now + min(life_s, MAX_RECORD_LIFE_S)
    return Placed(key=name_key(name), subkey=signer.peer_id.hex(), value=value, expires_at=until)


def place_manifest(signed: SignedManifest, *, now: float) -> Placed:
    """Store a manifest for MAX_RECORD_LIFE_S; any member may do that again."""
    return Placed(
        key=manifest_key(signed.swarm),
        subkey=MANIFEST_SUBKEY,
        value=signed.encode(),
        expires_at=now + MAX_RECORD_LIFE_S,
    )


def place_peer(signer: Signer, swarm: bytes, record: PeerRecord, *, seq: int, now: float, life_s: float) -> Placed:
    """Announce ourselves for `life_s`, at most MAX_RECORD_LIFE_S. Raises ConfigError for a bad life."""
    check_range("life of a peer record", life_s, 1.0, MAX_RECORD_LIFE_S)
    value = _sign(signer, PEER_KIND, swarm, seq, now + life_s, _ENCODER.encode(record))
    return Placed(key=peers_key(swarm), subkey=signer.peer_id.hex(), value=value, expires_at=now + life_s)


def open_claim(name: str, subkey: str, value: bytes, now: float) -> NameClaim:
    """A claim to `name` found under `subkey`.

    Raises LimitExceeded, Malformed, WrongVersion, Refused (another kind, name or founder), Stale,
    BadSignature.
    """
    owner = _owner(subkey)
    record = _open(value, owner, CLAIM_KIND, now, MAX_CLAIM_LIFE_S)
    if (said := _read_name(record)) != name:
        raise Refused(f"claim to the name {said!r} under {name[:MAX_TEXT]!r}", peer=owner)
    return NameClaim(name=name, founder=record.signer, swarm=record.swarm, seq=record.seq, expires_at=record.expires_at)


def open_manifest_record(swarm: bytes, value: bytes) -> Manifest:
    """The manifest with hash `swarm`.

    Raises LimitExceeded, Malformed, WrongSwarm, WrongVersion, Refused, BadSignature; they can name nobody:
    whoever stored the value did not sign it.
    """
    return open_manifest(value, swarm=swarm, peer=None)


def open_peer(swarm: bytes, subkey: str, value: bytes, now: float) -> AnnouncedPeer:
    """The record of a peer of `swarm` found under `subkey`. Admission is not checked here: see `admission`.

    Raises LimitExceeded, Malformed, WrongVersion, WrongSwarm, Refused (another kind or peer, or a value out
    of range), Stale, BadSignature.
    """
    owner = _owner(subkey)
    record = _open(value, owner, PEER_KIND, now, MAX_RECORD_LIFE_S, swarm=swarm)
    said = decode(_PEER_DECODER, record.payload, what="peer record", limit=MAX_RECORD_BYTES, peer=owner)
    return AnnouncedPeer(
        peer=record.signer, swarm=record.swarm, seq=record.seq, expires_at=record.expires_at, record=said
    )


def validate_record(key: str, subkey: str, value: bytes, expires_at: float, now: float) -> None:
    """Whether a store may take `value` until `expires_at` (unix seconds). Keys of other programs pass.

    Raises LimitExceeded, Malformed, WrongVersion (of a manifest it is no fault), WrongSwarm, Refused (not of our key scheme, or in
    the wrong place), Stale (expired, held longer than the record is valid or than MAX_RECORD_LIFE_S), BadSignature.
    """
    if not key.startswith("farflung/"):
        return
    check_size(value, what="record", limit=MAX_RECORD_BYTES, peer=None)
    kind, _, name = key.removeprefix(PREFIX).partition("/")
    if not key.startswith(PREFIX) or not name:
        raise Refused(f"{key[:MAX_TEXT]!r} is no key of ours")
    if not now < expires_at <= now + MAX_RECORD_LIFE_S + MAX_CLOCK_SKEW_S:
        raise Stale(f"record to be held for {expires_at - now:.0f} s, allowed are {MAX_RECORD_LIFE_S:.0f}")
    valid_until: float
    if kind == "name":
        valid_until = open_claim(name, subkey, value, now).expires_at
    elif kind == "peers" and _HEX32.fullmatch(name):
        valid_until = open_peer(bytes.fromhex(name), subkey, value, now).expires_at
    elif kind == "manifest" and _HEX32.fullmatch(name) and subkey == MANIFEST_SUBKEY:
        # One of another version is kept, too: its key says that it is what it says, and who looks for it shall learn that it is there.
        with contextlib.suppress(WrongVersion):
            open_manifest_record(bytes.fromhex(name), value)
        return
    else:
        raise Refused(f"{key[:MAX_TEXT]!r} / {subkey[:MAX_TEXT]!r} is no place of ours")
    # A second, because signed expiries are rounded up to whole seconds.
    if expires_at > valid_until + 1:
        raise Stale(f"held {expires_at - valid_until:.0f} s longer than its signer meant", peer=_owner(subkey))


def place_of(value: bytes) -> tuple[str, str]:
    """The key and subkey that `value` belongs under, by its own account: to be hashed and compared, then
    validated.

    Raises LimitExceeded, Malformed, WrongVersion, Refused (a kind that we do not know).
    """
    check_size(value, what="record", limit=MAX_RECORD_BYTES, peer=None)
    try:
        record = _parse(value, None)
    except Malformed:
        signed = decode(_MANIFEST_DECODER, value, what="record", limit=MAX_RECORD_BYTES, peer=None)
        return manifest_key(signed.swarm), MANIFEST_SUBKEY
    if record.kind == CLAIM_KIND:
        return name_key(_read_name(record)), record.signer.hex()
    if record.kind == PEER_KIND:
        return peers_key(record.swarm), record.signer.hex()
    raise Refused(f"record of unknown kind {record.kind}", peer=record.signer)


def refreshed(placed: Placed, now: float) -> Placed | None:
    """Somebody's claim, verified before, to be put again as it is; None when it is no longer valid."""
    expires_at = min(_parse(placed.value, None).expires_at, now + MAX_RECORD_LIFE_S)
    if expires_at <= now:
        return None
    return Placed(key=placed.key, subkey=placed.subkey, value=placed.value, expires_at=expires_at)


def _sign(signer: Signer, kind: int, swarm: bytes, seq: int, expires_at: float, payload: bytes) -> bytes:
    record = Record(PROTOCOL_VERSION, kind, swarm, signer.peer_id, seq, math.ceil(expires_at), payload)
    encoded = _ENCODER.encode(record)
    if len(encoded) + SIGNATURE_BYTES > MAX_RECORD_BYTES:
        raise LocalError(f"a record of {len(encoded)} bytes is above {MAX_RECORD_BYTES}")
    return encoded + signer.sign(_DOMAIN + encoded)


def _owner(subkey: str) -> PeerId:
    if not _HEX32.fullmatch(subkey):
        raise Refused(f"{subkey[:MAX_TEXT]!r} is no public key in hex")
    return bytes.fromhex(subkey)


def _parse(value: bytes, peer: PeerId | None) -> Record:
    """The unverified record of a value."""
    check_size(value, what="record", limit=MAX_RECORD_BYTES, peer=peer)
    return decode_versioned(_RECORD_DECODER, value[:-SIGNATURE_BYTES], what="record", limit=MAX_RECORD_BYTES, peer=peer)


def _open(value: bytes, owner: PeerId, kind: int, now: float, max_life_s: float, swarm: bytes | None = None) -> Record:
    record = _parse(value, owner)
    check_version(record.version, what="record", peer=owner)
    if record.kind != kind:
        raise Refused(f"record of kind {record.kind} in a place of kind {kind}", peer=owner)
    if swarm is not None and record.swarm != swarm:
        raise WrongSwarm(f"record of swarm {short(record.swarm)} under {short(swarm)}", peer=owner)
    if record.signer != owner:
        raise Refused(f"record of {short(record.signer)} under another's key", peer=owner)
    if record.expires_at <= now:
        raise Stale(f"record expired {now - record.expires_at:.0f} s ago", peer=owner)
    if record.expires_at > now + max_life_s + MAX_CLOCK_SKEW_S:
        raise Stale(f"record valid for {record.expires_at - now:.0f} s, allowed are {max_life_s:.0f}", peer=owner)
    if seq_unix_s(record.seq) > now + MAX_CLOCK_SKEW_S:
        # Nothing its owner says later could ever replace it.
        raise Stale("record numbered ahead of time", peer=owner)
    try:
        verify(owner, value[-SIGNATURE_BYTES:], _DOMAIN + value[:-SIGNATURE_BYTES])
    except BadSignature as err:
        raise BadSignature(f"record: {err.reason}", peer=owner) from None
    return record


def _read_name(record: Record) -> str:
    try:
        name = record.payload.decode("ascii")
        check_name(name)
    except (UnicodeDecodeError, ConfigError) as err:
        raise Malformed(f"claim to no name: {err}", peer=record.signer) from err
    return name
