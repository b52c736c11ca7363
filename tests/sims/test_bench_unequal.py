"""What the peers say becomes utilisation and gaps, and the benchmark runs where links can be emulated."""

import itertools
import json
from typing import Any

import pytest

from farflung.sims import bench_unequal
from farflung.sims import wan as wans
from farflung.sims.bench_unequal import (
    OURS,
    SWARMS,
    Swarm,
    Task,
    UnequalFigures,
    figures_of,
    gap_percent,
    measure_unequal,
    missed,
    run_unequal,
    utilisation,
)
from farflung.sims.bench_workers import BenchError
from farflung.training.presets import preset


def result(**changed: Any) -> dict[str, Any]:
    """A peer that trains for six of the ten seconds between its first and its last round."""
    return {
        "steps": [[8.0, 11.0], [12.0, 15.0], [18.0, 22.0]],
        "late": [0.5],
        "commits": [10.0, 15.0, 20.0],
        "missed": 1,
        "digests": ["aa", "bb", "cc"],
        "tokens": [100, 200, 300],
        "losses": [3.0, 2.0, 1.5],
    } | changed


TWO = Swarm(name="two", speeds=(1.0, 0.5), rounds=2)


def test_only_steps_between_the_first_and_the_last_commit_count() -> None:
    assert utilisation(result()["steps"], result()["commits"]) == pytest.approx(0.6)
    assert utilisation([[0.0, 30.0]], [10.0, 20.0]) == 1.0
    assert utilisation([[0.0, 5.0]], [10.0, 20.0]) == 0.0


def test_goals_that_are_missed_are_told() -> None:
    ours = {"swarm": OURS, "utilisation": (0.99, 0.96), "gap_percent": 0.4}
    others = {"swarm": "equal steps", "utilisation": (0.2, 1.0), "gap_percent": 9.0}
    assert missed([ours, others, {"skipped": "no namespaces"}]) == []
    assert missed([ours | {"gap_percent": None}]) == []
    idle, worse = missed([ours | {"utilisation": (0.99, 0.94), "gap_percent": 0.6}])
    assert "computes 94.0 %" in idle and "+0.60 %" in worse


def test_equal_peers_have_rounds_after_as_many_tokens() -> None:
    (ours, equal) = (next(swarm for swarm in SWARMS if swarm.name == name) for name in (OURS, "equal peers"))
    per_round = [round(swarm.share * 16) * sum(swarm.speeds) / max(swarm.speeds) for swarm in (ours, equal)]
    assert per_round[0] == pytest.approx(per_round[1], rel=0.05)


def test_figures_are_those_of_each_peer() -> None:
    figures = figures_of(TWO, [result(), result(steps=[[10.0, 20.0]], late=[], missed=0)])
    assert figures.utilisation == pytest.approx((0.6, 1.0)) and figures.missed == (1, 0)
    assert (figures.rounds, figures.tokens_per_s, figures.late_steps) == (2, 50.0, 1)
    assert figures.curve == ((100, 3.0), (300, 2.0), (600, 1.5))


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"digests": ["aa", "bb", "xx"]}, "different states"), ({"commits": [10.0]}, "no round after the warm-up")],
)
def test_peers_that_did_not_train_together_give_no_figures(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        figures_of(TWO, [result(**changed), result()])


def test_gaps_are_taken_at_equal_tokens() -> None:
    reference = [(0, 4.0), (100, 2.0)]
    assert gap_percent([(0, 4.0), (50, 3.3)], reference) == pytest.approx(10.0)
    assert gap_percent([(0, 4.0), (200, 1.0)], reference) == pytest.approx(25.0)
    with pytest.raises(BenchError, match="around 50 tokens"):
        gap_percent([(60, 3.0), (90, 2.0)], [(0, 4.0), (50, 3.0)])


def canned(swarm: Swarm, task: Task, **_: Any) -> UnequalFigures:
    return figures_of(swarm, [result()] * len(swarm.speeds))


def test_json_has_a_row_for_each_swarm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_unequal, "measure_unequal", canned)
    monkeypatch.setattr(wans, "available", lambda: None)
    rows = run_unequal(as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(rows))
    assert [row["swarm"] for row in rows] == ["farflung", "equal steps", "equal peers"]
    assert [row["gap_percent"] for row in rows] == [0.0] * 3
    monkeypatch.setenv("COLUMNS", "200")
    run_unequal()
    assert "60.0 60.0 60.0 60.0" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    run_unequal()
    shown = capsys.readouterr().out
    assert all(f" {swarm.name} " in shown for swarm in SWARMS) and "…" not in shown


def test_swarms_are_of_the_same_speed_in_sum() -> None:
    assert {round(sum(swarm.speeds), 9) for swarm in SWARMS} == {2.3}
    assert [swarm.equal_steps for swarm in SWARMS] == [False, True, False]


def test_it_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(wans, "available", lambda: "no namespaces here")
    assert run_unequal() == [{"skipped": "no namespaces here"}]
    assert "skipped: no namespaces here" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("equal_steps", [False, True])
def test_real_peers_on_unequal_machines(equal_steps: bool) -> None:
    if (refused := wans.available()) is not None:
        pytest.skip(refused)
    swarm = Swarm(name="two", speeds=(1.0, 0.5), rounds=2, equal_steps=equal_steps)
    figures = measure_unequal(swarm, Task(preset="tiny", inner_steps=6))
    assert figures.rounds == 2 and len(figures.curve) == 3 and all(0.0 < x <= 1.0 for x in figures.utilisation)
    if equal_steps:  # both peers bring H steps, of two sequences each
        round_tokens = 2 * 6 * 2 * preset("tiny", vocab_size=256).seq_len
        assert [after - before for (before, _), (after, _) in itertools.pairwise(figures.curve)] == [round_tokens] * 2
