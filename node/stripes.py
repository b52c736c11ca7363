"""Putting a stream together again from segments that arrive over several connections. No IO.

A segment says where in the stream it belongs. When the caller waits with a buffer that covers it, its bytes are read
straight into that buffer; otherwise into memory of our own, of which there is a fixed amount ("ahead"): a segment that
does not fit is refused for now and its connection stops reading, which is the back-pressure.

No deadlock: each connection carries ascending offsets, so the first missing segment is always at the head of some
connection, and while a reader waits for it, it is admitted whatever the limit.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from farflung.protocol.errors import LimitExceeded, Malformed

AHEAD_BYTES = 4 << 20
"""Memory per stream for segments nobody reads yet: 8 connections with two segments of 256 KiB each."""
PIECE_COST_BYTES = 4 << 10
"""Least cost of a segment held ahead: a segment of one byte costs far more than a byte in Python."""
MAX_GAPS = 1024
"""Separate runs of bytes; honest senders make at most about one per connection."""


class Intervals:
    """A set of half-open byte ranges, merged where they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> bool:
        """Add a range; False (and no change) when it overlaps what is there."""
        at = bisect_left(self._ends, start)
        # Ranges before `at` end before `start`; the one at `at` may end exactly there and be extended.
        touches = at < len(self._ends) and self._ends[at] == start
        after = at + touches
        if after < len(self._starts) and self._starts[after] < end:
            return False
        joins = after < len(self._starts) and self._starts[after] == end
        if touches and joins:
            self._ends[at] = self._ends[after]
            del self._starts[after], self._ends[after]
        elif touches:
            self._ends[at] = end
        elif joins:
            self._starts[after] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        return True

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def prefix(self) -> int:
        """End of the run that begins at 0; 0 when there is none."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    @property
    def last(self) -> int:
        return self._ends[-1] if self._ends else 0


@dataclass(slots=True)
class _Piece:
    data: memoryview
    landed: bool = False


class Reassembly:
    """The receiving side of one stream."""

    def __init__(self, peer: bytes, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._peer = peer
        self._limit = ahead_bytes
        self._claimed = Intervals()
        self._landed = Intervals()
        self._pieces: dict[int, _Piece] = {}
        self._held = 0
        self._position = 0
        self._target: memoryview | None = None
        self._missing = 0
        self._total: int | None = None

    @property
    def held_bytes(self) -> int:
        """Cost of what is held ahead of the reader."""
        return self._held

    def claim(self, offset: int, length: int) -> None:
        """A segment was announced. Raises Malformed when it overlaps another or lies beyond the end, LimitExceeded."""
        if self._total is not None and offset + length > self._total:
            raise Malformed("a segment beyond the end of its stream", peer=self._peer)
        if not self._claimed.add(offset, offset + length):
            raise Malformed("a segment that overlaps another", peer=self._peer)
        if len(self._claimed) > MAX_GAPS:
            raise LimitExceeded("too many gaps in a stream", peer=self._peer)

    def place(self, offset: int, length: int) -> memoryview | None:
        """Where to put the bytes of a claimed segment; None: not now, ask again after the reader moved."""
        if self._target is not None:
            start = offset - self._position
            if 0 <= start and start + length <= len(self._target):
                return self._target[start : start + length]
        cost = max(length, PIECE_COST_BYTES)
        wanted = self._target is not None and offset == self._landed.prefix
        if self._held + cost > self._limit and not wanted:
            return None
        memory: Any = np.empty(length, dtype=np.uint8)  # not zeroed. Any: numpy declares no buffer protocol before 3.12
        piece = _Piece(memoryview(memory))
        self._pieces[offset] = piece
        self._held += cost
        return piece.data

    def land(self, offset: int, length: int) -> bool:
        """All bytes of a segment have been put in place; True when that completed the reader's buffer."""
        self._landed.add(offset, offset + length)
        piece = self._pieces.get(offset)
        if piece is None:
            self._missing -= length
        else:
            piece.landed = True
            self._consume(offset, piece)
        return self._finish_target()

    def set_target(self, buffer: memoryview) -> bool:
        """The reader waits for `buffer` (bytes, writable) to fill; True when it already is full."""
        assert self._target is None, "one reader at a time"
        self._target = buffer
        self._missing = len(buffer)
        for offset in sorted(self._pieces):
            if offset >= self._position + len(buffer):
                break
            piece = self._pieces[offset]
            if piece.landed:
                self._consume(offset, piece)
        return self._finish_target()

    def end(self, total: int) -> None:
        """The sender says how long the stream is. Raises Malformed when that contradicts what is known."""
        if (self._total is not None and self._total != total) or total < self._claimed.last:
            raise Malformed("contradictory ends of a stream", peer=self._peer)
        self._total = total

    @property
    def ended_short(self) -> bool:
        """The waiting reader can never be served: the stream ends inside its buffer."""
        return self._target is not None and self._total is not None and self._position + len(self._target) > self._total

    def drop(self) -> None:
        """Forget everything held, and the reader's buffer."""
        self._pieces.clear()
        self._held = 0
        self._target = None

    def _consume(self, offset: int, piece: _Piece) -> None:
        if self._target is None:
            return
        end = self._position + len(self._target)
        low, high = max(offset, self._position), min(offset + len(piece.data), end)
        if low < high:
            self._target[low - self._position : high - self._position] = piece.data[low - offset : high - offset]
            self._missing -= high - low
        if offset + len(piece.data) <= end:
            del self._pieces[offset]
            self._held -= max(len(piece.data), PIECE_COST_BYTES)

    def _finish_target(self) -> bool:
        if self._target is None or self._missing:
            return False
        self._position += len(self._target)
        self._target = None
        return True
