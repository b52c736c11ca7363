"""From a spec in a manifest, or from the header of a payload, to the codec."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from farflung.compression.codec import Codec, CodecError, Payload
from farflung.compression.four_bit import E3m0, Mxfp4, Nf4, Nvfp4
from farflung.compression.fp32 import Fp32
from farflung.compression.half import Bf16, Fp16
from farflung.compression.int4 import Int4
from farflung.compression.int8 import Int8
from farflung.compression.sign import Sign
from farflung.compression.stat2 import Stat2
from farflung.compression.wire import Header

CODECS: tuple[type[Codec], ...] = (Fp32, Int8, Int4, Bf16, Fp16, Nf4, Mxfp4, Nvfp4, E3m0, Stat2, Sign)
"""All there are. Names and ids are never used again for another codec."""

_BY_ID = {codec.codec_id: codec for codec in CODECS}
_BY_NAME = {codec.name: codec for codec in CODECS}
_SPEC = re.compile(r"(?P<name>[a-z][a-z0-9]*)(?:\((?P<arguments>[a-z0-9_=.,+-]+)\))?")
MAX_SPEC = 128
"""Characters of a spec: longer ones come from nobody honest."""


def parse_codec(spec: str) -> Codec:
    """The codec of a spec: `fp32`, `int8`, `int8(block=256)`; what is not said has its default. Raises ValueError."""
    match = _SPEC.fullmatch(spec) if len(spec) <= MAX_SPEC else None
    kind = _BY_NAME.get(match["name"]) if match else None
    if match is None or kind is None:
        raise ValueError(f"unknown codec {spec[:64]!r}; possible are {', '.join(_BY_NAME)}")
    given: dict[str, int | float | str] = {}
    for argument in match["arguments"].split(",") if match["arguments"] else ():
        key, equals, text = argument.partition("=")
        types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
        if not equals or key not in types or key in given:
            raise ValueError(f"{spec!r}: {kind.name} has {', '.join(types) or 'no parameters'}")
        try:
            given[key] = _TYPES[types[key]](text)
        except ValueError as error:
            raise ValueError(f"{spec!r}: {key}={text!r} cannot be read") from error
    return kind(**given)


_TYPES: dict[Any, Callable[[str], int | float | str]] = {int: int, float: float, str: str}
"""Of the fields of codecs."""


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
