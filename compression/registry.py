"""From a spec in a manifest, or from the header of a payload, to the codec."""

import re

from farflung.compression.codec import Codec, CodecError, Payload
from farflung.compression.fp32 import Fp32
from farflung.compression.int8 import Int8
from farflung.compression.wire import Header

_BY_ID: dict[int, type[Fp32] | type[Int8]] = {Fp32.codec_id: Fp32, Int8.codec_id: Int8}
_SPEC = re.compile(r"(?P<name>[a-z0-9]+)(?:\((?P<key>[a-z]+)=(?P<value>[1-9][0-9]{0,8})\))?")


def parse_codec(spec: str) -> Codec:
    """The codec of a spec: `fp32`, `int8`, `int8(block=256)`. Raises ValueError naming the possible."""
    match = _SPEC.fullmatch(spec)
    if match:
        name, key, value = match["name"], match["key"], match["value"]
        if name == "fp32" and key is None:
            return Fp32()
        if name == "int8" and key is None:
            return Int8()
        if name == "int8" and key == "block":
            return Int8(block=int(value))
    raise ValueError(f"unknown codec {spec[:64]!r}; possible are 'fp32' and 'int8(block=128)'")


def codec_of(payload: Payload) -> Codec:
    """The codec that a payload's header names. Raises CodecError. Compare it with what was agreed."""
    header = Header.read(payload)
    codec = _BY_ID.get(header.codec_id)
    if codec is None:
        raise CodecError(f"unknown codec id {header.codec_id}")
    if header.codec_version != codec.version:
        raise CodecError(f"version {header.codec_version} of codec {header.codec_id}, not {codec.version}")
    try:
        return codec.from_param(header.param)
    except ValueError as error:
        raise CodecError(f"parameter of codec {header.codec_id}: {error}") from error
