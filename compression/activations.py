"""Codecs for what crosses a pipeline boundary: activations and their gradients, [tokens, width], in any float dtype.

A protocol of their own beside `codec.Codec`, because a token is the unit, x and out have a shape and a dtype, and both live on
the device that computes. Each token becomes a row of `row_nbytes` bytes by itself: a payload is the header and its rows.

What decodes here never touches the outer state. So it need not have the same bits on all machines, and has not: matrix
products round as the machine likes, and out may be bf16. It is finite, and the same each time on one machine with
the same number of tokens and threads. Errors are neither averaged nor fed back (compression digest, section 1.7), so the
safe choices are `tokenint8` in both directions, or `rotint4` forward; `subspace` is exact for a model made for it.

    tokenint8    8 bits per element and 16 per token
    rotint4      4 bits per element and 16 per block, after a Hadamard rotation
    subspace    16 bits per coordinate of a fixed subspace

Legend: t = tokens.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.codec import Format, Payload

MAX_WIDTH = (1 << 16) - 1
_MAX_MAGNITUDE = 2.0**120  # far from where fp32 ends: a rotation adds up, a rounded scale may exceed


class ActivationCodec(Format, ABC):
    """Encode and decode tokens of one width. Implementations are frozen dataclasses that say what a row is."""

    width: int
    """Elements of a token."""

    @property
    def spec(self) -> str:
        """Canonical text; `registry.parse_activation_codec` reads it back."""
        return codec.spec_of(self)

    @property
    @abstractmethod
    def row_nbytes(self) -> int:
        """Bytes of an encoded token."""

    @abstractmethod
    def to_rows(self, x: Tensor) -> Tensor:
        """`x` [t, width] fp32, finite, to uint8 [t, row_nbytes] on the same device."""

    @abstractmethod
    def from_rows(self, rows: Tensor) -> Tensor:
        """`rows` uint8 [t, row_nbytes], any bytes, to fp32 [t, width] on the same device; maybe not finite."""

    def max_nbytes(self, numel: int) -> int:
        """Payload bytes of `numel` elements, header included; exact. Raises ValueError unless they are whole tokens."""
        if numel < 0 or numel % self.width:
            raise ValueError(f"{numel} elements are no tokens of {self.width}")
        return wire.HEADER_NBYTES + numel // self.width * self.row_nbytes

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """Encode `x` [tokens, width], any float dtype, contiguous, on the CPU or a GPU; `x` is never changed.

        Returns the payload: a view of `out` (at least `max_nbytes` writable bytes) or of fresh memory, pinned when `x` is
        on a GPU. Raises CodecError when an element is not finite or above 2**120.
        """
        self._check_shape(x, "x")
        view, memory = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        body = memory[wire.HEADER_NBYTES :].view(-1, self.row_nbytes)
        for first, last in self._parts(x):
            part = x.detach()[first:last].float()
            codec.check_magnitude(part.view(-1), _MAX_MAGNITUDE)
            body[first:last] = self.to_rows(part)
        wire.seal(view, self, x.numel())
        return view

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        """Decode into `out` [tokens, width], any float dtype, contiguous, on the CPU or a GPU, and return it.

        Raises CodecError when the payload is of other tokens, or not finite in the dtype of `out`, whose contents are
        then undefined.
        """
        self._check_shape(out, "out")
        body = wire.unseal_exactly(payload, self, out.numel())
        for first, last in self._parts(out):
            rows = torch.empty(last - first, self.row_nbytes, dtype=torch.uint8)
            wire.copy_bytes(body, first * self.row_nbytes, rows.view(-1))
            out[first:last] = self.from_rows(rows.to(out.device))
            codec.check_magnitude(out[first:last].view(-1), torch.finfo(out.dtype).max)
        return out

    def _parts(self, x: Tensor) -> list[tuple[int, int]]:
        parts = codec.chunks(x.numel(), self.width, cuda=x.is_cuda)
        return [(start // self.width, stop // self.width) for start, stop in parts]

    def _check_shape(self, x: Tensor, what: str) -> None:
        if not x.is_floating_point() or x.dim() != 2 or x.shape[1] != self.width or not x.is_contiguous():
            raise ValueError(f"{what} must be contiguous [tokens, {self.width}], not {x.dtype} of {tuple(x.shape)}")


def scales_of(absmax: Tensor, largest: int) -> Tensor:
    """bf16 scales under which `absmax` [...] fp32 becomes the integer `largest`, at most 127.

    Zero where they would be subnormal. Rounding to bf16 moves absmax / scale by at most one part in 256: no code gets larger.
    """
    scales = (absmax / largest).bfloat16()
    return scales.masked_fill(scales.float() < torch.finfo(torch.bfloat16).tiny, 0)


def divide(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales, and zero where the scale is zero; fp32, rounded to whole numbers."""
    return (x * scales.float().reciprocal().nan_to_num_(posinf=0.0)).round_()


def check_width(width: int) -> None:
    """Raise ValueError unless tokens can have this many elements."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width must be 1 to {MAX_WIDTH}, not {width}")
