"""The trellis codec: 0.05 to 4 bits per element at half the distance from the bound that scalar quantisers with entropy coding have.

For each element, with r the root mean square of the vector: the level that lies on the cheapest path through a trellis of
quantisers with the step D = step * r (`paths`), and its sign. decoded = sign * mean of |x| over all elements that have the
same quantiser and level; 0 for level 0; x itself for level LEVELS. The parameter is not the step but the bits per
element that Gaussian data takes; the step follows (`STEPS`). Levels are coded by adaptive decisions (`lanes`).

Measured beside `deadzone`, on Gaussian data, and on a pseudo-gradient (0.7 M elements between two norms, Muon, H = 30); R(D)
is the Gaussian bound:

    trellis(bits=)       0.14    0.36    0.72    0.85    2.0     4.0
    Gaussian, bits       0.133   0.357   0.722   0.851   1.99    4.01
      NMSE               .882    .701    .449    .375    .0755   .00444
      bits above R(D)    0.042   0.101   0.144   0.144   0.128   0.103
      deadzone: above    0.047   0.117   0.206   0.228   0.259   0.266
    gradient, bits       0.218   0.314   0.535   0.689   1.95    3.98
      NMSE               .750    .671    .518    .430    .0766   .00446
      bits above R(D)    0.011   0.025   0.060   0.080   0.095   0.072
      deadzone: above    0.024   0.059   0.121   0.144   0.230   0.235

So 0.05 to 0.16 bits less for the same error, from 0.7 bits on. At 0.85 bits one core (AVX2) takes some 25 ns for an element to encode and 9 to decode and
add, 40 and 20 times as long as `deadzone`: a second for 40 million parameters, against minutes of training between rounds. Without kernels NumPy takes
a hundred times as long, and more where a vector has few sections.

Why these choices:
- One step and one set of prices for the whole vector, though parts of it may be weaker: chances of the coder follow
  these, and reverse water-filling asks for one step. Prices for each 4096 elements are worth 0.001 to 0.006 bits and a second search.
- At least the largest element of any vector is sent: then error feedback sends everything in the end.
- Level LEVELS is exact: the heaviest tail costs 32 bits per outlier, and takes nothing from the rest.

Body: lengths of the sections u32[ceil(n / section)]; the sections; means fp32[2, highest level below LEVELS]. A section is
`section` elements, or what is left of them, and stands alone: its highest level p u8, plus 128 if answers are plain; and unless p is 0,
ones, elements above level 0, u32; only if p is LEVELS, those of that level u32; unless plain, shares u16[p + 1]; stream; signs, a
bit for each one; exact values fp32. Whatever the bytes are then, they decode to finite numbers.

C and NumPy give the same bytes. Vectors on a GPU are encoded on the CPU, a section at a time.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import codec, lanes, paths, vectors, wire
from farflung.compression.bitmaps import Bytes
from farflung.compression.codec import CodecError
from farflung.compression.lanes import Model
from farflung.compression.paths import LANES, LEVEL, LEVELS
from farflung.compression.planes import Floats
from farflung.compression.rate import RateCodec

STEPS = (
    (4.0715, 0.125), (3.9009, 0.14), (3.7298, 0.16), (3.4164, 0.2), (3.0968, 0.25), (2.7339, 0.32), (2.4034, 0.4), (2.0603, 0.5),
    (1.7817, 0.6), (1.546, 0.7), (1.3647, 0.8), (1.1894, 0.9), (1.0472, 1.0), (0.9286, 1.1), (0.8044, 1.2), (0.7247, 1.25),
    (0.6318, 1.3), (0.5194, 1.35), (0.3945, 1.4), (0.2539, 1.45), (0.1367, 1.5), (0.0505, 1.55), (0.0097, 1.6),
)  # fmt: skip
"""Bits of 2**20 Gaussian elements, and the step: measured with this code."""

_PLAIN = 128
_SAMPLE = 16, 1024  # pieces that prices are fitted to, and their elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Trellis(RateCodec["_Section"]):
    """Quantised along a trellis, then entropy coded, for a rate of 0.05 to 4 bits an element: a tenth fewer than `deadzone` for the same error, some thirty times slower."""

    name: ClassVar[str] = "trellis"
    codec_id: ClassVar[int] = 21
    version: ClassVar[int] = 1
    section: ClassVar[int] = 1 << 17
    levels: ClassVar[int] = LEVELS
    mean_rows: ClassVar[int] = 2

    @property
    def step(self) -> float:
        """D for a vector whose root mean square is 1."""
        return _step(self.bits)

    def _max_body(self, numel: int) -> int:
        """Of all payloads. A plain section has a bit for each element and each level of it, and one for each sign.

        A level is at most (|x| / D + 4) / 2, for the nearest of each parity are; the mean of |x| is at most r; and the share
        of level LEVELS at most the square of r over what lies below it.
        """
        strength = 1 / self.step
        bits = 2 + (strength + 4) / 2 + 32 * min((strength / (2 * LEVELS - 4)) ** 2, 1.0)
        per_section = 4 + 1 + 8 + 2 * (LEVELS + 1) + lanes.STATES_NBYTES + 2 * LANES + 2
        return 8 * LEVELS + -(-numel // Trellis.section) * per_section + math.ceil(bits * numel / 8)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`: `bits` per element, and the fixed parts of sections. Real pseudo-gradients take less,
        above 0.3 bits (see the module). Raises ValueError.
        """
        per_section = 4 + 1 + 4 + 2 * 3 + lanes.STATES_NBYTES
        expected = wire.HEADER_NBYTES + -(-numel // Trellis.section) * per_section + math.ceil(self.bits * numel / 8)
        return min(expected, self.max_nbytes(numel))

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite, or D is above 2**127."""
        codec.check_vector(x, "x")
        x = x.detach()
        view, _ = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        step = vectors.step_of(vectors.sums_of_squares(x), x.numel(), self.step)
        end, counts, sums = _write_sections(view, x, step)
        if step and not counts[:, 1:].any():
            end, counts, sums = _write_sections(view, x, step, only=_largest(x))
        means = _means(counts, sums)
        view = view[: end + means.nbytes]
        view[end:] = means.tobytes()
        wire.seal(view, self, x.numel())
        return view

    @staticmethod
    def _parse(data: Bytes, numel: int, num_means: int) -> "_Section":
        return _Section.read(data, numel, num_means)

    @staticmethod
    def _read(sections: Sequence["_Section"], means: Floats, weight: float, out: Tensor, *, add: bool) -> None:
        values = np.zeros((2, 128), np.float32)
        values[:, 1 : means.shape[1] + 1] = means
        with np.errstate(over="ignore"):
            values *= np.float32(weight)
        target = out.detach().numpy()
        at_a_time = lanes.groups_at_a_time()
        for first in range(0, len(sections), at_a_time):
            batch = sections[first : first + at_a_time]
            cells = [np.zeros(section.numel, np.uint8) for section in batch]
            lanes.decode([(one.stream, one.model, own) for one, own in zip(batch, cells, strict=True) if one.model])
            for number, (section, own) in enumerate(zip(batch, cells, strict=True), first):
                part = target[number * Trellis.section :][: section.numel]
                exact = section.exact.copy().view("<f4")
                paths.expand(own, section.signs, exact, values.reshape(-1), weight, part, add=add)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """Where things are in a payload."""

    numel: int
    model: Model | None
    """None where all are 0."""
    stream: Bytes
    signs: Bytes
    exact: Bytes

    @classmethod
    def read(cls, data: Bytes, numel: int, num_means: int) -> "_Section":
        """Raises CodecError unless the lengths fit."""
        planes, plain = (int(data[0]) & ~_PLAIN, int(data[0]) & _PLAIN) if len(data) else (LEVELS + 1, 0)
        if planes > LEVELS or min(planes, LEVELS - 1) > num_means:
            raise CodecError(f"section of {len(data)} bytes, highest level {planes} and {num_means} means")
        if planes == 0:
            if plain or len(data) != 1:
                raise CodecError(f"section of {len(data)} bytes of which none is needed")
            return cls(numel=numel, model=None, stream=data[1:], signs=data[1:], exact=data[1:])
        counts = 9 if planes == LEVELS else 5
        start = counts + (0 if plain else 2 * (planes + 1))
        if len(data) < start:
            raise CodecError(f"section of {len(data)} bytes")
        ones, *num_exact = data[1:counts].copy().view("<u4").tolist()
        exact = len(data) - 4 * sum(num_exact)
        signs = exact - -(-ones // 8)
        if not 0 < ones <= numel or sum(num_exact) > ones or signs - start < lanes.STATES_NBYTES:
            raise CodecError(f"section of {len(data)} bytes is too short for {ones} ones")
        model = Model.plain(planes) if plain else Model(shares=data[counts:start].copy().view("<u2"), adapts=True)
        if not model.is_possible:
            raise CodecError("a share is out of range")
        vectors.check_normal(data[exact:].copy().view("<f4"), or_zero=False)
        return cls(numel=numel, model=model, stream=data[start:signs], signs=data[signs:exact], exact=data[exact:])


@cache
def _step(bits: float) -> float:
    """The step at which Gaussian data takes `bits`."""
    known, steps = np.array(STEPS)[::-1].T
    return float(np.interp(bits, known, steps))


def _largest(x: Tensor) -> int:
    """Where the largest element is."""
    places = [(float(np.abs(part).max()), int(np.abs(part).argmax())) for part in vectors.parts(x, Trellis.section)]
    number = max(range(len(places)), key=lambda n: places[n][0])
    return number * Trellis.section + places[number][1]


def _sample(x: Tensor) -> Floats:
    """Some of its elements, which prices are fitted to."""
    count, length = _SAMPLE
    if x.numel() <= count * length:
        return x.cpu().numpy()
    starts = np.linspace(0, x.numel() - length, count).astype(int).tolist()
    return torch.cat([x[start : start + length] for start in starts]).cpu().numpy()


def _write_sections(
    view: memoryview,
    x: Tensor,
    step: float,  # D, or 0 if the vector counts as zero
    *,
    only: int | None = None,  # the element that has level 1, and all others level 0
) -> tuple[int, NDArray[np.int64], NDArray[np.float64]]:
    """Write the lengths and the sections of a body. Returns where they end, and how many elements have each quantiser and level, and the sums of their
    magnitudes: [2, LEVELS + 1].
    """
    lengths = np.zeros(-(-x.numel() // Trellis.section), "<u4")
    counts, sums = np.zeros((2, LEVELS + 1), np.int64), np.zeros((2, LEVELS + 1))
    end = wire.HEADER_NBYTES + lengths.nbytes
    inverse = 1 / step if step else 0.0
    prices = paths.fit(_sample(x), inverse) if step and only is None else None
    number, together = 0, lanes.groups_at_a_time() * Trellis.section
    for part in vectors.parts(x, together):
        if prices is not None:
            cells = paths.search(part, inverse, prices)
        else:
            cells = paths.single(len(part), None if only is None else only - number * Trellis.section)
        starts = range(0, len(part), Trellis.section)
        pieces = [(cells[at : at + Trellis.section], part[at : at + Trellis.section]) for at in starts]
        found = [paths.sums(*piece) for piece in pieces]
        models = [Model.of(own) if own[:, 1:].any() else None for own, _ in found]
        streams = iter(lanes.encode([(own, m) for (own, _), m in zip(pieces, models, strict=True) if m]))
        for piece, (own, magnitudes), model in zip(pieces, found, models, strict=True):
            counts += own
            sums += magnitudes
            section = _section(*piece, own, model, next(streams)) if model else bytes(1)
            view[end : end + len(section)] = section
            end += len(section)
            lengths[number] = len(section)
            number += 1
    view[wire.HEADER_NBYTES :][: lengths.nbytes] = lengths.tobytes()
    return end, counts, sums


def _section(cells: Bytes, part: Floats, counts: NDArray[np.int64], model: Model, stream: Bytes) -> bytes:
    """The bytes of one that is not all 0."""
    levels = cells & LEVEL
    above = np.flatnonzero(levels)
    plain = len(stream) + 2 * (model.planes + 1) > lanes.plain_nbytes(counts)
    if plain:
        [stream] = lanes.encode([(cells, Model.plain(model.planes))])
    exact = part[levels == LEVELS].astype("<f4")
    head = struct.pack("<BI", model.planes | (_PLAIN if plain else 0), len(above))
    if model.planes == LEVELS:
        head += struct.pack("<I", len(exact))
    if not plain:
        head += model.shares.astype("<u2").tobytes()
    signs = np.packbits(np.signbit(part[above]), bitorder="little")
    return b"".join((head, stream.tobytes(), signs.tobytes(), exact.tobytes()))


def _means(counts: NDArray[np.int64], sums: NDArray[np.float64]) -> Floats:
    """Of |x|, for each quantiser and each level in use below LEVELS; 0 where one has no elements."""
    used = int(np.max(np.nonzero(counts.sum(0)[1:LEVELS])[0] + 1, initial=0))
    if counts[:, LEVELS].any():
        used = LEVELS - 1
    means = sums[:, 1 : used + 1] / np.maximum(counts[:, 1 : used + 1], 1)
    means[means < vectors.MIN_STEP] = 0.0  # elements far below the step, at level 1 for their path's sake
    return np.minimum(means, np.finfo(np.float32).max).astype("<f4")
