"""Activations as 8-bit integers with one scale per token: the safe choice for pipeline boundaries, both directions.

scale = bf16(absmax / 127), q = round_to_even(x / scale), decoded q * scale, per token: half the bytes of bf16. On Gaussian
tokens of width 1024 the NMSE is 6.3e-5, with one element in a hundred 20 times as large 1.5e-3: such outliers take the levels
of all the others. On one core encoding takes about 4 times as long as copying the fp32 values, decoding 3 times.

A row: scale bf16, then codes int8[width].
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from farflung.compression import activations
from farflung.compression.activations import ActivationCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInt8(ActivationCodec):
    """8-bit integers, a scale per token."""

    name: ClassVar[str] = "tokenint8"
    codec_id: ClassVar[int] = 18
    version: ClassVar[int] = 1

    width: int
    """Elements of a token."""

    def __post_init__(self) -> None:
        activations.check_width(self.width)

    @property
    def param(self) -> int:
        """The width."""
        return self.width

    @classmethod
    def from_param(cls, param: int) -> Self:
        """`param` is the width. Raises ValueError."""
        return cls(width=param)

    @property
    def row_nbytes(self) -> int:
        """A scale and the codes."""
        return 2 + self.width

    def to_rows(self, x: Tensor) -> Tensor:
        """See `ActivationCodec.to_rows`."""
        scales = activations.scales_of(x.abs().amax(dim=1, keepdim=True), 127)
        codes = activations.divide(x, scales).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)

    def from_rows(self, rows: Tensor) -> Tensor:
        """See `ActivationCodec.from_rows`."""
        scales = rows[:, :2].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        return rows[:, 2:].view(torch.int8).float().mul_(scales.float())
