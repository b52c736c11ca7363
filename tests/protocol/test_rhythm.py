"""When a round is due, and for how long somebody late is waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.rhythm import SHARE, Offer, Rhythm, Runner, grace_s, hidden_s, is_due, patient_until

RHYTHM = Rhythm(inner_steps=10, delay_steps=9, step_tokens=50)
BLOCKING = Rhythm(inner_steps=10, delay_steps=0, step_tokens=50)

runners = st.builds(Runner, st.floats(0.0, 100.0), st.floats(0.1, 1e6))


@pytest.mark.parametrize(
    ("step_s", "now", "round_s", "offers"),
    [
        (1.0, 8.0, 0.0, False),  # the next boundary is just in time
        (1.0, 9.0, 0.0, False),
        (1.0, 9.6, 0.0, True),
        (4.0, 7.0, 0.0, False),  # the next is at 11, nearer to 10 than 7 is
        (4.0, 8.5, 0.0, True),
        (4.0, 6.4, 7.0, False),  # of 9 steps 7 are gone with the round: half a second late is allowed
        (4.0, 6.6, 7.0, True),
        (5.0, 5.1, 9.0, True),  # nothing is hidden: not a moment late
        (5.0, 11.0, 0.0, True),  # late already
        (99.0, 0.0, 0.0, True),  # a step longer than the lap is always the last in time
    ],
)
def test_the_offer_is_at_the_boundary_next_to_it(step_s: float, now: float, round_s: float, offers: bool) -> None:
    others = [Runner(10.0, 50.0), Runner(10.5, 500.0)]
    assert is_due(RHYTHM, others, step_s=step_s, round_s=round_s, now=now) is offers


def test_alone_nothing_is_due() -> None:
    assert not is_due(RHYTHM, [], step_s=1.0, round_s=0.0, now=1e9)


@given(st.lists(runners, min_size=1, max_size=5), st.floats(0.01, 50.0), st.floats(0.0, 50.0), st.floats(0.0, 200.0))
def test_it_offers_once_in_a_lap_and_never_later_than_is_hidden(
    others: list[Runner], step_s: float, round_s: float, start: float
) -> None:
    """Of consecutive boundaries, one is the first to offer at; it is due by at most the lateness, unless the first boundary was."""
    first = min(others, key=lambda runner: runner.ready_at)
    due, pace_s = first.ready_at, RHYTHM.step_tokens / first.tokens_per_s
    now = start
    if now + step_s < due:
        now += (due - now - step_s) // step_s * step_s
    while not is_due(RHYTHM, others, step_s=step_s, round_s=round_s, now=now):
        now += step_s
    late = now - due
    allowed = min(step_s / 2, hidden_s(RHYTHM, step_s=pace_s, round_s=round_s) / 4)
    assert late <= allowed + 1e-6 or now == start
    assert late > -step_s - 1e-6 or now == start


def test_the_grace_is_half_of_what_the_overlap_hides() -> None:
    assert hidden_s(RHYTHM, step_s=2.0, round_s=5.0) == 13.0 and grace_s(RHYTHM, step_s=2.0, round_s=5.0) == 6.5
    assert hidden_s(RHYTHM, step_s=2.0, round_s=20.0) == 0.0
    assert grace_s(RHYTHM, step_s=2.0, round_s=20.0) == SHARE * 20.0


def test_the_grace_is_no_shorter_than_messages_take() -> None:
    """Nor is it longer for that than they may take."""
    assert grace_s(RHYTHM, step_s=0.05, round_s=0.8) == pytest.approx(0.2)
    assert grace_s(RHYTHM, step_s=0.05, round_s=60.0) == 1.0


def test_without_overlap_everybody_makes_all_steps_and_a_round_waits_a_lap() -> None:
    assert not is_due(BLOCKING, [Runner(10.0, 50.0)], step_s=1.0, round_s=0.0, now=1e6)
    assert grace_s(BLOCKING, step_s=2.0, round_s=1.0) == 20.0


FULL, EARLY = Offer(10.0, 500, 50.0), Offer(6.0, 100, 10.0)


@pytest.mark.parametrize(
    ("offers", "awaited", "until"),
    [
        ([], [], 0.0),
        ([FULL], [], 13.5),  # half of 9 steps of a second, less the round's two
        ([FULL], [Runner(30.0, 1.0)], 13.5),
        ([FULL, EARLY], [Runner(30.0, 1.0)], 13.5),
        ([EARLY], [Runner(10.0, 50.0)], 31.5),  # its own grace of 21.5 s, from when the fast one is due
        ([EARLY], [], 27.5),
        ([Offer(10.0, 500, 0.0)], [], 110.0),  # nobody knows what it costs
        ([EARLY], [Runner(1e7, 50.0)], 106.0),
    ],
)
def test_patience_runs_from_when_the_round_is_due(offers: list[Offer], awaited: list[Runner], until: float) -> None:
    assert patient_until(RHYTHM, offers, awaited, round_s=2.0, longest_s=100.0) == until
