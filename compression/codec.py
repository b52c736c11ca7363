"""What a codec is: fp32 vector to bytes and back, as a pure function of its parameters.

A codec is a frozen dataclass without state (error feedback wraps it), so that a spec such as `int8(block=128)`
in a manifest means the same bytes everywhere. What all keep: `decode` is a pure function of the payload with one
IEEE rounding per element: the bits of the result do not depend on thread count, chunk size, alignment, device or
flush-to-zero mode. That keeps the outer state of all peers identical. What `encode` writes may differ between machines
in the last bit of a mean, say, but never between thread counts.

Whole-tensor eager code runs at 3-10 % of memcpy because its temporaries are fresh pages; everything here
works in chunks that stay in the L2 cache, with scratch that is reused from chunk to chunk (compression
digest, section 4).

Legend: n = elements of the vector.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

CPU_CHUNK = 1 << 18
"""Elements (1 MiB of fp32) per chunk on the CPU: it and its scratch stay in L2."""

CUDA_CHUNK = 1 << 24
"""Elements per chunk on a GPU: launches are amortised, scratch is 64 MiB."""

Payload = bytes | bytearray | memoryview
"""Anything contiguous that holds an encoded vector."""

ChunkReader = Callable[[int, int, Tensor], None]
"""`read(start, stop, out[stop - start])`: decode elements [start, stop) of a checked payload into `out`."""


class CodecError(ValueError):
    """A payload is damaged or not what was expected, or a vector cannot be encoded."""


class Format(Protocol):
    """What is said of a payload in specs and in its header. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """Its name in specs: lower-case letters and digits."""
    codec_id: ClassVar[int]
    """Number in the wire header; never reused for another codec."""
    version: ClassVar[int]
    """Version of this codec's payload layout, in the wire header."""

    @property
    def spec(self) -> str:
        """Canonical text with all parameters, e.g. `int8(block=128)` (see `spec_of`); `registry` reads it back."""

    @property
    def param(self) -> int:
        """All parameters as they stand in the wire header: 64 bits, 0 where there are none."""

    @classmethod
    def from_param(cls, param: int) -> Self:
        """The codec whose header says `param`. Raises ValueError."""

    def max_nbytes(self, numel: int) -> int:
        """Largest payload in bytes, header included, of `numel` elements. Raises ValueError if negative."""


class VectorCodec(Protocol):
    """Encodes and decodes vectors of fp32: a `Codec`, or a policy's codec of one slice."""

    def max_nbytes(self, numel: int) -> int:
        """Largest payload in bytes, header included, of `numel` elements. Raises ValueError if negative."""

    def expected_nbytes(self, numel: int) -> int:
        """Bytes in which `numel` Gaussian elements are expected to be sent, for planning; at most `max_nbytes`, which is the limit.

        Raises ValueError if `numel` is negative.
        """

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """Encode `x` [n], fp32, contiguous, on the CPU or a GPU; `x` is never changed.

        Returns the payload: a view of `out` (at least `max_nbytes(n)` writable bytes), or of fresh memory,
        which is pinned when `x` is on a GPU. Reusing `out` saves the page faults of fresh memory. Raises
        CodecError when an element is not finite, or too large for the format.
        """

    def check(self, payload: Payload, numel: int) -> None:
        """Raise CodecError unless `payload` decodes to `numel` finite elements; much cheaper than decoding."""

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """Decode to [numel] fp32 on the CPU, into `out` when given. Raises CodecError, before allocating."""

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """acc[n] += fp32(weight * decoded), for `acc` fp32, contiguous, on the CPU.

        Multiply and add round separately (no FMA), so every machine gets the same bits. Raises CodecError and
        leaves `acc` as it was when the payload is bad.
        """


class Codec(Format, VectorCodec, Protocol):
    """A way to encode vectors of any length (`activations.ActivationCodec` is for activations)."""

    @property
    def block(self) -> int:
        """Elements that share side information; parts of a vector had better start at multiples of it."""


def spec_of(codec: Format) -> str:
    """`name(field=value,...)` of a codec's dataclass, with all fields in their order; the name alone when it has none."""
    assert is_dataclass(codec)
    arguments = ",".join(f"{field.name}={getattr(codec, field.name)}" for field in fields(codec))
    return f"{codec.name}({arguments})" if arguments else codec.name


def check_vector(x: Tensor, what: str) -> None:
    """Raise ValueError unless `x` is a contiguous fp32 vector."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{what} must be a contiguous fp32 vector, not {x.dtype} of shape {tuple(x.shape)}")


def check_magnitude(x: Tensor, limit: float) -> None:
    """Raise CodecError unless all elements of the vector `x`, of any float dtype, are finite and at most `limit`."""
    for start, stop in chunks(x.numel(), 1, cuda=x.is_cuda):
        low, high = torch.aminmax(x[start:stop])  # both are NaN when any element is
        if not bool((low >= -limit) & (high <= limit)):
            raise CodecError(f"an element is not finite, or its magnitude is above {limit:g}")


def chunk_numel(block: int, *, cuda: bool = False) -> int:
    """Elements of a chunk: a multiple of `block`, as close below the target as there is."""
    return max((CUDA_CHUNK if cuda else CPU_CHUNK) // block, 1) * block


def chunks(numel: int, block: int, *, cuda: bool = False) -> Iterator[tuple[int, int]]:
    """(start, stop) of each chunk; every start is a multiple of `block`."""
    step = chunk_numel(block, cuda=cuda)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def decode_with(read: ChunkReader, numel: int, block: int, out: Tensor | None) -> Tensor:
    """Run `read` over all chunks into `out` [numel] or a new tensor. Raises ValueError for a wrong `out`."""
    if out is None:
        out = torch.empty(numel, dtype=torch.float32)
    check_target(out, numel, "out")
    with torch.no_grad():
        for start, stop in chunks(numel, block):
            read(start, stop, out[start:stop])
    return out


def decode_add_with(read: ChunkReader, acc: Tensor, block: int, weight: float) -> None:
    """acc += weight * decoded, chunk by chunk, with one chunk of scratch."""
    numel = acc.numel()
    scratch = torch.empty(min(numel, chunk_numel(block)), dtype=torch.float32)
    with torch.no_grad():
        for start, stop in chunks(numel, block):
            part = scratch[: stop - start]
            read(start, stop, part)
            part.mul_(weight)  # its own rounding: add_(part, alpha=weight) is an FMA on some CPUs
            acc[start:stop].add_(part)


def check_target(x: Tensor, numel: int, what: str) -> None:
    """Raise ValueError unless `x` is a contiguous fp32 CPU vector of `numel` elements."""
    check_vector(x, what)
    if x.device.type != "cpu" or x.numel() != numel:
        raise ValueError(f"{what} must have {numel} elements on the CPU, not {x.numel()} on {x.device}")
