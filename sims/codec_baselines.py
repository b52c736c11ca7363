"""Other projects' codecs for `farflung bench codec`: hivemind's, and bitsandbytes' and torchao's where installed.

Each is called as its own project calls it. hivemind cuts a tensor into parts that have 512 KiB once encoded, which is
also three times as fast as encoding 64 MB at once; what it sends is a protobuf message for each part. Its averager adds
a decoded part with `add_(part, alpha=weight)`, so that is the decode-add of all baselines.

hivemind 1.1.12 cannot decode its 8-bit codecs with numpy 2.4 or newer (`int()` of an array of one element); that is
reported, not repaired: 2.3 is the last with which they work. bitsandbytes and torchao are not dependencies of
farflung: without them their rows are missing, and the bench says so. Tried with bitsandbytes 0.50.2 and torchao 0.18.0.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.sims.codec_methods import DecodeFailed, Method

HIVEMIND_PART_NBYTES = 1 << 19
"""`hivemind.averaging.partition.DEFAULT_PART_SIZE_BYTES`: bytes of one part, encoded."""

BITSANDBYTES_BLOCK, NF4_BLOCK, TORCHAO_BLOCK = 4096, 64, 128
"""Elements per scale: bitsandbytes' and hivemind's default, QLoRA's, and ours."""


def baselines() -> tuple[list[Method], list[str]]:
    """All that can be imported here, and a sentence for each that cannot."""
    methods: list[Method] = []
    skipped: list[str] = []
    for name, load in (
        ("hivemind", _hivemind),
        ("hivemind blockwise8", _hivemind_blockwise),
        ("bitsandbytes", _bitsandbytes),
        ("torchao", _torchao),
    ):
        try:
            methods += load()
        except ImportError as error:
            skipped.append(f"{name}: {error}")
    return methods, skipped


def _hivemind() -> list[Method]:
    compression: Any = importlib.import_module("hivemind.compression")
    return [
        _hivemind_method("float16", compression.Float16Compression(), bits=16),
        _hivemind_method("uniform8", compression.Uniform8BitQuantization(), bits=8),
        _hivemind_method("quantile8", compression.Quantile8BitQuantization(), bits=8),
    ]


def _hivemind_blockwise() -> list[Method]:
    importlib.import_module("bitsandbytes")  # which hivemind itself imports only when it encodes
    compression: Any = importlib.import_module("hivemind.compression")
    return [_hivemind_method("blockwise8", compression.BlockwiseQuantization(), bits=8)]


def _hivemind_method(name: str, compression: Any, *, bits: int) -> Method:
    from hivemind.compression import CompressionInfo

    part_numel = HIVEMIND_PART_NBYTES * 8 // bits

    def encode(x: Tensor) -> list[Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
            return [
                compression.compress(part, CompressionInfo.from_tensor(part)) for part in torch.split(x, part_numel)
            ]

    def extract(message: Any) -> Tensor:
        try:
            part: Tensor = compression.extract(message)
        except TypeError as error:
            raise DecodeFailed(f"decoding fails: {error}") from error
        return part

    def decode_add_(messages: list[Any], acc: Tensor, weight: float) -> None:
        for message, part in zip(messages, torch.split(acc, part_numel), strict=True):
            part.add_(extract(message), alpha=weight)

    return Method(
        by="hivemind",
        name=name,
        encode=encode,
        nbytes=lambda messages: sum(message.ByteSize() for message in messages),
        decode=lambda messages: torch.cat([extract(message) for message in messages]),
        decode_add_=decode_add_,
    )


def _bitsandbytes() -> list[Method]:
    functional: Any = importlib.import_module("bitsandbytes.functional")

    def nf4_nbytes(payload: Any) -> int:
        codes, state = payload  # blocks' scales are in 8 bits, with a second level of fp32 scales and one fp32 mean
        return int(codes.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes + 4)

    return [
        _plain(
            "bitsandbytes",
            f"blockwise8(block={BITSANDBYTES_BLOCK})",
            encode=lambda x: functional.quantize_blockwise(x, blocksize=BITSANDBYTES_BLOCK),
            nbytes=lambda payload: payload[0].nbytes + payload[1].absmax.nbytes,
            decode=lambda payload: functional.dequantize_blockwise(*payload),
        ),
        _plain(
            "bitsandbytes",
            f"nf4(block={NF4_BLOCK})",
            encode=lambda x: functional.quantize_4bit(
                x, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
            ),
            nbytes=nf4_nbytes,
            decode=lambda payload: functional.dequantize_4bit(*payload).flatten(),  # on a CPU it is one row
        ),
    ]


def _torchao() -> list[Method]:
    primitives: Any = importlib.import_module("torchao.quantization.quant_primitives")
    block = (1, TORCHAO_BLOCK)

    def encode(x: Tensor) -> Any:
        rows = x.view(-1, TORCHAO_BLOCK)
        scale, zero_point = primitives.choose_qparams_affine(rows, primitives.MappingType.SYMMETRIC, block, torch.int8)
        return primitives.quantize_affine(rows, block, scale, zero_point, torch.int8), scale, zero_point

    def decode(payload: Any) -> Tensor:
        codes, scale, zero_point = payload
        values: Tensor = primitives.dequantize_affine(codes, block, scale, zero_point, torch.int8)
        return values.flatten()

    return [
        _plain(
            "torchao",
            f"int8(block={TORCHAO_BLOCK})",
            encode=encode,
            nbytes=lambda payload: payload[0].nbytes + payload[1].nbytes,  # symmetric: the zero points are all 0
            decode=decode,
        )
    ]


def _plain(
    by: str,
    name: str,
    *,
    encode: Callable[[Tensor], Any],
    nbytes: Callable[[Any], int],
    decode: Callable[[Any], Tensor],
) -> Method:
    def decode_add_(payload: Any, acc: Tensor, weight: float) -> None:
        acc.add_(decode(payload), alpha=weight)

    return Method(by=by, name=name, encode=encode, nbytes=nbytes, decode=decode, decode_add_=decode_add_)
