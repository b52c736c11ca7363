"""Golden headers, and every length checked before anything is allocated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.node import frames
from farflung.protocol import limits
from farflung.protocol.errors import LimitExceeded, Malformed, RemoteError

PEER = b"p" * 32


def test_golden() -> None:
    assert frames.HEADER.pack(frames.DATA, 0x0102030405060708, 0x10).hex() == "03010203040506070800000010"
    assert frames.LENGTH.pack(5).hex() == "00000005"
    assert (frames.READY, frames.OPEN, frames.DATA, frames.FIN, frames.TAIL) == (1, 2, 3, 4, 5)


@given(st.binary(min_size=frames.HEADER.size, max_size=frames.HEADER.size))
def test_any_header_is_a_frame_or_a_typed_error(header: bytes) -> None:
    try:
        kind, offset, length = frames.parse_header(header, PEER)
    except RemoteError as error:
        assert error.peer == PEER
    else:
        assert frames.HEADER.pack(kind, offset, length) == header
        assert length <= frames.MAX_SEGMENT_BYTES


@pytest.mark.parametrize(
    "header",
    [
        (frames.DATA, 0, 0),
        (frames.DATA, 0, frames.MAX_SEGMENT_BYTES + 1),
        (frames.DATA, frames.MAX_STREAM_BYTES, 1),
        (frames.OPEN, 0, frames.STREAM_ID_BYTES),
        (frames.OPEN, 0, 1000),
        (frames.FIN, frames.MAX_STREAM_BYTES + 1, 0),
    ],
)
def test_limits(header: tuple[int, int, int]) -> None:
    with pytest.raises(LimitExceeded):
        frames.parse_header(frames.HEADER.pack(*header), PEER)


@pytest.mark.parametrize("header", [(frames.READY, 1, 0), (frames.TAIL, 0, 1), (frames.TAIL, 1, 0), (99, 0, 0)])
def test_frames_without_content_have_none(header: tuple[int, int, int]) -> None:
    with pytest.raises(Malformed):
        frames.parse_header(frames.HEADER.pack(*header), PEER)


def test_lengths() -> None:
    assert frames.control_length(frames.LENGTH.pack(limits.MAX_CONTROL_BYTES), PEER) == limits.MAX_CONTROL_BYTES
    assert frames.control_length(frames.CONTROL_END, PEER) == 0
    for length in (limits.MAX_CONTROL_BYTES + 1, 2**32 - 1):
        with pytest.raises(LimitExceeded):
            frames.control_length(frames.LENGTH.pack(length), PEER)
    with pytest.raises(LimitExceeded):
        frames.chunk_length(frames.LENGTH.pack(frames.MAX_SEGMENT_BYTES + 1), PEER)
    for kind in ("", "x" * 65):
        with pytest.raises(ValueError):
            frames.encode_kind(kind)
