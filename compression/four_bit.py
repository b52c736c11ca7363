"""Codecs of 4 bits per element from tables of 16: NF4, MXFP4, NVFP4 and E3M0 (digest, sections 1.1 and 1.2).

All scale a block by its absmax. NMSE on Gaussian data with the default block, and bits per element with scales:

    nf4     8.6e-3   4.25   quantiles of a normal distribution, made for it
    nvfp4   9.0e-3   4.5    E2M1 in blocks of 16; the best of them for heavy tails
    mxfp4   1.3e-2   4.25   E2M1 with powers of two as scales
    e3m0    3.7e-2   4.13   powers of two; what Streaming DiLoCo sends

Codes are found and packed two at a time by one look-up. An element is first cut to a *cell*, the signed byte
trunc(cells * x / scale), and two cells are the key. The thresholds of E2M1 are multiples of 1/4, so that 4 cells per
scale find its nearest entry exactly (ties go away from zero); with 127 per scale, those of other tables move by
at most 1/254 of the absmax, which adds 0.5 % to the NMSE of NF4. On one core this takes five eighths of the time of a
look-up by fp16(x / scale) with packing after it, and a seventeenth of torch.bucketize's.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from farflung.compression.scales import Bf16Scale, E4M3Scale, E8M0Scale
from farflung.compression.tables import Scratch, TableCodec

_POWERS = tuple(2.0**exponent for exponent in range(-6, 1))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(TableCodec):
    """The entry of a table of 16 that is nearest to x / scale, where the scale follows from the block's absmax."""

    cells: ClassVar[int]
    """Into how many cells the encoder cuts a scale; an element must not be more than 127 of them from zero."""

    def _size(self, x: Tensor, scratch: Scratch) -> Tensor:
        magnitude = torch.abs(x, out=scratch.values[: x.numel()].view_as(x))
        # Magnitudes are in the order of their bits, and torch's amax of fp32 takes twice as long for rows of 16.
        return torch.amax(magnitude.view(torch.int32), dim=1).view(torch.float32)

    def _pack(self, x: Tensor, scales: Tensor, scratch: Scratch) -> Tensor:
        inverse = torch.threshold(scales, 0.0, torch.inf).reciprocal_().mul_(self.cells)  # of a scale of 0: 0
        numel = x.numel()
        position = torch.mul(x, inverse[:, None], out=scratch.values[:numel].view_as(x))
        cells = scratch.bytes.view(torch.int8)[: numel + numel % 2]
        cells[:numel].view_as(x).copy_(position)
        cells[numel:] = 0
        keys = scratch.keys[: len(cells) // 2].copy_(cells.view(torch.uint16))
        return torch.index_select(_codes_of_pairs(self.table, self.cells).to(x.device), 0, keys)


@cache
def _codes_of_pairs(table: tuple[float, ...], cells: int) -> Tensor:
    """[2**16] uint8: the packed codes of two cells; the first cell is the key's low byte."""
    cell = np.arange(256).astype(np.int8).astype(np.float64)
    middle = (cell + 0.5 * np.sign(cell)) / cells
    nearest = np.abs(middle[:, None] - np.array(table)).argmin(axis=1)  # the first of equals: never minus zero
    return torch.from_numpy((nearest[:, None] << 4 | nearest).astype(np.uint8).ravel())


@dataclass(frozen=True, kw_only=True, slots=True)
class Nf4(FourBit):
    """The table of QLoRA and bitsandbytes, with bf16 scales where those have theirs quantised twice (4.13 bits)."""

    name = "nf4"
    codec_id = 6
    version = 1
    # fmt: off
    table = (
        -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    )
    # fmt: on
    cells = 127
    scales = Bf16Scale()

    block: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4(FourBit):
    """OCP Microscaling's FP4: E2M1 with a power of two per block, by the FLOOR rule; 32 is the block of OCP."""

    name = "mxfp4"
    codec_id = 7
    version = 1
    table = (*_E2M1, *(-value for value in _E2M1))
    cells = 4
    scales = E8M0Scale()

    block: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4(FourBit):
    """NVIDIA's FP4: E2M1 with an E4M3 per block and one fp32 per vector; 16 is NVIDIA's block."""

    name = "nvfp4"
    codec_id = 8
    version = 1
    table = Mxfp4.table
    cells = 4
    scales = E4M3Scale()

    block: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class E3m0(FourBit):
    """A sign and three bits of exponent: 0 and the powers of two from 2**-6 to 1, as in Streaming DiLoCo.

    The paper gives neither the scale nor the rounding; these, the block's absmax and the nearest value, are the
    digest's reading.
    """

    name = "e3m0"
    codec_id = 9
    version = 1
    table = (0.0, *_POWERS, -0.0, *(-value for value in _POWERS))
    cells = 127
    scales = Bf16Scale()

    block: int = 128
