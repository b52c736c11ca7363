"""Parts cover the vector, slower links get less, and no other cut would be much faster."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.partition import cut, fractions, in_waves, levelled, narrow, slow

rates = st.lists(st.sampled_from([0.0, 1e4, 5e4, 1e5, 3e5, 1e6, 1e7, 1e9]), min_size=1, max_size=12)


@given(rates, st.integers(0, 5), st.booleans(), st.data())
def test_shares_sum_to_one(ups: list[float], more: int, with_downlinks: bool, data: st.DataObject) -> None:
    downs = data.draw(st.lists(st.sampled_from([0.0, 1e5, 1e7]), min_size=len(ups), max_size=len(ups)))
    shares = fractions(ups, len(ups) + more, downs if with_downlinks else None)
    assert len(shares) == len(ups)
    assert sum(shares) == pytest.approx(1.0) and all(0.0 <= s <= 1.0 + 1e-12 for s in shares)


@given(rates)
def test_a_slower_uplink_never_gets_more(ups: list[float]) -> None:
    known = [u for u in ups if u > 0]
    if not known:
        return
    shares = fractions(known, len(known))
    pairs = sorted(zip(known, shares, strict=True))
    assert all(a[1] <= b[1] + 1e-9 for a, b in pairwise(pairs))


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
    st.sampled_from([1, 16, 128]),
)
def test_the_cut_covers_everything_aligned(numel: int, weights: list[float], align: int) -> None:
    total = sum(weights) or 1.0
    ranges = cut(0, numel, [w / total for w in weights], align)
    assert len(ranges) == len(weights)
    assert ranges[0][0] == 0 and ranges[-1][1] == numel
    for (_, stop), (start, _) in pairwise(ranges):
        assert stop == start
    for start, stop in ranges:
        assert start <= stop and (start == stop or start % align == 0)


def test_the_cut_follows_the_shares() -> None:
    assert cut(0, 1000, [0.5, 0.25, 0.25], 10) == [(0, 500), (500, 750), (750, 1000)]
    assert cut(0, 10, [0.5, 0.5], 16) in ([(0, 0), (0, 10)], [(0, 10), (10, 10)])
    assert cut(0, 0, [1.0], 16) == [(0, 0)]


@given(st.integers(0, 100), st.integers(0, 5000), rates, st.sampled_from([1, 16, 128]), st.integers(1, 3))
def test_waves_cover_everything_one_after_the_other(
    first: int, numel: int, ups: list[float], align: int, waves: int
) -> None:
    parts = list(in_waves(first, first + numel, fractions(ups, len(ups)), align, waves))
    flat = [place for _, (start, stop) in parts for place in (start, stop)]
    assert all(start < stop for _, (start, stop) in parts)
    assert flat == [] if numel == 0 else (flat[0], flat[-1]) == (first, first + numel)
    assert all(stop == start for stop, start in zip(flat[1:-1:2], flat[2::2], strict=True))
    assert sum(later <= owner for (owner, _), (later, _) in pairwise(parts)) < waves


def test_every_owner_has_a_part_in_every_wave() -> None:
    assert list(in_waves(10, 90, [0.5, 0.25, 0.25], 1, 2)) == [
        *((0, (10, 30)), (1, (30, 40)), (2, (40, 50))),
        *((0, (50, 70)), (1, (70, 80)), (2, (80, 90))),
    ]
    assert sorted(places for _, places in in_waves(0, 20, [0.5, 0.5], 16, 2)) == [
        (0, 16),
        (16, 20),
    ]  # too short for four


def makespan(shares: list[float], ups: list[float], downs: list[float], receivers: int) -> float:
    """Seconds until the slowest link is through, for a vector of one byte."""
    times = []
    for share, up, down in zip(shares, ups, downs, strict=True):
        sent = (1 - share) + (receivers - 1) * share
        received = (1 - share) + (len(ups) - 1) * share
        times += [sent / up, received / down]
    return max(times)


@pytest.mark.parametrize(
    ("ups", "downs", "receivers"),
    [
        ([1.0, 1.0, 1.0], None, 3),
        ([1.0, 2.0, 4.0], None, 3),
        ([1.0, 0.5, 0.5], None, 5),
        ([1.0, 10.0, 10.0], None, 3),
        ([3.0, 2.0], None, 2),
        ([4.0, 2.0], None, 4),
        ([1.0, 1.0, 1.0], [1.0, 0.5, 2.0], 3),
        ([2.0, 1.0, 3.0], [2.0, 2.0, 1.5], 4),
        ([1.0, 2.0, 3.0, 4.0], None, 4),
    ],
)
def test_close_to_the_best_of_all_cuts(ups: list[float], downs: list[float] | None, receivers: int) -> None:
    steps = 40 if len(ups) < 4 else 24
    down = downs or [1e12] * len(ups)
    best = min(
        makespan([i / steps for i in [*head, steps - sum(head)]], ups, down, receivers)
        for head in product(range(steps + 1), repeat=len(ups) - 1)
        if sum(head) <= steps
    )
    found = makespan(fractions(ups, receivers, downs), ups, down, receivers)
    assert found <= 1.03 * best


def test_unknown_links_count_as_typical_ones() -> None:
    assert fractions([0.0, 0.0, 0.0, 0.0], 4) == pytest.approx([0.25] * 4)
    assert fractions([1e6, 0.0, 1e6], 3) == pytest.approx([1 / 3] * 3)
    slow = fractions([1e6, 1e6, 0.0, 6e5], 4)
    assert slow[2] == pytest.approx(slow[0]) and slow[3] < slow[0]


def test_downlinks_that_are_no_bound_leave_the_uplinks_to_decide() -> None:
    ups = [1e6, 6e5, 1e6]
    assert fractions(ups, 3, [0.0] * 3) == fractions(ups, 3)
    assert fractions(ups, 3, [0.0] * 3)[1] < 1 / 3
    known = fractions([1e6] * 4, 4, [0.0, 3e5, 0.0, 0.0])
    assert known[1] < known[0] / 2 and known[0] == known[2] == known[3], "one narrow link says nothing of the others"


def offered_to(peer: int, ups: list[float], receivers: int) -> float:
    """What it receives at when everybody else sends to all others by turns, and its link takes it all."""
    return sum(up / (receivers - 1) for other, up in enumerate(ups) if other != peer)


@given(st.lists(st.sampled_from([1e4, 5e4, 1e5, 3e5, 1e6, 6e6]), min_size=2, max_size=12), st.integers(0, 5))
def test_who_takes_all_that_others_offer_is_never_taken_for_narrow(ups: list[float], more: int) -> None:
    receivers = len(ups) + more
    seen = [offered_to(peer, ups, receivers) for peer in range(len(ups))]
    assert narrow(seen, ups, receivers) == [0.0] * len(ups), "what is seen is a bound of the senders, not of the link"
    assert narrow([rate / 1.5 for rate in seen], ups, receivers) == [0.0] * len(ups), "nor is noise"
    assert narrow([0.0] * len(ups), ups, receivers) == [0.0] * len(ups), "nor that nothing was measured"
    assert fractions(ups, receivers, narrow(seen, ups, receivers)) == fractions(ups, receivers)


def test_a_link_that_takes_clearly_less_than_it_is_offered_is_narrow() -> None:
    ups = [1e6, 1e6, 5e6, 1e6]
    assert narrow([2.3e6, 0.4e6, 1e6, 2.3e6], ups, 4) == [0.0, 0.4e6, 0.0, 0.0], (
        "the third sends much and is sent little: that says nothing of what it could receive"
    )


def test_one_owner_takes_all() -> None:
    assert fractions([123.0], 5) == [1.0]
    assert fractions([0.0], 1, [0.0]) == [1.0]


def test_noise_of_measured_rates_is_levelled_and_real_differences_are_not() -> None:
    assert levelled([1.0, 1.2, 0.9, 0.0, 10.0]) == [1.2, 1.2, 1.2, 1.2, 10.0]
    assert levelled([0.0, 0.0]) == [0.0, 0.0]


@given(rates)
def test_the_slow_ones_are_known_to_be_and_no_more_than_half(some: list[float]) -> None:
    found = slow(some)
    assert len(found) == len(some) and 2 * sum(found) <= len(some)
    known = sorted(rate for rate in some if rate > 0.0)
    assert all(0.0 < rate < known[len(known) // 2] / 1.5 for rate, is_slow in zip(some, found, strict=True) if is_slow)


def test_near_the_typical_rate_nobody_is_slow() -> None:
    assert slow([1e6, 0.9e6, 0.7e6, 0.5e6, 1e7]) == [False, False, False, True, False]
    assert slow([0.0, 0.0, 1e3]) == [False] * 3 and slow([]) == []
