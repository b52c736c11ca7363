"""Quantisers of whole vectors whose parameter is a rate: what `deadzone` and `trellis` have in common.

Their bodies are the lengths of the sections u32[ceil(n / elements of a section)]; the sections, each of which stands alone; and what
means the levels stand for, fp32.
"""

import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import codec, vectors
from farflung.compression.base import BaseCodec
from farflung.compression.codec import CodecError, Payload

MIN_BITS, MAX_BITS = 0.05, 4.0

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class RateCodec(BaseCodec):
    """See the module. Implements `Codec` but for encoding and what `_open` and `_read` have to know of a section."""

    bits: float = 1.0
    """Bits per element of Gaussian data, MIN_BITS to MAX_BITS; becomes the shortest decimal of its fp32."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", float(str(np.float32(self.bits))))
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(f"bits must be {MIN_BITS} to {MAX_BITS}, not {self.bits}")

    @property
    def block(self) -> int:
        """Bytes hold eight elements."""
        return 8

    @property
    def param(self) -> int:
        """`bits` as fp32."""
        return int.from_bytes(struct.pack("<f", self.bits), "little")

    @classmethod
    def from_param(cls, param: int) -> Self:
        """`param` is an fp32. Raises ValueError."""
        if not 0 <= param < 1 << 32:
            raise ValueError(f"{param} is not an fp32")
        return cls(bits=struct.unpack("<f", param.to_bytes(4, "little"))[0])

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        opened = self._open(payload, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        codec.check_target(out, numel, "out")
        self._read(opened, 1.0, out, add=False)
        return out

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`."""
        codec.check_target(acc, acc.numel(), "acc")
        self._read(self._open(payload, acc.numel()), weight, acc, add=True)

    @abstractmethod
    def _read(self, opened: Any, weight: float, out: Tensor, *, add: bool) -> None:
        """Set or add the elements of what `_open` gave, times `weight`."""


def split(
    body: Bytes,
    num_sections: int,
    rows: int,  # of means
    levels: int,  # of which each row has fewer means
) -> tuple[list[Bytes], NDArray[np.float32]]:
    """The sections, and the means [rows, k]. Raises CodecError."""
    start = 4 * num_sections
    lengths = body[:start].copy().view("<u4").tolist() if len(body) >= start else []
    end = start + sum(lengths)
    num_means, odd = divmod(len(body) - end, 4 * rows)
    if len(lengths) != num_sections or not 0 <= num_means < levels or odd:
        raise CodecError(f"{len(body)} bytes are not {num_sections} sections, their lengths and means")
    means = body[end:].copy().view("<f4").reshape(rows, -1)
    vectors.check_normal(means, or_zero=True)
    sections = []
    for length in lengths:
        sections.append(body[start : start + length])
        start += length
    return sections, means
