"""The simplest biased compressors, for tests of error feedback: what they keep, sent as fp32."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from farflung.compression import codec as codecs
from farflung.compression.codec import Codec, Payload
from farflung.compression.fp32 import Fp32

EXACT = Fp32()


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepSigns:
    """sign(x) times the mean of |x| of each 64 elements: what a 1-bit codec keeps."""

    name: ClassVar[str] = "keepsigns"
    codec_id: ClassVar[int] = 254
    version: ClassVar[int] = 1

    block: int = 1

    @property
    def spec(self) -> str:
        return codecs.spec_of(self)

    @property
    def param(self) -> int:
        return 0

    @classmethod
    def from_param(cls, param: int) -> Self:
        return cls()

    def max_nbytes(self, numel: int) -> int:
        return EXACT.max_nbytes(numel)

    def encode(self, x: Tensor, *, out: bytearray | memoryview | None = None) -> memoryview:
        return EXACT.encode(self.keep(x), out=out)

    def check(self, payload: Payload, numel: int) -> None:
        EXACT.check(payload, numel)

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        return EXACT.decode(payload, numel, out=out)

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        EXACT.decode_add_(payload, acc, weight)

    def keep(self, x: Tensor) -> Tensor:
        return torch.cat([x[:0]] + [block.sign() * block.abs().mean() for block in x.split(64)])


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLargest(KeepSigns):
    """One element in `of`, the largest."""

    name: ClassVar[str] = "keeplargest"

    of: int = 32

    def keep(self, x: Tensor) -> Tensor:
        chosen = x.abs().topk(-(-x.numel() // self.of)).indices
        return torch.zeros_like(x).index_copy(0, chosen, x[chosen])


BIASED: list[Codec] = [KeepSigns(), KeepLargest()]
