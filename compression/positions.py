"""Which elements a sparse codec kept, as bytes: sorted positions as gaps, a byte each, in Huffman codes (deflate).

A gap is the number of elements skipped since the kept one before; a byte of 255 adds 255 to the gap that follows.
Of what was measured (compression digest, section 1.3; 64 of every 4096 elements kept; bits per position, on random
positions and on those of AdamW pseudo-gradients of a model of 0.9 M parameters; one core, 2**24 elements, CPU time as a
multiple of copying the fp32 vector, with NumPy around the entropy coder):

| coding                         | random | AdamW | encode | decode |
|--------------------------------|--------|-------|--------|--------|
| entropy bound, log2 C(N, k) / k| 7.36   | 7.36  |        |        |
| gap bytes, zlib, Huffman only  | 7.47   | 7.41  | 0.57   | 0.33   |
| gap bytes, zstd level 1        | 7.47   | 7.36  | 0.18   | 0.18   |
| Rice, best parameter           | 7.53   | 7.56  | 0.28   | 0.28   |
| Elias-Fano                     | 8.00   | 8.00  | 0.21   | 0.24   |
| bitmap, zstd level 1           | 12.4   | 11.7  | 1.4    | 1.5    |

Huffman codes come within 1.5 % of the bound on random positions and use what real ones have in common; Rice, the best of
the fixed codes, needs 2 % more there. zstd would save another 0.6 % and half a copy's time, of the six that choosing
the elements takes: not worth another layout. At 0.8, 3 and 6 % kept the order is the same. Below 0.4 % most gaps need two
bytes, which costs about a bit per position.

Layout: number of positions u64, of gap bytes u64, of stored bytes u64; then the stored bytes, a raw deflate stream, or the
gap bytes themselves where that would not be shorter. How a machine's zlib compresses is its own affair.
"""

import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from farflung.compression.codec import CodecError

Positions = npt.NDArray[np.int64]

_HEAD = struct.Struct("<QQQ")
_ESCAPE = 255
_RAW = -15  # window bits of a deflate stream without header and checksum


def max_nbytes(numel: int, count: int) -> int:
    """Bytes that at most `count` positions below `numel` can take."""
    return _HEAD.size + count + numel // _ESCAPE


def expected_nbytes(numel: int, count: int) -> int:
    """Bytes that `count` positions are expected to take, drawn at random from `numel`: their gaps' entropy.

    With p = count / numel a gap has H(p) / p bits, H the binary entropy.
    """
    if not 0 < count < numel:
        return min(_HEAD.size + count, max_nbytes(numel, count))
    p = count / numel
    bits = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
    return min(_HEAD.size + math.ceil(count * bits / 8), max_nbytes(numel, count))


def encode(positions: Positions) -> bytes:
    """Positions, sorted and all different, to bytes."""
    gaps = _gap_bytes(positions).tobytes()
    packed = _compress(gaps)
    stored = packed if len(packed) < len(gaps) else gaps
    return _HEAD.pack(len(positions), len(gaps), len(stored)) + stored


def decode(body: memoryview, *, numel: int, max_count: int) -> tuple[Positions, memoryview]:
    """The positions at the start of `body`, sorted, all different and below `numel`, and what follows them.

    Raises CodecError, before allocating more than `max_count` positions below `numel` need.
    """
    if len(body) < _HEAD.size:
        raise CodecError(f"{len(body)} bytes cannot hold positions")
    count, num_gaps, num_stored = _HEAD.unpack_from(body)
    if count > max_count or not count <= num_gaps <= count + numel // _ESCAPE:
        raise CodecError(f"{count} positions in {num_gaps} bytes: at most {max_count} of {numel} elements are kept")
    if not num_stored <= min(num_gaps, len(body) - _HEAD.size):
        raise CodecError(f"{num_stored} stored bytes of {num_gaps}, and {len(body)} bytes in all")
    stored = body[_HEAD.size : _HEAD.size + num_stored]
    gaps = np.frombuffer(stored if num_stored == num_gaps else _decompress(stored, num_gaps), dtype=np.uint8)
    ends = np.flatnonzero(gaps != _ESCAPE)
    if len(ends) != count or (num_gaps and gaps[-1] == _ESCAPE):
        raise CodecError(f"{len(ends)} gaps, expected {count}")
    positions = gaps.cumsum(dtype=np.int64)[ends]
    positions += np.arange(count)
    if count and positions[-1] >= numel:
        raise CodecError(f"position {positions[-1]} of {numel} elements")
    return positions, body[_HEAD.size + num_stored :]


def _gap_bytes(positions: Positions) -> npt.NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    long = np.flatnonzero(gaps >= _ESCAPE)
    if not len(long):
        return gaps.astype(np.uint8)
    escapes, rest = np.divmod(gaps[long], _ESCAPE)
    gaps[long] = rest
    return np.insert(gaps.astype(np.uint8), np.repeat(long, escapes), _ESCAPE)


def _compress(gaps: bytes) -> bytes:
    deflate = zlib.compressobj(1, zlib.DEFLATED, _RAW, 9, zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(gaps) + deflate.flush()


def _decompress(stored: memoryview, nbytes: int) -> bytes:
    inflate = zlib.decompressobj(_RAW)
    try:
        gaps = inflate.decompress(stored, nbytes + 1)  # one more, to see that there is none
    except zlib.error as error:
        raise CodecError(f"gaps cannot be decompressed: {error}") from error
    if len(gaps) != nbytes or not inflate.eof or inflate.unused_data:
        raise CodecError(f"{len(gaps)} bytes of gaps, expected {nbytes}")
    return gaps
