"""What is said of this machine's clock."""

import math

import pytest

from farflung.node import clocks
from farflung.node.clocks import KNOWN_S, MAX_PEERS, WRONG_S, Clocks, about, clock_state, warnings


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def told(*ahead_s: float) -> str:
    found = Clocks()
    for number, each in enumerate(ahead_s):
        found.note(peer(number), each, 0.0)
    return found.trouble(1.0)


def test_a_clock_is_wrong_when_most_of_those_who_tell_theirs_agree_that_it_is() -> None:
    assert told() == told(2.0) == told(WRONG_S - 1.0, 1.0 - WRONG_S) == ""
    assert told(200.0) == (
        "this machine's clock is 3 min ahead of that of the one peer that has told its own: set the one that is wrong"
    )
    assert told(-200.0, -201.0, -199.0, 0.5) == "this machine's clock is 3 min behind those of 3 peers: set it"
    assert told(0.0, 200.0) == told(0.0, 0.0, 7200.0, 7200.0) == "", "theirs may be"
    assert told(-9e5, 200.0, 7200.0) == "", "they do not agree"
    assert told(math.nan, math.inf) == ""
    assert [about(each) for each in (-45.0, 200.0, 7300.0, -1e9)] == ["45 s", "3 min", "2 h", "11,574 days"]


def test_answers_are_few_replaced_forgotten_and_do_not_count_for_ever() -> None:
    found = Clocks()
    for number in range(2 * MAX_PEERS):
        found.note(peer(number), 200.0, 0.0)
    assert f"ahead of those of {MAX_PEERS} peers" in found.trouble(0.0)
    assert found.trouble(KNOWN_S + 1.0) == ""
    for number in range(MAX_PEERS, 2 * MAX_PEERS):
        found.note(peer(number), 0.0, 10.0)
    assert found.trouble(10.0) == ""
    found.note(peer(0), 200.0, 10.0)
    found.forget()
    found.note(peer(0), 0.0, 10.0)
    assert found.trouble(10.0) == ""


def test_the_system_says_whether_it_keeps_the_clock_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_state().startswith(("synchronised", "not synchronised", "unknown"))
    monkeypatch.setattr(clocks.sys, "platform", "darwin")
    assert clock_state() == "unknown" and warnings() == []
    monkeypatch.setattr(clocks, "clock_state", lambda: "not synchronised: run ntpd")
    assert warnings() == [
        "warning: this machine's clock is not synchronised: run ntpd. Peers refuse what is a minute off"
    ]
