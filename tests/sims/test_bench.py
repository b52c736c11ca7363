"""The benchmarks measure real nodes, refuse figures that mean nothing, and end what they started."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from farflung.sims import bench_overhead, bench_round
from farflung.sims import wan as wans
from farflung.sims.baselines import BaselineResult
from farflung.sims.bench_overhead import measure_overhead
from farflung.sims.bench_round import MB, RoundFigures, measure_rounds, run_round
from farflung.sims.bench_workers import BenchError, workers


@pytest.fixture(autouse=True)
def ends_what_it_started() -> Iterator[None]:
    """No process of a benchmark outlives it; what earlier tests left here (torch's manager of shared memory) is theirs."""
    before = psutil.Process().children(recursive=True)
    yield
    after = psutil.Process().children(recursive=True)
    assert [child for child in after if child not in before and child.is_running()] == []


@pytest.mark.slow
def test_rounds_of_real_peers() -> None:
    said: list[str] = []
    figures = measure_rounds(MB, peers=3, rounds=2, within_s=90, progress=said.append)
    assert (figures.peers, figures.mb, figures.codec, len(figures.rounds)) == (3, 1.0, "int8(block=128)", 2)
    assert figures.seconds > 0 and figures.mb_per_s == pytest.approx(1.0 / figures.seconds)
    assert figures.scatter_s + figures.gather_s + figures.commit_s + figures.decode_s > 0 and figures.apply_s > 0
    # two thirds of the vector to the owners, one third to both others, at 8.125 bits an element; more for a larger part
    assert 4 / 3 * 0.253 < figures.sent_mb < 2.0 * 0.255
    assert 1e-5 < figures.nmse < 1e-3
    assert said[0] == "warm-up" and said[-1] == "round 3 of 3 done"


@pytest.mark.slow
def test_a_node_beside_a_loop() -> None:
    figures = measure_overhead(preset="tiny", batch=2, steps=4, pairs=2, threads=1)
    assert (figures.inner_steps, figures.tokens_per_step, len(figures.ratios)) == (4, 256, 2)
    assert figures.ratio > 0 and figures.node_tokens_per_s > 0 and figures.loop_tokens_per_s > 0


def test_a_deadline_ends_every_process() -> None:
    with pytest.raises(BenchError, match="ended early"):
        measure_rounds(MB, peers=2, rounds=1, within_s=0.2)


def test_a_peer_whose_parent_was_killed_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from farflung.sims import bench_peer; bench_peer.ORPHAN_S = 0.2;"
        "sys.argv[2:] = ['--folder', sys.argv[1], *'vector --rank 0 --peers 2 --numel 64 --rounds 9'.split()]; del sys.argv[1];"
        "bench_peer.main()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert "contact" in json.loads(process.stdout.readline())
            process.stdin.write(json.dumps({"addresses": [[], []]}).encode() + b"\n")
            process.stdin.close()
            assert process.wait(60) == 1
        finally:
            process.kill()


FAILS_INSIDE = """
import asyncio, sys
from farflung.node.peer import Peer
from farflung.sims import bench_peer

async def fail(self, **_):
    learner = self.trainer._learner
    self.applier._learn(learner.train, [0], 0).send(None)  # it stands before its turn, in a thread
    raise RuntimeError("it failed inside")

Peer.run = fail
sys.argv[1:] = ["--folder", sys.argv[1]] + "node --preset tiny --batch 1 --steps 1 --threads 1".split()
bench_peer.main()
"""


def test_a_node_that_fails_ends_although_it_has_orders_to_hear(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FAILS_INSIDE, str(tmp_path)], **pipes) as process:
        assert process.stderr is not None
        try:
            assert process.wait(60) == 1
            assert b"it failed inside" in process.stderr.read()
        finally:
            process.kill()


def test_folders_and_workers_go_when_we_are_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[subprocess.Popen[Any]] = []

    def idle(argv: list[str], **pipes: Any) -> "subprocess.Popen[Any]":
        own = argv[argv.index("--folder") + 1]
        code = "import sys, time; open(sys.argv[1] + '/kept', 'w').close(); print('{}', flush=True); time.sleep(3600)"
        started.append(subprocess.Popen([sys.executable, "-c", code, own], start_new_session=True, **pipes))
        return started[-1]

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as end, workers(60) as start:
            start(["vector"], idle).hear()
            assert list(tmp_path.rglob("kept"))
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 128 + signal.SIGTERM
    assert started[0].returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


def test_the_last_words_are_told() -> None:
    with workers(30) as start:
        worker = start(["vector", "--rank", "none"])
        with pytest.raises(BenchError, match="invalid int value: 'none'"):
            worker.hear()


def seen(**changed: Any) -> dict[str, Any]:
    """What one peer says of one round."""
    return {
        "planned": 10.0,
        "cut": 10.5,
        "held_s": 0.9,
        "committed": 11.0,
        "averaged": 11.1,
        "applied": 11.5,
        "sent_bytes": 3 * MB,
        "digest": "ab",
        "contributors": 2,
        "left_out": 0,
    } | changed


def answers(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    warm_up = seen(committed=99.0)
    return [
        {"said": [], "nmse": 1e-4, "rounds": [warm_up, first]},
        {"said": [], "nmse": 2e-4, "rounds": [warm_up, second]},
    ]


def test_the_slowest_peer_counts_and_the_warm_up_does_not() -> None:
    results = answers(
        seen(), seen(planned=10.1, cut=10.6, committed=11.2, averaged=11.4, applied=12.0, sent_bytes=4 * MB)
    )
    figures = bench_round._figures(16 * MB, "int8", results)
    assert figures.seconds == pytest.approx(1.4) and figures.mb_per_s == pytest.approx(16 / 1.4)
    assert (figures.scatter_s, figures.gather_s) == (pytest.approx(0.5), pytest.approx(0.4))
    assert (figures.commit_s, figures.decode_s) == (pytest.approx(0.3), pytest.approx(0.2))
    assert figures.apply_s == pytest.approx(0.6)
    assert figures.sent_mb == 4.0 and figures.nmse == 2e-4


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"contributors": 1}, "without somebody's contribution"),
        ({"left_out": 1}, "without somebody's contribution"),
        ({"digest": "cd"}, "different outer states"),
    ],
)
def test_rounds_that_failed_give_no_figures(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        bench_round._figures(MB, "int8", answers(seen(), seen(**changed)))


def test_what_should_not_happen_is_told() -> None:
    results = answers(seen(), seen())
    results[0]["said"] = ["round.missed: too late"]
    with pytest.raises(BenchError, match="too late"):
        bench_round._figures(MB, "int8", results)


FIGURES = RoundFigures(
    method="farflung",
    codec="int8(block=128)",
    peers=8,
    mb=16.0,
    seconds=0.5,
    mb_per_s=32.0,
    scatter_s=0.2,
    gather_s=0.2,
    commit_s=0.1,
    decode_s=0.0,
    apply_s=0.5,
    sent_mb=2.0,
    nmse=1e-4,
    rounds=(0.5,),
)


def baseline(method: str, seconds: float) -> BaselineResult:
    return BaselineResult(
        method=method,  # type: ignore[arg-type]
        codec="fp16",
        peers=8,
        num_bytes=16 * MB,
        seconds=seconds,
        setup_seconds=1.0,
        mb_per_s=16 / seconds,
        nmse=1e-7,
        rounds=(seconds,),
        note=f"note of {method}",
    )


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(bench_round, "measure_rounds", lambda *a, **k: FIGURES)
    monkeypatch.setattr(bench_round, "hivemind_average", lambda *a, **k: baseline("hivemind", 2.0))
    monkeypatch.setattr(bench_round, "gloo_average", lambda *a, **k: baseline("gloo", 0.25))
    monkeypatch.setattr(wans, "available", lambda: "no namespaces here")
    return monkeypatch


@pytest.mark.usefixtures("canned")
def test_json_has_the_ratios_and_says_what_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_round(as_json=True, sizes=[16])
    printed = json.loads(capsys.readouterr().out)
    assert [row.get("method") for row in printed] == ["farflung", "hivemind", "gloo", None]
    assert [row["codec"] for row in printed[:3]] == ["int8(block=128)", "fp16", "fp16"]
    assert printed[1]["times_slower_than_farflung"] == 4.0
    assert printed[1]["times_slower_than_farflung_applied"] == 2.0
    assert printed[3] == rows[3] == {"where": "wan", "skipped": "no namespaces here"}


@pytest.mark.usefixtures("canned")
def test_the_table_is_for_people(canned: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    canned.setenv("COLUMNS", "160")
    run_round(sizes=[16])
    shown = capsys.readouterr().out
    assert "loopback, 16 MB, hivemind: 2.000 s, farflung is 4.00 times as fast" in shown
    assert "note of hivemind" in shown and "WAN skipped: no namespaces here" in shown


def test_wan_is_measured_against_its_link() -> None:
    row = bench_round._wan_row(FIGURES, "tunnel")
    assert row["link_s"] == pytest.approx(0.8) and row["times_the_link"] == pytest.approx(0.625)
    assert "0.62 times what the link needs" in bench_round._sentence(row)


@pytest.mark.usefixtures("canned")
def test_goals_that_are_missed_are_named(canned: pytest.MonkeyPatch) -> None:
    assert bench_round.missed(run_round(sizes=[16])) == []
    canned.setattr(bench_round, "hivemind_average", lambda *a, **k: baseline("hivemind", 1.4))
    slow = replace(FIGURES, seconds=1.3)
    rows = [*run_round(sizes=[16]), bench_round._wan_row(FIGURES, "tunnel"), bench_round._wan_row(slow, "tunnel")]
    assert bench_round.missed(rows) == [
        "loopback, 16 MB, hivemind: 1.400 s, farflung is 2.80 times as fast; at least 3.0 is wanted",
        "wan, 16 MB, farflung: 1.300 s, 1.62 times what the link needs; at most 1.5 is wanted",
    ]
    assert bench_overhead.missed({"ratio": 0.97}) == []
    assert bench_overhead.missed({"ratio": 0.96}) == ["a node at 0.960 of a loop; at least 0.97 is wanted"]


def test_short_rounds_are_measured_more_often() -> None:
    assert [bench_round.rounds_of(size) for size in (1, 16, 64, 256, 1024)] == [25, 25, 6, 3, 3]


def test_overhead_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench_overhead.OverheadFigures(
        preset="1m",
        parameters=1_000_000,
        threads=2,
        inner_steps=100,
        tokens_per_step=2048,
        step_s=0.1,
        node_tokens_per_s=19_700.0,
        loop_tokens_per_s=20_000.0,
        ratio=0.985,
        ratios=(0.98, 0.985, 0.99),
        warm_up_ratio=0.9,
    )
    monkeypatch.setattr(bench_overhead, "measure_overhead", lambda **k: figures)
    bench_overhead.run_overhead(as_json=True)
    assert json.loads(capsys.readouterr().out)["ratio"] == 0.985
    bench_overhead.run_overhead()
    shown = capsys.readouterr().out
    assert "19,700" in shown and "20,000" in shown and "0.985" in shown
