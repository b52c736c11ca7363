"""C gives PyTorch's bits, and building it is safe, cached, and may fail."""

import os
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import codec as codec_module
from farflung.compression import kernels
from farflung.compression.codec import Codec, CodecError
from farflung.compression.int4 import Int4
from farflung.compression.int8 import Int8
from farflung.compression.wire import HEADER_NBYTES

CODECS: list[Codec] = [Int8(block=16), Int8(), Int4(block=16), Int4()]

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, kernels.COMPILERS)), reason="no C compiler")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", None)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        prepared = kernels.prepare(tmp_path_factory.mktemp("cache"))
        assert prepared.native, prepared.reason
        assert kernels._library is not None
        return kernels._library


@pytest.fixture
def each_way(library: CDLL) -> list[CDLL | None]:
    """With PyTorch, and with C."""
    return [None, library]


def encoded(codec: Codec, x: Tensor) -> bytes | None:
    """The payload, or None when `x` cannot be encoded."""
    try:
        return bytes(codec.encode(x))
    except CodecError:
        return None


def bits(x: Tensor) -> bytes:
    return x.numpy().tobytes()


any_floats = st.lists(st.integers(0, 2**32 - 1), max_size=70)
tame_floats = st.lists(
    st.floats(-(2.0**-10), 2.0**-10, width=32).map(lambda v: struct.unpack("<I", struct.pack("<f", v))[0])
)


@needs_compiler
@settings(deadline=None, max_examples=300)
@given(patterns=any_floats | tame_floats, codec=st.sampled_from(CODECS))
@example(patterns=[0x7F7FFFFF], codec=Int8(block=16))  # the largest number: cannot be encoded
@example(patterns=[0x7EFFFFFF], codec=Int4(block=16))  # just below 2**127
@example(patterns=[1, 0x80000001, 0x007FFFFF], codec=Int8(block=16))  # subnormal
@example(patterns=[0x007E0000 * 7 // 8, 0x03000000], codec=Int4(block=16))
@example(patterns=[0x7FC00000, 0xFF800001], codec=Int4(block=16))
def test_encoding_has_the_same_bytes_for_any_floats(library: CDLL, patterns: list[int], codec: Codec) -> None:
    x = torch.tensor([p - (p >> 31 << 32) for p in patterns], dtype=torch.int32).view(torch.float32)
    kernels._library = None
    expected = encoded(codec, x)
    kernels._library = library
    assert encoded(codec, x) == expected


@needs_compiler
@settings(deadline=None, max_examples=300)
@given(
    codec=st.sampled_from(CODECS),
    numel=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
    weight=st.floats(-(2.0**20), 2.0**20) | st.sampled_from([0.0, 1.0, 1 / 3, -1e-30]),
    shift=st.integers(0, 3),
)
def test_decoding_has_the_same_bits_for_any_codes(
    library: CDLL, codec: Codec, numel: int, seed: int, weight: float, shift: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    acc = torch.randn(numel, generator=generator)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp2()
    payload = bytearray(codec.encode(x))
    codes_at = HEADER_NBYTES + 2 * -(-numel // codec.block)
    junk = torch.randint(0, 256, (len(payload) - codes_at,), generator=generator)
    payload[codes_at:] = bytes(junk.tolist())  # codes that no encoder writes as well
    moved = memoryview(bytes(shift) + bytes(payload))[shift:]  # read-only, at any alignment
    results = []
    for way in (None, library):
        kernels._library = way
        total = acc.clone()
        codec.decode_add_(moved, total, weight)
        results.append((bits(codec.decode(moved, numel)), bits(total)))
    assert results[0] == results[1]


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_the_same_bits_with_any_threads_and_chunks(
    codec: Codec, each_way: list[CDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 200_001
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-4
    results = set()
    for way in each_way:
        monkeypatch.setattr(kernels, "_library", way)
        for threads, chunk in ((1, 1 << 16), (2, 1 << 16), (2, 1 << 18)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(codec_module, "CPU_CHUNK", chunk)
            payload = bytes(codec.encode(x))
            total = x.clone()
            codec.decode_add_(payload, total, 0.37)
            results.add((payload, bits(codec.decode(payload, numel)), bits(total)))
    assert len(results) == 1


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_c_keeps_the_callers_contract(codec: Codec, library: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_library", library)
    x = torch.linspace(-1, 1, 1001)
    before = x.clone()
    memory = bytearray(b"\xaa" * (codec.max_nbytes(1001) + 64))
    payload = codec.encode(x, out=memory)
    assert torch.equal(x, before) and memory[len(payload) :] == b"\xaa" * 64
    padded = torch.full((1003,), 7.0)
    assert codec.decode(payload, 1001, out=padded[1:1002]).data_ptr() == padded[1:].data_ptr()
    assert padded[0] == 7 and padded[-1] == 7
    with pytest.raises(ValueError, match="1001 elements"):
        codec.decode(payload, 1001, out=torch.empty(1000))
    acc = torch.ones(1001)
    struct.pack_into("<H", memory, HEADER_NBYTES, 0x7FC0)
    with pytest.raises(CodecError, match="scale"):
        codec.decode_add_(payload, acc, 1.0)
    assert acc.eq(1).all()


def test_nothing_is_built_before_prepare() -> None:
    assert kernels.find("int8_encode") is None


@needs_compiler
def test_a_build_is_kept_and_named_for_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "cache"
    assert kernels.prepare(folder).native
    (first,) = folder.iterdir()
    before = first.stat().st_mtime_ns
    assert kernels.prepare(folder).native
    assert [file.stat().st_mtime_ns for file in folder.iterdir()] == [before]
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-DOTHER"))
    assert kernels.prepare(folder).native
    assert len(list(folder.iterdir())) == 2


@needs_compiler
def test_several_may_build_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(kernels.prepare, [tmp_path] * 4))
    assert all(one.native for one in prepared)
    assert len(list(tmp_path.iterdir())) == 1  # and no half-built ones beside it


def test_without_a_compiler_there_is_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COMPILERS", ())
    prepared = kernels.prepare(tmp_path)
    assert not prepared.native and "no C compiler" in prepared.reason
    assert kernels.find("int8_encode") is None
    assert len(Int8().encode(torch.ones(5))) == Int8().max_nbytes(5)


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(kernels, "COMPILERS", (str(broken),))
    prepared = kernels.prepare(tmp_path / "cache")
    assert not prepared.native and "no space left" in prepared.reason
    assert kernels.find("int8_encode") is None and not (tmp_path / "cache").exists()


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(kernels, "COMPILERS", (str(hanging),))
    monkeypatch.setattr(kernels, "BUILD_SECONDS", 0.1)
    prepared = kernels.prepare(tmp_path / "cache")
    assert not prepared.native and "timed out" in prepared.reason


@needs_compiler
def test_arithmetic_that_would_give_other_bits_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-ffast-math"))
    prepared = kernels.prepare(tmp_path)
    assert not prepared.native and "rounded" in prepared.reason and not list(tmp_path.iterdir())


@needs_compiler
def test_a_damaged_build_is_not_loaded(tmp_path: Path) -> None:
    assert kernels.prepare(tmp_path / "whole").native
    (built,) = (tmp_path / "whole").iterdir()
    kernels._library = None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / built.name).write_bytes(b"not a library")
    prepared = kernels.prepare(tmp_path / "damaged")
    assert not prepared.native and "cannot be built or loaded" in prepared.reason
    assert kernels.find("int8_encode") is None
