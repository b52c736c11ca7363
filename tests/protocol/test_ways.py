"""How far peers are from each other, by what they say anyway: clocks that differ, answers that cannot be, and words that tell of few at a time."""

import pytest
from tests.protocol.pipeline_says import says

from farflung.protocol.errors import Refused
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.limits import LONGEST_TRIP_MS, MAX_WAYS, WAY_NAME_BYTES
from farflung.protocol.pipeline_messages import Way
from farflung.protocol.roll import FORGET_S, Roll
from farflung.protocol.ways import REMEMBERED, Ways

A, B, C = (bytes([number]) * 32 for number in range(1, 4))
AHEAD_S = 5000.0
"""By how much B's clock is ahead of A's."""


def name(peer: bytes) -> bytes:
    return peer[:WAY_NAME_BYTES]


def talk(a: Ways, b: Ways, at: float, *, there_s: float, held_s: float, back_s: float) -> None:
    """A says something, B something later, and A again."""
    b.heard(A, a.say(at), a.tell([B], at), at + there_s + AHEAD_S)
    later = at + there_s + held_s
    a.heard(B, b.say(later + AHEAD_S), b.tell([A], later + AHEAD_S), later + back_s)
    last = later + back_s
    b.heard(A, a.say(last), a.tell([B], last), last + there_s + AHEAD_S)


def test_both_ends_measure_both_ways_whatever_their_clocks_show() -> None:
    a, b = Ways(A), Ways(B)
    talk(a, b, 10.0, there_s=0.03, held_s=1.7, back_s=0.05)
    assert a.trip_s(B) == pytest.approx(0.08, abs=0.002)
    assert b.trip_s(A) == pytest.approx(0.08, abs=0.002)
    assert a.trip_s(C) == 0.0


def test_a_trip_falls_at_once_and_rises_slowly() -> None:
    a, b = Ways(A), Ways(B)
    talk(a, b, 10.0, there_s=0.1, held_s=1.0, back_s=0.1)
    talk(a, b, 20.0, there_s=0.5, held_s=1.0, back_s=0.5)
    assert a.trip_s(B) == pytest.approx(0.3, abs=0.01)
    talk(a, b, 30.0, there_s=0.05, held_s=1.0, back_s=0.05)
    assert a.trip_s(B) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    "way",
    [
        Way(name(A), 7, 0, 0),  # a number that was never said: of an earlier process
        Way(name(A), 1, 3000, 0),  # held for longer than ago it was said: our clock has slept
        Way(name(C), 1, 0, 0),  # another's
    ],
)
def test_what_cannot_be_measures_nothing(way: Way) -> None:
    a = Ways(A)
    a.say(10.0)
    a.heard(B, 1, (way,), 12.0)
    assert a.trip_s(B) == 0.0


def test_old_words_are_forgotten() -> None:
    a = Ways(A)
    for at in range(REMEMBERED + 1):
        a.say(float(at))
    a.heard(B, 1, (Way(name(A), 1, 0, 0),), 20.0)
    assert a.trip_s(B) == 0.0
    a.heard(B, 2, (Way(name(A), 2, 0, 0),), 20.0)
    assert a.trip_s(B) == 19.0
    assert a.tell([B], 20.0 + 2 * LONGEST_TRIP_MS / 1000.0) == (Way(name(B), 0, 0, 19000),)


def test_one_word_tells_of_few_and_all_have_their_turn() -> None:
    a = Ways(A)
    many = [bytes([number]) * 32 for number in range(10, 10 + 2 * MAX_WAYS + 5)]
    words = [a.tell(many, 0.0) for _ in range(3)]
    assert {len(word) for word in words} == {MAX_WAYS}
    assert {way.peer for word in words for way in word} == {name(peer) for peer in many}


def test_of_two_who_differ_the_longer_way_counts() -> None:
    a = Ways(A)
    a.heard(B, 0, (Way(name(C), 0, 0, 40),), 0.0)
    assert a.between([A, C, B]) == {(1, 2): 0.04}
    a.heard(C, 0, (Way(name(B), 0, 0, 90), Way(name(C), 0, 0, 5), Way(b"nobody", 0, 0, 5)), 0.0)
    assert a.between([A, C, B]) == {(1, 2): 0.09}
    talk(a, Ways(B), 10.0, there_s=0.03, held_s=1.0, back_s=0.05)
    assert a.between([A, C, B]).keys() == {(0, 2), (1, 2)}
    a.forget(B)
    assert a.between([A, C, B]) == {(1, 2): 0.09} and a.trip_s(B) == 0.0


def test_a_roll_refuses_contradictions_and_forgets_who_is_gone() -> None:
    roll = Roll(b"s" * 32, Ed25519Signer(b"f" * 32).peer_id, A, stages=2, heartbeat_s=2.0)
    twice = says(1, ways=(Way(name(A), 1, 0, 0), Way(name(A), 2, 0, 0)))
    with pytest.raises(Refused, match="two ways to the same peer") as caught:
        roll.heard(B, twice, 0.0)
    assert caught.value.peer == B and roll.known == []
    roll.heard(B, says(1, beat=roll.ways.say(0.0), ways=(Way(name(A), 1, 0, 0), Way(name(C), 0, 0, 7))), 0.25)
    assert roll.ways.between([A, B, C]) == {(0, 1): 0.25, (1, 2): 0.007}
    roll.tick(FORGET_S + 1.0)
    assert roll.known == [] and roll.ways.between([A, B, C]) == {}
