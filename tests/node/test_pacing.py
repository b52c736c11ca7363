"""The cap holds under any pattern of requests, and is used in full."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.node.pacing import MIN_CHUNK_BYTES, Pacer, TokenBucket


@given(
    st.floats(1.0, 1e9),
    st.floats(1.0, 1e6),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.0, 10.0)), min_size=1, max_size=50),
)
def test_never_above_burst_plus_rate(rate: float, burst: float, requests: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    now, sent = 0.0, 0
    for size, pause in requests:
        now += pause
        leaves_at = now + bucket.reserve(size, now)
        sent += size
        assert sent <= (burst + rate * leaves_at) * (1 + 1e-6) + 1e-3


@given(st.integers(1, 1 << 20), st.floats(0.0, 100.0))
def test_a_clock_that_steps_back_grants_nothing(size: int, back: float) -> None:
    bucket = TokenBucket(1000.0, 1000.0, 100.0)
    first = bucket.reserve(size, 100.0)
    assert bucket.reserve(size, 100.0 - back) >= first


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_cap_is_kept_and_used() -> None:
    async def main() -> None:
        time = FakeTime()
        pacer = Pacer(1e6, clock=time.clock, sleep=time.sleep)
        sent = 0
        while sent < 20_000_000:
            await pacer.take(pacer.chunk_bytes)
            sent += pacer.chunk_bytes
        assert sent / time.now == pytest.approx(1e6, rel=0.02)

    asyncio.run(main())


def test_no_cap_never_waits() -> None:
    async def main() -> None:
        time = FakeTime()
        pacer = Pacer(None, clock=time.clock, sleep=time.sleep)
        await pacer.take(1 << 40)
        assert time.now == 0.0
        pacer.set_rate(100.0)
        assert pacer.chunk_bytes == MIN_CHUNK_BYTES
        pacer.set_rate(None)
        assert pacer.rate is None

    asyncio.run(main())


def test_cancelled_waits_are_given_back() -> None:
    async def main() -> None:
        pacer = Pacer(1000.0, clock=lambda: 0.0)
        await pacer.take(MIN_CHUNK_BYTES)  # the burst
        waiting = asyncio.ensure_future(pacer.take(1000))  # noqa: TID251
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pacer._bucket is not None
        assert pacer._bucket.reserve(1000, 0.0) == pytest.approx(1.0)

    asyncio.run(main())


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ValueError):
        Pacer(rate)


def test_what_is_not_there_now_is_not_taken() -> None:
    bucket = TokenBucket(10.0, 20.0, 0.0)
    assert bucket.takes(15.0, 0.0) and not bucket.takes(15.0, 0.0)
    assert bucket.takes(5.0, 0.0), "what was refused has cost nothing"
    assert not bucket.takes(15.0, 1.4) and bucket.takes(15.0, 1.5)
