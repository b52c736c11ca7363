"""Random-k with a shared seed: of every group of consecutive elements one, chosen by a hash. Index bits: none.

Group g of `every` elements keeps element h mod every, where h is word g of the hash of (seed, numel): integer arithmetic
(`hashing`), so every machine and every version of torch chooses the same. The last group, where it is shorter, keeps
one of what it has. Every element is as likely as any other, and no two groups collide as free draws would.
The values kept are coded by int8(block=128): at every = 64 this makes 0.127 bits per parameter.

The NMSE is 1 - 1 / every on any data, far behind top-k; in exchange all who use one seed keep the same elements, so that
their payloads could be added as they are. For an unbiased estimate multiply the weight of `decode_add_` by `every`.

The choice depends on nothing but the codec and the number of elements. A round that wants another choice than the round
before takes `dataclasses.replace(codec, seed=round)`, as all peers of the round know to; a codec that keeps
its seed sends the same elements for ever, and with error feedback the rest piles up unsent.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from farflung.compression import codec, sparse, wire
from farflung.compression.base import BaseCodec
from farflung.compression.codec import Payload
from farflung.compression.hashing import random_seed, random_words
from farflung.compression.int8 import Int8
from farflung.compression.positions import Positions

MAX_EVERY = 1 << 16
_VALUES = Int8(block=128)
_MAX_MAGNITUDE = 2.0**126


@dataclass(frozen=True, kw_only=True, slots=True)
class RandK(BaseCodec):
    """One element of every group, chosen by a hash, so that no indices are sent."""

    name: ClassVar[str] = "randk"
    codec_id: ClassVar[int] = 14
    version: ClassVar[int] = 1

    every: int = 64
    """Elements of a group, one of which is kept."""
    seed: int = 0
    """In [0, 2**32)."""

    def __post_init__(self) -> None:
        if not 2 <= self.every <= MAX_EVERY:
            raise ValueError(f"every must be 2 to {MAX_EVERY}, not {self.every}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be in [0, 2**32), not {self.seed}")

    @property
    def block(self) -> int:
        """The group."""
        return self.every

    @property
    def param(self) -> int:
        """every << 32 | seed."""
        return self.every << 32 | self.seed

    @classmethod
    def from_param(cls, param: int) -> Self:
        """Raises ValueError."""
        return cls(every=param >> 32, seed=param & 0xFFFFFFFF)

    def _max_body(self, numel: int) -> int:
        return _VALUES.max_nbytes(-(-numel // self.every))

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        """See `Codec.encode`. Raises CodecError when an element is not finite or above 2**126."""
        codec.check_vector(x, "x")
        x = x.detach()
        view, _ = wire.allocate(self.max_nbytes(x.numel()), out=out, pinned=x.is_cuda)
        codec.check_magnitude(x, _MAX_MAGNITUDE)  # also of what is not kept: nobody should average on with a NaN
        values = x[torch.from_numpy(self.positions(x.numel())).to(x.device)]
        _VALUES.encode(values, out=view[wire.HEADER_NBYTES :])
        wire.seal(view, self, x.numel())
        return view

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        values = self._open(payload, numel)
        return codec.decode_with(sparse.reader(self.positions(numel), values), numel, self.block, out)

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`. What was not kept is not touched."""
        codec.check_target(acc, acc.numel(), "acc")
        values = self._open(payload, acc.numel())
        sparse.add_(acc, self.positions(acc.numel()), values, weight)

    def positions(self, numel: int) -> Positions:
        """Which elements of `numel` are kept: int64 [groups], one in each group."""
        firsts = np.arange(0, numel, self.every)
        sizes = np.minimum(numel - firsts, self.every).astype(np.uint64)
        high = random_words(random_seed(self.seed, numel), len(firsts)) >> np.uint64(32)
        return firsts + (high * sizes >> np.uint64(32)).astype(np.int64)  # h * size / 2**32, in [0, size)

    def _open(self, payload: Payload, numel: int) -> sparse.Values:
        body = wire.unseal_exactly(payload, self, numel)
        values: sparse.Values = _VALUES.decode(body, -(-numel // self.every)).numpy()
        return values
