"""Two bits per element: four buckets of 1.5 standard deviations, and the mean of each, as in MuLoCo and SparseLoCo.

With the mean m and the standard deviation s of the whole vector (digest, section 1.3):

    code = clamp(round((x - m) / (6 s / 4)) + 2, 0, 3),    decoded = mean of the elements with this code

The buckets are not symmetric: they end at m - 2.25 s, m - 0.75 s and m + 0.75 s, ends included. NMSE on Gaussian data is 0.18 at 2.00 bits, which
the dead-zone quantiser halves; this codec is here to compare with.

Sums are taken in fp32 over rows of 128 elements, and over rows in fp64 and in order: so they do not depend on threads or
chunks. Squares must not overflow: elements above about 1e18 are refused, and those below 1e-19 count as zero.

Body: means fp32[4], then codes, 4 per byte, the first in the low bits.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.base import ChunkedCodec
from farflung.compression.codec import ChunkReader, CodecError, Payload
from farflung.compression.tables import look_up, values_of_bytes

_ROW = 128
_MEANS = struct.Struct("<4f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat2(ChunkedCodec):
    """The 2-bit statistical quantiser: the means of four buckets."""

    name: ClassVar[str] = "stat2"
    codec_id: ClassVar[int] = 10
    version: ClassVar[int] = 1

    @property
    def block(self) -> int:
        """All elements share the means; sums run over rows of this length."""
        return _ROW

    def _max_body(self, numel: int) -> int:
        return _MEANS.size + -(-numel // 4)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite, or above about 1e18."""
        codec.check_vector(x, "x")
        x = x.detach()
        numel = x.numel()
        view, memory = wire.allocate(self.max_nbytes(numel), out=out, pinned=x.is_cuda)
        codes = memory[wire.HEADER_NBYTES + _MEANS.size :]
        origin, step = _origin_and_step(x)
        sums = _write_codes(x, origin, step, codes)
        counts = _count(codes.numpy(), numel)
        means = origin + step * sums / np.maximum(counts, 1)  # an empty bucket's means nothing
        _MEANS.pack_into(view, wire.HEADER_NBYTES, *means)
        wire.seal(view, self, numel)
        return view

    def _open(self, payload: Payload, numel: int) -> ChunkReader:
        body = wire.unseal_exactly(payload, self, numel)
        means = _MEANS.unpack_from(body)
        if not np.isfinite(means).all():
            raise CodecError(f"the means {means} are not all finite")
        codes = np.asarray(body[_MEANS.size :])
        values = values_of_bytes(means)

        def read(start: int, stop: int, out: Tensor) -> None:
            look_up(codes, values, start, out)

        return read


def _origin_and_step(x: Tensor) -> tuple[float, float]:
    """The upper end of bucket 0, which is an fp32, and the width of a bucket. Raises CodecError."""
    sums = _RowSums(2, x)
    scratch = _chunk_of(x, torch.float32)
    for start, stop in codec.chunks(x.numel(), _ROW, cuda=x.is_cuda):
        part = x[start:stop]
        sums.put(0, start, part)
        sums.put(1, start, torch.mul(part, part, out=scratch[: stop - start]))
    mean, mean_square = sums.total() / max(x.numel(), 1)
    if not np.isfinite(mean_square):
        raise CodecError("cannot encode: an element is not finite, or its magnitude is above 1e18")
    step = 6 / 4 * max(mean_square - mean * mean, 0.0) ** 0.5
    return float(np.float32(mean - 1.5 * step)), float(step)


def _write_codes(x: Tensor, origin: float, step: float, codes: Tensor) -> NDArray[np.float64]:
    """Fill `codes`, packed, on the CPU. Returns for each bucket [4] the sum of (x - origin) / step."""
    sums = _RowSums(4, x)
    values, above = _chunk_of(x, torch.float32), _chunk_of(x, torch.float32)
    cells = _chunk_of(x, torch.uint8)
    inverse = 1 / step if step else 0.0
    for start, stop in codec.chunks(x.numel(), _ROW, cuda=x.is_cuda):
        numel = stop - start
        position = torch.sub(x[start:stop], origin, out=values[:numel]).mul_(inverse)
        sums.put(0, start, position)
        for bucket in (1, 2, 3):
            sums.put(bucket, start, torch.threshold(position, bucket - 1.0, 0.0, out=above[:numel]))
        cells[numel : numel + -numel % 4] = 0
        cells[:numel].copy_(position.ceil_().clamp_(0, 3))
        packed = _pack(cells[: numel + -numel % 4])
        codes[start // 4 :][: len(packed)].copy_(packed, non_blocking=x.is_cuda)
    above_lower_end = sums.total()  # this waits for the copies of codes, too
    above_upper_end = np.append(above_lower_end[1:], 0.0)
    in_bucket: NDArray[np.float64] = above_lower_end - above_upper_end
    return in_bucket


def _pack(cells: Tensor) -> Tensor:
    """[4 m] uint8 below 4 to [m] uint8, the first in the low bits."""
    words = cells.view(torch.int32)  # bytes 0 0 0 d, 0 0 0 c, 0 0 0 b, 0 0 0 a
    words = words >> 6 | words
    return (words >> 12 | words).to(torch.uint8)


def _count(codes: NDArray[np.uint8], numel: int) -> NDArray[np.int64]:
    """How often each code [4] occurs among the first `numel`; those behind are 0."""
    histogram = np.bincount(codes, minlength=256)
    in_byte = np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3
    counts = np.array([histogram @ (in_byte == code).sum(axis=1) for code in range(4)])
    counts[0] -= 4 * len(codes) - numel
    return counts


class _RowSums:
    """Sums of several vectors as long as `x`, by rows."""

    def __init__(self, num_vectors: int, x: Tensor) -> None:
        self._rows = torch.empty(num_vectors, -(-x.numel() // _ROW), dtype=torch.float32, device=x.device)

    def put(self, vector: int, start: int, part: Tensor) -> None:
        """Add up the rows of `part`, which starts at element `start`, a multiple of a row."""
        rows = self._rows[vector, start // _ROW :]
        num_whole = len(part) // _ROW
        torch.sum(part[: num_whole * _ROW].view(-1, _ROW), dim=1, out=rows[:num_whole])
        if num_whole * _ROW < len(part):
            rows[num_whole] = part[num_whole * _ROW :].sum()

    def total(self) -> NDArray[np.float64]:
        """The sum of each vector, in fp64."""
        rows = self._rows.cpu().double().numpy()
        with np.errstate(invalid="ignore"):  # NaN is the right sum of Inf and -Inf
            total: NDArray[np.float64] = rows.sum(axis=1)  # in numpy's order: torch's depends on the number of threads
        return total


def _chunk_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    numel = min(x.numel(), codec.chunk_numel(1, cuda=x.is_cuda)) + 3  # 3: to fill up the last byte
    return torch.empty(numel, dtype=dtype, device=x.device)
