"""One number of an optimiser's state in 8 bits: blocks of 256 with a scale each, and dithered rounding.

    scale = largest magnitude of the block,     value = table[code] * scale

Two tables, each dense where it matters (codes k):

- signed, for momenta: sign(k) * (k / 127)^2 for k in -127..127. Steps are 1.6 % of the block's largest value at the top and
  finer below.
- non-negative, for second moments: (k / 255)^8 for k in 1..255. What is used of a second moment is its root, whose steps are
  then 1.6 % at the top and 10 % where it is a 400th of the block's largest. There is no zero: the root is a denominator.

Rounding to nearest would freeze slow averages: with beta 0.99 a second moment changes by at most 1 % of itself per step when
gradients shrink, less than half a step of the table, so it would never fall. Values are therefore rounded up in the share
of steps in which they should be, by a threshold that runs through [0, 1) evenly from step to step (multiples of the golden
ratio) and from element to element: no bias, no random generator, and the same bits again after a restart.

Sources: Dettmers et al. 2022 (2110.02861) for block-wise 8-bit state. Their bitsandbytes has the optimisers for GPUs only, and
torchao's want a compiler on the user's machine, so the map is written out here: it runs wherever torch does, and packs any
optimiser's state, not only Adam's.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.training.page_locked import empty

BLOCK = 256
"""Numbers that share a scale."""
SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"})
"""Names in `torch.optim` of state that is never negative."""
PIECE = BLOCK << 14
"""Numbers encoded at a time, which bounds the memory for it: about 100 MB."""

_K = torch.arange(-127, 128, dtype=torch.float64)
SIGNED = (_K.sign() * (_K / 127) ** 2).float()
NON_NEGATIVE = ((torch.arange(1, 256, dtype=torch.float64) / 255) ** 8).float()
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927
"""The same for two dimensions: another irrational step, so that elements do not march in line."""


def stored_bytes(numel: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of `numel` numbers."""
    return numel, 4 * -(-numel // BLOCK)


@functools.cache
def _on(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(`SIGNED`, `NON_NEGATIVE`, thresholds of step 0) there, copied once: each copy from ordinary memory would make the host wait for a GPU.

    The thresholds come from the CPU, for Apple's GPUs have no double precision, and in single the multiples of an irrational number run out of
    digits."""
    first = torch.frac(torch.arange(BLOCK, dtype=torch.float64) * _PLASTIC).float()
    return SIGNED.to(device), NON_NEGATIVE.to(device), first.to(device)


def _thresholds(step: int, device: torch.device) -> Tensor:
    """Of the elements of a block in that step, fp32 in [0, 1)."""
    return torch.frac(_on(device)[2] + step * _GOLDEN % 1.0)


class EightBit:
    """Room for one tensor in 8 bits."""

    def __init__(self, like: Tensor, name: str, device: torch.device, *, pinned: bool) -> None:
        self.shape = like.shape
        self._table = 1 if name in SECOND_MOMENTS else 0  # of `_on`
        numel = like.numel()
        self.codes = empty((numel,), torch.uint8, device, pinned=pinned)
        self.scales = empty((-(-numel // BLOCK),), torch.float32, device, pinned=pinned)

    def put(
        self,
        values: Tensor,  # fp32 of the shape, finite
        step: int,  # of the optimiser, for the dither
    ) -> None:
        """Encode; on a GPU without waiting for it, but for the first time there, and where codes or scales go to host memory that is not page-locked."""
        flat, table = values.flatten(), _on(values.device)[self._table]
        threshold = _thresholds(step, values.device)
        for low in range(0, flat.numel(), PIECE):
            piece = flat[low : low + PIECE]
            padding = -piece.numel() % BLOCK
            blocks = (F.pad(piece, (0, padding)) if padding else piece).view(-1, BLOCK)
            scales = blocks.abs().amax(dim=1, keepdim=True)
            share = blocks / scales.clamp(min=1e-38)
            del blocks  # of the padded ones this was the last use; what follows is what takes most memory
            above = torch.bucketize(share, table, out_int32=True).clamp_(0, len(table) - 1)
            below = (above - 1).clamp_(min=0)
            floor = table[below]
            share.sub_(floor).div_(table[above].sub_(floor).clamp_(min=1e-38))
            codes = torch.where(share > threshold, above, below).to(torch.uint8)
            of_piece = self.codes[low : low + PIECE]
            of_piece.copy_(codes.flatten()[: piece.numel()], non_blocking=of_piece.is_pinned())
            of_blocks = self.scales[low // BLOCK : low // BLOCK + len(scales)]
            of_blocks.copy_(scales[:, 0], non_blocking=of_blocks.is_pinned())

    def get(self, device: torch.device) -> Tensor:
        """The values, fp32 of the shape, on `device`; from there or from page-locked memory without waiting, as `put`."""
        flat = torch.empty(self.codes.numel(), dtype=torch.float32, device=device)
        table = _on(device)[self._table]
        scales = self.scales.to(device, non_blocking=True)
        for low in range(0, flat.numel(), PIECE):
            codes = self.codes[low : low + PIECE].to(device, non_blocking=True)
            of_blocks = scales[low // BLOCK : (low + PIECE) // BLOCK, None].expand(-1, BLOCK).flatten()[: codes.numel()]
            torch.mul(table[codes.int()], of_blocks, out=flat[low : low + PIECE])
        return flat.view(self.shape)
