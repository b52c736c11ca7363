"""The benchmark of crowds in small: newcomers that give each other what they have are through sooner, and no sooner than one copy takes."""

import json

import pytest

from farflung.sims import bench_crowd
from farflung.sims.bench_crowd import Task, run_crowd


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_crowd_is_through_sooner_when_it_shares(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_crowd, "PRESET", "3m")
    alone, shared = run_crowd(seeds=1, as_json=True, task=Task(newcomers=5, up_mbit=2.0, down_mbit=25.0))
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == ["members only", "newcomers too"]
    assert alone.copy_s == shared.copy_s < shared.half_s <= shared.all_s < 0.5 * alone.all_s
    assert told["ratio"] == alone.all_s / shared.all_s
    assert alone.sources < shared.sources
