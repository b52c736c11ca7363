"""`farflung bench churn`: its swarms, what it makes of curves, and the whole command in small."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farflung.sims import bench_churn
from farflung.sims.bench_churn import run_churn
from farflung.sims.bench_workers import BenchError
from farflung.sims.churn_rows import checks, compare, last_gap, missed
from farflung.sims.churn_swarms import (
    EQUAL,
    REPLACED,
    SPEEDS,
    SWARMS,
    UNEQUAL,
    WAITING,
    ChurnSwarm,
    Played,
    Task,
    play,
    replacements,
    scenario_of,
)
from farflung.sims.swarm import Labour

SMALL = Task(seq_len=16, batch_tokens=16, steps=45, windows=8, warmup_steps=10, every_rounds=1)

CURVE = ((100, 4.0), (200, 3.0), (300, 2.0))


def played(factor: float = 1.0, least: float = 0.99) -> Played:
    curve = tuple((tokens, factor * loss) for tokens, loss in CURVE)
    return Played(utilisation=(1.0, 1.0, least, 1.0), rounds=3, missed=0, dropped_steps=0, curve=curve)


def everything(**changed: Played) -> dict[ChurnSwarm, list[Played]]:
    of = {swarm: [played(), played(1.01)] for swarm in SWARMS}
    for name, one in changed.items():
        swarm = {"unequal": UNEQUAL, "replaced": REPLACED}[name]
        of[swarm] = [one, replace(one, curve=tuple((tokens, 1.01 * loss) for tokens, loss in one.curve))]
    return of


def test_a_fifth_of_four_peers_in_a_hundred_steps_is_one_in_125() -> None:
    task = Task(steps=400, step_s=2.0)
    assert replacements(4, task, 0) == [(0, 250.0), (1, 500.0), (2, 750.0)]
    assert [slot for slot, _ in replacements(4, task, 3)] == [3, 0, 1]
    assert replacements(4, replace(task, steps=125), 0) == [], "nobody goes as it ends"


def test_who_is_replaced_a_second_time_is_the_newcomer() -> None:
    scenario = scenario_of(REPLACED, Task(steps=640), 0)
    gone = [happening.peers[0] for happening in scenario.happenings]
    assert gone == ["first0", "first1", "first2", "first3", "next0on0"]
    by_name = {peer.name: peer for peer in scenario.peers}
    assert by_name["next4on0"].join_s == (625.0, 625.0)
    assert by_name["next2on2"].tokens_per_s == by_name["first2"].tokens_per_s == 0.4 * 1024


def test_all_swarms_have_the_same_speed_and_warm_up_in_tokens() -> None:
    assert sum(EQUAL.speeds) == pytest.approx(sum(SPEEDS))
    steps = {s.name: scenario_of(s, Task(), 0).manifest["inner"]["warmup_steps"] for s in SWARMS}
    assert {round(steps[s.name] * s.pace) for s in SWARMS} == {92}
    assert steps["unequal"] == 40 and steps["equal"] == 23


def test_a_gap_is_that_of_the_last_third_at_equal_tokens() -> None:
    above = [(tokens, 1.02 * loss) for tokens, loss in CURVE]
    assert last_gap(above, CURVE) == pytest.approx(2.0)
    assert last_gap([(100, 9.0), (250, 2.6), (280, 2.2)], CURVE) == pytest.approx((4.0 + 0.0) / 2), "between rounds"
    assert last_gap([(100, 9.0), (1000, 0.0)], CURVE) == pytest.approx(100 * (7.0 - 2.0) / 2.0), "none there"
    with pytest.raises(BenchError, match="too few"):
        last_gap(CURVE[:1], CURVE)


def test_gaps_are_of_seeds_and_to_the_right_swarm() -> None:
    found = compare(everything(unequal=played(1.003), replaced=played(1.012)))
    assert found.row(UNEQUAL).gaps == pytest.approx((0.3, 0.3)) and found.row(UNEQUAL).against == "equal"
    assert found.row(REPLACED).gap == pytest.approx(100 * (1.012 / 1.003 - 1))
    assert found.row(REPLACED).against == "unequal" and found.row(EQUAL).gap is None
    assert found.spread_percent == pytest.approx(100 * 0.01 / 1.005)
    assert missed(found) == [] and [check.met for check in checks(found)] == [True] * 3


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({"unequal": played(1.006)}, [True, False, True]),
        ({"replaced": played(1.011)}, [True, True, False]),
        ({"unequal": played(least=0.94)}, [False, True, True]),
    ],
)
def test_goals_that_are_missed_are_said(changed: dict[str, Played], met: list[bool]) -> None:
    found = compare(everything(**changed))
    assert [check.met for check in checks(found)] == met and len(missed(found)) == met.count(False)


def test_a_step_under_way_counts_until_now() -> None:
    labour = Labour(training_s=10.0, until=103.0)
    assert labour.trained_by(101.0) == 8.0 and labour.trained_by(200.0) == 10.0


def test_nobody_waits_for_anybody() -> None:
    unequal = play(UNEQUAL, replace(SMALL, steps=80), 0)
    assert 0.95 < min(unequal.utilisation) <= max(unequal.utilisation) < 1.001
    tokens = [count for count, _ in unequal.curve]
    assert tokens == sorted(set(tokens)) and len(tokens) == unequal.rounds >= 3


def test_a_machine_stands_while_somebody_new_fetches_the_state() -> None:
    replaced = play(REPLACED, replace(SMALL, steps=160), 0)  # one goes after 125
    assert replaced.utilisation[0] < 0.99 < replaced.utilisation[3] and replaced.rounds >= 3


def test_where_rounds_wait_the_slowest_alone_computes_all_the_time() -> None:
    waiting = play(WAITING, replace(SMALL, steps=140), 0)
    assert waiting.utilisation[0] < 0.3 < 0.9 < waiting.utilisation[3]


def test_the_command_has_a_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_churn, "play", lambda swarm, task, seed, say: played(1.0 + 0.01 * seed))
    found = run_churn(seeds=2, page=tmp_path, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["rows"]] == [swarm.name for swarm in SWARMS]
    assert shown["rows"][1]["gap_percent"] == found.row(UNEQUAL).gap == 0.0
    assert (tmp_path / "churn.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "churn.md").read_text()
    assert "| unequal, replaced | 1 0.7 0.4 0.2 |" in page and "| 100.0 % " not in page and page.count("| met |") == 3
    run_churn(seeds=2)
    assert "unequal, waiting" in capsys.readouterr().out


def test_equal_peers_have_rounds_after_as_many_tokens() -> None:
    """Of a method with H = 30: unequal peers of speeds 1, 0.7, 0.4 and 0.2 have 69 steps in a round."""
    assert [swarm.inner_steps for swarm in (UNEQUAL, REPLACED, WAITING, EQUAL)] == [30, 30, 30, 18]
    assert EQUAL.inner_steps * EQUAL.pace == pytest.approx(30 * UNEQUAL.pace, rel=0.1)
