"""Reassembly of striped streams: every order gives the same bytes, memory is bounded, liars are caught."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.node.stripes import PIECE_COST_BYTES, Intervals, Reassembly
from farflung.protocol.errors import LimitExceeded, Malformed

PEER = b"p" * 32


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=30))
def test_intervals_are_a_set(ranges: list[tuple[int, int]]) -> None:
    intervals = Intervals()
    model: set[int] = set()
    for start, length in ranges:
        wanted = set(range(start, start + length))
        assert intervals.add(start, start + length) == (not wanted & model)
        if not wanted & model:
            model |= wanted
        runs = sum(1 for x in model if x - 1 not in model)
        assert len(intervals) == runs
        assert intervals.last == max(model) + 1
        prefix = next(x for x in range(100) if x not in model)
        assert intervals.prefix == prefix


class Connections:
    """Honest sender over `n` connections: ascending offsets on each, any interleaving; blocked ones are retried."""

    def __init__(self, data: bytes, sizes: list[int], owners: list[int], ahead: int) -> None:
        self.data = data
        self.incoming = Reassembly(PEER, ahead)
        self.queues: dict[int, list[tuple[int, int]]] = {}
        offset = 0
        for size, owner in zip(sizes, owners, strict=True):
            self.queues.setdefault(owner, []).append((offset, size))
            offset += size
        self.head: dict[int, tuple[int, int]] = {}

    def step(self, owner: int) -> bool | None:
        """Move one connection; True: completed the reader, False: progress, None: blocked or finished."""
        if owner not in self.head:
            if not self.queues.get(owner):
                return None
            self.head[owner] = self.queues[owner].pop(0)
            self.incoming.claim(*self.head[owner])
        offset, size = self.head[owner]
        view = self.incoming.place(offset, size)
        if view is None:
            return None
        del self.head[owner]
        view[:] = self.data[offset : offset + size]
        return self.incoming.land(offset, size)


@settings(max_examples=200)
@given(st.data())
def test_any_interleaving_gives_the_stream(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=40))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    total = sum(sizes)
    content = bytes(i % 251 for i in range(total))
    limit = data.draw(st.sampled_from([0, PIECE_COST_BYTES, 3 * PIECE_COST_BYTES, 1 << 20]))
    wire = Connections(content, sizes, owners, limit)
    result = bytearray()
    while len(result) < total:
        # Whatever comes before the reader waits stays within the limit.
        for owner in data.draw(st.lists(st.integers(0, 3), max_size=8)):
            wire.step(owner)
            assert wire.incoming.held_bytes <= limit + 2 * PIECE_COST_BYTES
        buffer = bytearray(data.draw(st.integers(1, min(120, total - len(result)))))
        done = wire.incoming.set_target(memoryview(buffer))
        while not done:
            moves = [wire.step(owner) for owner in data.draw(st.permutations(range(4)))]
            assert any(move is not None for move in moves), "deadlock"
            done = any(moves)
        result += buffer
    assert bytes(result) == content


def test_straight_into_the_readers_buffer() -> None:
    incoming = Reassembly(PEER)
    buffer = bytearray(100)
    assert not incoming.set_target(memoryview(buffer))
    incoming.claim(40, 60)
    view = incoming.place(40, 60)
    assert view is not None and view.obj is buffer
    assert incoming.held_bytes == 0


def test_ahead_is_bounded_in_count_too() -> None:
    incoming = Reassembly(PEER, ahead_bytes=10 * PIECE_COST_BYTES)
    for offset in range(10):
        incoming.claim(offset, 1)
        assert incoming.place(offset, 1) is not None
    incoming.claim(10, 1)
    assert incoming.place(10, 1) is None


def test_lies() -> None:
    incoming = Reassembly(PEER)
    incoming.claim(10, 10)
    with pytest.raises(Malformed, match="overlaps"):
        incoming.claim(15, 1)
    with pytest.raises(Malformed, match="ends"):
        incoming.end(15)
    incoming.end(30)
    with pytest.raises(Malformed, match="ends"):
        incoming.end(31)
    with pytest.raises(Malformed, match="beyond"):
        incoming.claim(25, 6)
    fresh = Reassembly(PEER)
    with pytest.raises(LimitExceeded, match="gaps"):
        for index in range(2000):
            fresh.claim(2 * index, 1)


def test_short_end_is_seen() -> None:
    incoming = Reassembly(PEER)
    incoming.set_target(memoryview(bytearray(10)))
    incoming.end(9)
    assert incoming.ended_short
