"""`farflung bench scale`: the figures are those of a simulation that was run, and too slow is said to be too slow."""

import json

import pytest
from typer.testing import CliRunner

from farflung.sims.bench_scale import Row, checks
from farflung.sims.main import app


def row(peers: int, seconds: float) -> Row:
    return Row(peers=peers, hours=1.0, rounds=9, members=peers, processor_s=peers * seconds, per_peer_hour_s=seconds)


def test_peers_are_simulated_and_timed() -> None:
    done = CliRunner().invoke(app, ["bench", "scale", "--peers", "2,3", "--minutes", "4", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(one["peers"], one["members"], one["hours"]) for one in told["rows"]] == [(2, 2, 4 / 60), (3, 3, 4 / 60)]
    for one in told["rows"]:
        assert one["rounds"] >= 1 and one["per_peer_hour_s"] == pytest.approx(one["processor_s"] / one["peers"] * 15)
    assert len(told["goals"]) == 2 and told["goals"][0]["met"] is False


def test_what_is_too_slow_is_missed() -> None:
    slow, steep = checks([row(8, 4.0), row(64, 8.0)])
    assert slow.met is False and "53 h" in slow.measured and "320 times too long" in slow.measured
    assert steep.met is False and "2.00 times from 8 to 64 peers" in steep.measured
    quick, flat = checks([row(100, 0.02), row(1000, 0.024)])
    assert quick.met and flat.met
    assert checks([row(8, 1.0)])[1].met is None


@pytest.mark.parametrize("wrong", ["", "0", "8,,16", "many"])
def test_wrong_numbers_are_refused(wrong: str) -> None:
    assert CliRunner().invoke(app, ["bench", "scale", "--peers", wrong]).exit_code == 2
