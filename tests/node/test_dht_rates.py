"""How much of the loop's time each peer may have, and all of them."""

import pytest

from farflung.node import dht_rates
from farflung.node.dht_rates import BURST_OF_ALL_S, BURST_OF_ONE_S, SHARE_OF_ALL, SHARE_OF_ONE, Over, Rates


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_each_has_its_share() -> None:
    rates = Rates(0.0)
    assert rates.take(peer(1), BURST_OF_ONE_S, 0.0) is None and rates.take(peer(1), 0.001, 0.0) is Over.ITS_OWN
    assert rates.take(peer(2), BURST_OF_ONE_S, 0.0) is None
    assert rates.take(peer(1), 10 * SHARE_OF_ONE + 0.001, 10.0) is Over.ITS_OWN
    assert rates.take(peer(1), 10 * SHARE_OF_ONE, 10.0) is None


def test_all_together_have_theirs_and_who_is_refused_has_spent_nothing() -> None:
    rates = Rates(0.0)
    taken = 0
    while (over := rates.take(peer(taken), BURST_OF_ONE_S, 0.0)) is None:
        taken += 1
    assert taken == pytest.approx(BURST_OF_ALL_S / BURST_OF_ONE_S)
    assert over is Over.ALL and rates.take(peer(taken), BURST_OF_ONE_S, 0.0) is Over.ALL
    assert rates.take(peer(taken), BURST_OF_ONE_S + 0.001, 0.0) is Over.ITS_OWN  # more than it may have, too
    assert rates.take(peer(taken), BURST_OF_ONE_S, BURST_OF_ONE_S / SHARE_OF_ALL) is None


def test_what_a_request_has_taken_counts_though_there_was_less_left() -> None:
    rates = Rates(0.0)
    rates.spend(peer(1), 2 * BURST_OF_ONE_S, 0.0)
    until = BURST_OF_ONE_S / SHARE_OF_ONE
    assert rates.take(peer(1), 0.001, until) is Over.ITS_OWN
    assert rates.take(peer(1), 0.001, until + 0.001 / SHARE_OF_ONE) is None
    for number in range(2, 100):
        rates.spend(peer(number), BURST_OF_ONE_S, until)
    assert rates.take(peer(100), 0.001, until) is Over.ALL


def test_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_rates, "MAX_PEERS", 3)
    rates = Rates(0.0)
    assert rates.take(peer(0), BURST_OF_ONE_S, 0.0) is None
    for number in range(1, 3):
        assert rates.take(peer(number), 0.001, 0.0) is None
    assert rates.take(peer(0), 0.001, 0.0)  # who asks is not forgotten before those who do not
    for number in range(3, 10):
        assert rates.take(peer(number), 0.001, 0.0) is None
    assert len(rates._of) == 3
