"""Bytes to typed structs, with every way it can fail turned into a typed error that names the peer.

msgspec checks types, lengths and unknown fields while it decodes and allocates nothing on the word of a
length header (tried: a declared array of 2^32 elements is refused as truncated). Besides its own errors it
lets three others through: `UnicodeDecodeError` for text that is not UTF-8, `RecursionError` for deep nesting,
and whatever a `__post_init__` raises that is not a `ValueError`, here `ConfigError`. `decode` is the one
place that knows this.
"""

from typing import Annotated, TypeVar

import msgspec

from farflung.protocol.errors import ConfigError, LimitExceeded, Malformed, Refused
from farflung.protocol.keys import PeerId

T = TypeVar("T")

Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
"""A number that fits 16 bits: versions, kinds."""


def check_size(data: bytes, *, what: str, limit: int, peer: PeerId | None) -> None:
    """Raise LimitExceeded when `data` is longer than `limit` bytes."""
    if len(data) > limit:
        raise LimitExceeded(f"{what} of {len(data)} bytes, limit {limit}", peer=peer)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, *, what: str, limit: int, peer: PeerId | None) -> T:
    """Decode `data` that came from `peer` (None: nobody can be named).

    Raises LimitExceeded (longer than `limit` bytes), Malformed (not of the decoder's type), Refused (of the
    type, but a `__post_init__` finds a value out of range).
    """
    check_size(data, what=what, limit=limit, peer=peer)
    try:
        return decoder.decode(data)
    except ConfigError as err:
        raise Refused(f"{what}: {err}", peer=peer) from err
    except RecursionError as err:
        raise Malformed(f"{what}: nested too deeply", peer=peer) from err
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise Malformed(f"{what}: {err}", peer=peer) from err
