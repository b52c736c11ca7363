"""Utilisation is what the meters say, and the benchmark runs where links can be emulated."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from tests.thorough import mostly

from farflung.sims import bench_overlap
from farflung.sims import wan as wans
from farflung.sims.bench_overlap import (
    Method,
    OverlapFigures,
    Task,
    measure_overlap,
    methods_of,
    missed,
    run_overlap,
    seen,
)
from farflung.sims.bench_workers import BenchError
from farflung.sims.overlap_peer import interface_bytes
from farflung.training.methods import DEFAULT

TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
  eth0:9884253332 185944 0 0 0 0 0 0 8905462 121798 0 0 0 0 0 0
"""


def test_the_kernels_counts_are_read() -> None:
    assert interface_bytes(TABLE, "eth0") == (8905462, 9884253332)
    assert interface_bytes(TABLE, "lo") == (7, 7)
    with pytest.raises(ValueError, match="no network interface eth1"):
        interface_bytes(TABLE, "eth1")


def result(**changed: Any) -> dict[str, Any]:
    """A peer that trains four steps of one second before the first exchange, and three of two later."""
    steps = [[float(t), t + 1.0, 1.0] for t in range(4)]
    steps += [[9.0, 11.0, 2.0], [11.0, 13.0, 2.0], [19.0, 21.0, 2.0]]
    return {
        "steps": steps,
        "marks": [[10.0, 100, 1000], [15.0, 150, 1500], [20.0, 400, 3000]],
        "calm": 4,
        "digests": ["aa", "bb"],
        "round_s": [9.0, 1.0, 3.0],
        "said": [],
    } | changed


def test_steps_count_by_what_is_inside_of_the_marks() -> None:
    told = seen(result())
    assert told.wall_s == 10.0
    assert told.busy_s == pytest.approx(1.0 + 2.0 + 1.0) and told.steps == pytest.approx(0.5 + 1.0 + 0.5)
    assert told.num_bytes == 300 + 2000
    assert (told.step_s, told.step_s_calm, told.longest_step_s) == (2.0, 1.0, 2.0)


def test_waiting_inside_of_a_step_is_not_compute() -> None:
    """Data-parallel: the step goes from begin to end, the all-reduce in it does not count."""
    told = seen(result(steps=[[0.0, 1.0, 1.0]] * 3 + [[10.0, 20.0, 2.5]], calm=3))
    assert told.busy_s == 2.5 and told.steps == 1.0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"marks": [[10.0, 100, 1000]]}, "no exchange after the warm-up"),
        ({"calm": 2}, "did not train before"),
        ({"marks": [[30.0, 100, 1000], [40.0, 100, 1000]]}, "or not after it"),
    ],
)
def test_meters_that_mean_nothing_give_no_figures(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        seen(result(**changed))


METHODS = {method.name: method for method in methods_of(6)}

OURS = Method(name="farflung", codec="int8(block=128)", inner_steps=8)


def test_figures_are_medians_over_the_peers() -> None:
    idle = result(steps=[*result()["steps"][:4], [10.0, 11.0, 1.0]])
    figures = bench_overlap._figures(OURS, 50.0, Task(), 3_000_000, [result(), result(), idle], (0.1, 0.002))
    assert figures.utilisation == pytest.approx(0.4) and figures.utilisation_at_calm_speed == pytest.approx(0.2)
    assert figures.hidden_at_most == pytest.approx(4 / 6)
    assert figures.wall_s_per_step == pytest.approx(5.0) and figures.bytes_per_step == pytest.approx(1150.0)
    assert (figures.round_s, figures.inner_steps, figures.delay_steps) == (2.0, 8, 7)
    assert (figures.router_cpu, figures.router_late_s) == (0.1, 0.002)


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"said": ["round.missed: too late"]}, "too late"), ({"digests": ["aa", "cc"]}, "different states")],
)
def test_peers_that_did_not_train_together_give_no_figures(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        bench_overlap._figures(OURS, 50.0, Task(), 3_000_000, [result(), result(**changed)], None)


def test_ours_are_like_the_baseline_and_as_they_ship() -> None:
    ours, default, blocking, parallel = methods_of(8)
    assert (ours.codec, ours.inner_steps, ours.delay_steps) == (blocking.codec, blocking.inner_steps, 7)
    assert (default.codec, default.mean_codec, default.kept) == (DEFAULT.codec, DEFAULT.mean_codec, True)
    assert (default.inner_steps, default.fragments, default.lap, default.delay_steps) == (30, 3, 10, 9), "as it is"
    assert blocking.delay_steps == parallel.delay_steps == 0 and parallel.codec == ""


def canned(method: Method, mbit_s: float, task: Task, **_: Any) -> OverlapFigures:
    results = [result(), result()]
    if not method.codec:
        results = [result(marks=[[10.0, 0, 0], [20.0, 50_000, 65_000]], round_s=[])] * 2
    return bench_overlap._figures(method, mbit_s, task, 3_000_000, results, None)


def test_json_has_a_row_for_each_link_and_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_overlap, "measure_overlap", canned)
    monkeypatch.setattr(wans, "available", lambda: None)
    rows = run_overlap(as_json=True, links=[20.0, 50.0])
    assert json.loads(capsys.readouterr().out) == rows
    names = ["farflung", "farflung, default", "blocking DiLoCo", "data-parallel"]
    assert [(row["mbit_s"], row["method"]) for row in rows] == [(rate, name) for rate in (20.0, 50.0) for name in names]
    assert [row["times_fewer_bytes"] for row in rows[:4]] == [50.0, 50.0, 50.0, 1.0]
    monkeypatch.setenv("COLUMNS", "80")
    run_overlap(links=[50.0])
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in names), "whole, where a terminal is as narrow as they come"
    assert " 40.0 " in shown and " 50.0 " in shown and "3.0 M parameters" in shown


def test_a_miss_is_said_of_our_rows_where_links_are_fast_enough() -> None:
    rows = [canned(method, rate, Task()) for rate in (20.0, 50.0) for method in methods_of(8)]
    said = missed([asdict(row) for row in rows])
    assert [text.split(":")[0] for text in said] == ["50 Mbit/s, farflung", "50 Mbit/s, farflung, default"]
    assert "computing 40.0 %" in said[0]
    assert missed([asdict(row) | {"utilisation": 0.97} for row in rows]) == []
    assert missed([{"skipped": "no namespaces here"}]) == []


def test_it_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(wans, "available", lambda: "no namespaces here")
    assert run_overlap() == [{"skipped": "no namespaces here"}]
    assert "skipped: no namespaces here" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly(["farflung, default"], METHODS))
def test_real_peers_behind_emulated_links(name: str) -> None:
    if (refused := wans.available()) is not None:
        pytest.skip(refused)
    method = METHODS[name]
    task = Task(preset="tiny", batch=1, rounds=2, peers=2)
    said: list[str] = []
    figures = measure_overlap(method, 20.0, task, within_s=90, progress=said.append)
    assert 0 < figures.utilisation < 1 and figures.step_s > 0 and figures.wall_s_per_step > figures.step_s
    assert (figures.round_s is None) == (method.codec == "")
    # half of the vector to the other and half of the means back, of 1 byte (of `default`'s fragment 1.5 bits, which as the mean go back as they came) or, in each step, of 4 bytes an
    # element; twice that, for what is received; headers, acknowledgements, and what is said besides
    sent = {"fp32": 4.0, METHODS["farflung"].codec: 1.0}.get(figures.codec, 1.2 / 8 / method.fragments)
    assert (
        2 * figures.parameters * sent / (method.lap + method.delay_steps if method.codec else 1)
        < figures.bytes_per_step
    )
    assert figures.bytes_per_step < 1.3 * 2 * figures.parameters * (1.0 if method.codec else 4.0)
    assert said[0] == "starting" and said[-1] == "exchange 3 of 3 done"
