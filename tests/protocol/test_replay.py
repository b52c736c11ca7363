"""The replay window against a plain set of everything seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import LimitExceeded, Replayed
from farflung.protocol.limits import REPLAY_WINDOW
from farflung.protocol.replay import ReplayGuard, first_seq, seq_unix_s

ALICE, BOB, CAROL = b"a" * 32, b"b" * 32, b"c" * 32


def accepted(guard: ReplayGuard, seq: int, *, now: float = 0.0, sender: bytes = ALICE) -> bool:
    try:
        guard.accept(sender, seq, now + 30, now, carrier=sender)
    except Replayed:
        return False
    return True


@given(st.lists(st.integers(0, 3 * REPLAY_WINDOW), max_size=60))
def test_same_as_a_set(seqs: list[int]) -> None:
    guard, seen = ReplayGuard(), set[int]()
    for seq in seqs:
        new = seq not in seen and (not seen or seq > max(seen) - REPLAY_WINDOW)
        assert accepted(guard, seq) == new
        if new:
            seen.add(seq)


def test_edges_of_the_window() -> None:
    guard = ReplayGuard()
    assert accepted(guard, REPLAY_WINDOW)
    assert accepted(guard, 1)
    assert not accepted(guard, 0)
    assert accepted(guard, 1 << 62)  # a jump costs nothing
    assert not accepted(guard, REPLAY_WINDOW)
    assert guard.snapshot()[ALICE].seen.bit_length() <= REPLAY_WINDOW


def test_restarted_sender_goes_on() -> None:
    guard, boot = ReplayGuard(), 1_800_000_000.25
    seq = first_seq(boot)
    assert seq_unix_s(seq) == boot
    for i in range(5):
        assert accepted(guard, seq + i)
    assert accepted(guard, first_seq(boot + 1))
    assert not accepted(guard, first_seq(boot))


def test_clock_that_went_back() -> None:
    used = first_seq(1_800_000_000) + 5
    assert first_seq(1_700_000_000, after=used) == used + 1


def test_expired_windows_make_room_and_live_ones_stay() -> None:
    guard = ReplayGuard(max_senders=2)
    assert accepted(guard, 5, now=0, sender=ALICE)
    assert accepted(guard, 5, now=10, sender=BOB)
    before = guard.snapshot()
    with pytest.raises(LimitExceeded):
        accepted(guard, 5, now=29, sender=CAROL)
    assert guard.snapshot() == before
    assert accepted(guard, 5, now=30, sender=CAROL)  # all of Alice's messages have expired
    assert set(guard.snapshot()) == {BOB, CAROL}
    assert not accepted(guard, 5, now=39, sender=BOB)


def test_sender_silent_for_a_life_may_begin_anew() -> None:
    guard = ReplayGuard()
    assert accepted(guard, 1000, now=0)
    assert not accepted(guard, 1000, now=29)
    assert accepted(guard, 3, now=30)
