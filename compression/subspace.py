"""Activations as coordinates in a fixed subspace, for models whose boundaries stay in one (Protocol Models, 2506.01260).

U [width, rank] has orthonormal columns, the same on both ends because it follows from the seed alone. A token x is sent as
z = x U in bf16 and decodes to z U^T: the projection of x, which is x itself (up to the rounding of z) if x lies in span(U).

It is for the model to see that it does: all that writes to the residual stream at a boundary is projected to span(U), and
the fixed part of the embedding is left out, as both ends know it. With T that table,

    sender    payload = codec.encode(x - T[tokens])          receiver    x = codec.decode(payload, out) + T[tokens]

and the token ids, which travel along. A gradient by x needs no T: only its projection has an effect on what lies behind.
Of a model that was not made for it this codec throws away all but rank / width of a token (digest, section 1.7).

A row: z bf16[rank].
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from farflung.compression import activations
from farflung.compression.activations import ActivationCodec
from farflung.compression.hashing import random_seed, random_uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class Subspace(ActivationCodec):
    """Coordinates in a subspace that a seed names."""

    name: ClassVar[str] = "subspace"
    codec_id: ClassVar[int] = 19
    version: ClassVar[int] = 1

    width: int
    """Elements of a token."""
    rank: int
    """Dimensions of the subspace, at most `width`."""
    seed: int = 0
    """Of the basis; in [0, 2**32)."""

    def __post_init__(self) -> None:
        activations.check_width(self.width)
        if not 1 <= self.rank <= self.width:
            raise ValueError(f"rank must be 1 to {self.width}, not {self.rank}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2**32), not {self.seed}")

    @property
    def param(self) -> int:
        """width << 48 | rank << 32 | seed."""
        return self.width << 48 | self.rank << 32 | self.seed

    @classmethod
    def from_param(cls, param: int) -> Self:
        """Raises ValueError."""
        return cls(width=param >> 48, rank=param >> 32 & 0xFFFF, seed=param & 0xFFFFFFFF)

    @property
    def row_nbytes(self) -> int:
        """The coordinates."""
        return 2 * self.rank

    def basis(self, device: torch.device) -> Tensor:
        """U [width, rank] fp32, for the codec and for the model's projections. Shared: not to be written to."""
        return _basis(self.width, self.rank, self.seed, device)

    def to_rows(self, x: Tensor) -> Tensor:
        """See `ActivationCodec.to_rows`."""
        return (x @ self.basis(x.device)).bfloat16().view(torch.uint8)

    def from_rows(self, rows: Tensor) -> Tensor:
        """See `ActivationCodec.from_rows`."""
        return rows.view(torch.bfloat16).float() @ self.basis(rows.device).T


@lru_cache(maxsize=8)
def _basis(width: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """The Q factor of a random matrix, in fp64 on the CPU; with a positive diagonal of R it is the only one."""
    words = random_uniform(random_seed(seed, width, rank), width * rank)
    with torch.inference_mode(False):  # a model may train with it, whoever asks first
        q, r = torch.linalg.qr(torch.from_numpy(words).view(width, rank))
        unique: Tensor = q * r.diagonal().sign()
        return unique.float().to(device)
