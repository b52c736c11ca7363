"""One list of all codecs, held to what `Codec` promises: a codec that is registered and not in it fails here."""

import itertools
import struct
from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression import kernels
from farflung.compression.codec import Codec, CodecError
from farflung.compression.registry import ACTIVATION_CODECS, CODECS, codec_of, parse_codec
from farflung.compression.wire import HEADER_NBYTES
from farflung.compression.zstd import Zstd

EVERY = [
    parse_codec(spec)
    for spec in (
        "fp32", "bf16", "fp16", "int8(block=16)", "int4(block=16)", "nf4(block=16)", "mxfp4(block=16)", "nvfp4", "e3m0(block=16)",
        "stat2", "sign(block=16)", "deadzone(bits=1.0)", "trellis(bits=1.0)", "topk(chunk=64,k=16,bits=1)", "topk(chunk=64,k=16,bits=2)",
        "topk(chunk=64,k=16,bits=8)", "randk(every=3)", "lowrank(rank=2,cols=7)", "dct(cols=64,k=5)",
        "int4(block=16)+zstd", "topk(chunk=64,k=16)+zstd",
    )
]  # fmt: skip
LIMIT = 2.0**15
"""No codec refuses numbers of this magnitude; fp16 refuses 2^16."""

every_codec = pytest.mark.parametrize("codec", EVERY, ids=lambda c: c.spec)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(x: Tensor) -> bytes:
    return x.numpy().tobytes()


def checked(codec: Codec, x: Tensor) -> Tensor:
    """What `x` decodes to, after checking that it is left alone and that payload and sum are as promised."""
    before = bits(x)
    payload = bytes(codec.encode(x))
    assert bits(x) == before and bytes(codec.encode(x)) == payload
    assert HEADER_NBYTES <= len(payload) <= codec.max_nbytes(len(x)) and codec_of(payload) == codec
    codec.check(payload, len(x))
    y = codec.decode(payload, len(x))
    assert y.shape == x.shape and y.dtype == torch.float32 and bool(y.isfinite().all())
    acc = torch.linspace(-1.0, 1.0, len(x))
    expected = acc + y * 0.3
    codec.decode_add_(payload, acc, 0.3)
    assert bits(acc) == bits(expected)
    return y


def test_the_list_has_them_all() -> None:
    assert {codec.name for codec in EVERY} == {kind.name for kind in (*CODECS, Zstd)}


def test_ids_and_versions_are_for_ever() -> None:
    """They stand in payloads and in saved states. A new codec gets a new id; a new layout a new version."""
    numbers = {kind.name: (kind.codec_id, kind.version) for kind in (*CODECS, *ACTIVATION_CODECS, Zstd)}
    assert numbers == NUMBERS


floats = st.floats(width=32, min_value=-LIMIT, max_value=LIMIT) | st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126])


@every_codec
@settings(deadline=None, max_examples=25)
@given(values=st.lists(floats, max_size=150))
@example(values=[])
@example(values=[1.0])
@example(values=[1e-45, -1e-45])
def test_any_finite_vector_of_any_length(codec: Codec, values: list[float]) -> None:
    checked(codec, torch.tensor(values, dtype=torch.float32))


@every_codec
def test_every_length_from_none_on(codec: Codec) -> None:
    x = torch.randn(132, generator=torch.Generator().manual_seed(0)) * 1e-4
    for numel in range(len(x) + 1):
        checked(codec, x[:numel])


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -1e-30, 1e-4, -3.5, LIMIT])
def test_all_equal(codec: Codec, value: float) -> None:
    for numel in (1, 2, 64, 131):
        y = checked(codec, torch.full((numel,), value))
        assert not bool((y * value < 0).any()) or codec.name == "dct", "signs are kept; a tile's cosines overshoot"
        assert float(y.abs().max()) <= 2 * abs(value)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("numel", "at"), [(1, 0), (130, 0), (130, 129)])
def test_what_is_not_finite_is_a_typed_error(codec: Codec, bad: float, numel: int, at: int) -> None:
    x = torch.ones(numel)
    x[at] = bad
    with pytest.raises(CodecError, match="finite"):
        codec.encode(x)


@every_codec
def test_what_is_no_contiguous_fp32_vector_is_refused(codec: Codec) -> None:
    x = torch.ones(64)
    for bad in (x[::2], x.view(8, 8), x.view(8, 8).T[0], x.double(), x.bfloat16()):
        with pytest.raises(ValueError, match="contiguous fp32 vector"):
            codec.encode(bad)
    payload = codec.encode(x[:32])
    for target in (torch.ones(64)[::2], torch.ones(32, dtype=torch.float64)):
        with pytest.raises(ValueError, match="contiguous fp32 vector"):
            codec.decode_add_(payload, target, 1.0)


@every_codec
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_damage_is_a_typed_error_or_finite(codec: Codec, data: st.DataObject) -> None:
    """Bytes overwritten, cut or appended, with the header's length put right or not; a refused payload changes nothing."""
    numel = 130
    bad = bytearray(codec.encode(torch.linspace(-1.0, 1.0, numel)))
    at = data.draw(st.integers(0, len(bad) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=12))
    bad[at : at + len(junk)] = junk
    bad = bad[: data.draw(st.sampled_from([len(bad), at]))] + data.draw(st.binary(max_size=4))
    if len(bad) >= HEADER_NBYTES and data.draw(st.booleans()):
        struct.pack_into("<Q", bad, 24, len(bad) - HEADER_NBYTES)
    acc = torch.ones(numel)
    try:
        codec.decode_add_(bad, acc, 1.0)
    except CodecError:
        assert acc.eq(1).all()
        with pytest.raises(CodecError):
            codec.check(bad, numel)
    else:
        assert acc.isfinite().all()


@every_codec
def test_a_header_that_promises_too_much_is_refused_before_anything_is_allocated(codec: Codec) -> None:
    """2^50 elements: 4 PiB, which nobody has; a MemoryError would say that it was tried."""
    good = bytes(codec.encode(torch.linspace(-1.0, 1.0, 130)))
    for start in (0, HEADER_NBYTES) if isinstance(codec, Zstd) else (0,):
        bad = bytearray(good)
        struct.pack_into("<Q", bad, start + 8, 1 << 50)
        for numel in (130, 1 << 50):
            with pytest.raises(CodecError):
                codec.check(bad, numel)
            with pytest.raises(CodecError):
                codec.decode(bad, numel)


@every_codec
def test_the_same_bits_in_eager_and_compiled_with_any_threads(
    codec: Codec, library: CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 80_001
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-4
    results = set()
    for way, threads in itertools.product((None, library), (1, 2)):
        monkeypatch.setattr(kernels, "_library", way)
        monkeypatch.setattr(codec_module, "CPU_CHUNK", 1 << 16)
        torch.set_num_threads(threads)
        payload = bytes(codec.encode(x))
        total = x.clone()
        codec.decode_add_(payload, total, 0.37)
        results.add((payload, bits(codec.decode(payload, numel)), bits(total)))
    assert len(results) == 1


# (id, version) by name.
NUMBERS = {
    "fp32": (1, 1), "int8": (2, 1), "int4": (3, 1), "bf16": (4, 1), "fp16": (5, 1), "nf4": (6, 1), "mxfp4": (7, 1), "nvfp4": (8, 1),
    "e3m0": (9, 1), "stat2": (10, 1), "sign": (11, 1), "deadzone": (12, 1), "topk": (13, 1), "randk": (14, 1), "lowrank": (15, 1),
    "dct": (16, 1), "rotint4": (17, 1), "tokenint8": (18, 1), "subspace": (19, 1), "trellis": (21, 1), "zstd": (60, 1),
}  # fmt: skip
