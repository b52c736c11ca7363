"""A mean that is not reduced: the contributions that it is made of, as they were coded, and what they weigh.

    mean = 0;  for each contribution, in their order:  mean <- mean + fp32(weight * decoded)

A mean that is coded once more loses what its codec leaves out, and nobody makes up for it. Its contributions lose nothing, and are not even longer where nobody has to hear
more than one: two members, of whom each has sent one itself, so that only the other's travels (`without`, `put_back`), or any number of members and one contribution.

    header      32 bytes, as in front of every encoded vector (`wire`); param: how many contributions
    entries     weight f64 | bytes u64, little-endian, of each
    payloads    of the contributions, one after another
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.compression import wire
from farflung.compression.aggregate import Contribution, accumulate
from farflung.compression.codec import CodecError, Payload, VectorCodec, check_target
from farflung.compression.policy import FlatCodec

CODEC_ID = 20
"""Of the same numbers as those of `registry`."""
VERSION = 1

MOST = 2
"""Contributions: of three, somebody lacks two at least."""

_ENTRY = struct.Struct("<dQ")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class MeanCodec:
    """Of the mean of a part, coded once more or unreduced: as its header says."""

    up: VectorCodec
    """Of contributions."""
    down: VectorCodec
    """Of means that are coded once more."""

    def leaves_unreduced(self, lacked: int, numel: int) -> bool:
        """Whether a mean is better left as it is, where nobody lacks more than so many of its contributions: nobody has to hear more then, and it is exact."""
        return lacked <= 1 and self.up.expected_nbytes(numel) <= self.down.expected_nbytes(numel)

    def max_nbytes(self, numel: int) -> int:
        """See `Codec.max_nbytes`."""
        unreduced = wire.HEADER_NBYTES + MOST * (_ENTRY.size + self.up.max_nbytes(numel))
        return max(self.down.max_nbytes(numel), unreduced)

    def check(self, payload: Payload, numel: int) -> None:
        """See `Codec.check`."""
        if not is_unreduced(payload):
            self.down.check(payload, numel)
            return
        for contribution, _ in _split(payload, numel):
            self.up.check(contribution, numel)

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        if not is_unreduced(payload):
            return self.down.decode(payload, numel, out=out)
        self.check(payload, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        check_target(out, numel, "out")
        accumulate(numel, _split(payload, numel), self.up, out=out)
        return out.clamp_(-_LARGEST, _LARGEST)  # two finite numbers may add up to one that is not


@dataclass(frozen=True, slots=True)
class MeanPolicy:
    """Of means of slices of one flat vector, as a `FlatCodec` is of vectors."""

    up: FlatCodec
    down: FlatCodec

    def part(self, start: int, stop: int) -> MeanCodec:
        """What encodes the mean of the slice [start, stop). Raises ValueError when there is no such slice."""
        return MeanCodec(self.up.part(start, stop), self.down.part(start, stop))

    def kept_nbytes(self) -> int:
        """Bytes in which a mean of the whole vector is expected to be kept at most, whoever contributes."""
        return max(MOST * self.up.expected_nbytes(), self.down.expected_nbytes())


def pack(numel: int, contributions: Sequence[Contribution]) -> memoryview:
    """The unreduced mean of at most `MOST` contributions of `numel` elements, whose weights are from 0 to 1. Raises ValueError for others."""
    if not 0 < len(contributions) <= MOST or not all(_is_weight(weight) for _, weight in contributions):
        raise ValueError(f"{len(contributions)} contributions of {[weight for _, weight in contributions]}")
    entries = b"".join(_ENTRY.pack(weight, len(payload)) for payload, weight in contributions)
    body = b"".join([entries, *(payload for payload, _ in contributions)])
    header = wire.Header(
        codec_id=CODEC_ID, codec_version=VERSION, numel=numel, param=len(contributions), body_nbytes=len(body)
    )
    return memoryview(header.write() + body)


def is_unreduced(payload: Payload) -> bool:
    """By its header. Raises CodecError when it has none."""
    return wire.Header.read(payload).codec_id == CODEC_ID


def num_decoded(payload: Payload) -> int:
    """Vectors that are decoded for a mean, reduced or not. Raises CodecError."""
    header = wire.Header.read(payload)
    return header.param if header.codec_id == CODEC_ID else 1


def without(payload: Payload, index: int) -> memoryview:
    """An unreduced mean for whoever has that contribution: all but its bytes."""
    start, stop = _bounds(payload)[index]
    view = wire.as_bytes(payload)
    return memoryview(b"".join((view[:start], view[stop:])))


def heard_nbytes(payload: Payload, index: int | None) -> int:
    """Bytes of a mean, reduced or not, that somebody had to be sent whose contribution is number `index` of it; None: who has none in it. Raises CodecError."""
    if index is None or not is_unreduced(payload):
        return len(payload)
    return len(payload) - sum(stop - start for start, stop in _bounds(payload)[index : index + 1])


def put_back(rest: Payload, index: int, contribution: Payload) -> memoryview:
    """The whole mean from what `without` left of it. Raises CodecError when it is not that contribution which it lacks."""
    bounds = _bounds(rest)
    if index >= len(bounds):
        raise CodecError(f"an unreduced mean of {len(bounds)} contributions that lacks number {index}")
    start, stop = bounds[index]
    view = wire.as_bytes(rest)
    if stop - start != len(contribution) or len(view) != bounds[-1][1] - len(contribution):
        raise CodecError(f"an unreduced mean of {len(view)} bytes lacks {stop - start}, not {len(contribution)}")
    return memoryview(b"".join((view[:start], contribution, view[start:])))


def _bounds(payload: Payload) -> list[tuple[int, int]]:
    """Where in the whole payload each contribution lies. Raises CodecError."""
    header, view = wire.Header.read(payload), wire.as_bytes(payload)
    if (header.codec_id, header.codec_version) != (CODEC_ID, VERSION) or not 0 < header.param <= MOST:
        raise CodecError(f"no unreduced mean: codec {header.codec_id}.{header.codec_version}, {header.param} entries")
    end = wire.HEADER_NBYTES + header.param * _ENTRY.size
    if len(view) < end:
        raise CodecError(f"an unreduced mean of {len(view)} bytes ends before its {header.param} entries do")
    bounds = []
    for _, nbytes in _ENTRY.iter_unpack(view[wire.HEADER_NBYTES : end]):
        bounds.append((end, end + nbytes))
        end += nbytes
    if end != wire.HEADER_NBYTES + header.body_nbytes:
        raise CodecError(f"an unreduced mean of {header.body_nbytes} bytes, its contributions end at {end}")
    return bounds


def _split(payload: Payload, numel: int) -> list[Contribution]:
    """The contributions. Raises CodecError."""
    bounds, view = _bounds(payload), wire.as_bytes(payload)
    if wire.Header.read(payload).numel != numel or len(view) != bounds[-1][1]:
        raise CodecError(f"an unreduced mean of {len(view)} bytes is damaged, or not of {numel} elements")
    entries = view[wire.HEADER_NBYTES : bounds[0][0]]
    weights = [weight for weight, _ in _ENTRY.iter_unpack(entries)]
    if not all(map(_is_weight, weights)):
        raise CodecError(f"contributions of an unreduced mean weigh {weights}")
    return [(view[start:stop], weight) for (start, stop), weight in zip(bounds, weights, strict=True)]


def _is_weight(weight: float) -> bool:
    return math.isfinite(weight) and 0.0 <= weight <= 1.0
