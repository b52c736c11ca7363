"""What the blockwise integers, int8 and int4, share: all but how many bits a code has.

For each block: scale = bf16(absmax / largest), q = round_to_even(x / scale), decoded = q * scale, with largest = 127
or 7 (compression digest, section 1.1).

Why these choices:
- bf16 scales: pseudo-gradients are around 1e-4, so their scales would be subnormal in fp16; fp32 doubles
  the overhead and gains nothing. Quantisation uses the *stored* scale. Rounding it moves absmax/scale by at
  most one part in 256, so the largest |q| of a block is always `largest`: no clamp is needed, and encoding a decoded
  vector gives it back exactly.
- scales are zero or normal numbers, never subnormal: then q * scale is never subnormal, and the result does
  not depend on whether a CPU flushes subnormals. Blocks with absmax below largest * 2**-126 decode to zero.
- scales are at most bf16(2**127 / largest): then q * scale is always finite, also for a hostile q of
  -largest - 1, which is never written.

Body: scales bf16[ceil(n / block)], then the codes. All sizes follow from n and block. A last block that is shorter
is laid out like a whole one of its length.

The PyTorch code below is the reference, what GPUs run, and the fallback without a compiler; blockwise.c does the same.

Legend: b = blocks of a piece, w = elements of each.
"""

from abc import abstractmethod
from collections.abc import Iterator
from ctypes import c_float, c_size_t, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.compression import codec, kernels, wire
from farflung.compression.base import BlockCodec
from farflung.compression.codec import ChunkReader, CodecError, Payload

_MIN_SCALE = 2.0**-126  # smallest normal number of bf16, as of fp32
_MIN_SCALE_BITS = 0x0080

# Arguments of the kernels: x, numel, block, scales, codes; and scales, codes, numel, block, ...
_ENCODE = (c_void_p, c_size_t, c_size_t, c_void_p, c_void_p)
_DECODE = (c_void_p, c_void_p, c_size_t, c_size_t, c_void_p)  # out
_DECODE_ADD = (c_void_p, c_void_p, c_size_t, c_size_t, c_float, c_void_p)  # weight, acc


@dataclass(frozen=True, kw_only=True, slots=True)
class Blockwise(BlockCodec):
    """Integers with one bf16 scale per block."""

    largest: ClassVar[int]
    """Largest |q|."""
    max_scale_bits: ClassVar[int]
    """bf16(2**127 / largest)."""
    codes_per_byte: ClassVar[int]

    max_block: ClassVar[int] = 1 << 16
    """A block must fit a chunk (`codec.CPU_CHUNK`)."""

    block: int = 128

    def _max_body(self, numel: int) -> int:
        return 2 * self._num_blocks(numel) + self._num_bytes(numel)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite or above about 2**127."""
        codec.check_vector(x, "x")
        x = x.detach()
        numel = x.numel()
        view, memory = wire.allocate(self.max_nbytes(numel), out=out, pinned=x.is_cuda)
        scales = torch.empty(self._num_blocks(numel), dtype=torch.bfloat16, pin_memory=x.is_cuda)
        codes = memory[wire.HEADER_NBYTES + 2 * len(scales) :]
        native = None if x.is_cuda else kernels.find(f"{self.name}_encode", *_ENCODE)
        if native is None:
            self._encode(x, scales, codes)
        else:
            native(x.data_ptr(), numel, self.block, scales.data_ptr(), codes.data_ptr())
        if not self._scales_are_valid(scales):
            raise CodecError("cannot encode: an element is not finite, or its magnitude is above 2**127")
        view[wire.HEADER_NBYTES : wire.HEADER_NBYTES + 2 * len(scales)] = wire.tensor_bytes(scales)
        wire.seal(view, self, numel)
        return view

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        scales, codes = self._open(payload, numel)
        native = kernels.find(f"{self.name}_decode", *_DECODE)
        if native is None:
            return codec.decode_with(self._reader(scales, codes), numel, self.block, out)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        codec.check_target(out, numel, "out")
        native(scales.data_ptr(), kernels.address(codes), numel, self.block, out.data_ptr())
        return out

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`."""
        numel = acc.numel()
        codec.check_target(acc, numel, "acc")
        scales, codes = self._open(payload, numel)
        native = kernels.find(f"{self.name}_decode_add", *_DECODE_ADD)
        if native is None:
            codec.decode_add_with(self._reader(scales, codes), acc, self.block, weight)
        else:
            native(scales.data_ptr(), kernels.address(codes), numel, self.block, weight, acc.data_ptr())

    @abstractmethod
    def _pack(self, values: Tensor, codes: Tensor) -> None:
        """Integers `values` [b, w] fp32 to `codes` [b, ceil(w / codes_per_byte)] uint8, perhaps on another device.

        May change `values`.
        """

    @abstractmethod
    def _unpack(self, codes: Tensor, out: Tensor) -> None:
        """`codes` [b, ceil(w / codes_per_byte)] uint8 to integers `out` [b, w] fp32."""

    def _num_bytes(self, numel: int) -> int:
        return -(-numel // self.codes_per_byte)

    def _encode(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """`x` [n] to `scales` [blocks] bf16 and `codes` [bytes] uint8. Bad blocks get invalid scales."""
        scratch = _Scratch(
            min(len(x), codec.chunk_numel(self.block, cuda=x.is_cuda)), self.block, self.largest, x.device
        )
        # On a GPU all of this is queued on one stream: copies out of scratch run before it is reused.
        for start, stop in self._pieces(0, len(x), cuda=x.is_cuda):
            rows = x[start:stop].view(-1, min(self.block, stop - start))
            first = start // self.block
            values = self._quantise(rows, scratch, scales[first : first + len(rows)])
            self._pack(values, codes[self._num_bytes(start) : self._num_bytes(stop)].view(len(rows), -1))
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()

    def _quantise(self, x: Tensor, scratch: "_Scratch", scales: Tensor) -> Tensor:
        """`x` [b, w] to `scales` [b] bf16, and to integers [b, w] fp32 in the scratch, which are returned."""
        values = scratch.values[: x.numel()].view(x.shape)
        absmax, stored = scratch.absmax[: len(x)], scratch.scales[: len(x)]
        torch.abs(x, out=values)
        torch.amax(values, dim=1, out=absmax)
        stored.copy_(absmax.div_(scratch.largest))
        absmax.copy_(stored)  # compared in fp32: torch's compare of bf16 takes longer than all the rest
        absmax.mul_(absmax >= _MIN_SCALE)  # NaN stays NaN, so that the check of the scales finds it
        scales.copy_(stored.copy_(absmax), non_blocking=True)
        inverse = absmax.reciprocal_().nan_to_num_(nan=0.0, posinf=0.0)
        return torch.mul(x, inverse[:, None], out=values).round_()

    def _open(self, payload: Payload, numel: int) -> tuple[Tensor, memoryview]:
        """The scales [blocks] bf16, checked, and the bytes of the codes. Raises CodecError."""
        body = wire.unseal_exactly(payload, self, numel)
        scales = torch.empty(self._num_blocks(numel), dtype=torch.bfloat16)
        wire.copy_bytes(body, 0, scales)
        if not self._scales_are_valid(scales):
            raise CodecError("a scale is negative, subnormal, too large or not finite")
        return scales, body[2 * len(scales) :]

    def _scales_are_valid(self, scales: Tensor) -> bool:
        """Zero, or a positive normal number in range. Integer compares, as subnormals may be flushed.

        numpy's: torch's of 16 bit integers take six times as long, a tenth of the whole encoding.
        """
        bits = scales.view(torch.int16).numpy()
        return bool((((bits >= _MIN_SCALE_BITS) & (bits <= self.max_scale_bits)) | (bits == 0)).all())

    def _reader(self, scales: Tensor, codes: memoryview) -> ChunkReader:
        values = scales.float()
        scratch = torch.empty(min(len(codes), codec.chunk_numel(self.block, cuda=False)), dtype=torch.uint8)

        def read(start: int, stop: int, out: Tensor) -> None:
            for first, last in self._pieces(start, stop, cuda=False):
                rows = out[first - start : last - start].view(-1, min(self.block, last - first))
                part = scratch[: self._num_bytes(last) - self._num_bytes(first)]
                wire.copy_bytes(codes, self._num_bytes(first), part)
                self._unpack(part.view(len(rows), -1), rows)
                rows.mul_(values[first // self.block :][: len(rows), None])

        return read

    def _pieces(self, start: int, stop: int, *, cuda: bool) -> Iterator[tuple[int, int]]:
        """(start, stop) of pieces with rows of one length: whole blocks by the chunk, then what is left."""
        whole = stop - (stop - start) % self.block
        for first, last in codec.chunks(whole - start, self.block, cuda=cuda):
            yield start + first, start + last
        if whole < stop:
            yield whole, stop


class _Scratch:
    """Memory that the pieces of one call share."""

    def __init__(self, numel: int, block: int, largest: int, device: torch.device) -> None:
        num_blocks = -(-numel // block)
        self.values = torch.empty(numel, dtype=torch.float32, device=device)
        self.absmax = torch.empty(num_blocks, dtype=torch.float32, device=device)
        self.scales = torch.empty(num_blocks, dtype=torch.bfloat16, device=device)
        # A tensor over there: by a number of the host, CUDA multiplies with the inverse, which rounds differently.
        self.largest = torch.full((), largest, dtype=torch.float32, device=device)


def store(values: Tensor, codes: Tensor) -> None:
    """Convert `values` fp32 to the integers `codes`, perhaps on another device."""
    if codes.device == values.device:
        codes.copy_(values)
    else:  # converted on the GPU: copy_ by itself would carry fp32 to the host
        codes.copy_(values.to(codes.dtype), non_blocking=True)
