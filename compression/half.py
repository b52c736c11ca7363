"""Two bytes per element: bf16 and fp16, rounded to nearest even (digest, sections 1.1 and 3.3).

bf16 has the range of fp32 and 8 significant bits: NMSE 2.8e-6 at any magnitude. fp16 has 11 bits, NMSE 4e-8,
where elements are above 6e-5; below that they become subnormal, and zero below 3e-8. Magnitudes that would round to
infinity, for fp16 those from 65520 on, are refused and not clamped: they come from a run that has diverged, and a clamp
would hide that.

Body: bf16[n] or fp16[n].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.base import ChunkedCodec
from farflung.compression.codec import ChunkReader, CodecError, Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class _Half(ChunkedCodec):
    """Elements converted to a dtype of 16 bits."""

    version: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype]
    infinity: ClassVar[int]
    """The bits of +Inf, the least of those that are not finite."""

    @property
    def block(self) -> int:
        """Elements are independent."""
        return 1

    def _max_body(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite, or rounds to infinity."""
        codec.check_vector(x, "x")
        x = x.detach()
        numel = x.numel()
        view, memory = wire.allocate(self.max_nbytes(numel), out=out, pinned=x.is_cuda)
        body = memory[wire.HEADER_NBYTES :]
        scratch = torch.empty(min(numel, codec.chunk_numel(1, cuda=x.is_cuda)), dtype=self.dtype, device=x.device)
        for start, stop in codec.chunks(numel, 1, cuda=x.is_cuda):
            part = scratch[: stop - start].copy_(x[start:stop])
            body[2 * start : 2 * stop].copy_(part.view(torch.uint8), non_blocking=x.is_cuda)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        self._check_finite(view[wire.HEADER_NBYTES :], numel)
        wire.seal(view, self, numel)
        return view

    def _open(self, payload: Payload, numel: int) -> ChunkReader:
        body = wire.unseal_exactly(payload, self, numel)
        self._check_finite(body, numel)
        scratch = torch.empty(min(numel, codec.chunk_numel(1, cuda=False)), dtype=self.dtype)

        def read(start: int, stop: int, out: Tensor) -> None:
            part = scratch[: stop - start]
            wire.copy_bytes(body, 2 * start, part)
            out.copy_(part)

        return read

    def _check_finite(self, body: memoryview, numel: int) -> None:
        bits = torch.empty(min(numel, codec.CPU_CHUNK), dtype=torch.int16)
        for start, stop in codec.chunks(numel, 1):
            part = bits[: stop - start]
            wire.copy_bytes(body, 2 * start, part)
            if part.bitwise_and_(0x7FFF).max() >= self.infinity:
                raise CodecError(f"elements {start} to {stop - 1} are not all finite in {self.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16(_Half):
    """bfloat16: 2 bytes an element."""

    name = "bf16"
    codec_id = 4
    dtype = torch.bfloat16
    infinity = 0x7F80


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16(_Half):
    """IEEE half precision: 2 bytes an element."""

    name = "fp16"
    codec_id = 5
    dtype = torch.float16
    infinity = 0x7C00
