"""Means as the contributions that they are made of: what they decode to, what travels of them, and what is refused."""

import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression import unreduced
from farflung.compression.aggregate import accumulate
from farflung.compression.codec import CodecError
from farflung.compression.policy import parse_policy, uniform
from farflung.compression.registry import ACTIVATION_CODECS, CODECS, parse_codec
from farflung.compression.unreduced import MeanCodec, MeanPolicy
from farflung.compression.zstd import Zstd

NUMEL = 5000
UP, DOWN = parse_codec("deadzone(bits=0.65)"), parse_codec("deadzone(bits=1.1)")
CODEC = MeanCodec(UP, DOWN)


def vectors(count: int = 2, numel: int = NUMEL) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def packed() -> tuple[list[memoryview], memoryview]:
    """Two contributions, and their mean."""
    payloads = [UP.encode(x) for x in vectors()]
    return payloads, unreduced.pack(NUMEL, [(payloads[0], 0.75), (payloads[1], 0.25)])


def test_it_decodes_to_the_weighted_sum_to_the_bit() -> None:
    payloads, mean = packed()
    CODEC.check(mean, NUMEL)
    wanted = accumulate(NUMEL, [(payloads[0], 0.75), (payloads[1], 0.25)], UP)
    assert torch.equal(CODEC.decode(mean, NUMEL), wanted)
    out = torch.full((NUMEL,), 7.0)
    assert CODEC.decode(mean, NUMEL, out=out) is out and torch.equal(out, wanted)
    assert unreduced.num_decoded(mean) == 2


def test_what_is_coded_once_more_goes_through_the_other_codec() -> None:
    (x,) = vectors(1)
    payload = DOWN.encode(x)
    assert not unreduced.is_unreduced(payload) and unreduced.num_decoded(payload) == 1
    CODEC.check(payload, NUMEL)
    assert torch.equal(CODEC.decode(payload, NUMEL), DOWN.decode(payload, NUMEL))
    assert unreduced.heard_nbytes(payload, 0) == len(payload)
    _, mean = packed()
    assert unreduced.heard_nbytes(mean, 2) == len(mean), (
        "whose contribution its owner has left out, whatever was agreed"
    )


@settings(max_examples=30)
@given(index=st.integers(0, 1), numel=st.integers(1, 9000), policy=st.sampled_from(["int8", "1d:fp32,int4(block=64)"]))
def test_who_has_one_contribution_puts_it_back(index: int, numel: int, policy: str) -> None:
    flat = parse_policy(policy).resolve([("matrix", (40, 100)), ("norm", (5000,))])
    codec = MeanPolicy(flat, flat).part(0, numel)
    payloads = [codec.up.encode(x) for x in vectors(numel=numel)]
    mean = unreduced.pack(numel, [(payload, 0.5) for payload in payloads])
    rest = unreduced.without(mean, index)
    assert len(rest) == len(mean) - len(payloads[index]) == unreduced.heard_nbytes(mean, index)
    assert bytes(unreduced.put_back(rest, index, payloads[index])) == bytes(mean)
    assert len(mean) <= codec.max_nbytes(numel) and unreduced.heard_nbytes(mean, None) == len(mean)


def test_a_mean_is_left_unreduced_where_nobody_has_to_hear_more() -> None:
    assert CODEC.leaves_unreduced(0, NUMEL) and CODEC.leaves_unreduced(1, NUMEL)
    assert not CODEC.leaves_unreduced(2, NUMEL)
    assert not MeanCodec(parse_codec("fp32"), parse_codec("int8")).leaves_unreduced(1, NUMEL)
    flat = parse_policy("1d:fp32,int4(block=64)").resolve([("matrix", (40, 100)), ("norm", (50,))])
    assert MeanPolicy(flat, flat).part(3000, 4030).leaves_unreduced(1, 1030), "codecs of slices, too"


def test_no_codec_has_its_number() -> None:
    assert unreduced.CODEC_ID not in {codec.codec_id for codec in (*CODECS, *ACTIVATION_CODECS, Zstd)}


def test_what_adds_up_beyond_fp32_is_the_largest_there_is() -> None:
    most = torch.finfo(torch.float32).max
    up = parse_codec("fp32")
    payload = up.encode(torch.tensor([most, -most]))
    mean = unreduced.pack(2, [(payload, 1.0), (payload, 1.0)])
    assert MeanCodec(up, up).decode(mean, 2).tolist() == [most, -most]


def _entry(at: int, value: bytes) -> Callable[[bytearray], None]:
    def write(damaged: bytearray) -> None:
        damaged[at : at + len(value)] = value

    return write


FIRST = 32
"""Where the first entry begins."""

DAMAGES: dict[str, Callable[[bytearray], None]] = {
    "ends early": lambda damaged: damaged.__delitem__(slice(-1, None)),
    "goes on": lambda damaged: damaged.extend(b"\0"),
    "ends within its entries": lambda damaged: damaged.__delitem__(slice(FIRST + 20, None)),
    "no contribution": _entry(16, bytes(8)),
    "three": _entry(16, b"\3" + bytes(7)),
    "another version": _entry(4, b"\2"),
    "another length": _entry(8, struct.pack("<Q", NUMEL + 1)),
    "a weight above one": _entry(FIRST, struct.pack("<d", 1.5)),
    "a negative weight": _entry(FIRST, struct.pack("<d", -0.5)),
    "a weight that is none": _entry(FIRST, struct.pack("<d", float("nan"))),
    "a contribution that is too long": _entry(FIRST + 8, struct.pack("<Q", 1 << 60)),
    "a contribution that is none": _entry(FIRST + 32, b"XX"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_refused(damage: Callable[[bytearray], None]) -> None:
    _, mean = packed()
    damaged = bytearray(mean)
    damage(damaged)
    out = torch.full((NUMEL,), 7.0)
    with pytest.raises(CodecError):
        CODEC.check(damaged, NUMEL)
    with pytest.raises(CodecError):
        CODEC.decode(damaged, NUMEL, out=out)
    assert torch.equal(out, torch.full((NUMEL,), 7.0))


def test_another_contribution_than_it_lacks_is_not_put_back() -> None:
    payloads, mean = packed()
    rest = unreduced.without(mean, 0)
    for index, contribution in ((0, payloads[0][:-1]), (2, payloads[0]), (0, b"")):
        with pytest.raises(CodecError):
            unreduced.put_back(rest, index, contribution)
    with pytest.raises(CodecError):
        unreduced.put_back(mean, 0, payloads[0])
    with pytest.raises(CodecError):
        unreduced.put_back(DOWN.encode(vectors(1)[0]), 0, payloads[0])


@pytest.mark.parametrize("weights", [(), (0.5, 0.25, 0.25), (1.5,), (-0.1,), (float("nan"),)])
def test_what_is_no_mean_is_not_packed(weights: tuple[float, ...]) -> None:
    payload = UP.encode(vectors(1)[0])
    with pytest.raises(ValueError, match="contributions of"):
        unreduced.pack(NUMEL, [(payload, weight) for weight in weights])


def test_what_is_kept_of_a_mean_is_both_contributions_where_those_are_longer() -> None:
    up, down = uniform(UP, NUMEL), uniform(DOWN, NUMEL)
    assert MeanPolicy(up, down).kept_nbytes() == 2 * up.expected_nbytes() > down.expected_nbytes()
    wide = uniform(parse_codec("int8"), NUMEL)
    assert MeanPolicy(up, wide).kept_nbytes() == wide.expected_nbytes()
