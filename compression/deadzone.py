"""The dead-zone uniform quantiser with bucket means and entropy coding: 0.05 to 4 bits per element on one curve.

For each element, with r the root mean square of the vector and D = step * r:

    level   = 0 if |x| < t, else 1 + floor((|x| - t) / D), at most LEVELS
    decoded = sign(x) * mean of |x| over all elements of that level; of level 0: 0; of level LEVELS: x itself

The parameter is not the step but the bits per element that Gaussian data takes; the step follows (`_step`). Real
pseudo-gradients are less even and have heavier tails, so they take fewer (compression digest, sections 1.8 and 3.3).
Levels become bit planes (`planes`), and these are coded to half a percent above their entropy (`bitmaps`). Measured on
Gaussian data, and on a pseudo-gradient (3 M parameters, AdamW, H = 30); R(D) is the Gaussian bound:

    deadzone(bits=)      0.14    0.36    0.9     1.0     2.0     3.6     4.0
    Gaussian, bits       0.144   0.365   0.905   1.005   2.003   3.604   4.003
      NMSE               .875    .709    .394    .349    .0892   .00975  .00562
      bits above R(D)    0.048   0.117   0.234   0.245   0.260   0.263   0.265
    gradient, bits       0.215   0.354   0.756   0.849   1.938   3.542   3.942
      NMSE               .734    .626    .396    .356    .0888   .00975  .00561

The digest's packing of levels into bytes for zstd takes, on the same gradient at the same NMSE, 5 % more bits at 1.8,
7 % at 0.8, 20 % at 0.35 and 29 % at 0.21. Speed on one core (AVX2), as a ratio to memcpy of the fp32: at 1 bit encode 0.42
to 0.47 and decode-add 0.55 to 0.61, at 2 bits 0.33 and 0.43; without kernels NumPy takes 35 to 65 times as long.

Why these choices:
- One step for the whole vector but a probability for each 4096 elements: that is what reverse water-filling asks for
  when the variance differs from part to part.
- The threshold t depends on the rms s of the 4096 elements around: t = (1/2 + 0.0075 (D / s)**4) D. It is within
  0.003 bits of the Lagrangian optimum for a Gaussian from 0.2 to 4 bits: to the nearest for fine steps, rarer ones
  where ones cost many bits. Vectors far from Gaussian, of equal magnitudes for example, could lose all at low
  rates; so lower thresholds are tried on a sample, and taken if the Lagrangian is 3 % less.
- At least the largest element of any vector is sent: then error feedback sends everything in the end.
- Level LEVELS is exact: the heaviest tail costs 32 bits per outlier, and takes nothing from the rest.

Body: lengths of the sections u32[ceil(n / section)]; the sections; means fp32[planes in use, below LEVELS]. A section
is `section` elements, or what is left of them, and stands alone: number of planes p u8; ones of each u32[p], never 0;
levels and stream of the planes, as `bitmaps` has it; signs; exact values fp32. All lengths follow from
the ones; whatever the bytes are then, they decode to finite numbers.

C and NumPy give the same bytes. Vectors on a GPU are encoded on the CPU, a section at a time.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import bitmaps, codec, kernels, planes, vectors, wire
from farflung.compression.bitmaps import Bytes
from farflung.compression.codec import CodecError
from farflung.compression.planes import BLOCK, LEVELS, SECTION, UNITS, Floats, Planes
from farflung.compression.rate import RateCodec

_PRICE = math.log(2) / 6  # of a bit in D**2: the slope of the rate-distortion curve for fine steps
_FACTORS = (0.6, 0.4, 0.25)  # of thresholds
_SAMPLE = 2048  # elements that thresholds are tried on
_FALLBACK_SECTIONS = 16  # that NumPy takes at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadZone(RateCodec["_Section"]):
    """Quantised with a wide zero, then entropy coded, for a rate of 0.05 to 4 bits an element."""

    name: ClassVar[str] = "deadzone"
    codec_id: ClassVar[int] = 12
    version: ClassVar[int] = 1
    section: ClassVar[int] = SECTION
    levels: ClassVar[int] = LEVELS

    @property
    def step(self) -> float:
        """D for a vector whose root mean square is 1."""
        return _step(self.bits)

    def _max_body(self, numel: int) -> int:
        """Of all payloads, about 2.5 times that of Gaussian data at 1 bit.

        Integers of mean square s have at most log2(2 pi e (s + 1/12)) / 2 bits, and s is at most (1/step + 7/8)**2.
        Blocks' levels, and odds and slots rounded to whole numbers, take less than another 6 % and 0.03 bits.
        """
        square = (1 / self.step + 7 / 8) ** 2
        bits = 1.06 * 0.5 * math.log2(2 * math.pi * math.e * (square + 1 / 12)) + 0.03
        bits += 32 * min(square / LEVELS**2, 1.0)  # exact values
        per_section = 4 + 1 + (4 + 2) * LEVELS + bitmaps.STATES_NBYTES
        return 4 * LEVELS + -(-numel // DeadZone.section) * per_section + math.ceil(bits * numel / 8)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`: `bits` per element, and the fixed parts of sections. Real pseudo-gradients take less,
        above 0.3 bits (see the module). Raises ValueError.
        """
        sections = -(-numel // DeadZone.section)
        expected = wire.HEADER_NBYTES + sections * (4 + bitmaps.STATES_NBYTES) + math.ceil(self.bits * numel / 8)
        return min(expected, self.max_nbytes(numel))

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite, or D is above 2**127."""
        codec.check_vector(x, "x")
        x = x.detach()
        view, _ = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        size, thresholds = _quantiser(x, self.step)
        end, counts, units = _write_sections(view, x, size, thresholds)
        if size and not counts.any():
            thresholds[:] = max(1, int(float(x.abs().amax()) / size * UNITS) - 1)
            end, counts, units = _write_sections(view, x, size, thresholds)
        means = _means(counts, units, size)
        view = view[: end + means.nbytes]
        view[end:] = means.tobytes()
        wire.seal(view, self, x.numel())
        return view

    @staticmethod
    def _parse(data: Bytes, numel: int, num_means: int) -> "_Section":
        return _Section.read(data, numel, num_means)

    @staticmethod
    def _read(sections: Sequence["_Section"], means: Floats, weight: float, out: Tensor, *, add: bool) -> None:
        values = np.zeros(LEVELS + 1, np.float32)
        values[1 : means.shape[1] + 1] = means[0]
        with np.errstate(over="ignore"):
            values *= np.float32(weight)
        target = out.detach().numpy()
        rooms = _rooms(len(sections))
        for first in range(0, len(sections), max(len(rooms), 1)):
            batch = list(zip(rooms, sections[first : first + len(rooms)], strict=False))
            for room, section in batch:
                room.numel, room.ones = section.numel, section.ones
                room.sign_map()[:] = section.signs
                room.exact_values()[:] = section.exact.copy().view("<f4")
            coded = [(section.levels, section.stream) for _, section in batch if section.ones]
            bitmaps.decode(coded, [room.maps() for room, _ in batch if room.ones])
            for number, (room, section) in enumerate(batch, first):
                part = target[number * DeadZone.section :][: section.numel]
                planes.expand(room, values, weight, part, add=add)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """Where things are in a payload."""

    numel: int
    ones: list[int]
    levels: Bytes
    stream: Bytes
    signs: Bytes
    exact: Bytes

    @classmethod
    def read(cls, data: Bytes, numel: int, num_means: int) -> "_Section":
        """Raises CodecError unless the lengths fit."""
        num_planes = int(data[0]) if len(data) else LEVELS + 1
        start = 1 + 4 * num_planes
        if min(num_planes, LEVELS - 1) > num_means or num_planes > LEVELS or len(data) < start:
            raise CodecError(f"section of {len(data)} bytes, {num_planes} planes and {num_means} means")
        ones = data[1:start].copy().view("<u4").tolist()
        bits = [numel, *ones]
        if any(not 0 < below <= above for above, below in zip(bits, ones, strict=False)):
            raise CodecError(f"planes of {numel} elements cannot have {ones} ones")
        num_levels = sum(bitmaps.num_blocks(-(-count // 8)) for count in bits[:num_planes])
        exact = len(data) - (4 * ones[-1] if num_planes == LEVELS else 0)
        signs = exact - (-(-ones[0] // 8) if ones else 0)
        stream = start + num_levels
        if signs - stream < bitmaps.STATES_NBYTES if ones else len(data) != start:
            raise CodecError(f"section of {len(data)} bytes is too short or too long for {ones} ones")
        if num_levels and data[start:stream].max() >= bitmaps.NUM_LEVELS:
            raise CodecError("a block has an unknown level")
        vectors.check_normal(data[exact:].copy().view("<f4"), or_zero=False)
        return cls(
            numel=numel, ones=ones, levels=data[start:stream], stream=data[stream:signs], signs=data[signs:exact],
            exact=data[exact:],
        )  # fmt: skip


def _quantiser(x: Tensor, step: float) -> tuple[float, NDArray[np.int32]]:
    """D, or 0 if the vector counts as zero, and the threshold of each block in units. Raises CodecError."""
    squares = vectors.sums_of_squares(x)
    size = vectors.step_of(squares, x.numel(), step)
    if not size:
        return 0.0, np.full(len(squares), UNITS, np.int32)
    counts = np.minimum(x.numel() - BLOCK * np.arange(len(squares)), BLOCK)
    strengths = np.sqrt(squares / counts) / size
    thresholds = _threshold(strengths)
    stride = -(-x.numel() // _SAMPLE)
    sample = x[::stride].cpu().numpy().astype(np.float64) / size
    thresholds *= _factor(np.abs(sample), thresholds[np.arange(len(sample)) * stride // BLOCK])
    return size, np.rint(thresholds * UNITS).astype(np.int32)


def _threshold(strengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """t / D for Gaussian parts of rms `strengths` * D; at most 5."""
    return 0.5 + 0.0075 / np.maximum(strengths, 0.2) ** 4


def _factor(magnitudes: NDArray[np.float64], thresholds: NDArray[np.float64]) -> float:
    """What to multiply thresholds by, judged from a sample of magnitudes and their thresholds in units of D."""

    def lagrangian(factor: float) -> float:
        levels = np.clip(magnitudes - factor * thresholds + 1, 0, LEVELS).astype(np.int64)
        shares = np.bincount(levels, minlength=LEVELS + 1) / len(levels)
        means = np.bincount(levels, magnitudes, minlength=LEVELS + 1) / len(levels) / np.where(shares, shares, 1)
        means[0] = 0
        error = np.square(magnitudes - means[levels])[levels < LEVELS].sum() / len(levels)
        entropy = -np.sum(shares * np.log2(np.where(shares, shares, 1)))
        return float(error + _PRICE * (entropy + 1 - shares[0] + 32 * shares[LEVELS]))

    costs = {factor: lagrangian(factor) for factor in _FACTORS}
    best = min(costs, key=costs.__getitem__)
    return best if costs[best] < 0.97 * lagrangian(1.0) else 1.0


@cache
def _step(bits: float) -> float:
    """The step at which Gaussian data takes `bits`, by bisection."""
    low, high = 0.2, 3.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _gaussian_bits(middle) > bits else (low, middle)
    return high


def _gaussian_bits(step: float) -> float:
    """Entropy of levels and signs, and the blocks' levels, per element."""
    threshold = step * float(_threshold(np.array(1 / step)))
    tails = [1.0, *(math.erfc((threshold + step * level) / math.sqrt(2)) for level in range(LEVELS)), 0.0]
    shares = [above - below for above, below in pairwise(tails)]
    entropy = -sum(share * math.log2(share) for share in shares if share > 0)
    return entropy + tails[1] + 32 * tails[LEVELS] + 8 / BLOCK * sum(tails[:LEVELS])


def _rooms(num_sections: int) -> list[Planes]:
    """Room for the sections that are worked on at a time."""
    at_a_time = 1 if kernels.find("planes_quantise") else _FALLBACK_SECTIONS
    return [Planes() for _ in range(min(at_a_time, num_sections))]


def _write_sections(
    view: memoryview, x: Tensor, size: float, thresholds: NDArray[np.int32]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Write the lengths and the sections of a body. Returns where they end, and the elements and units of each level."""
    num_sections = -(-x.numel() // DeadZone.section)
    lengths = np.zeros(num_sections, "<u4")
    counts, units = np.zeros(LEVELS, np.int64), np.zeros(LEVELS, np.int64)
    end = wire.HEADER_NBYTES + lengths.nbytes
    parts, rooms = vectors.parts(x, DeadZone.section), _rooms(num_sections)
    for first in range(0, num_sections, max(len(rooms), 1)):
        batch = rooms[: num_sections - first]
        for number, room in enumerate(batch, first):
            blocks = thresholds[number * (DeadZone.section // BLOCK) :]
            units += planes.quantise(next(parts), UNITS / size if size else 0.0, blocks, room)
            counts += room.counts()
        coded = bitmaps.encode([room.maps() for room in batch])
        for number, (room, (levels, stream)) in enumerate(zip(batch, coded, strict=True), first):
            start = end
            head = struct.pack(f"<B{len(room.ones)}I", len(room.ones), *room.ones)
            body = (levels, stream, room.sign_map(), room.exact_values()) if room.ones else ()
            for piece in (head, *(array.tobytes() for array in body)):
                view[end : end + len(piece)] = piece
                end += len(piece)
            lengths[number] = end - start
    view[wire.HEADER_NBYTES :][: lengths.nbytes] = lengths.tobytes()
    return end, counts, units


def _means(
    counts: NDArray[np.int64],  # [LEVELS]
    units: NDArray[np.int64],  # [LEVELS]
    size: float,
) -> Floats:
    """Of |x|, for each level in use below LEVELS; 0 where a level between has no elements."""
    in_use = min(int(np.max(np.nonzero(counts)[0] + 1, initial=0)), LEVELS - 1)
    means = units[:in_use] / np.maximum(counts[:in_use], 1) * (size / UNITS)
    return np.minimum(means, np.finfo(np.float32).max).astype("<f4")
