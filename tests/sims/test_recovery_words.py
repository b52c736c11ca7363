"""What rows of a few seeds can tell of the goals: met, missed, or not decidable."""

from dataclasses import replace

import pytest
from tests.sims.recovery_cases import SAFE

from farflung.sims.recovery_power import all_of, is_below, limits
from farflung.sims.recovery_rows import Row, Single
from farflung.sims.recovery_words import UNDECIDED, checks, missed

TIER = replace(SAFE, seeds=3, rates=(0.10,))


def row(method: str, gaps: tuple[float, ...], hours: tuple[float | None, ...]) -> Row:
    known = [one for one in hours if one is not None]
    return Row(
        method=method,
        rate=0.0 if method == "none" else 0.10,
        seeds=len(gaps),
        losses=11.0,
        final_loss=1.8,
        gap_percent=sum(gaps) / len(gaps),
        spread_percent=1.0,
        gaps=gaps,
        reached=len(known),
        steps_to_target=350.0,
        hours_to_target=sum(known) / len(known) if len(known) == len(hours) else None,
        hours=hours,
        end_hours=(20.0,) * len(gaps),
        kept_percent=1.9,
        recovered_percent=0.2,
        rungs={},
        curve=((0, 3.0), (6, 1.8)),
    )


ROWS = [
    row("none", (0.0, 0.0, 0.0), (8.8, 8.9, 9.0)),
    row("checkpoint", (12.0, 13.0, 14.0), (None, 17.0, None)),
    row("redundant", (0.0, 0.0, 0.0), (14.0, 14.1, 14.2)),
    row("checkfree", (5.0, 6.0, 7.0), (11.0, 11.5, 12.0)),
    row("checkfree+", (6.0, 7.0, 8.0), (12.0, 12.5, 13.0)),
    row("copy", (8.0, 9.1, 10.0), (13.0, 13.0, 13.1)),
    row("random", (30.0, 33.0, 41.0), (None, None, None)),
    row("ours", (0.2, 0.4, 0.3), (9.2, 9.3, 9.4)),
]
ORDER, RANKING, GAP, KEPT, FIRST = range(5)


def verdicts(*changed: Row) -> list[bool | None]:
    rows = [next((new for new in changed if new.method == old.method), old) for old in ROWS]
    return [check.met for check in checks(rows, [], TIER)]


def test_all_goals_met() -> None:
    assert verdicts() == [True] * 5 and not missed(checks(ROWS, [], TIER))


def test_a_gap_within_the_noise_of_its_bound_decides_nothing() -> None:
    noisy = replace(ROWS[-1], gaps=(-1.5, 0.9, 2.0))
    assert verdicts(noisy)[GAP] is None
    assert verdicts(replace(noisy, gaps=(1.5, 1.6, 1.7)))[GAP] is False
    goal = checks([*ROWS[:-1], noisy], [], TIER)[GAP]
    assert goal.verdict == UNDECIDED and "+0.47 % (" in goal.measured


def test_a_single_seed_decides_nothing_but_bytes() -> None:
    one = [replace(old, seeds=1, gaps=old.gaps[:1], hours=old.hours[:1], end_hours=old.end_hours[:1]) for old in ROWS]
    assert [check.met for check in checks(one, [], TIER)] == [None, None, None, True, None]


def test_a_run_that_diverged_misses_the_goal() -> None:
    assert verdicts(replace(ROWS[-1], gaps=(0.2, None, 0.3), gap_percent=None))[GAP] is False


def test_bytes_are_counted() -> None:
    assert verdicts(replace(ROWS[-1], kept_percent=2.01))[KEPT] is False


def test_pairs_of_a_seed_are_compared() -> None:
    """Their seeds differ by more than they do, and still it is plain."""
    copy, anew = (8.0, 18.0, 28.0), (9.0, 19.1, 29.0)
    mean = replace(ROWS[3], gaps=(7.0, 17.1, 27.0))
    assert verdicts(mean, replace(ROWS[5], gaps=copy), replace(ROWS[6], gaps=anew))[ORDER] is True
    assert verdicts(mean, replace(ROWS[5], gaps=anew), replace(ROWS[6], gaps=copy))[ORDER] is False


def test_who_is_never_there_is_later_than_the_end() -> None:
    assert verdicts(replace(ROWS[-1], hours=(9.2, None, 9.4)))[FIRST] is None  # is it before all that were there?
    late = replace(ROWS[-1], hours=(None, None, None), end_hours=(20.0, 20.1, 20.0))
    assert verdicts(late)[FIRST] is False
    assert verdicts(replace(ROWS[6], hours=(None, 9.0, None)))[FIRST] is None
    assert verdicts(replace(ROWS[3], hours=(None, None, None)))[RANKING] is False
    assert verdicts(replace(ROWS[3], hours=(None, 11.5, 12.0), end_hours=(13.0,) * 3))[RANKING] is None


def test_checkfree_with_swaps_may_be_behind_the_one_without() -> None:
    assert ROWS[4].hours > ROWS[3].hours and verdicts()[RANKING] is True


def test_what_was_not_run_is_no_goal() -> None:
    assert checks(ROWS, [], TIER)[FIRST].target.endswith("before every other method")
    assert checks([*ROWS[:3], ROWS[-1]], [], TIER)[-1].target.endswith("before checkpoint and redundant")
    assert "checkfree+" not in checks(ROWS[:4], [], TIER)[0].target
    told = checks([ROWS[0], ROWS[-1]], [], TIER)
    assert [check.target.split(":")[0] for check in told] == ["ours at 10 %"] * 2


def test_a_short_tier_is_not_asked_for_the_published_ranking() -> None:
    """Runs in which a mean has no time to recover cannot have it."""
    asked = [check.target for check in checks(ROWS, [], TIER)]
    short = [check.target for check in checks(ROWS, [], replace(TIER, is_short=True))]
    assert [target for target in asked if "as published" in target] and short == [
        target for target in asked if "as published" not in target
    ]


def test_single_losses_are_compared_run_by_run() -> None:
    lefts = {"neighbour mean": (0.01, 0.11), "copy": (0.02, 0.121), "random": (0.03, 0.13)}
    once = [
        Single(event="interior", rung=rung, runs=2, jump=0.1, left=0.06, lefts=one, setback=1.0, rungs={})
        for rung, one in lefts.items()
    ]
    assert checks([], once, TIER)[0].met is True
    mean, copy, anew = once
    swapped = [replace(copy, rung=mean.rung), replace(mean, rung=copy.rung), anew]
    assert checks([], swapped, TIER)[0].met is False
    [goal] = checks([], [mean, copy, replace(anew, lefts=anew.lefts[:1])], TIER)
    assert goal.met is None and goal.measured == "a run diverged"
    assert not checks([], [mean, copy], TIER)


@pytest.mark.parametrize(
    ("values", "below"),
    [((0.9, 1.0, 1.1), False), ((0.5, 0.6, 0.7), True), ((0.5, 0.6, 3.0), None), ((0.1,), None), ((0.5,) * 30, True)],
)
def test_limits_of_a_mean(values: tuple[float, ...], below: bool | None) -> None:
    assert is_below(values, 0.8) is below


def test_limits_are_students() -> None:
    low, high = limits((1.0, 2.0, 3.0)) or (0.0, 0.0)
    assert (low, high) == pytest.approx((2 - 2.92 / 3**0.5, 2 + 2.92 / 3**0.5))


def test_all_of_several() -> None:
    assert all_of([True, True]) is True and all_of([True, None]) is None
    assert all_of([None, False]) is False and all_of([]) is None
