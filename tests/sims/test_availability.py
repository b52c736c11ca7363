"""The shipped trace is what its module draws, and that is what was published."""

from statistics import mean, median

import pytest

from farflung.sims.availability import as_csv, draw_sessions
from farflung.sims.churn import make_schedule
from farflung.sims.faults import Start
from farflung.sims.scenario import SHIPPED, load_scenario


def test_the_shipped_trace_can_be_drawn_again() -> None:
    assert (SHIPPED / "trace.csv").read_text(encoding="utf-8") == as_csv(10, 5400.0)


def test_sessions_have_the_published_lengths_and_do_not_overlap() -> None:
    sessions = list(draw_sessions(400, 400 * 3600.0))
    lengths = [end - start for start, end, _ in sessions]
    assert mean(lengths) / 60.0 == pytest.approx(64.5, rel=0.05)
    assert median(lengths) / 60.0 == pytest.approx(22.6, rel=0.05)
    ends: dict[str, float] = {}
    for start, end, host in sessions:
        assert ends.get(host, 0.0) <= start < end
        ends[host] = end


def test_the_scenario_plays_the_trace() -> None:
    scenario = load_scenario(SHIPPED / "trace.toml")
    schedule = make_schedule(scenario, 0, SHIPPED)
    starts = sorted((round(fault.at), fault.peer) for fault in schedule.faults if isinstance(fault, Start))
    drawn = [(start, int(host[1:])) for start, _, host in draw_sessions(10, scenario.duration_s)]
    assert starts == sorted((round(start), peer) for start, peer in drawn)
