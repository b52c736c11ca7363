"""Which tensors go through which codec: norms and biases exact, big matrices coded.

A policy is a list of rules and a default, written shortly enough for a manifest (at most 128 characters of those
that a manifest allows in a codec field):

    int8(block=128)                                everything
    1d:fp32,int4(block=128)                        vectors exact, the rest in 4 bits
    1d:fp32,embed:int8(block=64),int4(block=128)   the first rule that fits decides

A rule is `selector:codec`. The selector `1d`, `2d`, ... means tensors of so many dimensions; any other is searched in
the parameter's name as a regular expression of letters, digits, `_` and `.` (any character). Without repetition
and alternatives, matching is linear, whoever wrote the manifest.

A swarm exchanges slices of one flat vector, not tensors. So a policy is resolved against the tensors of a model, in
their order, to segments of the flat vector; neighbours with the same codec become one segment (a decoder of
L layers with a tied head has 2 L of them under `1d:fp32,...`). A slice is encoded segment by segment, and its payload is the
payloads of its segments, one after another: each says in its header how long it is. That costs 32 bytes a segment, and
nothing where a slice lies in one segment: then the payload is the codec's own, as for a policy without rules.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.compression import codec as codecs
from farflung.compression import wire
from farflung.compression.codec import Codec, CodecError, Payload, VectorCodec
from farflung.compression.registry import MAX_SPEC, parse_codec

_BETWEEN_RULES = re.compile(r",(?![^()]*\))")
"""A comma that is not inside of parentheses."""
_SELECTOR = re.compile(r"[a-z0-9_.]+")
_DIMENSIONS = re.compile(r"([0-9])d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Tensors that fit the selector go through the codec."""

    selector: str
    codec: Codec

    def __post_init__(self) -> None:
        if not _SELECTOR.fullmatch(self.selector):
            raise ValueError(f"a selector is like `1d` or `embed`, of a-z, 0-9, _ and dots, not {self.selector!r}")

    def fits(self, name: str, num_dims: int) -> bool:
        dimensions = _DIMENSIONS.fullmatch(self.selector)
        if dimensions:
            return num_dims == int(dimensions[1])
        return re.search(self.selector, name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Elements [start, stop) of a vector, and their codec."""

    start: int
    stop: int
    codec: Codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Rules in the order in which they are tried, and the codec of what fits none."""

    rules: tuple[Rule, ...] = ()
    default: Codec

    @property
    def spec(self) -> str:
        """Canonical text; `parse_policy` reads it back."""
        return ",".join([f"{rule.selector}:{rule.codec.spec}" for rule in self.rules] + [self.default.spec])

    def resolve(
        self,
        shapes: Iterable[tuple[str, Sequence[int]]],  # name and shape of each tensor, in the order of the flat vector
    ) -> "FlatCodec":
        """The segments of the flat vector of these tensors. Raises ValueError when there is nothing in it."""
        segments: list[Segment] = []
        stop = 0
        for name, shape in shapes:
            codec = next((rule.codec for rule in self.rules if rule.fits(name, len(shape))), self.default)
            start, stop = stop, stop + math.prod(shape)
            if segments and segments[-1].codec == codec:
                segments[-1] = Segment(start=segments[-1].start, stop=stop, codec=codec)
            elif stop > start:
                segments.append(Segment(start=start, stop=stop, codec=codec))
        return FlatCodec(spec=self.spec, segments=tuple(segments))


def parse_policy(spec: str) -> Policy:
    """The policy of a spec as a manifest has it; a codec's spec is one. Raises ValueError."""
    if len(spec) > MAX_SPEC:
        raise ValueError(f"a policy of {len(spec)} characters; {MAX_SPEC} are possible")
    *rules, default = _BETWEEN_RULES.split(spec)
    parsed: list[Rule] = []
    for rule in rules:
        selector, colon, codec = rule.partition(":")
        if not colon:
            raise ValueError(f"{rule!r} in {spec!r} is no rule; one is `1d:fp32`, and what fits none stands last")
        parsed.append(Rule(selector=selector, codec=parse_codec(codec)))
    return Policy(rules=tuple(parsed), default=parse_codec(default))


def uniform(codec: Codec, numel: int) -> "FlatCodec":
    """One codec for a flat vector of `numel` elements. Raises ValueError when there are none."""
    return Policy(default=codec).resolve([("", (numel,))])


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatCodec:
    """A policy for one flat vector."""

    spec: str
    """Of the policy."""
    segments: tuple[Segment, ...]
    """From 0 to `numel` without gaps; neighbours differ in their codecs."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("a flat vector has at least one element")

    @property
    def numel(self) -> int:
        return self.segments[-1].stop

    @property
    def block(self) -> int:
        """Slices had better be cut at multiples of this many elements."""
        return math.lcm(*(segment.codec.block for segment in self.segments))

    def max_nbytes(self) -> int:
        """Largest payload of the whole vector, in bytes; slices of it together have a header more for each cut."""
        return self.part(0, self.numel).max_nbytes(self.numel)

    def expected_nbytes(self) -> int:
        """Bytes in which the whole vector is expected to be sent, for planning."""
        return sum(segment.codec.expected_nbytes(segment.stop - segment.start) for segment in self.segments)

    def part(self, start: int, stop: int) -> VectorCodec:
        """What encodes the slice [start, stop) of the flat vector. Raises ValueError when there is no such slice."""
        if not 0 <= start < stop <= self.numel:
            raise ValueError(f"no slice [{start}, {stop}) of a vector of {self.numel} elements can be encoded")
        first = bisect_right(self.segments, start, key=lambda segment: segment.stop)
        pieces: list[Segment] = []
        for segment in self.segments[first:]:
            if segment.start >= stop:
                break
            low, high = max(start, segment.start), min(stop, segment.stop)
            pieces.append(Segment(start=low - start, stop=high - start, codec=segment.codec))
        return pieces[0].codec if len(pieces) == 1 else SliceCodec(pieces)


class SliceCodec:
    """Vectors of one length whose segments have codecs of their own."""

    def __init__(self, pieces: Sequence[Segment]) -> None:
        self._pieces = pieces
        self._numel = pieces[-1].stop

    def max_nbytes(self, numel: int) -> int:
        """See `Codec.max_nbytes`. Raises ValueError for another length than the slice's."""
        self._check_numel(numel)
        return sum(piece.codec.max_nbytes(piece.stop - piece.start) for piece in self._pieces)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`. Raises ValueError for another length than the slice's."""
        self._check_numel(numel)
        return sum(piece.codec.expected_nbytes(piece.stop - piece.start) for piece in self._pieces)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`."""
        codecs.check_vector(x, "x")
        view, _ = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        end = 0
        for piece in self._pieces:
            end += len(piece.codec.encode(x[piece.start : piece.stop], out=view[end:]))
        return view[:end]

    def check(self, payload: Payload, numel: int) -> None:
        """See `Codec.check`."""
        for piece, part in self._split(payload, numel):
            piece.codec.check(part, piece.stop - piece.start)

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        self.check(payload, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        codecs.check_target(out, numel, "out")
        for piece, part in self._split(payload, numel):
            piece.codec.decode(part, piece.stop - piece.start, out=out[piece.start : piece.stop])
        return out

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`."""
        codecs.check_target(acc, acc.numel(), "acc")
        self.check(payload, acc.numel())  # all of it first: nothing is added of a payload that ends badly
        for piece, part in self._split(payload, acc.numel()):
            piece.codec.decode_add_(part, acc[piece.start : piece.stop], weight)

    def _split(self, payload: Payload, numel: int) -> Iterator[tuple[Segment, memoryview]]:
        """Each segment and its own payload; all of `payload` is theirs. Raises CodecError."""
        self._check_numel(numel)
        rest = wire.as_bytes(payload)
        for piece in self._pieces:
            length = wire.HEADER_NBYTES + wire.Header.read(rest).body_nbytes
            yield piece, rest[:length]  # shorter than that, it is for the piece's codec to refuse
            rest = rest[length:]
        if rest:
            raise CodecError(f"payload has {len(rest)} bytes more than its segments")

    def _check_numel(self, numel: int) -> None:
        if numel != self._numel:
            raise ValueError(f"the slice has {self._numel} elements, not {numel}")
