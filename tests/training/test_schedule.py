"""Learning rates by step."""

import pytest

from farflung.training.schedule import Schedule


def test_cosine_rises_and_falls() -> None:
    schedule = Schedule(peak=1.0, warmup_steps=10, total_steps=110)
    assert schedule.at(0) == pytest.approx(0.1)
    assert schedule.at(9) == schedule.at(10) == 1.0
    assert schedule.at(60) == pytest.approx(0.55)
    assert schedule.at(110) == schedule.at(10_000) == pytest.approx(0.1)


def test_wsd_stays_and_then_falls() -> None:
    schedule = Schedule(peak=2.0, warmup_steps=4, total_steps=100, kind="wsd", final_ratio=0.0)
    assert schedule.at(4) == schedule.at(80) == 2.0
    assert schedule.at(90) == pytest.approx(1.0)
    assert schedule.at(100) == schedule.at(101) == 0.0


def test_constant_has_no_end() -> None:
    schedule = Schedule(peak=0.5, warmup_steps=2, kind="constant")
    assert [schedule.at(step) for step in (0, 1, 2, 10**9)] == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak": 0.0},
        {"peak": 1.0, "warmup_steps": 5, "total_steps": 5},
        {"peak": 1.0, "kind": "linear"},
        {"peak": 1.0, "total_steps": 5, "final_ratio": 2.0},
    ],
)
def test_impossible_schedules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Schedule(**wrong)  # type: ignore[arg-type]
