"""The benchmark of groups in small: what it says of swarms that it divides, and that meetings keep groups together."""

import json
from typing import Any

import pytest

from farflung.sims import bench_groups
from farflung.sims.bench_groups import DIVISIONS, ONE, Task, gap_percent, run_groups

SMALL = Task(peers=4, steps=48, batch_tokens=64, seq_len=32)


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_groups, "WINDOWS", 8)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_groups_that_meet_stay_together(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_groups(as_json=True, task=SMALL)
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["division"]["name"] for row in told] == [division.name for division in DIVISIONS]
    whole, *divided = rows
    always, seldom, never = (next(one for one in divided if one.division.meet_every == every) for every in (1, 4, 0))
    assert (whole.groups, whole.met, whole.apart_percent) == ((4,), 0, 0.0)
    assert whole.loss == pytest.approx(whole.loss_of_mean) and gap_percent(whole, rows) == 0.0
    assert whole.division == ONE and all(row.groups == (2, 2) for row in divided)
    assert never.met == 0 < seldom.met < always.met
    assert 0.0 < always.apart_percent < never.apart_percent
    assert all(row.rounds > 1 and row.tokens > 0 and row.bytes_per_peer > 0 for row in rows)
    assert [row["gap_percent"] for row in told] == [gap_percent(row, rows) for row in rows]
