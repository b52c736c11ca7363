"""What tests of codecs with a rate share: vectors, and what C and NumPy alike make of them."""

from typing import Any

import torch
from torch import Tensor

from farflung.compression import kernels
from farflung.compression.codec import CodecError
from farflung.compression.rate import RateCodec

RATES = [0.05, 0.36, 0.89, 2.0, 4.0]


def by_numpy(call: Any, *arguments: Any) -> Any:
    """`call(*arguments)` without the kernels."""
    with kernels.without():
        return call(*arguments)


def gaussian(numel: int, seed: int = 0, scale: float = 1e-4) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def both_ways(codec: RateCodec[Any], x: Tensor) -> tuple[bytes, Tensor]:
    """Payload and decoded vector, after checking that C, NumPy and decode_add_ agree and that the payload fits."""
    payload = bytes(codec.encode(x))
    assert payload == bytes(by_numpy(codec.encode, x)) and len(payload) <= codec.max_nbytes(len(x))
    codec.check(payload, len(x))
    y = codec.decode(payload, len(x))
    assert same_bits(y, by_numpy(codec.decode, payload, len(x))) and bool(y.isfinite().all())
    start = gaussian(len(x), seed=9)
    for weight in (0.3, -1.0):
        acc, acc_by_numpy = start.clone(), start.clone()
        codec.decode_add_(payload, acc, weight)
        by_numpy(codec.decode_add_, payload, acc_by_numpy, weight)
        assert same_bits(acc, start + y * weight) and same_bits(acc_by_numpy, acc)
    return payload, y


def hostile_input() -> Tensor:
    """A vector with several planes at 4 bits, and exact values."""
    x = gaussian(300, scale=1.0)
    x[7], x[100] = 150.0, -200.0
    return x


def outcome(codec: RateCodec[Any], payload: bytes | bytearray, numel: int) -> bytes | None:
    """What C and NumPy alike make of it: finite numbers, or None for a CodecError that leaves `acc` as it was."""
    results = []
    for call in (lambda f, *a: f(*a), by_numpy):
        acc = torch.ones(numel)
        try:
            call(codec.decode_add_, payload, acc, 0.5)
        except CodecError:
            assert acc.eq(1).all()
            results.append(None)
        else:
            assert acc.isfinite().all()
            results.append(acc.numpy().tobytes())
    assert results[0] == results[1]
    return results[0]
