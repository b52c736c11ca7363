"""Costs come from measurements as a line through two sizes, are written, read again, and change what a simulation takes."""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from farflung.protocol.errors import ConfigError
from farflung.sims import bench_calibrate, calibrate_ways
from farflung.sims.bench_calibrate import Run, costs_of, fast_peers, read_calls
from farflung.sims.bench_workers import BenchError
from farflung.sims.calibrate_loops import Rounds, _Clock, count_ways
from farflung.sims.churn import make_schedule
from farflung.sims.costs import Costs, load_costs, write_costs
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate


def run(preset: str, numel: int, **calls: list[float]) -> Run:
    return Run(preset=preset, num_parameters=numel, step_s=0.1, start_s=5.0, calls=calls)


def test_a_call_is_a_line_through_two_sizes() -> None:
    small = run("small", 1_000_000, decode=[0.003, 0.9, 0.003], save_vote=[0.01], clone=[0.5])
    large = run("large", 11_000_000, decode=[0.023], save_vote=[0.008], state=[0.001])
    costs = costs_of([small, large], {"message_s": 0.001, "write_s": 0.0002, "door_s": 0.0, "loop_times": 1.5})
    assert costs.calls["decode"] == (0.001, 0.002) and costs.seconds("decode", 5_000_000) == pytest.approx(0.011)
    assert costs.calls["save_vote"] == (0.01, 0.0), "no call is cheaper with a larger model"
    assert costs.calls["clone"] == (0.0, 0.5) and costs.calls["state"] == (0.001, 0.0), "one size: a pass, and no pass"
    assert (costs.start_s, costs.message_s, costs.hand_s) == (5.0, 0.0015, 0.0055)
    assert costs.pass_parameters_per_s == round(1e6 / 0.251) and costs.write_s == 0.0003
    assert costs.trained_per_s == 128 * 6e6 / 0.1, "half-way between the two"
    assert costs.step_s(3_000_000, 256) == pytest.approx(0.1) and Costs().step_s(3_000_000, 256) == 0.0


def test_every_call_goes_through_a_door() -> None:
    costs = Costs(door_s=0.5, calls={"save_vote": (0.25, 0.0)})
    assert (costs.seconds("save_vote", 7), costs.seconds("settle", 7)) == (0.75, 0.501)


@pytest.mark.slow
def test_ways_between_real_engines_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_ways, "PINGS", 5)
    told = calibrate_ways.measure_ways()
    assert all(told[what] > 0.0 for what in ("message_s", "write_s", "door_s", "seal_s", "open_s"))
    assert told["heartbeat_bytes"] > 150


def test_messages_pieces_and_calls_of_a_round_are_counted() -> None:
    """Of three nodes: each sends the others its contribution and its mean, in a header and a payload at least, and asks its doors for more than ten things."""
    counts, message_bytes = count_ways(
        fast_peers("tiny", tokens_per_s=256.0, count=3, seconds=40.0, delay_steps="auto")
    )
    assert message_bytes > 150
    assert counts["write"] >= 2 * 2 * 2 * 2 and counts["door"] >= 3 * 10, "in some rounds one was late"
    assert counts["message"] >= 3 * 2 * (1 + 3), "a greeting, and three words at least of a round, whoever proposes"
    assert counts["message"] < 200 and counts["write"] < 200


def test_only_rounds_of_all_begin_and_end_what_is_counted() -> None:
    rounds = Rounds(2)
    told = ((1, 1, 5.0), (2, 2, 10.0), (2, 2, 11.0), (3, 2, 12.0), (5, 1, 14.0), (6, 2, 20.0), (7, 2, 25.0))
    for height, members, done in told:
        rounds.see({"event": "round.commit", "round": height, "view": list(range(members))}, (done, 0.0))
        rounds.see({"event": "step"}, (1000.0, 0.0))
    with pytest.raises(BenchError, match="2 nodes made 4 rounds together, and 5 are needed"):
        rounds.each()
    for height, members, done in ((8, 2, 35.0), (9, 1, 99.0)):
        rounds.see({"event": "round.commit", "round": height, "view": list(range(members))}, (done, 0.0))
    assert rounds.each() == [5.0, 0.0], "five rounds, from the second height to the eighth, as told first"


SPINS = """
import sys, threading, time

def spin():
    until = time.thread_time() + 0.4
    while time.thread_time() < until:
        pass

other = threading.Thread(target=spin)
other.start()
other.join()
spin()
print("done", flush=True)
sys.stdin.read()
"""


def test_the_clock_of_a_node_is_that_of_its_first_thread() -> None:
    """Which computes for 0.4 s beside its start, and another thread as long."""
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", SPINS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        assert 0.38 < _Clock(process.pid).seconds() < 0.7
        process.stdin.close()


def test_what_is_not_measured_has_a_default() -> None:
    costs = Costs()
    assert costs.seconds("settle", 10**9) == 0.001 and costs.seconds("decode", 4 * 10**8) == pytest.approx(1.001)


amounts = st.floats(0.0, 100.0)


@given(amounts, amounts, st.dictionaries(st.sampled_from(["decode", "apply", "_encode"]), st.tuples(amounts, amounts)))
def test_costs_survive_their_file(start_s: float, some_s: float, calls: dict[str, tuple[float, float]]) -> None:
    costs = Costs(
        start_s=start_s, message_s=some_s, write_s=some_s / 2, door_s=some_s / 3, trained_per_s=some_s, calls=calls
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.toml"
        file.write_text(write_costs(costs))
        assert load_costs(file) == costs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "costs.toml holds no costs"),
        ("[cost]\nstart_s = 1.0", "bench calibrate --out FILE"),
        ("[costs]\nstart = 1.0", "unknown field `start`"),
        ("[costs]\nstart_s = -1.0", "start_s = -1.0: must be between"),
        ("[costs.calls]\ndecode = [-1.0, 0.0]", "calls.decode[0] = -1.0"),
    ],
)
def test_files_without_costs_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "costs.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_costs(file)
    assert said in str(refused.value)


def test_what_metered_nodes_wrote_is_read_without_their_start(tmp_path: Path) -> None:
    for number, lines in enumerate(
        ('["decode",0.5]\n["train",9.0]\n', '["prepare",9.0]\n["decode",0.25]\n["renamed",3.0]\n')
    ):
        (tmp_path / f"{number}.jsonl").write_text(lines)
    assert read_calls(tmp_path.glob("*.jsonl")) == {"decode": [0.5, 0.25], "renamed": [3.0]}


def test_calls_that_the_costs_do_not_know_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were left out in silence: whoever renamed a call lost its cost."""
    runs = iter([run("small", 1_000_000, decode=[0.1], renamed=[2.0, 4.0]), run("large", 11_000_000, renamed=[6.0])])
    ways = {"message_s": 0.001, "write_s": 0.0002, "door_s": 0.0}
    monkeypatch.setattr(bench_calibrate, "measure_ways", lambda: ways)
    monkeypatch.setattr(bench_calibrate, "measure_nodes", lambda preset: next(runs))
    monkeypatch.setattr(bench_calibrate, "loops_told", lambda *_: {"loop_times": 1.0})
    console = Console(file=io.StringIO(), width=40)
    costs, told = bench_calibrate.calibrate(console)
    assert set(costs.calls) == {"decode"} and told["unpriced"] == {"renamed": "3 calls, 4.000000 s each"}
    assert isinstance(console.file, io.StringIO)
    assert "NOT IN THE COSTS: renamed: 3 calls, 4.000000 s each" in console.file.getvalue()


def test_a_slow_start_and_slow_messages_are_late_in_a_simulation() -> None:
    scenario = msgspec.structs.replace(fast_peers("tiny", tokens_per_s=256.0, seconds=40.0), mode="cost")
    seen = []
    for costs in (Costs(), Costs(start_s=10.0), Costs(message_s=1.0)):
        priced = msgspec.structs.replace(scenario, costs=costs)
        report = simulate(prepare(priced, 0, make_schedule(priced, 0, Path())).plan)
        assert not report.violations
        seen.append(report)
    cheap, late, slow = seen
    assert cheap.labour[0].running_s == pytest.approx(40.0, abs=0.01) and late.labour[0].running_s == pytest.approx(
        30.0, abs=0.01
    )
    assert min(slow.round_seconds[2:]) > max(cheap.round_seconds[2:]) + 1.0
    assert cheap.rounds > late.rounds > 0 and cheap.rounds > slow.rounds > 0
