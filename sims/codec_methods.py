"""The codecs that `farflung bench codec` shows, ours and others', behind one record of functions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from farflung.compression import kernels
from farflung.compression.registry import parse_codec

SPECS: tuple[str, ...] = (
    "fp32",
    "bf16",
    "fp16",
    "int8(block=128)",
    "int8(block=4096)",
    "int8(block=128)+zstd",
    "int4(block=128)",
    "int4(block=128)+zstd",
    "nf4",
    "mxfp4",
    "nvfp4",
    "e3m0",
    "stat2",
    "sign",
    "deadzone(bits=4.0)",
    "deadzone(bits=3.6)",
    "deadzone(bits=2.0)",
    "deadzone(bits=1.1)",
    "deadzone(bits=1.0)",
    "deadzone(bits=0.9)",
    "deadzone(bits=0.36)",
    "deadzone(bits=0.14)",
    "deadzone(bits=0.1)",
    "trellis(bits=4.0)",
    "trellis(bits=2.0)",
    "trellis(bits=1.0)",
    "trellis(bits=0.9)",
    "trellis(bits=0.36)",
    "trellis(bits=0.14)",
    "topk",
    "topk(k=66)",
    "topk(chunk=16384,k=270)",
    "topk(bits=2)",
    "topk(bits=8)",
    "randk",
    "lowrank(rank=8,cols=256)",
    "dct(cols=256)",
)
"""What is shown of ours, in the order of the tables: every codec of the registry at least once. Where a target of speed
is about a codec, its first line here is meant (`codec_targets`)."""

EAGER: tuple[str, ...] = ("int8(block=128)", "deadzone(bits=2.0)")
"""What is shown of ours without the C kernels as well, on one source: it sends the same bytes, only slower."""

OURS = "farflung"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A butterfly all-reduce that is shown: who averages, with which codecs, and how well it is to do."""

    peers: int
    up: str
    down: str
    most_nmse: float
    """Issue 3's target."""

    @property
    def source(self) -> str:
        return f"mean of {self.peers} peers"

    @property
    def codec(self) -> str:
        return f"{parse_codec(self.up).spec} up, {parse_codec(self.down).spec} down"


MEANS: tuple[Mean, ...] = (
    Mean(peers=16, up="int8", down="int8", most_nmse=5e-5),
    Mean(peers=8, up="int4", down="int8", most_nmse=3.5e-3),
)
"""Every pair of uplink and downlink codecs that is shown."""


class DecodeFailed(RuntimeError):
    """A baseline cannot decode what it has encoded; the message is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to encode a vector. What `encode` returns is good until the next call of it."""

    by: str
    """Whose it is."""
    name: str
    encode: Callable[[Tensor], Any]
    """From fp32 [n] to whatever is sent."""
    nbytes: Callable[[Any], int]
    """Bytes of it on the wire."""
    decode: Callable[[Any], Tensor]
    """To fp32 [n]. Raises DecodeFailed."""
    decode_add_: Callable[[Any, Tensor, float], None]
    """Add the decoded vector times a weight to fp32 [n]. Raises DecodeFailed."""
    eager: bool = False
    """One of ours, with PyTorch in the place of the C kernels."""


def eager(spec: str) -> Method:
    """A codec of the registry as it is where there is no C compiler. Raises ValueError."""
    method = ours(spec)

    def encode(x: Tensor) -> memoryview:
        with kernels.without():
            payload: memoryview = method.encode(x)
            return payload

    def decode_add_(payload: memoryview, acc: Tensor, weight: float) -> None:
        with kernels.without():
            method.decode_add_(payload, acc, weight)

    return replace(method, encode=encode, decode_add_=decode_add_, eager=True)


def ours(spec: str) -> Method:
    """A codec of the registry, encoding into memory that is used again, as a node does. Raises ValueError."""
    codec = parse_codec(spec)
    memory = bytearray()
    numel = 0

    def encode(x: Tensor) -> memoryview:
        nonlocal memory, numel
        numel = x.numel()
        if len(memory) < codec.max_nbytes(numel):
            memory = bytearray(codec.max_nbytes(numel))
        return codec.encode(x, out=memory)

    return Method(
        by=OURS,
        name=codec.spec,
        encode=encode,
        nbytes=len,
        decode=lambda payload: codec.decode(payload, numel),
        decode_add_=codec.decode_add_,
    )
