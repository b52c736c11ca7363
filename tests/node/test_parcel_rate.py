"""The uplink as parcels show it: trips are no sending, parcels share the link, and what says nothing is left out."""

import pytest

from farflung.node.one_way import MEASURABLE_BYTES, REMEMBERED
from farflung.node.parcel_rate import LEAST_S, MOST_S, ParcelRate
from farflung.protocol.settings import FAST_BYTES_PER_S

TRIP_S = 0.2


def sent(rate: ParcelRate, begins: list[float], departures: list[float], nbytes: int, trip_s: float = TRIP_S) -> None:
    """Parcels that are begun and leave the uplink then; answers come in the order of the departures."""
    news = [(at, 0, at) for at in begins]
    news += [(left + trip_s, 1, begin) for begin, left in zip(begins, departures, strict=True)]
    for now, answered, begin in sorted(news):
        if answered:
            rate.arrived(begin, nbytes, trip_s, now)
        else:
            rate.begin(now)


def test_the_trip_is_no_sending() -> None:
    rate = ParcelRate()
    sent(rate, [1.0], [1.1], 100_000)
    assert rate.bytes_per_s == pytest.approx(1e6)


def test_parcels_to_several_peers_share_the_uplink() -> None:
    """The far one leaves first and is answered last."""
    rate = ParcelRate()
    rate.begin(1.0)
    rate.begin(1.01)
    rate.arrived(1.01, 100_000, 0.02, 1.22)  # left at 1.2
    assert rate.bytes_per_s == 0.0, "another that was begun before it is under way"
    rate.arrived(1.0, 100_000, 0.5, 1.6)  # left at 1.1
    assert rate.bytes_per_s == pytest.approx(1e6)


def test_a_pause_is_no_sending() -> None:
    """The second is begun before the first is answered, but long after it has left."""
    rate = ParcelRate()
    sent(rate, [1.0, 1.18], [1.1, 1.28], 100_000)
    assert rate.bytes_per_s == pytest.approx(1e6)


def test_an_uplink_that_is_never_idle_is_measured_all_the_same() -> None:
    rate = ParcelRate()
    begins = [0.05 * number for number in range(120)]
    sent(rate, begins, [0.1 + 0.1 * number for number in range(120)], 100_000)
    assert rate.bytes_per_s == pytest.approx(1e6, rel=0.06)
    rate = ParcelRate()
    sent(rate, begins[:60], [0.1 + 0.1 * number for number in range(60)], 100_000)
    assert MOST_S < 6.0 and rate.bytes_per_s == pytest.approx(1e6, rel=0.06)


def test_small_runs_and_lost_parcels_say_nothing_and_fast_ones_little() -> None:
    rate = ParcelRate()
    sent(rate, [1.0], [1.01], MEASURABLE_BYTES - 1)
    assert rate.bytes_per_s == 0.0
    rate.begin(2.0)
    rate.lost(2.0)
    sent(rate, [3.0], [3.0], 100_000)
    assert rate.bytes_per_s == 100_000 / LEAST_S
    sent(rate, [4.0], [4.0], 1 << 30)
    assert rate.bytes_per_s == FAST_BYTES_PER_S


def test_the_best_of_the_last_runs_counts() -> None:
    rate = ParcelRate()
    sent(rate, [1.0], [1.1], 200_000)
    for number in range(REMEMBERED - 1):
        sent(rate, [10.0 + number], [10.1 + number], 100_000)
    assert rate.bytes_per_s == pytest.approx(2e6)
    sent(rate, [40.0], [40.1], 100_000)
    assert rate.bytes_per_s == pytest.approx(1e6)
