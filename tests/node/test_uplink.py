"""What the uplink gives, and the pace for bulk that follows from it."""

import asyncio

import pytest

from farflung.node.uplink import BELOW, IDLE_ROUNDS, REMEMBERED, Uplink
from farflung.protocol.settings import FAST_BYTES_PER_S
from farflung.sims import clock


def test_bulk_goes_a_little_below_the_best_rate_seen_and_now_and_then_unpaced() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)
    assert link.pace_bytes_per_s is None, "nothing is known yet"
    paces = []
    for rate in [2.0e6, 1.0e6] * REMEMBERED:
        link.observe(rate, 10.0)
        paces.append(link.pace_bytes_per_s)
    assert paces.count(None) == 2
    assert {p for p in paces if p is not None} == {BELOW * 2.0e6}


def test_short_transfers_and_fast_links_set_no_pace() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)
    link.observe(1.0e6, 0.5)
    assert link.pace_bytes_per_s is None and link.bytes_per_s == 1.0e6
    link.observe(1.0e6, 10.0)
    assert link.pace_bytes_per_s == BELOW * 1.0e6
    link.observe(0.5e6, 0.5)
    assert link.pace_bytes_per_s is None, "what is sent now is short"
    link.observe(1.0e9, 10.0)
    assert link.pace_bytes_per_s is None and link.bytes_per_s == FAST_BYTES_PER_S


def test_transfers_that_run_together_share_the_link() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)

    async def send(seconds: float) -> None:
        with link.transfer(1_000_000):
            await asyncio.sleep(seconds)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(send(2.0))
            group.create_task(send(4.0))

    clock.run(both())
    assert link.bytes_per_s == pytest.approx(500_000.0)


def test_a_transfer_that_fails_does_not_count() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)

    async def fail() -> None:
        with pytest.raises(ValueError), link.transfer(1_000_000):
            raise ValueError

    clock.run(fail())
    assert link.bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("passed", "blames_us", "rate"), [(4_000_000, True, 400_000.0), (4_000_000, False, 0.0), (0, True, 0.0)]
)
def test_where_no_transfer_comes_to_its_end_in_time_what_has_arrived_counts(
    passed: int, blames_us: bool, rate: float
) -> None:
    """If it is not the fault of who should have taken it."""
    delivered = 0
    link = Uplink(lambda: delivered, FAST_BYTES_PER_S)

    async def send() -> None:
        with link.transfer(100_000_000):
            await asyncio.sleep(1000.0)

    async def give_up() -> None:
        nonlocal delivered
        link.give_up()  # nothing is under way: this means nothing
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send())
            await asyncio.sleep(10.0)
            delivered = passed
            if blames_us:
                link.give_up()
            sending.cancel()

    clock.run(give_up())
    assert link.bytes_per_s == pytest.approx(rate)


def test_a_rate_is_forgotten_when_nothing_was_sent_for_long_and_then_later_still() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)
    for rounds in (IDLE_ROUNDS, 2 * IDLE_ROUNDS, 4 * IDLE_ROUNDS):
        link.observe(1.0e5, 10.0)
        for _ in range(rounds - 1):
            link.stay_idle()
        assert link.bytes_per_s == 1.0e5
        link.stay_idle()
        assert link.bytes_per_s == 0.0


def test_a_faster_link_than_the_forgotten_one_begins_anew() -> None:
    link = Uplink(lambda: 0, FAST_BYTES_PER_S)
    for rate, rounds in ((1.0e5, IDLE_ROUNDS), (1.5e5, 2 * IDLE_ROUNDS), (4.0e5, IDLE_ROUNDS)):
        link.observe(rate, 10.0)
        for _ in range(rounds):
            assert link.bytes_per_s
            link.stay_idle()
        assert link.bytes_per_s == 0.0


def test_what_is_fast_and_what_can_be_measured_scale_together() -> None:
    link = Uplink(lambda: 0, fast_bytes_per_s=FAST_BYTES_PER_S / 1000.0)

    async def send() -> None:
        for size in (60, 66):
            with link.transfer(size):
                await asyncio.sleep(0.5)

    clock.run(send())
    assert link.bytes_per_s == pytest.approx(132.0), "that of the second, which is as long as 66,000 bytes"
    link.observe(1e9, 10.0)
    assert link.bytes_per_s == FAST_BYTES_PER_S / 1000.0 and link.pace_bytes_per_s is None


def test_the_best_stretch_counts_and_not_the_slow_start_and_the_wait_at_the_end() -> None:
    delivered = 7_000_000  # earlier transfers
    link = Uplink(lambda: delivered, FAST_BYTES_PER_S)

    async def send() -> None:
        nonlocal delivered
        loop = asyncio.get_running_loop()
        with link.transfer(8_000_000):
            for rate in [0.0] * 8 + [1_000_000.0] * 32 + [0.0] * 8:  # 2 s of nothing, 8 s at full speed, 2 s of nothing
                await asyncio.sleep(0.25)
                delivered += int(rate / 4)
                link.sample(loop.time())

    clock.run(send())
    assert link.bytes_per_s == pytest.approx(1_000_000.0)
    assert link.pace_bytes_per_s == pytest.approx(BELOW * 1_000_000.0)


def test_samples_between_transfers_count_for_nothing() -> None:
    delivered = 0
    link = Uplink(lambda: delivered, FAST_BYTES_PER_S)
    link.sample(0.0)
    delivered = 10_000_000_000
    link.sample(10.0)

    async def send() -> None:
        with link.transfer(1_000_000):
            await asyncio.sleep(4.0)

    clock.run(send())
    assert link.bytes_per_s == pytest.approx(250_000.0)
