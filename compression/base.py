"""What codecs of vectors write in the same way, so that each has only its own idea to say.

BaseCodec       spec, parameters of a codec that has none, size of the header, check
ChunkedCodec    decodes by a `ChunkReader`
BlockCodec      has one parameter, the block
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from farflung.compression import codec, wire
from farflung.compression.codec import ChunkReader, Payload

MIN_BLOCK = 16
"""Smaller blocks spend a bit and more per element on bf16 scales."""


class BaseCodec(ABC):
    """Implements `Codec` but for `block`, `encode` and decoding."""

    __slots__ = ()

    name: ClassVar[str]
    codec_id: ClassVar[int]
    version: ClassVar[int]

    @property
    def spec(self) -> str:
        """See `Codec.spec`."""
        return codec.spec_of(self)

    @property
    def param(self) -> int:
        """See `Codec.param`; 0 where a codec does not say otherwise."""
        return 0

    @classmethod
    def from_param(cls, param: int) -> Self:
        """See `Codec.from_param`. Raises ValueError."""
        if param != 0:
            raise ValueError(f"{cls.name} has no parameter, got {param}")
        return cls()

    def max_nbytes(self, numel: int) -> int:
        """See `Codec.max_nbytes`. Raises ValueError."""
        if numel < 0:
            raise ValueError(f"a vector cannot have {numel} elements")
        return wire.HEADER_NBYTES + self._max_body(numel)

    def expected_nbytes(self, numel: int) -> int:
        """See `Codec.expected_nbytes`: the largest payload, for all payloads of most codecs have one size. Raises ValueError."""
        return self.max_nbytes(numel)

    def check(self, payload: Payload, numel: int) -> None:
        """See `Codec.check`. Raises CodecError."""
        self._open(payload, numel)

    @abstractmethod
    def _max_body(self, numel: int) -> int:
        """Largest number of bytes after the header."""

    @abstractmethod
    def _open(self, payload: Payload, numel: int) -> object:
        """What decoding needs of a payload, checked. Raises CodecError."""


class ChunkedCodec(BaseCodec):
    """Decodes chunk by chunk."""

    __slots__ = ()

    @property
    @abstractmethod
    def block(self) -> int:
        """See `Codec.block`."""

    @abstractmethod
    def _open(self, payload: Payload, numel: int) -> ChunkReader:
        """Reads chunks of a payload, which is checked. Raises CodecError."""

    def decode(self, payload: Payload, numel: int, *, out: Tensor | None = None) -> Tensor:
        """See `Codec.decode`. Raises CodecError."""
        return codec.decode_with(self._open(payload, numel), numel, self.block, out)

    def decode_add_(self, payload: Payload, acc: Tensor, weight: float) -> None:
        """See `Codec.decode_add_`. Raises CodecError."""
        codec.check_target(acc, acc.numel(), "acc")
        codec.decode_add_with(self._open(payload, acc.numel()), acc, self.block, weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCodec(BaseCodec):
    """A scale per block, and the block is the only parameter."""

    max_block: ClassVar[int]

    block: int = field()  # without `field()` a property of the same name in another base would be its default
    """Elements per scale; a power of two."""

    def __post_init__(self) -> None:
        if not MIN_BLOCK <= self.block <= self.max_block or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, {MIN_BLOCK} to {self.max_block}, not {self.block}")

    @property
    def param(self) -> int:
        """The block."""
        return self.block

    @classmethod
    def from_param(cls, param: int) -> Self:
        """`param` is the block. Raises ValueError."""
        return cls(block=param)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)
