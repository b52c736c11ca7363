"""The timetable of fragments: DiLoCo's for one fragment, every fragment once per H steps, nothing left at the end."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.training.streaming import Actions, Exchange, Timetable


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    interval = draw(st.integers(1, 40))
    return Timetable(interval=interval, fragments=draw(st.integers(1, interval)), delay=draw(st.integers(0, interval)))


def test_one_fragment_without_delay_is_plain_diloco() -> None:
    table = Timetable(interval=10)
    for step in range(1, 40):
        whole = (Exchange(0, step // 10 - 1),) if step % 10 == 0 else ()
        assert table.after(step) == Actions(sends=whole, applies=whole)


def test_fragments_take_turns_and_come_back_later() -> None:
    table = Timetable(interval=6, fragments=3, delay=1)
    seen = {step: table.after(step, last=15) for step in range(1, 16)}
    sends = {step: [(e.fragment, e.version) for e in actions.sends] for step, actions in seen.items() if actions.sends}
    assert sends == {2: [(1, 0)], 4: [(2, 0)], 6: [(0, 0)], 8: [(1, 1)], 10: [(2, 1)], 12: [(0, 1)], 14: [(1, 2)]}
    assert [step for step, actions in seen.items() if actions.applies] == [3, 5, 7, 9, 11, 13, 15]
    assert seen[15].flush == (Exchange(0, 2), Exchange(1, 3), Exchange(2, 2))


def test_one_round_late_sends_before_it_applies() -> None:
    table = Timetable(interval=5, delay=5)
    assert table.after(5) == Actions(sends=(Exchange(0, 0),))
    assert table.after(10) == Actions(sends=(Exchange(0, 1),), applies=(Exchange(0, 0),))
    assert table.after(15, last=15) == Actions(sends=(Exchange(0, 2),), applies=(Exchange(0, 1), Exchange(0, 2))), (
        "the last step leaves nothing in flight"
    )


@given(table=timetables(), start=st.integers(0, 100))
def test_every_fragment_is_sent_once_in_any_h_steps(table: Timetable, start: int) -> None:
    first = table.interval + start
    sent = Counter(e.fragment for step in range(first, first + table.interval) for e in table.after(step).sends)
    assert sent == Counter(range(table.fragments))


@given(table=timetables(), last=st.integers(1, 120))
def test_what_is_sent_is_applied_once_in_order_and_the_end_leaves_nothing(table: Timetable, last: int) -> None:
    sent: dict[Exchange, int] = {}
    versions = [0] * table.fragments
    moved = [0] * table.fragments
    for step in range(1, last + 1):
        actions = table.after(step, last)
        for exchange in actions.sends:
            sent[exchange] = step
        for exchange in (*actions.applies, *actions.flush):
            at = sent.pop(exchange, step)
            assert step == min(at + table.delay, last) and exchange.version == versions[exchange.fragment]
            versions[exchange.fragment] += 1
            moved[exchange.fragment] = max(moved[exchange.fragment], at)
        assert actions.flush == () or step == last
    assert not sent and moved == [last] * table.fragments, "every fragment's progress up to the last step counts"


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="choose 1 to 5"):
        Timetable(interval=5, fragments=6)
    with pytest.raises(ValueError, match="choose 0 to the interval"):
        Timetable(interval=5, delay=6)
