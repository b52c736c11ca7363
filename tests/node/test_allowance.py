"""How much is passed on, and that nothing is remembered of who has asked for nothing lately."""

from farflung.node.allowance import BURST_BYTES, BYTES_PER_S, LEAST_BYTES, Allowance


def peer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_authors_and_receivers_have_a_share_each() -> None:
    allowance = Allowance()
    assert all(allowance.takes(peer(1), peer(2), LEAST_BYTES, 0.0) for _ in range(BURST_BYTES // LEAST_BYTES))
    assert not allowance.takes(peer(1), peer(3), 1, 0.0) and not allowance.takes(peer(4), peer(2), 1, 0.0)
    assert allowance.takes(peer(4), peer(3), BURST_BYTES, 0.0), "what was refused counts for neither"
    assert allowance.takes(peer(1), peer(2), BYTES_PER_S, 1.0) and not allowance.takes(peer(1), peer(2), 1, 1.0)


def test_of_peers_that_come_and_go_those_of_late_are_remembered() -> None:
    """For months there may be new ones every day."""
    allowance, most = Allowance(), 0
    for number in range(1000):
        assert allowance.takes(peer(number), peer(5000 + number), BYTES_PER_S, float(number))
        most = max(most, len(allowance._authors), len(allowance._receivers))
    assert most <= 3
    for _ in range(2):
        allowance.takes(peer(7), peer(8), BURST_BYTES, 2000.0)
        allowance.takes(peer(9), peer(10), 1, 2000.0)
    assert not allowance.takes(peer(7), peer(8), 1, 2000.0), (
        "who has had its share does not get another one by being forgotten"
    )
