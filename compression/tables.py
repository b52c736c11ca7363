"""What the codecs with a scale per block and a small table of values have in common.

For each block: scale = a size of the block (its absmax, say) as a `ScaleFormat` stores it; code = the entry of the table
nearest to x / scale; decoded = table[code] * scale, with one rounding. So a codec is a table, a scale format, a size
and a way to find the nearest entry.

Packing is adjacent: the first code is in the low bits of the first byte, as OCP and torch's float4_e2m1fn_x2 have it.
Compiled code is faster if a byte holds codes from the halves of a block (digest, section 4), but eager code is faster
with neighbours: a byte is then the key under which `numpy.take` finds the 2, 4 or 8 values that it stands for. On one
core, in units of memcpy: 0.85 for 4 bits, against 0.45 for two look-ups by halves; 1.6 for 2 bits; 2.4 for 1 bit.

Body: the unit, fp32, in formats that have one; scales[ceil(n / block)]; codes, ceil(n * bits / 8) bytes.

Legend: n = elements of the vector, b = blocks of a chunk, r = elements of a block (fewer than `block` in the last).
"""

import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.base import BlockCodec, ChunkedCodec
from farflung.compression.codec import ChunkReader, CodecError, Payload
from farflung.compression.scales import ScaleFormat

_UNIT = struct.Struct("<f")


class Scratch:
    """Memory that the chunks of one call share, for at most `numel` elements."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.values = torch.empty(numel, dtype=torch.float32, device=device)
        self.bytes = torch.empty(numel + 1, dtype=torch.uint8, device=device)
        self.keys = torch.empty(numel // 2 + 1, dtype=torch.int32, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCodec(BlockCodec, ChunkedCodec):
    """Entries of a small table, with one scale per block."""

    table: ClassVar[tuple[float, ...]]
    """What each code stands for, in scales; 2 or 16 entries."""
    scales: ClassVar[ScaleFormat]

    max_block: ClassVar[int] = 1 << 14
    """torch splits the sum of a single row among threads from 2**15 elements on: then the bytes would depend on them."""

    @abstractmethod
    def _size(self, x: Tensor, scratch: Scratch) -> Tensor:
        """The size [b] of the blocks `x` [b, r], for their scales."""

    @abstractmethod
    def _pack(self, x: Tensor, scales: Tensor, scratch: Scratch) -> Tensor:
        """The codes of the blocks `x` [b, r] with scales [b], packed; bits that are left over are those of a zero."""

    def _max_body(self, numel: int) -> int:
        return self._codes_at(numel) + -(-numel // codes_per_byte(self.table))

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite, or too large for a scale."""
        codec.check_vector(x, "x")
        x = x.detach()
        numel, per_byte = x.numel(), codes_per_byte(self.table)
        unit = self.scales.unit(x)
        view, memory = wire.allocate(self.max_nbytes(numel), out=out, pinned=x.is_cuda)
        codes = memory[wire.HEADER_NBYTES + self._codes_at(numel) :]
        # On a GPU all of this is queued on one stream: copies out of scratch run before it is reused.
        stored = torch.empty(self._num_blocks(numel), dtype=self.scales.dtype, pin_memory=x.is_cuda)
        scratch = Scratch(min(numel, codec.chunk_numel(self.block, cuda=x.is_cuda)), x.device)

        def encode_blocks(start: int, stop: int, length: int) -> None:
            blocks = x[start:stop].view(-1, length)
            scales = torch.empty(len(blocks), dtype=stored.dtype, device=x.device)
            self.scales.store(self._size(blocks, scratch), unit, scales)
            packed = self._pack(blocks, self.scales.load(scales, unit), scratch)
            stored[start // self.block :][: len(scales)].copy_(scales, non_blocking=x.is_cuda)
            codes[start // per_byte :][: len(packed)].copy_(packed, non_blocking=x.is_cuda)

        whole = numel - numel % self.block
        for start, stop in codec.chunks(whole, self.block, cuda=x.is_cuda):
            encode_blocks(start, stop, self.block)
        if whole < numel:
            encode_blocks(whole, numel, numel - whole)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        if not self.scales.is_valid(stored, unit):
            raise CodecError("cannot encode: an element is not finite, or too large for a scale")
        body = view[wire.HEADER_NBYTES :]
        if self.scales.has_unit:
            _UNIT.pack_into(body, 0, unit)
        body[self._scales_at : self._codes_at(numel)] = wire.tensor_bytes(stored)
        wire.seal(view, self, numel)
        return view

    def _open(self, payload: Payload, numel: int) -> ChunkReader:
        body = wire.unseal_exactly(payload, self, numel)
        block = self.block
        unit: float = _UNIT.unpack_from(body)[0] if self.scales.has_unit else 1.0
        stored = torch.empty(self._num_blocks(numel), dtype=self.scales.dtype)
        wire.copy_bytes(body, self._scales_at, stored)
        if not self.scales.is_valid(stored, unit):
            raise CodecError("a scale is negative, subnormal, too large or not finite")
        scales = self.scales.load(stored, unit)
        codes = np.asarray(body[self._codes_at(numel) :])
        values = values_of_bytes(self.table)

        def read(start: int, stop: int, out: Tensor) -> None:
            look_up(codes, values, start, out)
            whole = (stop - start) // block * block
            first = start // block
            out[:whole].view(-1, block).mul_(scales[first : first + whole // block, None])
            if whole < stop - start:
                out[whole:].mul_(scales[-1])

        return read

    @property
    def _scales_at(self) -> int:
        return _UNIT.size if self.scales.has_unit else 0

    def _codes_at(self, numel: int) -> int:
        return self._scales_at + self._num_blocks(numel) * self.scales.dtype.itemsize


def codes_per_byte(table: tuple[float, ...]) -> int:
    """8, 4 or 2 for tables of 2, 4 or 16 entries."""
    return 8 // (len(table) - 1).bit_length()


def values_of_bytes(table: tuple[float, ...]) -> NDArray[np.float32]:
    """[256, k] fp32: the values of the k codes that each byte holds."""
    bits = 8 // codes_per_byte(table)
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & len(table) - 1
    values: NDArray[np.float32] = np.array(table, dtype=np.float32)[codes]
    return values


def look_up(codes: NDArray[np.uint8], values: NDArray[np.float32], start: int, out: Tensor) -> None:
    """Fill `out` with the values of the packed `codes` from the one of number `start`, the first of its byte.

    `values` [256, k] are those of each byte.
    """
    per_byte = values.shape[1]
    target: NDArray[np.float32] = out.numpy()
    whole = len(target) // per_byte
    source = codes[start // per_byte :]
    # mode="clip" writes into `out` directly; the default would fill a buffer and copy it.
    np.take(values, source[:whole], axis=0, out=target[: whole * per_byte].reshape(whole, per_byte), mode="clip")
    rest = len(target) - whole * per_byte
    if rest:
        target[-rest:] = values[source[whole], :rest]
