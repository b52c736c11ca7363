"""What codecs say that they will send, for planning: near what they do send, and never above the limit."""

import pytest
import torch

from farflung.compression import wire
from farflung.compression.policy import parse_policy
from farflung.compression.registry import CODECS, parse_codec

SPECS = [
    "fp32", "int8", "int8+zstd", "int4+zstd", "stat2", "sign", "deadzone(bits=0.1)", "deadzone(bits=1.0)", "deadzone(bits=4.0)",
    "topk", "topk(chunk=256,k=16,bits=2)", "topk(bits=8)", "randk", "lowrank(rank=8,cols=256)", "dct(cols=256)",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_gaussian_vectors_take_what_is_expected(spec: str) -> None:
    codec = parse_codec(spec)
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)) * 1e-3
    nbytes, expected = len(codec.encode(x)), codec.expected_nbytes(len(x))
    assert 0.94 * expected < nbytes < 1.06 * expected or ("zstd" in spec and 0.84 * expected < nbytes <= expected), (
        nbytes,
        expected,
    )


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.name)
def test_expected_is_within_the_limit_for_every_length(kind: type) -> None:
    codec = parse_codec({"lowrank": "lowrank(rank=2,cols=10)", "dct": "dct(cols=64)"}.get(kind.name, kind.name))
    for numel in [*range(70), 1000, 4095, 4097, 100_000]:
        assert wire.HEADER_NBYTES <= codec.expected_nbytes(numel) <= codec.max_nbytes(numel), numel
    with pytest.raises(ValueError, match="-1"):
        codec.expected_nbytes(-1)


def test_a_policy_expects_what_its_segments_do() -> None:
    flat = parse_policy("1d:fp32,deadzone(bits=1.0)").resolve([("matrix", (512, 512)), ("norm", (512,))])
    assert flat.expected_nbytes() == parse_codec("deadzone(bits=1.0)").expected_nbytes(1 << 18) + 32 + 4 * 512
    assert flat.expected_nbytes() < 0.4 * flat.max_nbytes()
