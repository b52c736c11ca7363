"""An optional zstd stage over any other codec: `int4(block=128)+zstd`.

Codes of fixed width have less entropy than bits: int4 in blocks of 128 takes 3.4 instead of 4.1 bits per element of a
pseudo-gradient, int8 7.6 instead of 8.1 (compression digest, section 1.8). Level 1 is as good as level 3 there, and
compresses 1.5 to 2 GB/s of codes per core. `deadzone` has its own coder and gains nothing.

Body: the header of the inner payload; compressed lengths u32[ceil(b / CHUNK)], with b the length of the inner body;
then its chunks, CHUNK bytes each but for the last, as zstd frames that state their content size. A chunk that would
not get shorter is stored as it is, so its length is that of the chunk. Everything that memory is allocated for is
known, and compared with the limit of the inner codec, before a frame is touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
import zstandard
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.codec import Codec, CodecError, Payload
from farflung.compression.wire import HEADER_NBYTES, Header

CHUNK = 1 << 20
"""Bytes of the inner body in a frame."""
LEVEL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Zstd:
    """A codec, then zstd."""

    name: ClassVar[str] = "zstd"
    codec_id: ClassVar[int] = 60
    version: ClassVar[int] = 1

    inner: Codec

    def __post_init__(self) -> None:
        if isinstance(self.inner, Zstd):
            raise ValueError("zstd cannot follow zstd")

    @property
    def block(self) -> int:
        """That of the inner codec."""
        return self.inner.block

    @property
    def spec(self) -> str:
        """Canonical text."""
        return f"{self.inner.spec}+zstd"

    @property
    def param(self) -> int:
        """The inner header has the parameters."""
        return 0

    @classmethod
    def from_param(cls, param: int) -> Self:
        """Raises ValueError: the inner codec is not in the parameter. `registry.codec_of` reads the inner header."""
        raise ValueError(f"zstd cannot be made from a parameter alone, {param}")

    def max_nbytes(self, numel: int) -> int:
        """Largest payload in bytes, with all chunks stored as they are. Raises ValueError."""
        inner = self.inner.max_nbytes(numel)
        return HEADER_NBYTES + inner + 4 * _num_chunks(inner - HEADER_NBYTES)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`: as if zstd saved nothing. It saves 6 % of int8 and 14 % of int4. Raises ValueError."""
        stage = self.max_nbytes(numel) - self.inner.max_nbytes(numel)
        return stage + self.inner.expected_nbytes(numel)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`."""
        inner = self.inner.encode(x)
        view, _ = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        lengths = np.zeros(_num_chunks(len(inner) - HEADER_NBYTES), "<u4")
        end = HEADER_NBYTES + HEADER_NBYTES + lengths.nbytes
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        for number, chunk in enumerate(_chunks(inner)):
            frame: memoryview | bytes = compressor.compress(chunk)
            if len(frame) >= len(chunk):
                frame = chunk
            lengths[number] = len(frame)
            view[end : end + len(frame)] = frame
            end += len(frame)
        view = view[:end]
        view[HEADER_NBYTES : 2 * HEADER_NBYTES] = inner[:HEADER_NBYTES]
        view[2 * HEADER_NBYTES :][: lengths.nbytes] = lengths.tobytes()
        wire.seal(view, self, x.numel())
        return view

    def check(self, payload: Payload, numel: int) -> None:
        """See `Codec.check`. This decompresses the payload."""
        self.inner.check(self._decompress(payload, numel), numel)

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        return self.inner.decode(self._decompress(payload, numel), numel, out=out)

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`."""
        codec.check_target(acc, acc.numel(), "acc")
        self.inner.decode_add_(self._decompress(payload, acc.numel()), acc, weight)

    def _decompress(self, payload: Payload, numel: int) -> memoryview:
        """The inner payload. Raises CodecError before it allocates more than one can be long."""
        body = wire.unseal(payload, self, numel)
        inner_nbytes = HEADER_NBYTES + Header.read(body).body_nbytes
        if inner_nbytes > self.inner.max_nbytes(numel):
            raise CodecError(f"inner payload of {inner_nbytes} bytes, at most {self.inner.max_nbytes(numel)} can be")
        start = HEADER_NBYTES + 4 * _num_chunks(inner_nbytes - HEADER_NBYTES)
        if len(body) < start:
            raise CodecError(f"{len(body)} bytes cannot hold the lengths of {inner_nbytes} compressed bytes")
        lengths = np.frombuffer(body[HEADER_NBYTES:start], "<u4").tolist()
        if start + sum(lengths) != len(body):
            raise CodecError(f"frames of {sum(lengths)} bytes, expected {len(body) - start}")
        inner = wire.tensor_bytes(torch.empty(inner_nbytes, dtype=torch.uint8))
        inner[:HEADER_NBYTES] = body[:HEADER_NBYTES]
        decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK)
        for chunk, length in zip(_chunks(inner), lengths, strict=True):
            frame = body[start : start + length]
            chunk[:] = frame if length == len(chunk) else _decompress(decompressor, frame, len(chunk))
            start += length
        return inner


def _num_chunks(nbytes: int) -> int:
    return -(-nbytes // CHUNK)


def _chunks(inner: memoryview) -> Iterator[memoryview]:
    """The chunks of an inner payload's body."""
    for start in range(HEADER_NBYTES, len(inner), CHUNK):
        yield inner[start : start + CHUNK]


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: memoryview, nbytes: int) -> bytes:
    """Raises CodecError unless `frame` is one zstd frame that states its content of `nbytes` bytes, and has it."""
    try:
        stated = zstandard.get_frame_parameters(frame).content_size  # what would be allocated
        if stated != nbytes:
            raise CodecError(f"a frame of {stated} bytes, expected {nbytes}")
        return decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"not a zstd frame: {error}") from error
