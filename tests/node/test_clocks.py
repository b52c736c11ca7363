"""What is said of this machine's clock."""

import math

import pytest

from farflung.node import clocks
from farflung.node.clocks import ASKING_S, KNOWN_S, MAX_PEERS, WRONG_S, Clocks, about, clock_state, warnings


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def told(*ahead_s: float, by_found: tuple[float, ...] = ()) -> str:
    heard = Clocks()
    for number, each in enumerate((*ahead_s, *by_found)):
        heard.note(peer(number), each, 0.0, named=number < len(ahead_s))
    return heard.trouble(1.0)


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


def test_those_that_were_found_do_not_outvote_the_named_ones() -> None:
    """Keys cost nothing."""
    assert told(2.0, by_found=(3600.0,) * 40) == ""
    assert told(200.0, 200.0, by_found=(0.0,) * 40).endswith("3 min ahead of those of 2 peers: set it")
    assert told(by_found=(3600.0, 0.0, 3590.0)) == (
        "this machine's clock and those of 2 peers differ by 60 min: set the one that is wrong"
    )
    heard = Clocks()
    for number in range(MAX_PEERS - 1):
        heard.note(peer(number), 0.0, 0.0, named=True)
    for number in range(MAX_PEERS, 9 * MAX_PEERS):
        heard.note(peer(number), 3600.0, 1.0, named=False)
    assert len(heard._answers) == MAX_PEERS and sum(one.named for one in heard._answers.values()) == MAX_PEERS - 1
    for number in range(MAX_PEERS):
        heard.note(peer(number), 200.0, 2.0, named=True)
    heard.note(peer(MAX_PEERS), 0.0, 2.0, named=False)
    assert f"ahead of those of {MAX_PEERS} peers" in heard.trouble(2.0)


def test_answers_are_few_replaced_forgotten_and_do_not_count_for_ever() -> None:
    heard = Clocks()
    for number in range(2 * MAX_PEERS):
        heard.note(peer(number), 200.0, 0.0, named=True)
    assert f"ahead of those of {MAX_PEERS} peers" in heard.trouble(0.0)
    assert heard.trouble(KNOWN_S + 1.0) == ""
    for number in range(MAX_PEERS, 2 * MAX_PEERS):
        heard.note(peer(number), 0.0, 10.0, named=True)
    assert heard.trouble(10.0) == ""
    heard.note(peer(0), 200.0, 10.0, named=True)
    heard.forget()
    heard.note(peer(0), 0.0, 10.0, named=True)
    assert heard.trouble(10.0) == ""


def test_a_clock_that_was_set_right_is_right_once_those_asked_last_say_so() -> None:
    """It was told to be set for half an hour more, by the answers of those that were not asked again."""
    heard = Clocks()
    for number in range(50):
        heard.note(peer(number), 45.0, 0.0, named=True)
    assert heard.trouble(ASKING_S + 1.0)
    for number in range(16):
        heard.note(peer(number), 0.0, ASKING_S + 1.0, named=True)
    assert heard.trouble(ASKING_S + 1.0) == heard.trouble(KNOWN_S - 1.0) == ""
    for number in range(16):
        heard.note(peer(number), 45.0, 2 * ASKING_S + 2.0, named=True)
    assert "ahead of those of 16 peers: set it" in heard.trouble(2 * ASKING_S + 2.0)


def test_the_system_says_whether_it_keeps_the_clock_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_state().startswith(("synchronised", "not synchronised", "unknown"))
    monkeypatch.setattr(clocks.sys, "platform", "darwin")
    assert clock_state() == "unknown" and warnings() == []
    monkeypatch.setattr(clocks, "clock_state", lambda: "not synchronised: run ntpd")
    assert warnings() == [
        "warning: this machine's clock is not synchronised: run ntpd. Peers refuse what is a minute off"
    ]
