"""What the uplink gives, and the pace for bulk that follows from it."""

import asyncio

import pytest

from farflung.node.uplink import BELOW, FAST_BYTES_PER_S, REMEMBERED, Uplink
from farflung.sims import clock


def test_bulk_goes_a_little_below_the_best_rate_seen_and_now_and_then_unpaced() -> None:
    link = Uplink()
    assert link.pace_bytes_per_s is None, "nothing is known yet"
    paces = []
    for rate in [2.0e6, 1.0e6] * REMEMBERED:
        link.observe(rate, 10.0)
        paces.append(link.pace_bytes_per_s)
    assert paces.count(None) == 2
    assert {p for p in paces if p is not None} == {BELOW * 2.0e6}


def test_short_transfers_and_fast_links_set_no_pace() -> None:
    link = Uplink()
    link.observe(1.0e6, 0.5)
    assert link.pace_bytes_per_s is None and link.bytes_per_s == 1.0e6
    link.observe(1.0e9, 10.0)
    assert link.pace_bytes_per_s is None and link.bytes_per_s == FAST_BYTES_PER_S


def test_transfers_that_run_together_share_the_link() -> None:
    link = Uplink()

    async def send(seconds: float) -> None:
        with link.sending(1_000_000):
            await asyncio.sleep(seconds)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(send(2.0))
            group.create_task(send(4.0))

    clock.run(both())
    assert link.bytes_per_s == pytest.approx(500_000.0)


def test_a_transfer_that_fails_does_not_count() -> None:
    link = Uplink()

    async def fail() -> None:
        with pytest.raises(ValueError), link.sending(1_000_000):
            raise ValueError

    clock.run(fail())
    assert link.bytes_per_s == 0.0
