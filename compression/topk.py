"""Chunked top-k, as in SparseLoCo (arXiv 2508.15706): of every chunk the k elements of largest magnitude.

What is kept is coded as `kept` says. Bits per parameter and NMSE, beside SparseLoCo's 12-bit indices and 2-bit values (the
compression digest, section 3.3); AdamW are pseudo-gradients of 30 steps of a model of 0.9 M parameters, as one vector:

|                             | Gauss         | Laplace | Student t4 | AdamW         |
|-----------------------------|---------------|---------|------------|---------------|
| SparseLoCo, 64 of 4096      | 0.219   0.882 |   0.793 |      0.781 | 0.219   0.890 |
| topk                        | 0.137   0.882 |   0.793 |      0.756 | 0.136   0.891 |
| topk(k=66)                  | 0.140   0.879 |   0.789 |      0.753 | 0.139   0.888 |
| topk(chunk=16384,k=270)     | 0.140   0.877 |   0.786 |      0.750 | 0.138   0.882 |
| topk(bits=2)                | 0.154   0.881 |   0.788 |      0.740 | 0.153   0.890 |
| topk(bits=8)                | 0.246   0.881 |   0.785 |      0.720 | 0.245   0.890 |

A vector costs some 120 bytes besides: small tensors had better be coded together.

A biased codec that leaves most elements out: without error feedback around it they are never sent (digest, section 3.4).
A quota per chunk, not one threshold for all, spreads an update over all layers and rows. The last chunk, where it
is shorter, has its share of the quota, rounded up.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from farflung.compression import codec, kept, sparse, wire
from farflung.compression.base import BaseCodec
from farflung.compression.codec import Payload
from farflung.compression.kept import Kept

MIN_CHUNK, MAX_CHUNK = 64, 1 << 16
"""A chunk must fit `codec.CPU_CHUNK`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(BaseCodec):
    """The largest elements of every chunk."""

    name: ClassVar[str] = "topk"
    codec_id: ClassVar[int] = 13
    version: ClassVar[int] = 1

    chunk: int = 4096
    """Consecutive elements that share a quota and a scale; a power of two."""
    k: int = 64
    """Elements kept of a chunk; at most a quarter of it, beyond which dense codecs are better."""
    bits: int = 1
    """Bits per kept value: 1, 2 or 8."""

    def __post_init__(self) -> None:
        if not MIN_CHUNK <= self.chunk <= MAX_CHUNK or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two, {MIN_CHUNK} to {MAX_CHUNK}, not {self.chunk}")
        if not 1 <= self.k <= self.chunk // 4:
            raise ValueError(f"k must be 1 to {self.chunk // 4}, a quarter of the chunk, not {self.k}")
        kept.check_bits(self.bits)

    @property
    def block(self) -> int:
        """The chunk."""
        return self.chunk

    @property
    def param(self) -> int:
        """chunk << 32 | k << 8 | bits."""
        return self.chunk << 32 | self.k << 8 | self.bits

    @classmethod
    def from_param(cls, param: int) -> Self:
        """Raises ValueError."""
        return cls(chunk=param >> 32, k=param >> 8 & 0xFFFFFF, bits=param & 0xFF)

    def _max_body(self, numel: int) -> int:
        """Gaps that compress badly make it, most are a tenth smaller."""
        return kept.max_nbytes(numel, self.chunk, self._max_count(numel), self.bits)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`. Raises ValueError."""
        most = self.max_nbytes(numel)
        body = kept.expected_nbytes(numel, self.chunk, self._max_count(numel), self.bits)
        return min(wire.HEADER_NBYTES + body, most)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite or above 2**90."""
        codec.check_vector(x, "x")
        x = x.detach()
        numel, chunk = x.numel(), self.chunk
        view, _ = wire.allocate(self.max_nbytes(numel), out=out, pinned=x.is_cuda)
        whole = numel - numel % chunk
        found = [
            kept.largest(x[start:stop].view(-1, chunk), self.k, at=start)
            for start, stop in codec.chunks(whole, chunk, cuda=x.is_cuda)
        ]
        if whole < numel:
            padded = torch.nn.functional.pad(x[whole:], (0, chunk - (numel - whole)))
            found.append(kept.largest(padded[None], self._share(numel - whole), at=whole))
        coded = kept.quantise(found, numel=numel, chunk=chunk, bits=self.bits)
        return wire.fill(view, self, numel, kept.pack(coded, self.bits))

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        coded = self._open(payload, numel)
        return codec.decode_with(sparse.reader(coded.positions, coded.values()), numel, self.block, out)

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`. What was not kept is not touched."""
        codec.check_target(acc, acc.numel(), "acc")
        coded = self._open(payload, acc.numel())
        sparse.add_(acc, coded.positions, coded.values(), weight)

    def _share(self, numel: int) -> int:
        """The quota of `numel` elements of a chunk."""
        return -(-self.k * numel // self.chunk)

    def _max_count(self, numel: int) -> int:
        return numel // self.chunk * self.k + self._share(numel % self.chunk)

    def _open(self, payload: Payload, numel: int) -> Kept:
        body = wire.unseal(payload, self, numel)
        return kept.unpack(body, numel=numel, chunk=self.chunk, max_count=self._max_count(numel), bits=self.bits)
