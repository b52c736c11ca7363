"""`farflung sim`: the same seed makes the same log, failures are made small and played again, and expectations decide."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.node.events import EventLog
from farflung.protocol import planning, proposer
from farflung.protocol.participation import Participation
from farflung.sims import sim_run
from farflung.sims.chaos import run_brisk, toy_plan
from farflung.sims.churn import make_schedule
from farflung.sims.failure import chapters, kind_of, load_failure, replay, shorten, write_failure
from farflung.sims.faults import Drop, Heal, Kill, Partition, Pause, Schedule, Start
from farflung.sims.main import app
from farflung.sims.scenario import parse_scenario
from farflung.sims.scenario_run import plan_scenario, simulate_any
from farflung.sims.sim_result import newest_loss
from farflung.sims.simulation import Report, simulate
from farflung.sims.trail import log_line

REAL = """
about = "three peers train"
mode = "real"
duration_s = 60.0
seed = 5
[manifest.model]
preset = "tiny"
seq_len = 32
[manifest.data]
spec = "text:{text}"
[manifest.swarm]
batch_tokens = 64
inner_steps = 4
total_steps = 100
min_round_s = 1.0
max_round_s = 20.0
[manifest.inner]
warmup_steps = 5
[[peers]]
name = "home"
count = 3
tokens_per_s = 64.0
join_s = [0.0, 4.0]
[[happenings]]
at = 30.0
what = "kill"
peers = ["home/1"]
for_s = 9.0
[expect]
min_rounds = 3
max_loss = 9.0
"""


@pytest.fixture
def real(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i * i}\n" for i in range(3000)))
    file = tmp_path / "real.toml"
    file.write_text(REAL.replace("{text}", str(text)))
    return file


def sim(*words: object) -> tuple[int, str]:
    """Exit code, and what is written to stdout."""
    code, said, _ = sim_told(*words)
    return code, said


def sim_told(*words: object) -> tuple[int, str, list[str]]:
    """And the lines on stderr."""
    result = CliRunner().invoke(app, ["sim", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr.splitlines()


def test_a_step_that_is_never_finished_is_no_training_and_no_contribution_is_no_share(real: Path) -> None:
    """Steps of three minutes in a run of one: whoever is a member trains the whole time, and one is killed and begins anew."""
    real.write_text(
        real.read_text()
        .replace("tokens_per_s = 64.0", "tokens_per_s = 0.35")
        .replace("min_rounds = 3", "max_missed_share = 0.0\nmin_training_share = 1.0")
    )
    code, said = sim("run", real, "--json")
    result = json.loads(said)
    assert code == 1 and result["contributed"] == result["missed"] == 0
    assert 0.3 < result["training_share"] < 1.0 and result["missed_share"] is None
    assert {one["what"]: one["met"] for one in result["expected"]} == {
        "training_share >= 1": False,
        "missed_share <= 0": False,
        "loss <= 9": False,
    }


@pytest.mark.thorough
def test_what_only_the_logs_show_is_a_violation_too(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit looks at what nodes wrote, whether it is kept or not: here at tokens that a round counts and nobody trained on."""
    emit = EventLog.emit

    def boasts(self: EventLog, event: str, **fields: Any) -> None:
        if event == "round.commit":
            fields["contributors"] = {
                peer: tokens * (2 if peer == min(fields["contributors"]) else 1)
                for peer, tokens in fields["contributors"].items()
            }
        emit(self, event, **fields)

    monkeypatch.setattr(EventLog, "emit", boasts)
    code, said = sim("run", real, "--json", "--out", tmp_path / "out")
    result = json.loads(said)
    assert code == 1 and not result["passed"] and any(v.startswith("invariant 4") for v in result["violations"])
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    figures = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [f"invariant {one['which']}" for one in figures["invariants_broken"]] == [
        said.partition(",")[0] for said in result["violations"]
    ]
    monkeypatch.chdir(tmp_path)
    code, said = sim("run", real, "--json")
    unkept = json.loads(said)
    others = {"wall_s": 0, "folder": ""}
    assert code == 1 and unkept | others == result | others
    for folder in (result["folder"], unkept["folder"]):  # the whole run, for logs are judged when it is over
        assert load_failure(Path(folder)).violations == result["violations"]
    code, said = sim("replay", result["folder"])
    assert code == 0 and result["violations"][0] in said and "the same log" in said


def test_a_crash_is_told_with_and_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node says of itself that it has crashed: the log tells it, and its violation."""
    emit = EventLog.emit
    left = [20]

    def fails(self: EventLog, event: str, **fields: Any) -> None:
        left[0] -= event == "step"
        if not left[0]:
            raise ValueError("no such step")
        emit(self, event, **fields)

    monkeypatch.setattr(EventLog, "emit", fails)
    monkeypatch.setattr(sim_run, "SHORTEN_RUNS", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(FAILS)
    for words in ((), ("--out", tmp_path / "out")):
        left[0] = 20
        code, said = sim("run", tmp_path / "small.toml", "--json", *words)
        assert code == 1 and "crashed: ValueError: no such step" in json.loads(said)["violations"][0]
    assert " crash " in (tmp_path / "out" / "events.log").read_text()
    assert "no such step" in (tmp_path / "out" / "report.html").read_text()


def test_the_result_is_there_even_if_no_report_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("farflung.sims.sim_run.report_folder", full)
    (tmp_path / "small.toml").write_text(FAILS)
    code, _ = sim("run", tmp_path / "small.toml", "--out", tmp_path / "out")
    assert code != 0 and json.loads((tmp_path / "out" / "result.json").read_text())["passed"]


def elsewhere(code: str, *arguments: str) -> str:
    """What it prints in a process whose strings and bytes have other hashes than here."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0" if sys.flags.hash_randomization else "4242", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout


def test_a_real_scenario_runs_and_repeats_itself_to_the_byte(real: Path, tmp_path: Path) -> None:
    """Also in another process, where nobody is told how far it is."""
    code, said, told = sim_told("run", real, "--json", "--out", tmp_path / "one")
    result = json.loads(said)
    assert code == 0 and result["passed"] and result["violations"] == []
    assert result["rounds"] >= 3 and 0.0 < result["loss"] < 9.0 and result["faults"] == 5
    log = (tmp_path / "one" / "events.log").read_bytes()
    events = [json.loads(line) for line in (tmp_path / "one" / "events.jsonl").read_text().splitlines()]
    assert len(events) + 5 == len(log.splitlines()), "faults are no node's events"
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    done = [int(line.split()[1]) for line in told if line.startswith("real: ")]
    assert done[0] == 0 and 9 <= len(done) <= 11 and done == sorted(done), "a line for each tenth"
    assert elsewhere(AGAIN, str(real)).strip() == result["log_sha256"] == sha256(log).hexdigest()


AGAIN = """
import sys
from pathlib import Path
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import load_scenario
from farflung.sims.scenario_run import plan_scenario, simulate_any

file = Path(sys.argv[1])
scenario = load_scenario(file)
print(simulate_any(plan_scenario(scenario, 5, make_schedule(scenario, 5, file.parent))).log_sha256)
"""


@pytest.mark.thorough
def test_another_seed_is_another_run(real: Path) -> None:
    first, second = (json.loads(sim("run", real, "--json", "--seed", seed)[1]) for seed in (1, 2))
    assert first["log_sha256"] != second["log_sha256"]


@pytest.mark.thorough
def test_the_method_may_be_another_one(real: Path) -> None:
    def sent(*words: str) -> int:
        return int(json.loads(sim("run", real, "--json", *words)[1])["sent_bytes"])

    assert sent() == sent("--method", "default") < 0.6 * sent("--method", "none"), "two bits a parameter, or eight"
    code, _, said = sim_told("run", real, "--method", "mine")
    assert code and said == ["error: no method is called 'mine'; there are default, thrifty, none"]


def test_what_was_expected_decides(real: Path) -> None:
    real.write_text(real.read_text().replace("min_rounds = 3", "min_rounds = 3000"))
    code, said = sim("run", real)
    assert code == 1 and "NOT MET" in said and "rounds >= 3000" in said


def test_the_log_of_toys_does_not_depend_on_the_hash_seed() -> None:
    code = "from farflung.sims.chaos import run_brisk; print(run_brisk(4, keep=False).log_sha256)"
    assert elsewhere(code).strip() == run_brisk(4, keep=False).log_sha256 != ""


def lose_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with fewer contributors than members are averaged wrongly."""
    reduce = Participation._reduce

    def wrong(self, part, contributors, *, early):  # type: ignore[no-untyped-def]
        asked = reduce(self, part, contributors, early=early)
        halves = tuple((p, w / 2) for p, w in asked.weights)
        return dataclasses.replace(asked, weights=halves) if len(halves) < 4 else asked

    monkeypatch.setattr(Participation, "_reduce", wrong)


def quiet_until_100() -> Schedule:
    starts = [Start(at=0.0, peer=peer) for peer in range(4)]
    faults = [
        Drop(at=20.0, until=30.0, probability=0.1),
        Partition(at=40.0, groups=((0, 1, 2, 3),)),
        Heal(at=45.0),
        Kill(at=60.0, peer=2),
        Pause(at=110.0, peer=1),
        Start(at=120.0, peer=2),
    ]
    return Schedule(num_peers=4, duration_s=150.0, faults=(*starts, *faults))


def test_a_failure_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_a_reason(monkeypatch)
    plan = toy_plan(2, quiet_until_100(), calm_s=0.0)
    report = simulate(plan)
    assert report.violations and report.violations[0].startswith("invariant 4")
    shortest, found = shorten(plan, report, max_runs=30)
    left = [type(fault).__name__ for fault in shortest.schedule.faults]
    assert len(left) < len(plan.schedule.faults) and found.violations[0].startswith("invariant 4")


LONG = """
about = "one of four peers is killed and comes back"
mode = "cost"
duration_s = 400.0
calm_s = 160.0
[manifest.model]
preset = "tiny"
[manifest.swarm]
inner_steps = 4
min_round_s = 2.0
[[peers]]
name = "home"
count = 4
tokens_per_s = 2000.0
join_s = [0.0, 20.0]
[[happenings]]
at = 60.0
what = "kill"
peers = ["home/2"]
for_s = 20.0
"""


@pytest.mark.thorough
def test_a_small_failure_has_the_founder_of_the_long_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing is decided any more, a swarm that was never founded looks the same; but who founds it is written in its manifest, which replays make anew."""

    def stuck(situation: planning.Situation) -> planning.StartRound | planning.ChangeView | planning.Wait:
        return planning.Wait("stuck") if len(situation.view) > 2 else decide(situation)

    decide = planning.decide
    monkeypatch.setattr(proposer, "decide", stuck)
    scenario = parse_scenario(LONG, name="long")
    schedule = make_schedule(scenario, 3, tmp_path)
    assert schedule.founder == 2
    plan = plan_scenario(scenario, 3, schedule)
    report = simulate_any(plan, keep=True)
    shortest, found = shorten(plan, report, max_runs=12)
    assert found.rounds and Start(at=schedule.faults[0].at, peer=2) in shortest.schedule.faults
    write_failure(tmp_path, scenario, shortest, found)
    failure, again = replay(tmp_path)
    assert failure.founder == 2 and again.log_sha256 == found.log_sha256


FAILS = """
about = "three of four peers train"
mode = "cost"
duration_s = 60.0
[manifest.model]
preset = "tiny"
seq_len = 16
[manifest.swarm]
batch_tokens = 64
inner_steps = 4
min_round_s = 1.0
max_round_s = 20.0
[[peers]]
name = "home"
count = 4
tokens_per_s = 64.0
[[happenings]]
at = 15.0
what = "kill"
peers = ["home/3"]
[[happenings]]
at = 50.0
what = "kill"
peers = ["home/2"]
"""


def test_a_violation_is_written_down_and_played_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lose_a_reason(monkeypatch)
    (tmp_path / "fails.toml").write_text(FAILS)
    code, said, told = sim_told("run", tmp_path / "fails.toml", "--out", tmp_path, "--json")
    result = json.loads(said)
    small = [line for line in told if line.startswith("fails is made small: ")]
    assert f"0 of {sim_run.SHORTEN_RUNS} runs" in small[0] and small[0].endswith(result["violations"][0])
    assert 3 <= len(small) <= sim_run.SHORTEN_RUNS + 2 and re.search("; [1-5] faults: ", small[1]), "each of the runs"
    assert code == 1 and result["violations"][0].startswith("invariant 4")
    failure = load_failure(Path(result["folder"]))
    assert failure.violations[0].startswith("invariant 4") and len(failure.faults) < 6
    again = replay(Path(result["folder"]))[1]
    assert again.violations == failure.violations and again.log_sha256 == failure.log_sha256
    code, said = sim("replay", result["folder"])
    assert code == 0 and "the same log" in said


def test_a_replay_that_goes_otherwise_says_so(tmp_path: Path) -> None:
    scenario = parse_scenario(FAILS, name="fails")
    plan = plan_scenario(scenario, 0, make_schedule(scenario, 0, tmp_path))
    schedule = Schedule(num_peers=4, duration_s=10.0, faults=(Start(at=0.0, peer=0),))
    plan = dataclasses.replace(plan, schedule=schedule, stop_when_broken=True)
    report = simulate_any(plan, keep=True)
    report.log_sha256 = "00"
    write_failure(tmp_path, scenario, plan, report)
    code, said = sim("replay", tmp_path)
    assert code == 1 and "ANOTHER LOG" in said


def test_violations_are_of_one_kind_whatever_their_numbers_and_stages() -> None:
    one = "stage 1, life 2, invariant 4: the mean of round 6 is 14.2% off that of its contributors"
    assert kind_of(one) == kind_of("invariant 4: the mean of round 12 is 3% off that of its contributors")
    left = "invariant 0: peer 3 is left behind: height 7 of 9, joining"
    assert kind_of(left) == "invariant 0: peer # is left behind" != kind_of("invariant 0: no round in the calm stretch")
    crashes = [
        f"invariant 8: peer {n} crashed: {error}: 7"
        for n, error in ((1, "KeyError"), (2, "KeyError"), (1, "ValueError"))
    ]
    assert kind_of(crashes[0]) == kind_of(crashes[1]) != kind_of(crashes[2])


def test_what_is_no_failure_is_refused(tmp_path: Path) -> None:
    code, said, told = sim_told("replay", tmp_path)
    assert (code, said) == (2, "") and "failure.json" in " ".join(told)


def test_chapters_begin_with_faults_the_first_word_of_a_commit_and_what_is_broken() -> None:
    """In a swarm of hundreds, and a million seconds after its beginning: numbers take more places then. What comes at one moment is one chapter."""

    def one(at: float, peer: int | None, kind: str, **fields: object) -> str:
        return log_line(at, peer, kind, {"height": 0, **fields})

    since = 999_998.0
    expected = [
        [one(since, None, "fault", what="start peer 0"), one(since, None, "fault", what="start peer 100")],
        [one(since + 1, None, "fault", what="start peer 7"), one(since + 1.5, 100, "step")],
        [one(since + 2, 100, "round.commit", height=1), one(since + 2.25, 0, "round.commit", height=1)],
        [one(since + 3, 7, "view.commit", height=1, group="aa"), one(since + 3.5, 7, "round.commit", height=1)],
        [one(since + 4, 7, "round.commit", height=2), one(since + 4, None, "invariant.broken", which=4)],
        [one(since + 5, None, "invariant.broken", which=5)],
    ]
    assert chapters([line for chapter in expected for line in chapter]) == expected


def test_shipped_scenarios_are_listed() -> None:
    code, said = sim("list")
    assert code == 0 and "churn-8" in said and "flash-crowd" in said
    names = [line[: len(line) - len(line.split(maxsplit=1)[1])] for line in said.splitlines()]
    assert len(set(map(len, names))) == 1, "what they are about begins in one column"


def test_the_loss_of_a_run_is_that_of_its_newest_parameters_whoever_tells_of_old_ones_later() -> None:
    report = Report(seed=0, num_peers=2, schedule=[])
    for at, tokens, loss in ((10.0, 100, 5.0), (60.0, 400, 2.0), (61.0, 200, 3.0)):  # a slow peer's took 40 s
        report.note(at, {"event": "outer.eval", "peer": "aa", "loss": loss, "tokens": tokens})
    assert newest_loss(report.losses) == 2.0
