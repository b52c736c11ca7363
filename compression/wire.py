"""The header in front of every encoded vector, and moving bytes between payloads and tensors.

32 bytes, little-endian; the body follows without a gap:

    0   magic           2 bytes  "CX"
    2   header version  u8       1
    3   codec id        u8
    4   codec version   u8
    5   reserved        3 bytes  zero
    8   numel           u64
    16  param           u64      the codec's parameters, packed as it says
    24  body length     u64      bytes after the header

There is no checksum: bytes come over authenticated streams or are known by their digest, and a payload that
was changed decodes to finite numbers or not at all. Name, round and peer are in the signed messages around it.

Tensors are little-endian in memory on every machine torch ships for; a big-endian one is refused.
"""

import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.compression.codec import CodecError, Format, Payload

MAGIC = b"CX"
HEADER_VERSION = 1
_HEADER = struct.Struct("<2sBBB3xQQQ")
HEADER_NBYTES = _HEADER.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a payload says about itself."""

    codec_id: int
    codec_version: int
    numel: int
    """Elements of the vector."""
    param: int
    """The codec's parameters, packed."""
    body_nbytes: int
    """Bytes after the header."""

    @classmethod
    def read(cls, payload: Payload) -> "Header":
        """Parse the first 32 bytes. Raises CodecError."""
        view = as_bytes(payload)
        if len(view) < HEADER_NBYTES:
            raise CodecError(f"payload of {len(view)} bytes is shorter than its {HEADER_NBYTES} byte header")
        magic, header_version, codec_id, codec_version, numel, param, body_nbytes = _HEADER.unpack_from(view)
        if magic != MAGIC:
            raise CodecError(f"payload starts with {magic!r}, not with {MAGIC!r}")
        if header_version != HEADER_VERSION:
            raise CodecError(f"header version {header_version}, this program reads {HEADER_VERSION}")
        if any(view[5:8]):
            raise CodecError("reserved header bytes are not zero")
        return cls(
            codec_id=codec_id,
            codec_version=codec_version,
            numel=numel,
            param=param,
            body_nbytes=body_nbytes,
        )

    def write(self) -> bytes:
        """The 32 bytes."""
        fields = (self.codec_id, self.codec_version, self.numel, self.param, self.body_nbytes)
        return _HEADER.pack(MAGIC, HEADER_VERSION, *fields)


def as_bytes(payload: Payload) -> memoryview:
    """A flat byte view. Raises CodecError when the buffer is not contiguous."""
    view = memoryview(payload)
    if not view.c_contiguous:
        raise CodecError("payload is not contiguous in memory")
    return view.cast("B")


def allocate(nbytes: int, *, out: bytearray | memoryview | None, pinned: bool) -> tuple[memoryview, Tensor]:
    """Memory for a payload, as bytes and as the uint8 tensor [nbytes] over the same bytes.

    Raises ValueError when `out` is too small, read-only or not contiguous.
    """
    _check_byte_order()
    if out is None:
        fresh = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return tensor_bytes(fresh), fresh
    view = memoryview(out)
    if view.readonly or not view.c_contiguous or view.nbytes < nbytes:
        raise ValueError(f"out must be {nbytes} contiguous writable bytes")
    view = view.cast("B")[:nbytes]
    return view, torch.frombuffer(view, dtype=torch.uint8)


def seal(view: memoryview, codec: Format, numel: int) -> None:
    """Write the header over the first 32 bytes of a payload whose body is complete."""
    header = Header(
        codec_id=codec.codec_id,
        codec_version=codec.version,
        numel=numel,
        param=codec.param,
        body_nbytes=len(view) - HEADER_NBYTES,
    )
    view[:HEADER_NBYTES] = header.write()


def fill(view: memoryview, codec: Format, numel: int, body: bytes) -> memoryview:
    """Write header and body, of whatever length, into memory for the largest payload. Returns the payload."""
    payload = view[: HEADER_NBYTES + len(body)]
    payload[HEADER_NBYTES:] = body
    seal(payload, codec, numel)
    return payload


def unseal(payload: Payload, codec: Format, numel: int) -> memoryview:
    """The body of a payload that is of this codec and of `numel` elements, and not longer than such a one can be.

    Raises CodecError, allocates nothing.
    """
    _check_byte_order()
    header = Header.read(payload)
    view = as_bytes(payload)
    for what, got, expected in (
        ("codec id", header.codec_id, codec.codec_id),
        ("codec version", header.codec_version, codec.version),
        ("codec parameter", header.param, codec.param),
        ("number of elements", header.numel, numel),
        ("payload length", len(view), HEADER_NBYTES + header.body_nbytes),
    ):
        if got != expected:
            raise CodecError(f"{what} is {got}, expected {expected}")
    if len(view) > codec.max_nbytes(numel):
        raise CodecError(f"payload of {len(view)} bytes, the longest possible has {codec.max_nbytes(numel)}")
    return view[HEADER_NBYTES:]


def unseal_exactly(payload: Payload, codec: Format, numel: int) -> memoryview:
    """`unseal` for codecs whose payloads of `numel` elements all have `max_nbytes(numel)` bytes. Raises CodecError."""
    body = unseal(payload, codec, numel)
    expected = codec.max_nbytes(numel) - HEADER_NBYTES
    if len(body) != expected:
        raise CodecError(f"body length is {len(body)}, expected {expected}")
    return body


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy; keeps the tensor alive."""
    array: Any = tensor.view(torch.uint8).numpy()  # Any: numpy's stubs declare no buffer protocol before 3.12
    return memoryview(array)


def copy_bytes(source: memoryview, start: int, target: Tensor) -> None:
    """Fill `target` (contiguous, CPU) with the bytes of `source` from `start`, at any alignment.

    `torch.frombuffer` would save the copy, but warns about read-only memory; chunks are copied within the
    cache.
    """
    raw = tensor_bytes(target)
    raw[:] = source[start : start + len(raw)]


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise CodecError("payloads are little-endian, and this machine is not")
