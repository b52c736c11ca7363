"""Raw little-endian fp32: 4 bytes per element, exact. The reference, and for vectors too small to matter.

Values that are not finite are refused on both sides: one peer's NaN would otherwise become everybody's mean.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.base import ChunkedCodec
from farflung.compression.codec import ChunkReader, CodecError, Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32(ChunkedCodec):
    """Exact: 4 bytes an element."""

    name: ClassVar[str] = "fp32"
    codec_id: ClassVar[int] = 1
    version: ClassVar[int] = 1

    @property
    def block(self) -> int:
        """Elements are independent."""
        return 1

    def _max_body(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite."""
        codec.check_vector(x, "x")
        view, memory = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        body = memory[wire.HEADER_NBYTES :]
        body.copy_(x.detach().view(torch.uint8), non_blocking=x.is_cuda)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        _check_finite(view[wire.HEADER_NBYTES :], x.numel())
        wire.seal(view, self, x.numel())
        return view

    def _open(self, payload: Payload, numel: int) -> ChunkReader:
        body = wire.unseal_exactly(payload, self, numel)
        _check_finite(body, numel)

        def read(start: int, stop: int, out: Tensor) -> None:
            wire.copy_bytes(body, 4 * start, out)

        return read


def _check_finite(body: memoryview, numel: int) -> None:
    scratch = torch.empty(min(numel, codec.CPU_CHUNK), dtype=torch.float32)
    for start, stop in codec.chunks(numel, 1):
        part = scratch[: stop - start]
        wire.copy_bytes(body, 4 * start, part)
        low, high = torch.aminmax(part)  # both are NaN when any element is
        if not (torch.isfinite(low) & torch.isfinite(high)):
            raise CodecError(f"elements {start} to {stop - 1} are not all finite")
