"""One bit per element: its sign, and per block the mean magnitude, as in EF-signSGD (digest, section 1.3).

Of all scales the mean of |x| has the least squared error: NMSE is 1 - 2/pi = 0.363 on Gaussian data (0.361 in blocks of
128, at 1.125 bits). It is for use with error feedback.

Signs are packed by `numpy.packbits`: with the comparison it runs at 2.6 of memcpy on one core, folding bytes
together with torch's integer operations at 0.6.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farflung.compression.scales import Bf16Scale
from farflung.compression.tables import Scratch, TableCodec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign(TableCodec):
    """Signs, and the mean magnitude of each block. The sum of a block's magnitudes must be finite too."""

    name = "sign"
    codec_id = 11
    version = 1
    table = (1.0, -1.0)
    scales = Bf16Scale()

    block: int = 128

    def _size(self, x: Tensor, scratch: Scratch) -> Tensor:
        magnitude = torch.abs(x, out=scratch.values[: x.numel()].view_as(x))
        return magnitude.sum(dim=1).div_(x.shape[1])

    def _pack(self, x: Tensor, scales: Tensor, scratch: Scratch) -> Tensor:
        if x.is_cuda:
            bits = functional.pad(torch.signbit(x.flatten()).byte(), (0, -x.numel() % 8)).view(-1, 8)
            return (bits << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(dim=1, dtype=torch.uint8)
        negative = scratch.bytes[: x.numel()].view(torch.bool).numpy()
        return torch.from_numpy(np.packbits(np.signbit(x.flatten().numpy(), out=negative), bitorder="little"))
