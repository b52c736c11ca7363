"""Bytes of what crosses a boundary between stages: activations one way, their gradients the other.

`fp32` is exact. Any activation codec (compression/activations.py) makes less of it: `tokenint8` in both directions, or `rotint4`
forwards, where the digest of compression (1.7) says what they cost. Targets go as int32, where the last hop computes the loss.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.compression.activations import ActivationCodec
from farflung.compression.codec import CodecError, Payload
from farflung.compression.fp32 import Fp32
from farflung.compression.registry import parse_activation_codec

TARGET_BYTES = 4


@dataclass(frozen=True, slots=True)
class Boundary:
    """One direction of a model's boundaries. Encodes from, and decodes to, any device."""

    codec: Fp32 | ActivationCodec
    width: int

    @classmethod
    def parse(cls, spec: str, width: int) -> "Boundary":
        """From `fp32`, or the spec of an activation codec for this width. Raises ValueError."""
        codec = Fp32() if spec == Fp32.name else parse_activation_codec(spec)
        if isinstance(codec, ActivationCodec) and codec.width != width:
            raise ValueError(f"codec {spec} for a model of width {width}; say width={width}")
        return cls(codec, width)

    def max_nbytes(self, tokens: int) -> int:
        """Most bytes of so many tokens."""
        return self.codec.max_nbytes(tokens * self.width)

    def encode(self, x_BTD: Tensor) -> memoryview:
        """Raises CodecError when an element is not finite."""
        x = x_BTD.detach().contiguous()
        if isinstance(self.codec, Fp32):
            return self.codec.encode(x.float().view(-1))
        return self.codec.encode(x.view(-1, self.width))

    def decode(
        self, payload: Payload, batch: int, length: int, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:  # [batch, length, width]
        """Raises CodecError when the payload is damaged or of other tokens."""
        if isinstance(self.codec, Fp32):
            x = self.codec.decode(payload, batch * length * self.width).to(device, dtype)
        else:
            x = torch.empty(batch * length, self.width, dtype=dtype, device=device)
            self.codec.decode(payload, x)
        return x.view(batch, length, self.width)

    def carried(self, x_BTD: Tensor) -> Tensor:
        """What arrives of it. Raises CodecError when an element is not finite."""
        batch, length, _ = x_BTD.shape
        return self.decode(self.encode(x_BTD), batch, length, device=x_BTD.device)


def encode_targets(targets_BT: Tensor) -> bytes:
    """Little-endian int32."""
    return bytes(targets_BT.to("cpu", torch.int32).contiguous().numpy().astype("<i4").tobytes())


def decode_targets(
    data: bytes, batch: int, length: int, vocab_size: int
) -> Tensor:  # [batch, length] int64, on the CPU
    """Raises CodecError for a class that does not exist."""
    targets = torch.from_numpy(np.frombuffer(data, dtype="<i4").astype(np.int64)).view(batch, length)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab_size:
        raise CodecError(f"a target outside of a vocabulary of {vocab_size}")
    return targets
