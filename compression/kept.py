"""The largest elements of every chunk as signs, magnitudes and positions: what sparse payloads consist of.

Chunks are equally long; from each its k largest magnitudes are kept (fewer where fewer are not zero; the lower
position wins a tie). Every chunk has a bf16 scale, and a kept value decodes to fp32(q) * fp32(scale), q an integer:

| bits | q                    | scale          | a chunk besides    |
|------|----------------------|----------------|--------------------|
| 1    | +-1                  | mean |kept|    |                    |
| 2    | +-low or +-127       | upper / 127    | low: u8, 1 to 127  |
| 8    | +-1 to +-127         | max |kept|/127 |                    |

With 2 bits `upper` and `low` (in units of the scale) are the means of |kept| above and up to the chunk's mean.
At 1.6 % density the precision of the values hardly matters, more positions do (compression digest, section 1.3).

Selection: torch.topk over 4096 elements takes 16 times as long as copying them. Instead the elements are folded to
maxima of groups; the k-th largest maximum is a threshold that at least k elements reach and, with 16 elements to a
group and k = 64, only 73 of 4096 do; among these few the quota is exact. That takes 6 times as long as copying.

Magnitudes from 2**-90 to 2**90 are coded; smaller ones count as zero, larger ones are refused. So scales are never
subnormal, nor is anything that a transform of a chunk makes of them, and nothing overflows.

Layout: positions (`positions.encode`), scales bf16[chunks], low u8[chunks] (2 bits only); then bit planes of ceil(m / 8)
bytes for m kept values, signs (1 is negative) and with 2 bits also levels (1 is upper); or, with 8 bits, q int8[m].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farflung.compression import positions, wire
from farflung.compression.codec import CodecError
from farflung.compression.positions import Positions

BITS = (1, 2, 8)
"""Bits per kept value."""
MAX_MAGNITUDE = 2.0**90
MIN_MAGNITUDE = 2.0**-90
_MAX_SCALE_BITS, _MIN_SCALE_BITS = 0x6C80, 0x1280  # the same as bf16
_MAX_CODE = 127
_MAX_FOLD = 32

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kept:
    """m kept elements of a vector in chunks."""

    chunk: int
    """Elements of a chunk."""
    positions: Positions
    """int64 [m], sorted."""
    codes: npt.NDArray[np.int8]
    """q, int8 [m]."""
    scales: Values
    """fp32 [chunks]."""

    def values(self) -> Values:
        """fp32 [m]: one rounding each."""
        return self.codes.astype(np.float32) * self.scales[self.positions // self.chunk]


def check_bits(bits: int) -> None:
    """Raise ValueError unless values can be coded at this many bits."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, not {bits}")


def max_nbytes(numel: int, chunk: int, max_count: int, bits: int) -> int:
    """Bytes that at most `max_count` kept elements of `numel` can take."""
    num_chunks = -(-numel // chunk)
    return positions.max_nbytes(numel, max_count) + _side_nbytes(num_chunks, bits) + _codes_nbytes(max_count, bits)


def expected_nbytes(numel: int, chunk: int, count: int, bits: int) -> int:
    """Bytes that `count` kept elements are expected to take, evenly spread over `numel`."""
    num_chunks = -(-numel // chunk)
    return positions.expected_nbytes(numel, count) + _side_nbytes(num_chunks, bits) + _codes_nbytes(count, bits)


def largest(rows: Tensor, k: int, *, at: int) -> tuple[Positions, Values]:
    """The `k` largest magnitudes of each of `rows` [r, chunk], fp32, chunk a power of two and k at most chunk / 4.

    Returns their sorted positions, where the first row starts at position `at`, and the elements there. Raises CodecError
    when an element is not finite or too large.
    """
    chunk = rows.shape[1]
    magnitudes = rows.abs()
    fold = min(_MAX_FOLD, 1 << (chunk // (4 * k)).bit_length() - 1)
    folded = magnitudes.view(len(rows), fold, -1).amax(dim=1)  # strided groups: whole rows of maxima at once
    if not float(folded.amax()) <= MAX_MAGNITUDE:
        raise CodecError(f"an element is not finite, or its magnitude is above {MAX_MAGNITUDE:g}")
    thresholds = folded.topk(k, dim=1, sorted=False).values.amin(dim=1) if rows.is_cuda else _kth(folded, k)
    thresholds.clamp_(min=MIN_MAGNITUDE)
    if rows.is_cuda:
        found = (magnitudes >= thresholds[:, None]).flatten().nonzero().squeeze(1)
        places, values = found.cpu().numpy(), rows.flatten()[found].cpu().numpy()
    else:  # numpy compares and searches 3 times as fast as torch does
        places = np.flatnonzero(magnitudes.numpy() >= thresholds.numpy()[:, None])
        values = rows.numpy().reshape(-1)[places]
    kept = _within_quota(places // chunk, np.abs(values), len(rows), k)
    return places[kept] + at, values[kept]


def quantise(found: Sequence[tuple[Positions, Values]], *, numel: int, chunk: int, bits: int) -> Kept:
    """Code what `largest` found, part after part, in a vector of `numel` elements."""
    at = np.concatenate([np.empty(0, dtype=np.int64), *(positions for positions, _ in found)])
    values = np.concatenate([np.empty(0, dtype=np.float32), *(values for _, values in found)])
    of, num_chunks = at // chunk, -(-numel // chunk)
    magnitudes = np.abs(values)
    if bits == 1:
        scales = _stored(_means(magnitudes, of, num_chunks))
        codes = np.ones(len(at), dtype=np.float32)
    elif bits == 2:
        upper = magnitudes >= _means(magnitudes, of, num_chunks)[of]  # all of them where all are equal
        scales = _stored(_means(magnitudes[upper], of[upper], num_chunks) / _MAX_CODE)
        low = (_means(magnitudes[~upper], of[~upper], num_chunks) / scales.clip(MIN_MAGNITUDE)).clip(1)
        codes = np.where(upper, _MAX_CODE, low.astype(np.float32)[of])
    else:
        scales = _stored(_maxima(magnitudes, of, num_chunks) / _MAX_CODE)
        codes = (magnitudes / scales[of]).clip(1)  # none is zero: encoding again keeps the same elements
    return Kept(chunk, at, np.copysign(np.rint(codes), values).astype(np.int8), scales)


def pack(kept: Kept, bits: int) -> bytes:
    """The body of a payload."""
    scales = torch.empty(len(kept.scales), dtype=torch.bfloat16).copy_(torch.from_numpy(kept.scales))
    parts = [positions.encode(kept.positions), bytes(wire.tensor_bytes(scales))]
    signs, magnitudes = np.signbit(kept.codes), np.abs(kept.codes)
    if bits == 1:
        parts.append(_plane(signs))
    elif bits == 2:
        upper = magnitudes == _MAX_CODE
        low = np.zeros(len(kept.scales), dtype=np.uint8)
        low[kept.positions[~upper] // kept.chunk] = magnitudes[~upper]
        parts += [low.tobytes(), _plane(signs), _plane(upper)]
    else:
        parts.append(kept.codes.tobytes())
    return b"".join(parts)


def unpack(body: memoryview, *, numel: int, chunk: int, max_count: int, bits: int) -> Kept:
    """The kept elements of a body that `pack` made, or CodecError; allocates for `max_count` elements at most."""
    num_chunks = -(-numel // chunk)
    at, rest = positions.decode(body, numel=numel, max_count=max_count)
    if len(rest) != _side_nbytes(num_chunks, bits) + _codes_nbytes(len(at), bits):
        raise CodecError(f"{len(rest)} bytes for {len(at)} values in {num_chunks} chunks")
    stored = torch.empty(num_chunks, dtype=torch.bfloat16)
    wire.copy_bytes(rest, 0, stored)
    scale_bits = stored.view(torch.int16)
    if not bool((((scale_bits >= _MIN_SCALE_BITS) & (scale_bits <= _MAX_SCALE_BITS)) | (scale_bits == 0)).all()):
        raise CodecError("a scale is negative, too small, too large or not finite")
    rest = rest[2 * num_chunks :]
    if bits == 8:
        return Kept(chunk, at, np.frombuffer(rest, dtype=np.int8), stored.float().numpy())
    codes = np.ones(len(at), dtype=np.int8)
    if bits == 2:
        low = np.frombuffer(rest[:num_chunks], dtype=np.int8)
        rest = rest[num_chunks:]
        upper = _read_plane(rest[_plane_nbytes(len(at)) :], len(at))
        codes = np.where(upper, np.int8(_MAX_CODE), low[at // chunk])
    np.negative(codes, out=codes, where=_read_plane(rest, len(at)))
    return Kept(chunk, at, codes, stored.float().numpy())


def _kth(rows: Tensor, k: int) -> Tensor:
    place = rows.shape[1] - k
    return torch.from_numpy(np.partition(rows.numpy(), place, axis=1)[:, place].copy())


def _within_quota(
    row: Positions,  # int64 [m], sorted: the row of each candidate
    magnitudes: Values,  # fp32 [m]
    num_rows: int,
    k: int,
) -> npt.NDArray[np.bool_]:  # [m]: among the k largest of its row, the first ones of those that are equal
    counts = np.bincount(row, minlength=num_rows)
    width = int(counts.max())
    if width <= k:
        return np.ones(len(row), dtype=np.bool_)
    column = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    table = np.full((num_rows, width), -1, dtype=np.float32)
    table[row, column] = magnitudes
    kth = np.partition(table, width - k, axis=1)[:, width - k, None]
    kept = table >= kth
    if np.count_nonzero(kept) > num_rows * k:  # several are the k-th
        above = table > kth
        equal = kept & ~above
        kept = above | (equal & (equal.cumsum(axis=1) <= k - above.sum(axis=1, keepdims=True)))
    quota: npt.NDArray[np.bool_] = kept[row, column]
    return quota


def _means(magnitudes: Values, of: Positions, num_chunks: int) -> npt.NDArray[np.float64]:
    """Mean per chunk, added in order of position: the same for every thread count. Zero for none."""
    counts = np.bincount(of, minlength=num_chunks)
    means: npt.NDArray[np.float64] = np.bincount(of, weights=magnitudes, minlength=num_chunks) / counts.clip(1)
    return means


def _maxima(magnitudes: Values, of: Positions, num_chunks: int) -> npt.NDArray[np.float64]:
    maxima = np.zeros(num_chunks)
    starts = np.flatnonzero(np.diff(of, prepend=-1))
    if len(starts):
        maxima[of[starts]] = np.maximum.reduceat(magnitudes, starts)
    return maxima


def _stored(scales: npt.NDArray[np.float64]) -> Values:
    """Scales as the payload will have them: rounded to bf16, and none between zero and the smallest."""
    rounded: Values = torch.from_numpy(np.where(scales > 0, scales.clip(MIN_MAGNITUDE), 0)).bfloat16().float().numpy()
    return rounded


def _side_nbytes(num_chunks: int, bits: int) -> int:
    return (3 if bits == 2 else 2) * num_chunks


def _codes_nbytes(count: int, bits: int) -> int:
    return count if bits == 8 else bits * _plane_nbytes(count)


def _plane_nbytes(count: int) -> int:
    return -(-count // 8)


def _plane(bits: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def _read_plane(plane: memoryview, count: int) -> npt.NDArray[np.bool_]:
    raw = np.frombuffer(plane, dtype=np.uint8, count=_plane_nbytes(count))
    return np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)
