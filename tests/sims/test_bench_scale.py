"""`farflung bench scale`: the figures are those of a simulation that was run, and too slow is said to be too slow."""

import json

import pytest
from typer.testing import CliRunner

from farflung.sims.bench_scale import Row, checks, ratio
from farflung.sims.main import app


def row(peers: int, seconds: float, greetings: str = "reckoned") -> Row:
    return Row(
        peers=peers,
        greetings=greetings,
        hours=1.0,
        rounds=9,
        members=peers,
        processor_s=peers * seconds,
        coming_s=3.0 * seconds,
        settled_s=seconds,
        peak_mb=2.0 * peers,
    )


def test_peers_are_simulated_and_timed() -> None:
    done = CliRunner().invoke(app, ["bench", "scale", "--peers", "2,3", "--minutes", "22", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(one["greetings"], one["peers"], one["members"], one["hours"]) for one in told["rows"]] == [
        ("sent", 2, 2, 22 / 60),
        ("reckoned", 2, 2, 22 / 60),
        ("reckoned", 3, 3, 22 / 60),
    ]
    for one in told["rows"]:
        halves_s = one["coming_s"] + one["settled_s"]
        assert one["rounds"] >= 1 and min(one["coming_s"], one["settled_s"]) > 0.0
        assert one["peak_mb"] is None if one["greetings"] == "sent" else one["peak_mb"] > 100.0
        assert halves_s * one["peers"] * 11 / 60 == pytest.approx(one["processor_s"])
    assert len(told["goals"]) == 4 and told["goals"][0]["met"] is False
    assert told["goals"][1]["met"] is None and told["goals"][1]["untold"] == "not run"


def test_what_is_too_slow_is_missed() -> None:
    slow, _, steep, large = checks([row(8, 4.0), row(3000, 8.0)])
    assert slow.met is False and "53.3 h" in slow.measured and "320.0 times as long" in slow.measured
    assert steep.met is False and "2.00 times from 8 to 3000 peers" in steep.measured
    assert large.met is False and "6,000 MB with 3000 peers" in large.measured
    fine = checks([row(100, 0.02), row(1000, 0.024)])
    assert [one.verdict for one in fine] == ["met", "not run", "met", "met"]
    assert checks([row(8, 1.0)])[2].met is None
    many = checks([row(100, 0.05), row(10_000, 0.1)])[1]
    assert many.met is False and many.measured == "1,000 s, 1.7 times as long, by 60 virtual minutes of 10,000"
    assert checks([row(100, 0.05), row(10_000, 0.06)])[1].verdict == "met"
    sent = row(8, 2.0, greetings="sent")
    assert checks([sent, row(8, 1.0)]) == checks([row(8, 1.0)])
    assert "cost 0.50 s an hour, 4.0 times less than by messages (2.00 s)" in ratio([sent, row(8, 0.5)])


@pytest.mark.parametrize("wrong", ["", "0", "8,,16", "many"])
def test_wrong_numbers_are_refused(wrong: str) -> None:
    assert CliRunner().invoke(app, ["bench", "scale", "--peers", wrong]).exit_code == 2
