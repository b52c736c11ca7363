"""The zstd stage: the inner codec to the bit, and frames that lie."""

import struct

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression import zstd
from farflung.compression.codec import Codec, CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.fp32 import Fp32
from farflung.compression.int8 import Int8
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.wire import HEADER_NBYTES
from farflung.compression.zstd import Zstd

INNER: list[Codec] = [Fp32(), Int8(), Int8(block=16), DeadZone()]
CHUNK = 1024  # the smallest window of zstd
AT = 2 * HEADER_NBYTES  # of the compressed lengths


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "CHUNK", CHUNK)


def steps(numel: int) -> Tensor:
    """A vector that compresses."""
    return torch.arange(numel) // 50 * 1e-3


@pytest.mark.parametrize("inner", INNER, ids=lambda c: c.spec)
@pytest.mark.parametrize("numel", [0, 1, 17, CHUNK - 1, CHUNK, 5 * CHUNK + 7])
def test_it_decodes_to_what_the_inner_codec_does(inner: Codec, numel: int) -> None:
    codec, acc = Zstd(inner=inner), torch.ones(numel)
    for x in (steps(numel), torch.randn(numel, generator=torch.Generator().manual_seed(0))):
        payload = codec.encode(x)
        assert len(payload) <= codec.max_nbytes(numel) and codec_of(payload) == codec
        assert bytes(codec.encode(x, out=bytearray(codec.max_nbytes(numel)))) == bytes(payload)
        codec.check(payload, numel)
        expected = inner.decode(inner.encode(x), numel)
        assert torch.equal(codec.decode(payload, numel), expected)
        codec.decode_add_(payload, acc.fill_(1.0), 0.5)
        assert torch.equal(acc, 1 + expected * 0.5)


def test_it_makes_codes_shorter() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "CHUNK", 1 << 20)
        x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        assert len(Zstd(inner=Int8()).encode(x)) < 0.96 * len(Int8().encode(x))


def test_specs() -> None:
    for inner in INNER:
        codec = Zstd(inner=inner)
        assert codec.spec == f"{inner.spec}+zstd" and parse_codec(codec.spec) == codec and codec.block == inner.block
    assert parse_codec("int8+zstd") == Zstd(inner=Int8())
    for spec in ("+zstd", "int8+zstd+zstd", "int8+lz4", "zstd", "int8 +zstd"):
        with pytest.raises(ValueError, match=r"unknown codec|cannot follow"):
            parse_codec(spec)
    with pytest.raises(ValueError, match="parameter"):
        Zstd.from_param(0)


CODEC = Zstd(inner=Fp32())
X = steps(600)  # three chunks


def with_frame(frame: bytes) -> bytearray:
    """A payload whose second frame is this one."""
    good = bytes(CODEC.encode(X))
    lengths = struct.unpack_from("<3I", good, AT)
    start = AT + 12 + lengths[0]
    bad = bytearray(good[:start] + frame + good[start + lengths[1] :])
    struct.pack_into("<I", bad, AT + 4, len(frame))
    struct.pack_into("<Q", bad, 24, len(bad) - HEADER_NBYTES)
    return bad


def compress(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"junk",
        compress(bytes(CHUNK)) + b"x",
        compress(bytes(CHUNK)) * 2,
        compress(bytes(CHUNK - 1)),
        compress(bytes(CHUNK + 1)),
        compress(bytes(1 << 26)),
        compress(bytes(CHUNK), write_content_size=False),
        compress(bytes(CHUNK))[:-1],
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\x01\x00\x00",  # says that it has 2**64 - 1 bytes
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip",
    ],
    ids=["none", "junk", "trailing", "two", "short", "long", "bomb", "no_size", "cut", "huge", "skippable"],
)
def test_frames_that_lie(frame: bytes) -> None:
    assert CODEC.decode(with_frame(compress(bytes(CHUNK))), len(X))[300] == 0
    bad, acc = with_frame(frame), torch.ones(len(X))
    with pytest.raises(CodecError):
        CODEC.decode_add_(bad, acc, 1.0)
    with pytest.raises(CodecError):
        CODEC.check(bad, len(X))
    assert acc.eq(1).all()


@pytest.mark.parametrize("body_nbytes", [0, 2399, 2401, 1 << 32, (1 << 64) - 1])
def test_an_inner_length_that_lies(body_nbytes: int) -> None:
    bad = bytearray(CODEC.encode(X))
    struct.pack_into("<Q", bad, HEADER_NBYTES + 24, body_nbytes)
    with pytest.raises(CodecError):
        CODEC.decode(bad, len(X))


@pytest.mark.parametrize(("offset", "value"), [(3, 99), (4, 9), (8, 77), (16, 1), (35, 2), (35, 60), (40, 77), (48, 1)])
def test_headers_that_are_not_what_was_agreed(offset: int, value: int) -> None:
    bad = bytearray(CODEC.encode(X))
    bad[offset] = value
    with pytest.raises(CodecError):
        CODEC.decode(bad, len(X))


def test_nested_headers_are_refused_without_recursion() -> None:
    header = bytes(CODEC.encode(X))[:HEADER_NBYTES]
    with pytest.raises(CodecError):
        codec_of(header * 10_000)
    with pytest.raises(CodecError):
        codec_of(header)


# By version 1, of int8(block=16): one frame, and lengths that it states. Other releases of zstd may find other frames, and must read these.
GOLDEN = "4358013c01000000c80000000000000000000000000000005b000000000000004358010201000000c8000000000000001000000000000000e2000000000000003700000028b52ffd20e2750100e000000000000004370437043784c600007f7f404040407f7f55557f7f070081c0c0c2015402260e4404c9d6ba2f"


def test_golden_bytes_stay_readable() -> None:
    payload, x = bytes.fromhex(GOLDEN), steps(200)
    assert codec_of(payload) == Zstd(inner=Int8(block=16))
    assert torch.equal(
        Zstd(inner=Int8(block=16)).decode(payload, 200), Int8(block=16).decode(Int8(block=16).encode(x), 200)
    )


@settings(deadline=None, max_examples=100)
@given(cut=st.integers(0, 200), tail=st.binary(max_size=20), fix=st.booleans())
def test_junk_is_a_typed_error(cut: int, tail: bytes, fix: bool) -> None:
    good = bytes(CODEC.encode(X))
    junk = bytearray(good[: min(cut, len(good) - 1)] + tail)
    if fix and len(junk) >= HEADER_NBYTES:
        struct.pack_into("<Q", junk, 24, len(junk) - HEADER_NBYTES)
    try:
        assert CODEC.decode(junk, len(X)).isfinite().all()
    except CodecError:
        pass
