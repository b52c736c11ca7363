"""What the downlink has been seen to take: the best of late, of stretches that are long enough to say something."""

import asyncio
from collections.abc import Sequence

import pytest

from farflung.node.downlink import LEAST_S, Downlink
from farflung.node.one_way import REMEMBERED
from farflung.protocol.settings import FAST_BYTES_PER_S
from farflung.sims import clock


class Counter:
    """What has been received, and a link that looks at it."""

    def __init__(self) -> None:
        self.received = 7_000_000  # by earlier transfers
        self.link = Downlink(lambda: self.received, FAST_BYTES_PER_S)

    async def receive(self, rates: Sequence[float]) -> None:
        """So much in each quarter of a second."""
        for rate in rates:
            await asyncio.sleep(0.25)
            self.received += int(rate / 4)
            self.link.sample(asyncio.get_running_loop().time())


def test_the_best_of_late_counts_until_it_is_forgotten() -> None:
    link = Downlink(lambda: 0, FAST_BYTES_PER_S)
    told = []
    for rate in [1.0e6, 3.0e6, *[2.0e6] * REMEMBERED]:
        link.observe(rate, 10.0)
        told.append(link.bytes_per_s)
    assert told == [1.0e6, *[3.0e6] * REMEMBERED, 2.0e6]


def test_what_waited_in_buffers_is_no_measurement_and_fast_links_are_alike() -> None:
    link = Downlink(lambda: 0, FAST_BYTES_PER_S)
    link.observe(1.0e9, LEAST_S / 2)
    assert link.bytes_per_s == 0.0
    link.observe(1.0e9, LEAST_S)
    assert link.bytes_per_s == FAST_BYTES_PER_S


def test_transfers_that_come_in_together_are_one_stretch() -> None:
    counter = Counter()

    async def receive(start: float, seconds: float) -> None:
        await asyncio.sleep(start)
        with counter.link.transfer(600_000):
            await asyncio.sleep(seconds)
            counter.received += 600_000

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(receive(0.0, 2.0))
            group.create_task(receive(1.0, 2.0))

    clock.run(both())
    assert counter.link.bytes_per_s == pytest.approx(400_000.0)


def test_slow_senders_at_the_end_do_not_lower_what_fast_ones_have_shown() -> None:
    counter = Counter()

    async def receive() -> None:
        with counter.link.transfer(2_200_000):
            await counter.receive([1_000_000.0] * 8 + [20_000.0] * 40)

    clock.run(receive())
    assert counter.link.bytes_per_s == pytest.approx(1_000_000.0)


def test_transfers_that_come_to_no_end_count_with_what_came() -> None:
    """A link that is too slow for its part ends few of them: it would never be measured."""
    counter = Counter()

    async def receive() -> None:
        with pytest.raises(ValueError), counter.link.transfer(5_000_000):
            await counter.receive([20_000.0] * 40)
            raise ValueError

    clock.run(receive())
    assert counter.link.bytes_per_s == pytest.approx(20_000.0)


def test_what_comes_in_between_rounds_begins_no_measurement() -> None:
    counter = Counter()
    clock.run(counter.receive([1_000_000.0] * 8))
    assert counter.link.bytes_per_s == 0.0
