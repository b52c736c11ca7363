"""The choice of the next lap: allowed whatever is measured, long enough to hide a round, short where links are fast, and steady."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.lap import BUSY, CALM, STANDS, Laps

FREE = Laps(least=5, most=400)

laps = st.tuples(st.integers(1, 50), st.integers(0, 500), st.floats(0, 1)).map(
    lambda t: Laps(least=t[0], most=t[0] + t[1], delay=None if t[2] < 0.5 else int(t[2] * (t[0] - 1)))
)
seconds = st.floats(1e-3, 1e4)
measured = st.lists(st.floats(0, 1e4), max_size=5)


@given(laps, st.integers(1, 600), st.integers(0, 2000), st.one_of(st.just(0.0), seconds), measured)
def test_what_is_chosen_is_allowed(limits: Laps, lap: int, left: int, step_s: float, rounds_s: list[float]) -> None:
    lap = max(limits.least, min(lap, limits.most))
    chosen, reason = limits.choose(lap, left=left, step_s=step_s, rounds_s=rounds_s)
    assert limits.allows(chosen, left) and reason
    assert 0 <= limits.delay_of(chosen) < chosen


@given(seconds, st.floats(1e-2, 1e2), st.integers(5, 400))
def test_a_round_hides_behind_training(step_s: float, steps: float, lap: int) -> None:
    chosen, reason = FREE.choose(lap, left=1 << 40, step_s=step_s, rounds_s=[steps * step_s])
    assert steps * step_s <= BUSY * FREE.delay_of(chosen) * step_s * (1 + 1e-9), reason
    needed, _ = FREE.choose(1, left=1 << 40, step_s=step_s, rounds_s=[steps * step_s])
    assert chosen <= max(FREE.least, needed / CALM), "and no longer than that by much"


@given(seconds, st.floats(0, 1e2), st.integers(5, 400))
def test_a_second_choice_changes_nothing(step_s: float, steps: float, lap: int) -> None:
    once, _ = FREE.choose(lap, left=1 << 40, step_s=step_s, rounds_s=[steps * step_s])
    again, _ = FREE.choose(once, left=1 << 40, step_s=step_s, rounds_s=[steps * step_s])
    assert again == once


@given(st.floats(0, 1e2), st.floats(0, 1e2))
def test_slower_rounds_do_not_make_shorter_laps(a: float, b: float) -> None:
    chosen = [FREE.choose(5, left=1 << 40, step_s=1.0, rounds_s=[s])[0] for s in sorted((a, b))]
    assert chosen == sorted(chosen)


@given(st.integers(0, 8), st.floats(1e-2, 1e2))
def test_where_tau_is_too_short_laps_are_so_long_that_peers_hardly_stand(delay: int, round_s: float) -> None:
    limits = Laps(least=10, most=1 << 30, delay=delay)
    chosen, _ = limits.choose(10, left=1 << 40, step_s=1.0, rounds_s=[round_s])
    assert max(0.0, round_s - delay) <= STANDS * chosen


def test_noise_changes_nothing_and_one_bad_round_neither() -> None:
    lap, _ = FREE.choose(5, left=1 << 40, step_s=1.0, rounds_s=[12.0] * 3)
    assert lap == 19
    for rounds_s in ([11.0, 10.0, 12.0], [60.0, 12.0, 12.0], [0.1, 12.0, 12.0]):
        assert FREE.choose(lap, left=1 << 40, step_s=1.0, rounds_s=rounds_s)[0] == lap
    assert FREE.choose(lap, left=1 << 40, step_s=1.0, rounds_s=[24.0, 24.0, 12.0])[0] == 37, "a second one counts"
    assert FREE.choose(lap, left=1 << 40, step_s=1.0, rounds_s=[2.0, 2.0, 12.0])[0] == FREE.least


@given(laps, st.integers(1, 600), st.floats(0, 1e2))
def test_while_somebody_downloads_the_state_laps_only_become_longer(limits: Laps, lap: int, round_s: float) -> None:
    lap = max(limits.least, min(lap, limits.most))
    without, _ = limits.choose(lap, left=1 << 40, step_s=1.0, rounds_s=[round_s])
    longer, reason = limits.choose(lap, left=1 << 40, step_s=1.0, rounds_s=[round_s], newcomer=True)
    assert longer >= max(without, min(1.5 * lap, limits.most)) or limits.least == limits.most
    assert limits.allows(longer, 1 << 40) and ("catch up" in reason or longer == without)


@pytest.mark.parametrize(
    ("left", "rounds_s", "chosen", "says"),
    [
        (1 << 40, [4.0], 7, "rounds take 4 s and steps 1 s: 7 steps hide one"),
        (1 << 40, [0.1], 5, "5 is the least"),
        (1 << 40, [1000.0], 400, "400 is the most"),
        (20, [1000.0], 20, "20 is the most of what is left of the run"),
        (3, [1000.0], 5, "5 is the most of what is left of the run"),
        (1 << 40, [], 7, "nobody has said yet"),
    ],
)
def test_it_says_why(left: int, rounds_s: list[float], chosen: int, says: str) -> None:
    lap, reason = FREE.choose(7, left=left, step_s=1.0, rounds_s=rounds_s)
    assert lap == chosen and says in reason


def test_what_the_manifest_fixes_is_not_chosen() -> None:
    fixed = Laps.fixed(30, 9)
    assert fixed.choose(30, left=1 << 40, step_s=1.0, rounds_s=[1000.0]) == (30, "fixed by the manifest")
    assert fixed.delay_of(30) == 9 and Laps(least=30, most=30).delay_of(30) == 29


@given(laps, st.integers(1, 3000), st.data())
def test_laps_never_overrun_the_run(limits: Laps, total: int, data: st.DataObject) -> None:
    """Whatever is chosen on the way, the sum of the laps stays within the run, and what is left in the end is less than a lap."""
    total = max(total, limits.least)
    steps, lap, rounds = 0, limits.least, 0
    while not limits.finished(total - steps) and rounds < 100:
        steps, rounds = steps + lap, rounds + 1
        measured = data.draw(st.floats(0, 1e3))
        lap, _ = limits.choose(lap, left=total - steps, step_s=1.0, rounds_s=[measured])
    assert steps <= total and (rounds == 100 or total - steps < limits.least)
