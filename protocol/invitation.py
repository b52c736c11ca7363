"""An invitation: one string that a person can paste, with all that a machine needs to join.

    farflung1 base32( length 2 bytes | msgpack payload | checksum 4 bytes )

Base32 in lower case: a fifth longer than base64url, but one double click selects it, and neither case nor
`-`/`_` can get lost. About 275 characters with one address. The length tells a cut-off paste from a mistyped
one; the checksum is the start of a SHA-256. It is typed by people, so what is wrong with it is a ConfigError
that says what to do.
"""

import base64
import re
from collections.abc import Iterable

import msgspec

from farflung.protocol.addresses import AddressPacker, AddressUnpacker, is_address
from farflung.protocol.checks import check_length
from farflung.protocol.errors import ConfigError, RemoteError
from farflung.protocol.keys import digest
from farflung.protocol.limits import MAX_ADDRESSES, MAX_INVITATION_BYTES, MAX_NAME
from farflung.protocol.naming import check_name
from farflung.protocol.wire import decode

PREFIX = "farflung1"
"""`1` is the version, and no letter of base32."""

_CHECK_BYTES = 4
_FOREIGN = re.compile(r"[^a-z2-7]")
_CUT_SHORT = re.compile(PREFIX + "[a-z2-7]+")
_AGAIN = "copy the whole line again from where you got it"


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What an invitation says. Raises ConfigError for values that cannot be in one."""

    name: str
    swarm: bytes
    """The manifest's hash, 32 bytes."""
    founder: bytes
    """The founder's public key, 32 bytes."""
    invite_seed: bytes = b""
    """Secret whose public key is in the manifest, 32 bytes; empty for an open swarm."""
    addresses: tuple[str, ...] = ()
    """Where members may be found: multiaddrs, `tls://host:port`."""

    def __post_init__(self) -> None:
        check_name(self.name)
        check_length("invitation: swarm", self.swarm, 32)
        check_length("invitation: founder", self.founder, 32)
        check_length("invitation: secret", self.invite_seed, 0, 32)
        if len(self.addresses) > MAX_ADDRESSES:
            raise ConfigError(f"invitation: {len(self.addresses)} addresses, at most {MAX_ADDRESSES} are allowed")
        for address in self.addresses:
            if not is_address(address):
                raise ConfigError(f"invitation: {address!r} is no address")

    def __repr__(self) -> str:
        secret = "with secret" if self.invite_seed else "without secret"  # it must not reach a log
        return f"Invitation({self.name!r}, {self.swarm.hex()[:12]}, {secret}, {self.addresses})"


def carried(addresses: Iterable[str]) -> list[str]:
    """Those by which the DHT can be joined, and that can stand in an invitation: what a peer says of itself need be no address at all."""
    return [one for one in addresses if one.startswith("/") and is_address(one)]


class _Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    swarm: bytes
    founder: bytes
    invite_seed: bytes
    addresses: list[bytes]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Payload)


def encode_invitation(invitation: Invitation) -> str:
    """The string for people."""
    packer = AddressPacker()
    payload = _ENCODER.encode(
        _Payload(
            invitation.name,
            invitation.swarm,
            invitation.founder,
            invitation.invite_seed,
            [packer.pack(address) for address in invitation.addresses],
        )
    )
    if len(payload) > MAX_INVITATION_BYTES:
        raise ConfigError(f"invitation: {len(payload)} bytes, at most {MAX_INVITATION_BYTES}; give fewer addresses")
    return PREFIX + _base32(len(payload).to_bytes(2) + payload + _checksum(payload))


def is_invitation(text: str) -> bool:
    """Whether a person's argument, which names no swarm that is known, is meant as an invitation, be it the beginning of one."""
    said = text.strip().lower()
    return _CUT_SHORT.fullmatch(said) is not None or (
        re.match(r"farflung[0-9]", said) is not None and len(said) > MAX_NAME
    )


def decode_invitation(text: str) -> Invitation:
    """Read an invitation; spaces and line breaks inside are ignored, and so is case.

    Raises ConfigError that says whether it is no invitation, of another version, cut short, too long or
    mistyped.
    """
    if len(text) > 4 * MAX_INVITATION_BYTES:
        raise ConfigError(f"an invitation has at most {2 * MAX_INVITATION_BYTES} characters; {_AGAIN}")
    compact = "".join(text.split()).lower()
    if not compact.startswith(PREFIX):
        if re.match(r"farflung[0-9]", compact):
            raise ConfigError("this invitation was made by another version of farflung; update farflung to use it")
        raise ConfigError(f"an invitation begins with {PREFIX!r}; {_AGAIN}")
    body = compact[len(PREFIX) :]
    if foreign := _FOREIGN.search(body):
        raise ConfigError(f"{foreign[0]!r} cannot stand in an invitation; {_AGAIN}")
    payload = _payload(body)
    try:
        read = decode(_DECODER, payload, what="invitation", limit=MAX_INVITATION_BYTES, peer=None)
        unpacker = AddressUnpacker()
        if len(read.addresses) > MAX_ADDRESSES:
            raise ConfigError(f"invitation: {len(read.addresses)} addresses, at most {MAX_ADDRESSES}")
        addresses = tuple(unpacker.unpack(packed) for packed in read.addresses)
    except RemoteError as err:
        raise ConfigError(f"this invitation is broken ({err.reason}); ask for a new one") from err
    return Invitation(
        name=read.name,
        swarm=read.swarm,
        founder=read.founder,
        invite_seed=read.invite_seed,
        addresses=addresses,
    )


def _payload(body: str) -> bytes:
    """The checked payload of the base32 text."""
    mistyped = ConfigError(f"this invitation is mistyped or damaged; {_AGAIN}")
    if len(body) < 4:
        raise ConfigError(f"this invitation is cut short after {len(body)} characters; {_AGAIN}")
    length = int.from_bytes(base64.b32decode(body[:4].upper() + "====")[:2])
    if length > MAX_INVITATION_BYTES:
        raise mistyped
    expected = -(-(2 + length + _CHECK_BYTES) * 8 // 5)
    if len(body) < expected:
        raise ConfigError(f"this invitation is cut short: {len(body)} of {expected} characters; {_AGAIN}")
    if len(body) > expected:
        raise ConfigError(f"this invitation has {len(body) - expected} characters too many; {_AGAIN}")
    data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    payload, checksum = data[2:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    # Comparing the text too: base32 leaves spare bits in the last character.
    if checksum != _checksum(payload) or _base32(data) != body:
        raise mistyped
    return payload


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def _checksum(payload: bytes) -> bytes:
    return digest("invitation", payload)[:_CHECK_BYTES]
