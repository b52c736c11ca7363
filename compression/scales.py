"""How the scale of a block is stored: in bf16, or in one byte as MXFP4 and NVFP4 do.

The encoder quantises with the scale as stored. In every format a scale is zero, or so large that its product with any
entry of a table is a normal number, and so small that this product is finite: then what is decoded is finite, and
does not depend on whether a machine flushes subnormals, whatever bytes arrive. Blocks too small for that decode to
zeros.

Pseudo-gradients are around 1e-4, where fp16 is close to its subnormals (6e-5): hence bf16. Its rounding moves a scale by
at most one part in 256, which is nothing beside the steps of a table of 16.

Legend: b = number of blocks.
"""

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from farflung.compression.codec import CodecError


class ScaleFormat(ABC):
    """A way to store the scales of blocks, which follow from the blocks' sizes (their largest magnitudes, say)."""

    dtype: ClassVar[torch.dtype]
    """Of the stored scales."""
    has_unit: ClassVar[bool] = False
    """Whether all scales of a vector are multiples of one fp32, the unit, which is stored before them."""

    def unit(self, x: Tensor) -> float:
        """The unit for the vector `x` [n]; 1 in formats without. Raises CodecError if `x` cannot be encoded."""
        return 1.0

    @abstractmethod
    def store(self, size: Tensor, unit: float, stored: Tensor) -> None:
        """The scales for blocks of `size` [b], fp32, into `stored` [b]; overwrites `size`.

        A size of NaN or Inf gives a scale that is not valid.
        """

    @abstractmethod
    def load(self, stored: Tensor, unit: float) -> Tensor:
        """The scales [b], fp32, that valid `stored` ones [b] stand for."""

    @abstractmethod
    def is_valid(self, stored: Tensor, unit: float) -> bool:
        """Whether all of `stored` [b], on the CPU, and `unit` keep the promise above. Integer compares only."""


class Bf16Scale(ScaleFormat):
    """The size itself, rounded to bf16; zero at or below 2**-120. For tables within [-1, 1], down to 2**-6."""

    dtype = torch.bfloat16

    def store(self, size: Tensor, unit: float, stored: Tensor) -> None:
        """See `ScaleFormat.store`."""
        stored.copy_(torch.threshold_(size, 2.0**-120, 0.0))

    def load(self, stored: Tensor, unit: float) -> Tensor:
        """See `ScaleFormat.load`."""
        return stored.float()

    def is_valid(self, stored: Tensor, unit: float) -> bool:
        """See `ScaleFormat.is_valid`."""
        bits = stored.view(torch.int16).numpy()  # numpy compares integers 10 times as fast as torch
        return bool(np.all(((bits >= 0x0380) & (bits < 0x7F80)) | (bits == 0)))  # 2**-120 to the largest finite


class E8M0Scale(ScaleFormat):
    """MXFP4's 8 bits: 2**(floor(log2 size) - 2), the OCP specification's FLOOR rule (digest 1.2).

    The 2 is the exponent of 6, the largest entry of E2M1: sizes come to lie in [4, 8) scales, and above 6 saturate.
    Byte e means 2**(e - 127), and 0 means zero; 1 and what is above 252 are not valid.
    """

    dtype = torch.uint8

    def store(self, size: Tensor, unit: float, stored: Tensor) -> None:
        """See `ScaleFormat.store`."""
        exponent = size.view(torch.int32).bitwise_right_shift_(23).sub_(2)  # biased; 253 for NaN and Inf
        stored.copy_(torch.threshold_(exponent, 1, 0))

    def load(self, stored: Tensor, unit: float) -> Tensor:
        """See `ScaleFormat.load`."""
        return stored.int().bitwise_left_shift_(23).view(torch.float32)

    def is_valid(self, stored: Tensor, unit: float) -> bool:
        """See `ScaleFormat.is_valid`."""
        exponent = stored.numpy()
        return bool(np.all((exponent != 1) & (exponent <= 252)))


class E4M3Scale(ScaleFormat):
    """NVFP4's 8 bits: size / 6 as a multiple of the vector's unit, which is chosen so that the largest is 448.

    6 is the largest entry of E2M1, 448 the largest E4M3 (digest 1.2). The unit is rounded to bf16, so that encoding a
    decoded vector finds the same unit: 448 * 6 * unit is exact in fp32. A vector whose largest magnitude is below
    448 * 6 * 2**-116 (5e-32) decodes to zeros.
    """

    dtype = torch.float8_e4m3fn
    has_unit = True

    _TOP = 448.0 * 6.0
    _SMALLEST = 2.0**-116  # the smallest E4M3 is 2**-9, and the smallest entry of E2M1 2**-1
    _LARGEST = 2.0**116

    def unit(self, x: Tensor) -> float:
        """See `ScaleFormat.unit`. Raises CodecError if an element is not finite, or above about 2**127."""
        if x.numel() == 0:
            return 0.0
        low, high = torch.aminmax(x)  # both are NaN when any element is
        unit = float((torch.maximum(high, -low) / self._TOP).bfloat16())
        if not unit <= self._LARGEST:
            raise CodecError("cannot encode: an element is not finite, or its magnitude is above 2**127")
        return unit if unit >= self._SMALLEST else 0.0

    def store(self, size: Tensor, unit: float, stored: Tensor) -> None:
        """See `ScaleFormat.store`."""
        stored.copy_(size.mul_(1.0 / (6.0 * unit) if unit else 0.0))

    def load(self, stored: Tensor, unit: float) -> Tensor:
        """See `ScaleFormat.load`."""
        values = _e4m3_values().to(stored.device)  # torch's conversion of fp8 takes three times as long
        return torch.index_select(values, 0, stored.view(torch.uint8).int()).mul_(unit)

    def is_valid(self, stored: Tensor, unit: float) -> bool:
        """See `ScaleFormat.is_valid`."""
        in_range = unit == 0.0 or self._SMALLEST <= unit <= self._LARGEST
        return in_range and bool(np.all(stored.view(torch.uint8).numpy() < 0x7F))


@cache
def _e4m3_values() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
