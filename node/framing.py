"""Headers and blobs on bulk streams: each is preceded by its length, and every length is checked before memory is taken."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from farflung.compression.codec import Payload
from farflung.node.network import Stream, StreamHandler
from farflung.protocol.errors import LimitExceeded, NetworkError, Refused, RemoteError
from farflung.protocol.headers import BulkHeader, decode_header
from farflung.protocol.messages import encode

H = TypeVar("H", bound=BulkHeader)
T = TypeVar("T")

MAX_HEADER_BYTES = 1 << 10
"""Requests and headers are below 100 bytes."""

JOINED_BYTES = 1 << 14
"""Payloads up to this are copied behind their header: the most that one record of TLS holds."""

DRAIN_BYTES = 1 << 16
"""Buffer for bytes that are not kept."""

PIECE_BYTES = 1 << 18
"""Of a long blob."""

STALL_S = 30.0
"""For one: at 9 kB/s nothing is of use any more."""

HEADER_LENGTH_BYTES = 2
BLOB_LENGTH_BYTES = 8
ABSENT = (1 << 64) - 1
"""Length that says "not here"."""


async def write_header(stream: Stream, header: BulkHeader) -> None:
    """Raises NetworkError."""
    await _write_overhead(stream, _framed(header))


async def write_with_header(stream: Stream, header: BulkHeader, payload: Payload, *, follows: int = 0) -> None:
    """Header and payload, in one write where that costs no large copy: one packet and one record instead of two. `follows`: see `Stream.write`.
    Raises NetworkError.
    """
    if len(payload) > JOINED_BYTES:
        await write_header(stream, header)
        await stream.write(payload, follows=follows)
    else:
        head = _framed(header)
        await stream.write(b"".join((head, payload)), overhead=len(head))


async def read_header(stream: Stream, *kinds: type[H]) -> H:
    """The next header, of one of these kinds. Raises NetworkError; LimitExceeded, Malformed or Refused naming the peer."""
    length = int.from_bytes(await read_exactly(stream, HEADER_LENGTH_BYTES), "big")
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(f"bulk header of {length} bytes, limit {MAX_HEADER_BYTES}", peer=stream.peer)
    header = decode_header(await read_exactly(stream, length), peer=stream.peer)
    for kind in kinds:
        if isinstance(header, kind):
            return header
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise Refused(f"a {type(header).__name__} where a {expected} belongs", peer=stream.peer)


async def read_exactly(stream: Stream, num_bytes: int) -> bytes:
    """The next `num_bytes`; the caller has checked the number. Raises NetworkError."""
    data = bytearray(num_bytes)
    await stream.readinto(memoryview(data))
    return bytes(data)


async def read_payload(stream: Stream, num_bytes: int) -> memoryview:
    """The next `num_bytes`, however many, in fresh memory that is neither zeroed nor copied. Raises NetworkError."""
    memory: Any = np.empty(num_bytes, dtype=np.uint8)  # Any: numpy declares no buffer protocol before 3.12
    buffer = memoryview(memory)
    await stream.readinto(buffer)
    return buffer


async def drain(stream: Stream, num_bytes: int) -> None:
    """Read and drop. Raises NetworkError."""
    buffer = bytearray(min(num_bytes, DRAIN_BYTES))
    while num_bytes > 0:
        size = min(num_bytes, len(buffer))
        await stream.readinto(memoryview(buffer)[:size])
        num_bytes -= size


async def write_blob(stream: Stream, payload: Payload | None, *, about: bool = False) -> None:
    """A length and the bytes, or that there are none; `about`: they are not of what is sent but about it (`Stream.write`). Raises NetworkError."""
    length = ABSENT if payload is None else len(payload)
    await _write_overhead(stream, length.to_bytes(BLOB_LENGTH_BYTES, "big"))
    if payload:
        await stream.write(payload, overhead=len(payload) if about else 0)


async def write_long_blob(stream: Stream, payload: Payload | None) -> None:
    """The same of what may take as long as it needs, if only some of it goes out all the time. Raises NetworkError."""
    length = ABSENT if payload is None else len(payload)
    await _in_time(_write_overhead(stream, length.to_bytes(BLOB_LENGTH_BYTES, "big")))
    view = memoryview(payload or b"")
    for start in range(0, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        await _in_time(stream.write(piece, follows=len(view) - start - len(piece)))


async def read_blob(stream: Stream, limit: int) -> bytes | None:
    """What `write_blob` wrote. Raises NetworkError, or LimitExceeded naming the peer when it is above `limit` bytes."""
    length = await _read_length(stream, limit)
    return None if length is None else await read_exactly(stream, length)


async def read_long_blob(stream: Stream, limit: int) -> bytes | None:
    """What `write_long_blob` wrote, if only some of it comes all the time. Raises NetworkError, or LimitExceeded as `read_blob`."""
    length = await _in_time(_read_length(stream, limit))
    if length is None:
        return None
    data = bytearray(length)
    view = memoryview(data)
    for start in range(0, length, PIECE_BYTES):
        await _in_time(stream.readinto(view[start : start + PIECE_BYTES]))
    return bytes(data)


def _framed(header: BulkHeader) -> bytes:
    data = encode(header)
    return len(data).to_bytes(HEADER_LENGTH_BYTES, "big") + data


async def _write_overhead(stream: Stream, data: bytes) -> None:
    await stream.write(data, overhead=len(data))


async def _read_length(stream: Stream, limit: int) -> int | None:
    length = int.from_bytes(await read_exactly(stream, BLOB_LENGTH_BYTES), "big")
    if length == ABSENT:
        return None
    if length > limit:
        raise LimitExceeded(f"a blob of {length} bytes, limit {limit}", peer=stream.peer)
    return length


async def _in_time(moving: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(STALL_S):
            return await moving
    except TimeoutError as error:
        raise NetworkError(f"the link stood still for {STALL_S:.0f} s") from error


def guarded(
    handler: Callable[[Stream], Awaitable[None]], refused: Callable[[RemoteError], None], *, within_s: float | None
) -> StreamHandler:
    """A stream handler whose failures stay its own: broken links end it, broken rules are reported, slow peers time out: of a handler that sees to that
    itself, `within_s` is None."""

    async def serve(stream: Stream) -> None:
        try:
            async with asyncio.timeout(within_s):
                await handler(stream)
        except RemoteError as error:
            refused(error)
        except (NetworkError, TimeoutError):
            pass  # the peer or the link is gone; whoever waits for these bytes has a deadline of its own
        finally:
            await stream.close()

    return serve
