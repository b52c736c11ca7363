"""The bytes are what they were, and damaged ones are found before anything changes."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression.codec import Codec, CodecError
from farflung.compression.dct import Dct
from farflung.compression.four_bit import E3m0, Mxfp4, Nf4, Nvfp4
from farflung.compression.fp32 import Fp32
from farflung.compression.half import Bf16, Fp16
from farflung.compression.int4 import Int4
from farflung.compression.int8 import Int8
from farflung.compression.lowrank import LowRank
from farflung.compression.randk import RandK
from farflung.compression.registry import codec_of
from farflung.compression.sign import Sign
from farflung.compression.stat2 import Stat2
from farflung.compression.topk import TopK
from farflung.compression.wire import HEADER_NBYTES

# Encodings of GOLDEN_INPUT by version 1 of each codec. They change only together with the codec's version.
GOLDEN_INPUT = [0.0, 1.0, -2.0, 0.5, 1e-3, 127.0, -127.0, 63.4, -0.25] + [0.0] * 7 + [3e-4, -1e-4]
GOLDEN = {
    Fp32(): (
        "4358010101000000120000000000000000000000000000004800000000000000"
        "000000000000803f000000c00000003f6f12833a0000fe420000fec29a997d42000080be"
        "0000000000000000000000000000000000000000000000000000000052499d3917b7d1b8"
    ),
    Int8(block=16): (
        "4358010201000000120000000000000010000000000000001600000000000000803f1f360001fe00007f813f00000000000000007fd6"
    ),
}
CODECS: list[Codec] = [Fp32(), Int8(block=16), Int4(block=16)]
CODECS += [Bf16(), Fp16(), Nf4(), Mxfp4(), Nvfp4(), E3m0(), Sign(), Stat2()]
CODECS += [
    TopK(chunk=64, k=16),
    TopK(chunk=64, k=16, bits=2),
    TopK(chunk=64, k=16, bits=8),
    RandK(every=2),
    LowRank(rank=2, cols=4),
    Dct(cols=64, k=3),
]


@pytest.mark.parametrize("codec", GOLDEN, ids=lambda c: c.spec)
def test_golden_bytes(codec: Codec) -> None:
    assert bytes(codec.encode(torch.tensor(GOLDEN_INPUT))).hex() == GOLDEN[codec]


def test_golden_bytes_decode_to_golden_values() -> None:
    codec = Int8(block=16)
    values = codec.decode(bytes.fromhex(GOLDEN[codec]), len(GOLDEN_INPUT))
    step = float(torch.tensor(3e-4 / 127).bfloat16())
    expected = [0.0, 1.0, -2.0, 0.0, 0.0, 127.0, -127.0, 63.0, 0.0] + [0.0] * 7 + [127 * step, -42 * step]
    assert values.tolist() == pytest.approx(expected, abs=0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_a_flipped_bit_is_refused_or_decodes_to_finite_numbers(codec: Codec) -> None:
    good = bytes(codec.encode(torch.tensor(GOLDEN_INPUT)))
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        acc = torch.ones(len(GOLDEN_INPUT))
        try:
            codec.decode_add_(bad, acc, 1.0)
        except CodecError:
            assert acc.eq(1).all()
        else:
            assert bit >= 8 * HEADER_NBYTES and acc.isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_junk_is_a_typed_error(codec: Codec, data: st.DataObject) -> None:
    good = bytes(codec.encode(torch.tensor(GOLDEN_INPUT)))
    junk = data.draw(
        st.one_of(
            st.binary(max_size=200),
            st.integers(0, len(good) - 1).map(lambda n: good[:n]),
            st.binary(min_size=1, max_size=9).map(lambda tail: good + tail),
            st.binary(max_size=60).map(lambda tail: good[:32] + tail).filter(lambda b: b != good),
        )
    )
    try:
        assert codec.decode(junk, len(GOLDEN_INPUT)).isfinite().all()
    except CodecError:
        pass


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, b"XX", "starts with"),
        (2, b"\x02", "header version"),
        (3, b"\xfe", "codec id"),
        (4, b"\x09", "codec version"),
        (5, b"\x01", "reserved"),
        (8, b"\x13", "number of elements"),
        (8, b"\xff" * 8, "number of elements"),
        (16, b"\xff\xff", "codec parameter"),
        (24, b"\xff" * 8, "payload length"),
    ],
)
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.spec)
def test_header_fields_are_checked(codec: Codec, offset: int, value: bytes, match: str) -> None:
    bad = bytearray(codec.encode(torch.tensor(GOLDEN_INPUT)))
    bad[offset : offset + len(value)] = value
    with pytest.raises(CodecError, match=match):
        codec.decode(bad, len(GOLDEN_INPUT))


@pytest.mark.parametrize("scale", [0x7FC0, 0x7F80, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x007F, 0x7B82])
def test_hostile_scales_are_refused(scale: int) -> None:
    codec = Int8(block=16)
    bad = bytearray(codec.encode(torch.tensor(GOLDEN_INPUT)))
    struct.pack_into("<H", bad, 32, scale)
    acc = torch.ones(len(GOLDEN_INPUT))
    with pytest.raises(CodecError, match="scale"):
        codec.decode_add_(bad, acc, 1.0)
    assert acc.eq(1).all()


def test_the_largest_scale_and_code_stay_finite() -> None:
    codec = Int8(block=16)
    payload = bytearray(codec.encode(torch.tensor(GOLDEN_INPUT)))
    struct.pack_into("<H", payload, 32, 0x7B81)
    payload[36] = 0x80  # -128, which our encoder never writes
    assert torch.isfinite(codec.decode(payload, len(GOLDEN_INPUT))).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fp32_that_is_not_finite_is_refused(value: float) -> None:
    bad = bytearray(Fp32().encode(torch.tensor(GOLDEN_INPUT)))
    struct.pack_into("<f", bad, 32 + 4 * 5, value)
    acc = torch.ones(len(GOLDEN_INPUT))
    with pytest.raises(CodecError, match="finite"):
        Fp32().decode_add_(bad, acc, 1.0)
    assert acc.eq(1).all()


@pytest.mark.parametrize(("offset", "value"), [(3, b"\x63"), (4, b"\x63"), (16, b"\x11")])
def test_codec_of_refuses_the_unknown(offset: int, value: bytes) -> None:
    bad = bytearray(Int8().encode(torch.tensor(GOLDEN_INPUT)))
    bad[offset : offset + 1] = value
    with pytest.raises(CodecError):
        codec_of(bad)
