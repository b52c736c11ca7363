"""Quantisers of whole vectors whose parameter is a rate: what `deadzone` and `trellis` have in common.

Their bodies are the lengths of the sections u32[ceil(n / elements of a section)]; the sections, each of which stands alone; and what
means the levels stand for, fp32.
"""

import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from farflung.compression import codec, vectors, wire
from farflung.compression.base import BaseCodec
from farflung.compression.bitmaps import Bytes
from farflung.compression.codec import CodecError, Payload
from farflung.compression.planes import Floats

MIN_BITS, MAX_BITS = 0.05, 4.0


SectionT = TypeVar("SectionT")
"""What is known of a section of a payload before it is decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateCodec(BaseCodec, Generic[SectionT]):
    """See the module. Implements `Codec` but for encoding and what is in a section."""

    section: ClassVar[int]
    """Elements of a section."""
    levels: ClassVar[int]
    """The highest level, which has no mean."""
    mean_rows: ClassVar[int] = 1
    """How many means a level has."""

    bits: float = 1.0
    """Bits per element of Gaussian data, 0.05 to 4; becomes the shortest decimal of its fp32."""

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
        sections, means = self._open(payload, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32)
        codec.check_target(out, numel, "out")
        self._read(sections, means, 1.0, out, add=False)
        return out

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`."""
        codec.check_target(acc, acc.numel(), "acc")
        sections, means = self._open(payload, acc.numel())
        self._read(sections, means, weight, acc, add=True)

    def _open(self, payload: Payload, numel: int) -> tuple[list[SectionT], Floats]:
        """The sections, and the means [mean_rows, levels in use below the highest]."""
        body = np.frombuffer(wire.unseal(payload, self, numel), np.uint8)
        num_sections = -(-numel // self.section)
        start = 4 * num_sections
        lengths = body[:start].copy().view("<u4").tolist() if len(body) >= start else []
        end = start + sum(lengths)
        num_means, odd = divmod(len(body) - end, 4 * self.mean_rows)
        if len(lengths) != num_sections or not 0 <= num_means < self.levels or odd:
            raise CodecError(f"{len(body)} bytes are not {num_sections} sections, their lengths and means")
        means = body[end:].copy().view("<f4").reshape(self.mean_rows, -1)
        vectors.check_normal(means, or_zero=True)
        sections = []
        for number, length in enumerate(lengths):
            part = min(self.section, numel - number * self.section)
            sections.append(self._parse(body[start : start + length], part, num_means))
            start += length
        return sections, means

    @staticmethod
    @abstractmethod
    def _parse(data: Bytes, numel: int, num_means: int) -> SectionT:
        """A section of so many elements. Raises CodecError unless its lengths fit."""

    @staticmethod
    @abstractmethod
    def _read(sections: Sequence[SectionT], means: Floats, weight: float, out: Tensor, *, add: bool) -> None:
        """Set or add the elements, times `weight`."""
