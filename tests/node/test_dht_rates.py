"""How much of the loop's time each peer may have, and all of them."""

import pytest

from farflung.node import dht_rates
from farflung.node.dht_rates import BURST_OF_ALL_S, BURST_OF_ONE_S, SHARE_OF_ALL, SHARE_OF_ONE, Rates


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_each_has_its_share() -> None:
    rates = Rates(0.0)
    assert rates.takes(peer(1), BURST_OF_ONE_S, 0.0) and not rates.takes(peer(1), 0.001, 0.0)
    assert rates.takes(peer(2), BURST_OF_ONE_S, 0.0)
    assert not rates.takes(peer(1), 10 * SHARE_OF_ONE + 0.001, 10.0) and rates.takes(peer(1), 10 * SHARE_OF_ONE, 10.0)


def test_all_together_have_theirs_and_who_is_refused_has_spent_nothing() -> None:
    rates = Rates(0.0)
    taken = 0
    while rates.takes(peer(taken), BURST_OF_ONE_S, 0.0):
        taken += 1
    assert taken == pytest.approx(BURST_OF_ALL_S / BURST_OF_ONE_S)
    assert not rates.takes(peer(taken), BURST_OF_ONE_S, 0.0)
    assert rates.takes(peer(taken), BURST_OF_ONE_S, BURST_OF_ONE_S / SHARE_OF_ALL)


def test_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_rates, "MAX_PEERS", 3)
    rates = Rates(0.0)
    assert rates.takes(peer(0), BURST_OF_ONE_S, 0.0)
    for number in range(1, 3):
        assert rates.takes(peer(number), 0.001, 0.0)
    assert not rates.takes(peer(0), 0.001, 0.0)  # who asks is not forgotten before those who do not
    for number in range(3, 10):
        assert rates.takes(peer(number), 0.001, 0.0)
    assert len(rates._of) == 3
