"""From a spec in a manifest, or from the header of a payload, to the codec."""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from farflung.compression import wire
from farflung.compression.activations import ActivationCodec
from farflung.compression.codec import Codec, CodecError, Format, Payload
from farflung.compression.dct import Dct
from farflung.compression.deadzone import DeadZone
from farflung.compression.four_bit import E3m0, Mxfp4, Nf4, Nvfp4
from farflung.compression.fp32 import Fp32
from farflung.compression.half import Bf16, Fp16
from farflung.compression.int4 import Int4
from farflung.compression.int8 import Int8
from farflung.compression.lowrank import LowRank
from farflung.compression.randk import RandK
from farflung.compression.rotint4 import RotInt4
from farflung.compression.sign import Sign
from farflung.compression.stat2 import Stat2
from farflung.compression.subspace import Subspace
from farflung.compression.tokenint8 import TokenInt8
from farflung.compression.topk import TopK
from farflung.compression.trellis import Trellis
from farflung.compression.wire import Header
from farflung.compression.zstd import Zstd

CODECS: tuple[type[Codec], ...] = (
    Fp32,
    Int8,
    Int4,
    Bf16,
    Fp16,
    Nf4,
    Mxfp4,
    Nvfp4,
    E3m0,
    Stat2,
    Sign,
    DeadZone,
    Trellis,
    TopK,
    RandK,
    LowRank,
    Dct,
)
"""All there are, besides Zstd after any of them. Names and ids are never used again for another codec."""

ACTIVATION_CODECS: tuple[type[ActivationCodec], ...] = (RotInt4, TokenInt8, Subspace)
"""Those of pipeline boundaries; names and ids are of the same sets as those of CODECS."""

_F = TypeVar("_F", bound=Format)
_BY_ID = {codec.codec_id: codec for codec in CODECS}
_BY_NAME = {codec.name: codec for codec in CODECS}
_ACTIVATIONS_BY_NAME = {codec.name: codec for codec in ACTIVATION_CODECS}
_SPEC = re.compile(r"(?P<name>[a-z][a-z0-9]*)(?:\((?P<arguments>[a-z0-9_=.,+-]+)\))?")
_ZSTD = f"+{Zstd.name}"
MAX_SPEC = 128
"""Characters of a spec: longer ones come from nobody honest."""


def parse_codec(spec: str) -> Codec:
    """The codec of a spec: `fp32`, `int8`, `int8(block=256)+zstd`; what is not said has its default. Raises ValueError."""
    if spec.endswith(_ZSTD) and len(spec) <= MAX_SPEC:
        return Zstd(inner=parse_codec(spec.removesuffix(_ZSTD)))
    return _parse(spec, _BY_NAME)


def parse_activation_codec(spec: str) -> ActivationCodec:
    """The codec of a pipeline boundary, as `tokenint8(width=1024)`. Raises ValueError."""
    return _parse(spec, _ACTIVATIONS_BY_NAME)


def _parse(spec: str, by_name: Mapping[str, type[_F]]) -> _F:
    match = _SPEC.fullmatch(spec) if len(spec) <= MAX_SPEC else None
    kind = by_name.get(match["name"]) if match else None
    if match is None or kind is None:
        raise ValueError(f"unknown codec {spec[:64]!r}; possible are {', '.join(by_name)}")
    parameters = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, int | float | str] = {}
    for argument in match["arguments"].split(",") if match["arguments"] else ():
        key, equals, text = argument.partition("=")
        if not equals or key not in parameters or key in given:
            raise ValueError(f"{spec!r}: {kind.name} has {', '.join(parameters) or 'no parameters'}")
        try:
            given[key] = _TYPES[parameters[key].type](text)
        except ValueError as error:
            raise ValueError(f"{spec!r}: {key}={text!r} cannot be read") from error
    missing = [key for key, field in parameters.items() if field.default is MISSING and key not in given]
    if missing:
        raise ValueError(f"{spec!r}: {kind.name} needs {', '.join(missing)}")
    return kind(**given)


_TYPES: dict[Any, Callable[[str], int | float | str]] = {int: int, float: float, str: str}
"""Of the fields of codecs."""


def codec_of(payload: Payload) -> Codec:
    """The codec that a payload's header names. Raises CodecError. Compare it with what was agreed."""
    header = Header.read(payload)
    if (header.codec_id, header.codec_version, header.param) == (Zstd.codec_id, Zstd.version, 0):
        inner = wire.as_bytes(payload)[wire.HEADER_NBYTES :]
        if Header.read(inner).codec_id != Zstd.codec_id:
            return Zstd(inner=codec_of(inner))
    codec = _BY_ID.get(header.codec_id)
    if codec is None:
        raise CodecError(f"unknown codec id {header.codec_id}")
    if header.codec_version != codec.version:
        raise CodecError(f"version {header.codec_version} of codec {header.codec_id}, not {codec.version}")
    try:
        return codec.from_param(header.param)
    except ValueError as error:
        raise CodecError(f"parameter of codec {header.codec_id}: {error}") from error
