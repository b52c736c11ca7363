"""Processors that nodes of one machine share."""

from hypothesis import given
from hypothesis import strategies as st

from farflung.sims.processors import Processors


def test_two_processors_do_three_things_in_turns() -> None:
    both = Processors(2)
    assert [both.reserve(2.0, 1.0), both.reserve(5.0, 1.0), both.reserve(1.0, 1.0)] == [3.0, 6.0, 4.0]
    assert both.reserve(1.0, 10.0) == 11.0


@given(st.integers(1, 4), st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)), max_size=30))
def test_no_more_is_done_at_a_time_than_there_are_processors(count: int, work: list[tuple[float, float]]) -> None:
    processors, now, spans = Processors(count), 0.0, []
    for later, seconds in work:
        now += later
        done = processors.reserve(seconds, now)
        spans.append((done - seconds, done))
        assert done >= now + seconds - 1e-9
    for _, end in spans:
        assert sum(begin < end - 1e-6 and end <= done for begin, done in spans) <= count
