"""Signed control messages: who says it, in which swarm, until when, and only once.

A message on the wire is `msgpack(Envelope) || Ed25519 signature (64 bytes)`. The signature covers
`farflung/envelope/1\\0` and the bytes exactly as sent, so nothing is encoded anew to check it. Cost: about
200 bytes and one verification (roughly 0.1 ms) per message.

Refusals blame the carrier, that is the peer whose authenticated connection brought the bytes: before the
signature is checked nothing else is proven, and a replayed or stale message is the deed of whoever delivers
it. Whoever passes a message on has checked it.
"""

import math
from typing import TypeVar

import msgspec

from farflung.protocol.errors import (
    BadSignature,
    LocalError,
    Refused,
    Stale,
    WrongSwarm,
)
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, Signer, domain, short, verify
from farflung.protocol.limits import MAX_CLOCK_SKEW_S, MAX_CONTROL_BYTES, MAX_MESSAGE_LIFE_S
from farflung.protocol.replay import ReplayGuard
from farflung.protocol.types import Count, Digest, Key
from farflung.protocol.versions import PROTOCOL_VERSION, check_version, decode_versioned
from farflung.protocol.wire import Small, check_size

_DOMAIN = domain("envelope")

T = TypeVar("T", bound=msgspec.Struct)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the signature covers."""

    version: Small
    """Protocol version; it decides how the rest is read."""
    swarm: Digest
    """The manifest's hash."""
    sender: Key
    """Public key of the author."""
    kind: Small
    """Which message `body` holds."""
    seq: Count
    """Ascending per sender; see `replay.first_seq`."""
    expires_at: Count
    """Unix seconds; not valid from this second on."""
    body: bytes
    """The message proper, opaque here."""


class _Label(msgspec.Struct, array_like=True):
    """What an envelope begins with."""

    version: Small
    swarm: Digest
    sender: Key


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
_LABEL_DECODER = msgspec.msgpack.Decoder(_Label)


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A message that passed every check."""

    sender: PeerId
    """Author, proven by signature."""
    kind: int
    seq: int
    body: bytes


def seal(signer: Signer, swarm: bytes, kind: int, seq: int, expires_at: float, body: bytes) -> bytes:
    """Sign one message. `expires_at` in unix seconds is rounded up to a whole second.

    Raises LocalError when the message would be above MAX_CONTROL_BYTES.
    """
    envelope = Envelope(
        PROTOCOL_VERSION, swarm, signer.peer_id, kind, seq, math.ceil(expires_at), body
    )  # positional: array_like
    encoded = _ENCODER.encode(envelope)
    if len(encoded) + SIGNATURE_BYTES > MAX_CONTROL_BYTES:
        raise LocalError(f"a message of kind {kind} with {len(body)} bytes is above {MAX_CONTROL_BYTES}")
    return encoded + signer.sign(_DOMAIN + encoded)


def swarm_of(data: bytes, carrier: PeerId) -> bytes:
    """What a message says it is bound to, unproven: for those who listen in several places. Raises LimitExceeded, Malformed, WrongVersion."""
    return _parse(_LABEL_DECODER, data, carrier).swarm


def said_by(data: bytes, carrier: PeerId) -> PeerId:
    """Who says that it is the author, unproven. Raises LimitExceeded, Malformed, WrongVersion."""
    return _parse(_LABEL_DECODER, data, carrier).sender


class Opener:
    """Opens the messages of one swarm and remembers what it has seen."""

    def __init__(self, swarm: bytes, *, replay: ReplayGuard | None = None) -> None:
        """`swarm` is the 32-byte manifest hash; `replay` may be given to set its limits or to share it."""
        self._swarm = swarm
        self._replay = replay if replay is not None else ReplayGuard()

    @property
    def replay(self) -> ReplayGuard:
        """The windows, for statistics and tests."""
        return self._replay

    def open(self, data: bytes, now: float, carrier: PeerId, *, relayed: bool = False) -> Opened:
        """Check `data` that `carrier` (authenticated by the connection) delivered at `now` (unix seconds), and that it has not been opened before.

        With `relayed` the author may be another peer than the carrier. In this order, and with no change of
        state unless all pass, raises: LimitExceeded (size), Malformed (structure), WrongVersion, WrongSwarm,
        Refused (the author is not the carrier), Stale (expired, or valid for too long), BadSignature,
        Replayed (or LimitExceeded for too many senders at once).
        """
        envelope = self.check(data, now, carrier, relayed=relayed)
        return self.count(envelope, now, carrier)

    def count(self, envelope: Envelope, now: float, carrier: PeerId) -> Opened:
        """One that was checked: from now on it has been opened. Raises Replayed, or LimitExceeded for too many senders at once."""
        self._replay.accept(envelope.sender, envelope.seq, envelope.expires_at, now, carrier=carrier)
        return Opened(sender=envelope.sender, kind=envelope.kind, seq=envelope.seq, body=envelope.body)

    def check(self, data: bytes, now: float, carrier: PeerId, *, relayed: bool = False) -> Envelope:
        """The same, but for the last, which is `count`; nothing changes."""
        envelope = _parse(_DECODER, data, carrier)
        signed, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        check_version(envelope.version, what="message", peer=carrier)
        if envelope.swarm != self._swarm:
            raise WrongSwarm(f"message for swarm {short(envelope.swarm)}, ours is {short(self._swarm)}", peer=carrier)
        if envelope.sender != carrier and not relayed:
            raise Refused(f"message in the name of {short(envelope.sender)}", peer=carrier)
        if envelope.expires_at <= now:
            raise Stale(f"message expired {now - envelope.expires_at:.0f} s ago", peer=carrier)
        if envelope.expires_at > now + MAX_MESSAGE_LIFE_S + MAX_CLOCK_SKEW_S:
            raise Stale(
                f"message valid for {envelope.expires_at - now:.0f} s: lives too long, or a clock is wrong",
                peer=carrier,
            )
        try:
            verify(envelope.sender, signature, _DOMAIN + signed)
        except BadSignature as err:
            raise BadSignature(f"message from {short(envelope.sender)}: {err.reason}", peer=carrier) from None
        return envelope


def _parse(decoder: msgspec.msgpack.Decoder[T], data: bytes, carrier: PeerId) -> T:
    """Of what is signed."""
    check_size(data, what="message", limit=MAX_CONTROL_BYTES, peer=carrier)
    return decode_versioned(decoder, data[:-SIGNATURE_BYTES], what="message", limit=MAX_CONTROL_BYTES, peer=carrier)
