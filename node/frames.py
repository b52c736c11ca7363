"""The bytes between two engines: sizes and headers, all checked before anything is allocated.

Control (libp2p stream `farflung/control/1`, one per direction):   length u32 | message; length 0 ends the stream, and is
    answered by closing it
Bulk over libp2p (`farflung/bulk/1`):   kind length u8 | kind | then per chunk: length u32 | bytes; length 0 ends the stream
Bulk over TLS (ALPN `farflung/1`), each connection:   type u8 | offset u64 | length u32 | payload
    READY    offset 0, no payload: the listener accepted the dialler's key
    OPEN     offset 0, payload = stream id (16) | kind: this connection now carries that stream
    DATA     payload = bytes of the stream from `offset` on
    FIN      offset = bytes of the stream in this direction, no payload: this connection is done with it
    TAIL     offset 0, no payload, at any time: means nothing (see tls_stream.py for its use)
All integers are big-endian. Retired types are not used again.
"""

import struct
from typing import Final

from farflung.protocol import limits
from farflung.protocol.errors import LimitExceeded, Malformed

CONTROL_PROTOCOL: Final = "farflung/control/1"
BULK_PROTOCOL: Final = "farflung/bulk/1"
TLS_ALPN: Final = "farflung/1"

READY: Final = 1
OPEN: Final = 2
DATA: Final = 3
FIN: Final = 4
TAIL: Final = 5

LENGTH = struct.Struct(">I")
HEADER = struct.Struct(">BQI")
CONTROL_END = LENGTH.pack(0)

STREAM_ID_BYTES: Final = 16
MAX_KIND_BYTES: Final = 64
"""Kinds are short names such as `scatter`."""
MAX_SEGMENT_BYTES: Final = 256 << 10
"""One DATA segment: 256 KiB keeps the cost per byte of framing in Python small (measured; see tls.py)."""
MAX_STREAM_BYTES: Final = 1 << 50
"""One stream in one direction: far above any model, far below where offsets could wrap."""


def encode_kind(kind: str) -> bytes:
    """The name of a kind as bytes. Raises ValueError for our own bad names."""
    data = kind.encode()
    if not 0 < len(data) <= MAX_KIND_BYTES:
        raise ValueError(f"a kind has 1 to {MAX_KIND_BYTES} bytes")
    return data


def decode_kind(data: bytes, peer: bytes) -> str:
    """Raises Malformed."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Malformed("the kind of a stream is not UTF-8", peer=peer) from error


def control_length(header: bytes, peer: bytes) -> int:
    """Length of the next control message, 0 for the end. Raises LimitExceeded."""
    (length,) = LENGTH.unpack(header)
    if length > limits.MAX_CONTROL_BYTES:
        raise LimitExceeded(f"a control message of {length} bytes", peer=peer)
    return int(length)


def chunk_length(header: bytes, peer: bytes) -> int:
    """Length of the next bulk chunk, 0 for the end. Raises LimitExceeded."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_SEGMENT_BYTES:
        raise LimitExceeded(f"a bulk chunk of {length} bytes", peer=peer)
    return int(length)


def parse_header(header: bytes | bytearray, peer: bytes) -> tuple[int, int, int]:
    """(type, offset, length) of a TLS frame. Raises Malformed or LimitExceeded."""
    kind, offset, length = HEADER.unpack(header)
    if kind == DATA:
        if not 0 < length <= MAX_SEGMENT_BYTES or offset + length > MAX_STREAM_BYTES:
            raise LimitExceeded(f"a segment of {length} bytes at {offset}", peer=peer)
    elif kind == OPEN:
        if not STREAM_ID_BYTES < length <= STREAM_ID_BYTES + MAX_KIND_BYTES or offset:
            raise LimitExceeded(f"an opening frame of {length} bytes", peer=peer)
    elif kind == FIN:
        if length or offset > MAX_STREAM_BYTES:
            raise LimitExceeded(f"a stream of {offset} bytes", peer=peer)
    elif kind not in (READY, TAIL) or offset or length:
        raise Malformed(f"a frame of unknown type {kind}", peer=peer)
    return int(kind), int(offset), int(length)
