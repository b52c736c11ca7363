"""Tensors to codecs: what a spec means, and that a slice is the concatenation of its segments."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression.codec import Codec, CodecError
from farflung.compression.fp32 import Fp32
from farflung.compression.int8 import Int8
from farflung.compression.policy import FlatCodec, Policy, Rule, parse_policy, uniform
from farflung.protocol.manifest import _CODEC as MANIFEST_FIELD

SHAPES = [
    ("embed_tokens.weight", (20, 8)),
    ("layers.0.q_proj.weight", (8, 8)),
    ("layers.0.k_proj.weight", (4, 8)),
    ("layers.0.norm.weight", (8,)),
    ("layers.1.q_proj.weight", (8, 8)),
    ("layers.1.norm.weight", (8,)),
    ("empty", (0, 3)),
    ("norm.weight", (8,)),
]
NUMEL = 160 + 64 + 32 + 8 + 64 + 16
SPEC = "1d:fp32,embed:int8(block=64),int8(block=16)"


@pytest.fixture(scope="module")
def flat() -> FlatCodec:
    return parse_policy(SPEC).resolve(SHAPES)


def vector(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_neighbours_with_the_same_codec_are_one_segment(flat: FlatCodec) -> None:
    segments = [(s.start, s.stop, s.codec) for s in flat.segments]
    exact, coarse = Fp32(), Int8(block=16)
    assert segments == [
        (0, 160, Int8(block=64)),
        (160, 256, coarse),
        (256, 264, exact),
        (264, 328, coarse),
        (328, 344, exact),
    ]
    assert flat.numel == NUMEL and flat.block == 64


@pytest.mark.parametrize(
    "spec",
    ["fp32", "int8(block=128)", SPEC, "0.q_proj:fp32,2d:int8(block=32),fp32", "q_proj.weight:fp32,int8(block=16)"],
)
def test_specs_are_canonical_and_fit_a_manifest(spec: str) -> None:
    assert parse_policy(spec).spec == spec
    assert parse_policy(spec).resolve(SHAPES).spec == spec
    assert MANIFEST_FIELD.fullmatch(spec)


def test_defaults_are_written_out() -> None:
    assert parse_policy("1d:fp32,int8").spec == "1d:fp32,int8(block=128)"


def test_the_first_rule_that_fits_decides() -> None:
    policy = parse_policy("layers.0:fp32,2d:int8(block=32),int8(block=16)")
    codecs = [next((r.codec for r in policy.rules if r.fits(n, len(s))), policy.default) for n, s in SHAPES]
    layer, matrix, rest = Fp32(), Int8(block=32), Int8(block=16)
    assert codecs == [matrix, layer, layer, layer, matrix, rest, matrix, rest]


@pytest.mark.parametrize(
    "spec", ["", "1d:fp32", "1d:fp32,", ",fp32", ":fp32,fp32", "fp32,int8", "a*:fp32,fp32", "(a+)+:fp32,fp32",
             "1d:1d:fp32,fp32", "1d:fp16x,fp32", "A:fp32,fp32", "int8(block=128),1d:fp32", "a:fp32," * 30 + "fp32"],
)  # fmt: skip
def test_what_is_no_policy_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"unknown codec|is no rule|a selector is|characters"):
        parse_policy(spec)


def test_an_empty_vector_and_slices_that_are_none_are_refused(flat: FlatCodec) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Policy(default=Fp32()).resolve([("empty", (0,))])
    for start, stop in ((-1, 5), (5, 5), (6, 5), (0, NUMEL + 1)):
        with pytest.raises(ValueError, match="no slice"):
            flat.part(start, stop)


def test_one_codec_alone_makes_its_own_bytes(flat: FlatCodec) -> None:
    codec = Int8(block=16)
    assert uniform(codec, 1000).part(10, 700) is codec
    assert flat.part(170, 250) == codec


@settings(deadline=None, max_examples=60)
@given(cuts=st.sets(st.integers(1, NUMEL - 1), max_size=6), seed=st.integers(0, 99))
def test_any_slices(cuts: set[int], seed: int) -> None:
    """Every slice decodes to what its segments decode to, each coded by itself, within its promise of bytes."""
    flat = parse_policy(SPEC).resolve(SHAPES)
    x = vector(NUMEL, seed)
    for start, stop in pairwise([0, *sorted(cuts), NUMEL]):
        codec, numel = flat.part(start, stop), stop - start
        payload = codec.encode(x[start:stop])
        assert len(payload) == codec.max_nbytes(numel)
        codec.check(payload, numel)
        expected, joined = torch.empty(numel), b""
        for segment in flat.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                piece = segment.codec.encode(x[low:high])
                joined += bytes(piece)
                expected[low - start : high - start] = segment.codec.decode(piece, high - low)
        assert bytes(payload) == joined
        assert torch.equal(codec.decode(payload, numel), expected)
        acc = vector(numel, seed + 1)
        total = acc + expected * 0.3
        codec.decode_add_(payload, acc, 0.3)
        assert torch.equal(acc, total)
        assert bytes(codec.encode(x[start:stop], out=bytearray(codec.max_nbytes(numel) + 3))) == joined


def test_damaged_payloads_change_nothing(flat: FlatCodec) -> None:
    codec = flat.part(100, 300)
    good = bytes(codec.encode(vector(200)))
    bad = [good[:k] for k in range(len(good))] + [good + b"\0", good + good, good[32:]]
    bad += [good[:at] + b"\xff" * 8 + good[at + 8 :] for at in range(0, len(good) - 8, 8)]
    for payload in bad:
        acc = torch.ones(200)
        out = torch.ones(200)
        try:
            codec.decode_add_(payload, acc, 1.0)
        except CodecError:
            assert acc.eq(1).all()
            with pytest.raises(CodecError):
                codec.check(payload, 200)
            with pytest.raises(CodecError):
                codec.decode(payload, 200, out=out)
            assert out.eq(1).all()
        else:
            assert acc.isfinite().all()


def test_wrong_arguments_are_the_callers_fault(flat: FlatCodec) -> None:
    codec = flat.part(100, 300)
    payload = codec.encode(vector(200))
    with pytest.raises(ValueError, match="200 elements, not 199"):
        codec.decode(payload, 199)
    with pytest.raises(ValueError, match="200 elements, not 201"):
        codec.encode(vector(201))
    with pytest.raises(ValueError, match="contiguous fp32"):
        codec.encode(vector(400)[::2])
    with pytest.raises(ValueError, match="writable"):
        codec.encode(vector(200), out=bytearray(10))
    x = vector(200)
    x[170] = float("nan")
    with pytest.raises(CodecError, match="finite"):
        codec.encode(x)


def test_rules_hold_any_codec() -> None:
    codec: Codec = Int8(block=32)
    policy = Policy(rules=(Rule(selector="norm", codec=Fp32()),), default=codec)
    assert parse_policy(policy.spec) == policy
