"""Headers and blobs: every length is checked before memory is taken, and a broken peer's failure stays its own."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from farflung.node import framing
from farflung.protocol.errors import (
    LimitExceeded,
    Malformed,
    NetworkError,
    Refused,
    RemoteError,
)
from farflung.protocol.headers import BulkHeader, ChunkRequest, ContributionHeader, MeanHeader, MeanRequest
from farflung.protocol.messages import encode

PEER = b"p" * 32
HEADER = ContributionHeader(b"p" * 32, 3, 99)


class Pipe:
    """A stream whose other end is this test. It refuses to hand out a buffer that nobody could fill."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.written = bytearray()
        self.largest = 0
        self.overhead = 0
        self.closed = 0
        self.stall = False

    @property
    def peer(self) -> bytes:
        return PEER

    async def write(self, data: bytes | bytearray | memoryview, *, follows: int = 0, overhead: int = 0) -> None:
        self.written += data
        self.overhead += overhead

    async def readinto(self, buffer: memoryview) -> None:
        self.largest = max(self.largest, len(buffer))
        if self.stall:
            await asyncio.Event().wait()
        if len(buffer) > len(self.data):
            raise NetworkError("the stream ended")
        buffer[:] = self.data[: len(buffer)]
        del self.data[: len(buffer)]

    async def close(self) -> None:
        self.closed += 1


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


def framed(header: BulkHeader) -> bytes:
    body = encode(header)
    return len(body).to_bytes(framing.HEADER_LENGTH_BYTES, "big") + body


def fails(kind: type[RemoteError], main: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(kind) as caught:
        run(main)
    assert caught.value.peer == PEER


def test_headers_there_and_back() -> None:
    for header in (HEADER, MeanHeader(b"p" * 32, 0, 0), ChunkRequest(7)):
        pipe = Pipe()
        run(framing.write_header(pipe, header))
        assert bytes(pipe.written) == framed(header) and pipe.overhead == len(pipe.written)
        assert run(framing.read_header(Pipe(pipe.written), type(header))) == header


def test_all_headers_are_far_below_the_limit() -> None:
    for kind in (ContributionHeader, MeanHeader):
        assert len(encode(kind(b"p" * 32, 1 << 62, 1 << 62))) < 100
    assert len(encode(MeanRequest(b"p" * 32, 1 << 62, b"d" * 32))) < 100


def test_a_header_of_another_kind() -> None:
    fails(Refused, framing.read_header(Pipe(framed(HEADER)), MeanHeader))


def test_a_long_header_takes_no_memory() -> None:
    pipe = Pipe((framing.MAX_HEADER_BYTES + 1).to_bytes(2, "big") + bytes(5000))
    fails(LimitExceeded, framing.read_header(pipe, ContributionHeader))
    assert pipe.largest == framing.HEADER_LENGTH_BYTES


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x94\x40", encode(HEADER)[:-1], encode(HEADER) + b"\0"])
def test_a_damaged_header(body: bytes) -> None:
    pipe = Pipe(len(body).to_bytes(2, "big") + body)
    fails(Malformed, framing.read_header(pipe, ContributionHeader))


def test_a_stream_that_ends_early() -> None:
    data = framed(HEADER)
    for size in range(len(data)):
        with pytest.raises(NetworkError):
            run(framing.read_header(Pipe(data[:size]), ContributionHeader))


@pytest.mark.parametrize("payload", [None, b"", b"x", b"x" * 100])
def test_blobs_there_and_back(payload: bytes | None) -> None:
    pipe = Pipe()
    run(framing.write_blob(pipe, payload))
    found = run(framing.read_blob(Pipe(pipe.written), 100))
    assert found == payload and (found is None) == (payload is None)
    long, about = Pipe(), Pipe()
    run(framing.write_long_blob(long, payload))
    assert (long.written, long.overhead) == (pipe.written, pipe.overhead)
    assert pipe.overhead == framing.BLOB_LENGTH_BYTES
    run(framing.write_blob(about, payload, about=True))
    assert about.written == pipe.written and about.overhead == len(about.written)


@pytest.mark.parametrize("size", [10, framing.JOINED_BYTES + 1])
def test_of_a_header_and_its_payload_the_header_is_about_it(size: int) -> None:
    pipe = Pipe()
    run(framing.write_with_header(pipe, HEADER, bytes(size)))
    assert bytes(pipe.written) == framed(HEADER) + bytes(size) and pipe.overhead == len(framed(HEADER))


def test_a_long_blob_goes_in_pieces_and_ends_where_the_link_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "PIECE_BYTES", 64)
    monkeypatch.setattr(framing, "STALL_S", 0.01)
    payload, pipe = bytes(range(200)), Pipe()
    run(framing.write_long_blob(pipe, payload))
    there = Pipe(pipe.written)
    assert run(framing.read_long_blob(there, 200)) == payload and there.largest == 64
    fails(LimitExceeded, framing.read_long_blob(Pipe(pipe.written), 199))

    class Still(Pipe):
        async def readinto(self, buffer: memoryview) -> None:
            await (asyncio.sleep(60.0) if self.largest == 64 else super().readinto(buffer))

    with pytest.raises(NetworkError, match="stood still"):
        run(framing.read_long_blob(Still(pipe.written), 200))


@pytest.mark.parametrize("length", [101, 1 << 40, framing.ABSENT - 1])
def test_a_large_blob_takes_no_memory(length: int) -> None:
    pipe = Pipe(length.to_bytes(8, "big"))
    fails(LimitExceeded, framing.read_blob(pipe, 100))
    assert pipe.largest == framing.BLOB_LENGTH_BYTES


# ---- guarded --------------------------------------------------------------------------------------------------


def served(handler: Callable[[Any], Any], seconds: float = 5.0) -> tuple[Pipe, list[RemoteError]]:
    refused: list[RemoteError] = []
    pipe = Pipe()
    run(framing.guarded(handler, refused.append, within_s=seconds)(pipe))
    return pipe, refused


def test_broken_rules_are_reported_and_the_stream_is_closed() -> None:
    async def handler(stream: Any) -> None:
        raise Refused("no", peer=stream.peer)

    pipe, refused = served(handler)
    assert [e.peer for e in refused] == [PEER] and pipe.closed == 1


def test_broken_links_and_slow_peers_end_quietly() -> None:
    async def broken(stream: Any) -> None:
        raise NetworkError("gone")

    async def slow(stream: Any) -> None:
        stream.stall = True
        await framing.read_exactly(stream, 1)

    for handler, seconds in ((broken, 5.0), (slow, 0.01)):
        pipe, refused = served(handler, seconds)
        assert refused == [] and pipe.closed == 1


def test_our_own_faults_are_not_hidden() -> None:
    async def handler(stream: Any) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        served(handler)
