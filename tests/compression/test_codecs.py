"""What every codec promises, and what int8 promises besides."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression.codec import Codec, CodecError
from farflung.compression.dct import Dct
from farflung.compression.four_bit import E3m0, Mxfp4, Nf4, Nvfp4
from farflung.compression.fp32 import Fp32
from farflung.compression.half import Bf16, Fp16
from farflung.compression.int4 import Int4
from farflung.compression.int8 import Int8
from farflung.compression.lowrank import LowRank
from farflung.compression.randk import RandK
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.sign import Sign
from farflung.compression.stat2 import Stat2
from farflung.compression.topk import TopK

DENSE: list[Codec] = [Fp32(), Int8(), Int8(block=16), Int4(), Int4(block=16)]
DENSE += [Bf16(), Fp16(), Nf4(), Mxfp4(), Nvfp4(), E3m0(), Sign(), Stat2()]
"""Payloads of one length only."""
CODECS: list[Codec] = [
    *DENSE,
    TopK(chunk=256, k=16),
    TopK(chunk=256, k=16, bits=2),
    TopK(chunk=256, k=16, bits=8),
    RandK(every=4),
    LowRank(rank=2, cols=100),
    Dct(cols=64),
]
IDEMPOTENT = [codec for codec in DENSE if codec.name != "stat2"]  # they give decoded vectors back exactly
LOCAL = [codec for codec in DENSE if codec.name not in {"nvfp4", "stat2"}]  # nothing is shared beyond a block
SUMMING = {"sign", "stat2"}  # their sums may differ between devices in the last bit
CHUNK = 4096  # small, so that short vectors span several chunks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "CPU_CHUNK", CHUNK)


def gaussian(numel: int, seed: int = 0, scale: float = 1e-4) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def nmse(x: Tensor, y: Tensor) -> float:
    return float((x - y).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("codec", IDEMPOTENT, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 127, 128, 129, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
@pytest.mark.usefixtures("small_chunks")
def test_length_is_exact_and_decoding_is_idempotent(codec: Codec, numel: int) -> None:
    x = gaussian(numel)
    before = x.clone()
    payload = codec.encode(x)
    assert len(payload) == codec.max_nbytes(numel) and torch.equal(x, before)
    once = codec.decode(payload, numel)
    assert once.shape == (numel,) and once.dtype == torch.float32
    again = codec.encode(once)
    assert bytes(again) == bytes(payload)
    assert same_bits(codec.decode(again, numel), once)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)


@settings(deadline=None, max_examples=150)
@given(values=st.lists(floats, max_size=70), block=st.sampled_from([16, 32, 64]))
def test_any_finite_vector(values: list[float], block: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    exact = Fp32()
    assert same_bits(exact.decode(exact.encode(x), len(x)), x)
    codec = Int8(block=block)
    payload = codec.encode(x)
    y = codec.decode(payload, len(x))
    assert bool(torch.isfinite(y).all())
    assert same_bits(codec.decode(codec.encode(y), len(x)), y)
    for start in range(0, len(x), block):
        part = slice(start, start + block)
        absmax = float(x[part].abs().max())
        # half a step, and the scale's own rounding; blocks that would need a subnormal scale become zero
        bound = absmax / 127 * (0.5 + 1 / 256) if absmax >= 127 * 2.0**-126 else absmax
        assert float((x[part] - y[part]).abs().max()) <= bound * 1.001


def test_nmse_on_gaussian_data() -> None:
    x = gaussian(1 << 20)
    blocks = x.view(-1, 128)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    ideal = nmse(blocks, (blocks / scales).round() * scales)  # the same quantiser with unrounded scales
    ours = nmse(x, Int8().decode(Int8().encode(x), len(x)))
    assert ours < 1.01 * ideal and ours < 4.3e-5
    assert Int8().max_nbytes(1 << 20) * 8 / (1 << 20) < 8.13


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-45, -1e-40, 2.0**-126, 1e-36, 2e-36, 1e38])
def test_constants_zero_and_denormals(value: float) -> None:
    x = torch.full((200,), value)
    assert same_bits(Fp32().decode(Fp32().encode(x), 200), x)
    y = Int8().decode(Int8().encode(x), 200)
    if abs(value) < 127 * 2.0**-126:  # about 1.5e-36
        assert torch.count_nonzero(y) == 0
    else:
        torch.testing.assert_close(y, x, rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@pytest.mark.usefixtures("small_chunks")
def test_same_bits_for_every_thread_count_and_chunk(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 5 * CHUNK + 333
    x, acc = gaussian(numel), gaussian(numel, seed=1)
    results = []
    for chunk in (CHUNK, 2048, 128, 1 << 18):
        monkeypatch.setattr(codec_module, "CPU_CHUNK", chunk)
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            payload = bytes(codec.encode(x))
            total = acc.clone()
            codec.decode_add_(payload, total, 0.37)
            results.append((payload, codec.decode(payload, numel), total))
    first = results[0]
    for payload, decoded, total in results[1:]:
        assert payload == first[0] and same_bits(decoded, first[1]) and same_bits(total, first[2])


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@pytest.mark.usefixtures("small_chunks")
def test_decode_add_is_multiply_then_add(codec: Codec) -> None:
    x, acc = gaussian(9999), gaussian(9999, seed=1)
    payload = codec.encode(x)
    expected = acc + codec.decode(payload, 9999) * 0.3
    codec.decode_add_(payload, acc, 0.3)
    assert same_bits(acc, expected)


@pytest.mark.parametrize("codec", LOCAL, ids=lambda c: c.spec)
@pytest.mark.usefixtures("small_chunks")
def test_parts_decode_to_slices_of_the_whole(codec: Codec) -> None:
    x = gaussian(3 * CHUNK + 50)
    whole = codec.decode(codec.encode(x), len(x))
    cut = CHUNK + 2 * 128
    for part in (slice(0, cut), slice(cut, len(x))):
        piece = x[part]
        assert same_bits(codec.decode(codec.encode(piece), len(piece)), whole[part])


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_reused_memory_and_any_alignment(codec: Codec) -> None:
    x = gaussian(1000)
    fresh = codec.encode(x)
    memory = bytearray(codec.max_nbytes(1000) + 8)
    payload = codec.encode(x, out=memory)
    assert bytes(payload) == bytes(fresh) and len(payload) == len(fresh)
    expected = codec.decode(fresh, 1000)
    out = torch.empty(1000)
    for shift in (0, 1, 3):
        moved = memoryview(bytes(shift) + bytes(fresh))[shift:]  # read-only, and not aligned
        assert codec.decode(moved, 1000, out=out) is out and same_bits(out, expected)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 127, 999])
def test_what_is_not_finite_is_refused(codec: Codec, bad: float, at: int) -> None:
    x = gaussian(1000)
    x[at] = bad
    with pytest.raises(CodecError, match="finite"):
        codec.encode(x)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_wrong_arguments_are_the_callers_fault(codec: Codec) -> None:
    payload = codec.encode(gaussian(100))
    for bad in (gaussian(100).double(), gaussian(100).view(10, 10), gaussian(200)[::2]):
        with pytest.raises(ValueError, match="contiguous fp32 vector"):
            codec.encode(bad)
    with pytest.raises(ValueError, match="100 elements"):
        codec.decode(payload, 100, out=torch.empty(99))
    with pytest.raises(ValueError, match="writable"):
        codec.encode(gaussian(100), out=bytearray(10))
    with pytest.raises(ValueError, match="-1"):
        codec.max_nbytes(-1)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_spec_and_header_lead_back_to_the_codec(codec: Codec) -> None:
    assert parse_codec(codec.spec) == codec
    assert codec_of(codec.encode(gaussian(10))) == codec


@pytest.mark.parametrize("spec", ["", "int5", "int8(", "int8(block=100)", "int8(block=8)", "fp32(block=128)", "int8()"])
def test_unknown_specs_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"unknown codec|power of two|has no parameters|cannot be read|has block"):
        parse_codec(spec)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", [1, 4096, 5 * 4096 + 77])
def test_a_gpu_encodes_like_a_cpu(codec: Codec, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "CUDA_CHUNK", CHUNK)
    x = gaussian(numel)
    payload = codec.encode(x.cuda())
    assert torch.frombuffer(payload, dtype=torch.uint8).is_pinned()
    if codec.name not in SUMMING:
        assert bytes(payload) == bytes(codec.encode(x))
    broken = x.cuda()
    broken[-1] = float("nan")
    with pytest.raises(CodecError, match="finite"):
        codec.encode(broken)
