"""The choice of the next lap: allowed whatever is measured, long enough to hide a round, short where links are fast, and steady."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.lap import BUSY, CALM, NARROWS, STANDS, WIDENS, Lap, Laps, Took

FREE = Laps(least=5, most=400)


def choose(
    limits: Laps, lap: int, *, left: int = 1 << 40, step_s: float = 1.0, rounds_s: list[float], newcomer: bool = False
) -> tuple[int, str]:
    """Where rounds move one fragment each."""
    rounds = [Took(seconds, 1.0) for seconds in rounds_s]
    chosen, reason = limits.choose(Lap(lap), left=left, step_s=step_s, rounds=rounds, newcomer=newcomer)
    assert chosen.width == 1
    return chosen.steps, reason


laps = st.tuples(st.integers(1, 50), st.integers(0, 500), st.floats(0, 1)).map(
    lambda t: Laps(least=t[0], most=t[0] + t[1], delay=None if t[2] < 0.5 else int(t[2] * (t[0] - 1)))
)
seconds = st.floats(1e-3, 1e4)
measured = st.lists(st.floats(0, 1e4), max_size=5)


@given(laps, st.integers(1, 600), st.integers(0, 2000), st.one_of(st.just(0.0), seconds), measured)
def test_what_is_chosen_is_allowed(limits: Laps, lap: int, left: int, step_s: float, rounds_s: list[float]) -> None:
    lap = max(limits.least, min(lap, limits.most))
    chosen, reason = choose(limits, lap, left=left, step_s=step_s, rounds_s=rounds_s)
    assert limits.allows(Lap(chosen), left) and reason
    assert 0 <= limits.delay_of(chosen) < chosen


@given(seconds, st.floats(1e-2, 1e2), st.integers(5, 400))
def test_a_round_hides_behind_training(step_s: float, steps: float, lap: int) -> None:
    chosen, reason = choose(FREE, lap, step_s=step_s, rounds_s=[steps * step_s])
    assert steps * step_s <= BUSY * FREE.delay_of(chosen) * step_s * (1 + 1e-9), reason
    needed, _ = choose(FREE, 1, step_s=step_s, rounds_s=[steps * step_s])
    assert chosen <= max(FREE.least, needed / CALM), "and no longer than that by much"


@given(seconds, st.floats(0, 1e2), st.integers(5, 400))
def test_a_second_choice_changes_nothing(step_s: float, steps: float, lap: int) -> None:
    once, _ = choose(FREE, lap, step_s=step_s, rounds_s=[steps * step_s])
    again, _ = choose(FREE, once, step_s=step_s, rounds_s=[steps * step_s])
    assert again == once


@given(st.floats(0, 1e2), st.floats(0, 1e2))
def test_slower_rounds_do_not_make_shorter_laps(a: float, b: float) -> None:
    chosen = [choose(FREE, 5, rounds_s=[s])[0] for s in sorted((a, b))]
    assert chosen == sorted(chosen)


@given(st.integers(0, 8), st.floats(1e-2, 1e2))
def test_where_tau_is_too_short_laps_are_so_long_that_peers_hardly_stand(delay: int, round_s: float) -> None:
    limits = Laps(least=10, most=1 << 30, delay=delay)
    chosen, _ = choose(limits, 10, rounds_s=[round_s])
    assert max(0.0, round_s - delay) <= STANDS * chosen


@given(seconds, st.floats(0, 1e2), st.floats(0, 1e2))
def test_a_lap_makes_up_for_what_a_round_takes_from_training(step_s: float, round_steps: float, taken: float) -> None:
    rounds = [Took(round_steps * step_s, 1.0)]
    limits = Laps(least=5, most=1 << 30)
    chosen, _ = limits.choose(Lap(5), left=1 << 40, step_s=step_s, rounds=rounds, taken_s=taken * step_s)
    assert taken <= STANDS * chosen.steps * (1 + 1e-9)
    assert round_steps <= BUSY * limits.delay_of(chosen.steps) * (1 + 1e-9)


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_what_is_taken_from_training_for_each_fragment_is_no_reason_to_move_many(width: int) -> None:
    """To copy and to step twice as much takes twice as long: a wide round saves nothing of it, and its result only comes later."""
    limits, lap = Laps(least=5, most=1 << 20, widths=(1, 2, 3, 6)), Lap(5 * width, width)
    for _ in range(4):
        rounds = [Took(0.2, float(lap.width))] * 3
        lap, reason = limits.choose(lap, left=1 << 40, step_s=0.1, rounds=rounds, fragment_s=0.0, taken_s=1.0)
    assert lap == Lap(334), reason
    alone, reason = limits.choose(Lap(30, 6), left=1 << 40, step_s=0.1, rounds=rounds, taken_s=1.0)
    assert alone == Lap(2000, 6) and "make up for 6 s" in reason, "it stays wide where nothing is known of links"


@given(seconds, st.floats(0, 1e2), st.integers(5, 400))
def test_who_does_not_know_what_it_takes_from_the_fastest_makes_no_lap_shorter(
    step_s: float, steps: float, lap: int
) -> None:
    rounds = [Took(steps * step_s, 1.0)] * 3
    unknown, _ = FREE.choose(Lap(lap), left=1 << 40, step_s=step_s, rounds=rounds, taken_s=None)
    assert unknown.steps == max(lap, choose(FREE, lap, step_s=step_s, rounds_s=[steps * step_s])[0])
    wide, _ = WIDE.choose(Lap(60, 6), left=1 << 40, step_s=step_s, rounds=rounds, fragment_s=0.0, taken_s=None)
    assert wide.width == 6


def test_noise_changes_nothing_and_one_bad_round_neither() -> None:
    lap, _ = choose(FREE, 5, rounds_s=[12.0] * 3)
    assert lap == 19
    for rounds_s in ([11.0, 10.0, 12.0], [60.0, 12.0, 12.0], [0.1, 12.0, 12.0]):
        assert choose(FREE, lap, rounds_s=rounds_s)[0] == lap
    assert choose(FREE, lap, rounds_s=[24.0, 24.0, 12.0])[0] == 37, "a second one counts"
    assert choose(FREE, lap, rounds_s=[2.0, 2.0, 12.0])[0] == FREE.least


@given(laps, st.integers(1, 600), st.floats(0, 1e2))
def test_while_somebody_downloads_the_state_laps_only_become_longer(limits: Laps, lap: int, round_s: float) -> None:
    lap = max(limits.least, min(lap, limits.most))
    without, _ = choose(limits, lap, rounds_s=[round_s])
    longer, reason = choose(limits, lap, rounds_s=[round_s], newcomer=True)
    assert longer >= max(without, min(1.5 * lap, limits.most)) or limits.least == limits.most
    assert limits.allows(Lap(longer), 1 << 40) and ("catch up" in reason or longer == without)


@pytest.mark.parametrize(
    ("left", "rounds_s", "chosen", "says"),
    [
        (1 << 40, [4.0], 7, "rounds take 4 s and steps 1 s: 7 steps hide one"),
        (1 << 40, [0.1], 5, "5 is the least"),
        (1 << 40, [1000.0], 400, "400 is the most"),
        (20, [1000.0], 20, "20 is the most of what is left of the run"),
        (3, [1000.0], 3, "3 is the most of what is left of the run"),
        (1 << 40, [], 7, "nobody has said yet"),
    ],
)
def test_it_says_why(left: int, rounds_s: list[float], chosen: int, says: str) -> None:
    lap, reason = choose(FREE, 7, left=left, rounds_s=rounds_s)
    assert lap == chosen and says in reason


def test_what_the_manifest_fixes_is_not_chosen() -> None:
    fixed = Laps.fixed(30, 9)
    assert choose(fixed, 30, rounds_s=[1000.0]) == (30, "fixed by the manifest")
    assert fixed.delay_of(30) == 9 and Laps(least=30, most=30).delay_of(30) == 29


@given(laps, st.integers(1, 3000), st.data())
def test_laps_never_overrun_the_run(limits: Laps, total: int, data: st.DataObject) -> None:
    """Whatever is chosen on the way, the sum of the laps stays within the run, and is the run in the end."""
    total = max(total, limits.least)
    steps, lap, rounds = 0, limits.least, 0
    while not limits.finished(total - steps) and rounds < 100:
        steps, rounds = steps + lap, rounds + 1
        measured = data.draw(st.floats(0, 1e3))
        lap, _ = choose(limits, lap, left=total - steps, rounds_s=[measured])
    assert steps == total or (steps < total and rounds == 100)


@pytest.mark.parametrize(
    ("total", "lap", "last"), [(150, 100, 50), (2450, 80, 50), (199, 100, 99), (201, 100, 1), (200, 100, 100)]
)
def test_a_run_of_laps_that_the_manifest_fixes_ends_with_what_is_left_of_it(total: int, lap: int, last: int) -> None:
    limits, trail = Laps.fixed(lap, lap - 1), [lap]
    while not limits.finished(left := total - sum(trail)):
        begun, reason = limits.choose(Lap(trail[-1]), left=left, step_s=1.0, rounds=[])
        assert limits.allows(begun, left) and 0 <= limits.delay_of(begun.steps) < begun.steps and reason
        assert begun.steps == lap or not limits.allows(Lap(lap), left), "nor may anybody overrun it"
        trail.append(begun.steps)
    assert trail == [lap] * (len(trail) - 1) + [last]


WIDE = Laps(least=5, most=400, widths=(1, 2, 3, 6))
widths = st.sampled_from(WIDE.widths)


def rounds_of(width: int, fixed_s: float, fragment_s: float) -> list[Took]:
    return [Took(fixed_s + width * fragment_s, float(width))] * 3


@given(widths, st.integers(0, 3000), st.floats(0, 1e2), st.one_of(st.none(), st.floats(0, 1e2)), st.booleans())
def test_a_width_that_is_chosen_is_allowed(
    width: int, left: int, round_s: float, fragment_s: float | None, newcomer: bool
) -> None:
    before = Lap(7 * width, width)
    took = [Took(round_s, width)] * 3
    chosen, _ = WIDE.choose(before, left=left, step_s=1.0, rounds=took, fragment_s=fragment_s, newcomer=newcomer)
    assert WIDE.allows(chosen, left)
    assert fragment_s is not None or chosen.width == width or WIDE.least * width > left, (
        "it stays where nothing is known"
    )
    unknown, _ = WIDE.choose(before, left=left, step_s=0.0, rounds=took, fragment_s=fragment_s)
    assert WIDE.allows(unknown, left)


@given(widths, st.floats(1, 1e2), st.floats(0, 1e2))
def test_a_round_is_as_narrow_as_it_can_be_without_making_the_steps_between_two_of_a_fragment_much_more(
    width: int, fixed_s: float, fragment_s: float
) -> None:
    lap, reason = Lap(WIDE.least * width, width), ""
    for _ in range(3):
        before = lap
        rounds = rounds_of(lap.width, fixed_s, fragment_s)
        lap, reason = WIDE.choose(lap, left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=fragment_s)
    assert lap == before, f"it stays: {reason}"

    def between(k: int) -> float:
        return (
            WIDE.choose(Lap(5 * k, k), left=1 << 40, step_s=1.0, rounds=rounds_of(k, fixed_s, fragment_s))[0].steps / k
        )

    best = min(between(k) for k in WIDE.widths)
    assert between(lap.width) <= best / WIDENS * (1 + 1e-9)
    assert all(between(k) > NARROWS * best * (1 - 1e-9) for k in WIDE.widths if k < lap.width), (
        "not wider than that takes"
    )


def test_where_round_trips_take_the_time_everything_moves_at_once_and_where_bytes_do_fragments_take_turns() -> None:
    lap, reason = WIDE.choose(Lap(20), left=1 << 40, step_s=1.0, rounds=rounds_of(1, 12.0, 0.1), fragment_s=0.1)
    assert lap == Lap(30, 6) and "12.1 s" in reason and "6 of 6 fragments" in reason, "every 30 steps, not every 120"
    back, reason = WIDE.choose(lap, left=1 << 40, step_s=1.0, rounds=rounds_of(6, 1.0, 12.0), fragment_s=12.0)
    assert back == Lap(21, 1) and "1 of 6 fragments" in reason, "a link became slow"


def test_near_the_end_of_a_run_rounds_become_narrow() -> None:
    for left, width in ((30, 6), (29, 3), (14, 2), (9, 1), (0, 1)):
        lap, _ = WIDE.choose(Lap(30, 6), left=left, step_s=1.0, rounds=rounds_of(6, 12.0, 0.0), fragment_s=0.0)
        assert lap.width == width


def test_a_round_that_may_fail_for_being_wide_is_not() -> None:
    took = rounds_of(1, 12.0, 0.1)
    for longest_s, width in ((1000.0, 6), (71.0, 3), (68.0, 1)):
        lap, _ = WIDE.choose(Lap(20), left=1 << 40, step_s=1.0, rounds=took, fragment_s=0.1, longest_s=longest_s)
        assert lap.width == width, longest_s
    for longest_s, width in ((51.0, 6), (50.0, 3)):
        took = rounds_of(6, 12.0, 0.1)
        lap, _ = WIDE.choose(Lap(20, 6), left=1 << 40, step_s=1.0, rounds=took, fragment_s=0.1, longest_s=longest_s)
        assert lap.width == width, "what is as wide already may come a little nearer to it"


@given(widths, widths, st.integers(1, 100), st.integers(0, 100))
def test_what_links_do_not_say_is_learnt_from_rounds_of_another_width(
    width: int, other: int, fixed_s: int, fragment_s: int
) -> None:
    """Of processors, say."""
    now, newest = Lap(5 * width, width), rounds_of(width, fixed_s, fragment_s)
    told, _ = WIDE.choose(
        now, left=1 << 40, step_s=1.0, rounds=newest, fragment_s=fragment_s if width != other else 0.0
    )
    rounds = [*newest, *rounds_of(other, fixed_s, fragment_s)]
    assert WIDE.choose(now, left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=0.0)[0] == told


def test_a_width_is_looked_at_again_after_three_rounds() -> None:
    """And one bad round among them counts no more than elsewhere."""
    narrow = rounds_of(1, 10.0, 1.0)
    for first in ([44.0], [44.0, 12.0], [12.0, 44.0]):
        rounds = [*(Took(seconds, 3.0) for seconds in first), *narrow]
        assert WIDE.choose(Lap(30, 3), left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=0.0)[0].width == 3
    rounds = [Took(13.0, 3.0), Took(44.0, 3.0), Took(13.0, 3.0), *narrow]
    assert WIDE.choose(Lap(30, 3), left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=0.0)[0].width == 3
    rounds = [Took(44.0, 3.0), Took(40.0, 3.0), Took(13.0, 3.0), *narrow]
    assert WIDE.choose(Lap(30, 3), left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=0.0)[0].width == 1


@given(
    st.lists(st.tuples(st.floats(0, 1e3), widths, st.floats(-0.1, 0.1)), min_size=1, max_size=12), widths, st.booleans()
)
def test_rounds_of_all_widths_are_reckoned_with(said: list[tuple[float, int, float]], width: int, knows: bool) -> None:
    """Fragments are not quite equal: the mean of two rounds may move as much as a third one, or nearly."""
    rounds = [Took(seconds, k * (1 + off)) for seconds, k, off in said]
    lap, reason = WIDE.choose(
        Lap(5 * width, width), left=1 << 40, step_s=1.0, rounds=rounds, fragment_s=0.0 if knows else None
    )
    assert WIDE.allows(lap, 1 << 40)
    longest_s = max(took.seconds for took in rounds)
    # As fragments may be learnt to take, by rounds that are half a fragment apart.
    wide_s = longest_s + longest_s / 0.5 * WIDE.widths[-1]
    assert lap.steps <= max(2 + wide_s / BUSY, 5 * lap.width), reason


@pytest.mark.parametrize(("count", "fixed_s", "each_s"), [(3, 4.0, 1.0), (6, 4.0, 1.0), (3, 4.0, 4.0), (4, 1.0, 6.0)])
@pytest.mark.parametrize("said", [0.0, 0.5, 1.0, 3.0])
def test_whatever_links_are_said_to_give_the_width_comes_to_rest(
    count: int, fixed_s: float, each_s: float, said: float
) -> None:
    """What is said decides until it was tried, and what was learnt for as long as it is remembered."""
    limits = Laps(least=2, most=1 << 30, widths=tuple(k for k in range(1, count + 1) if count % k == 0))
    rng, lap, rounds, widths_seen = random.Random(count), Lap(2), list[Took](), list[int]()
    for _ in range(120):
        took_s = (fixed_s + lap.width * each_s) * rng.uniform(0.95, 1.05)
        rounds.insert(0, Took(took_s, float(lap.width)))
        lap, _ = limits.choose(lap, left=1 << 40, step_s=0.3, rounds=rounds, fragment_s=said * each_s)
        widths_seen.append(lap.width)
    changes = sum(a != b for a, b in pairwise(widths_seen))
    assert changes <= 4, widths_seen
