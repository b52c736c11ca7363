"""A simulated run leaves a folder that the report reads as if real nodes had written it."""

import json
from pathlib import Path

import pytest

from farflung.sims.facts import load_folder
from farflung.sims.sim_run import run_scenario
from farflung.sims.swarm import START_UNIX_S

SCENARIO = """
about = "Four peers, one of which is killed."
mode = "cost"
duration_s = 180.0

[manifest.model]
preset = "3m"

[manifest.swarm]
batch_tokens = 16384
inner_steps = 10
min_round_s = 5.0
max_round_s = 60.0

[[peers]]
name = "fast"
count = 3
tokens_per_s = 40000.0
up_mbit = 200.0
down_mbit = 500.0

[[peers]]
name = "slow"
count = 1
tokens_per_s = 10000.0
up_mbit = 200.0
down_mbit = 500.0
join_s = [30.0, 40.0]

[[happenings]]
at = 100.0
what = "kill"
peers = ["fast/2"]

[expect]
min_rounds = 3
min_members = 40
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "four.toml").write_text(SCENARIO)
    result = run_scenario(str(folder / "four.toml"), seed=1, out=folder / "out", quiet=True)
    assert result["violations"] == [] and not result["passed"], "nobody can have forty members"
    return folder / "out"


def test_the_folder_is_that_of_a_run(out: Path) -> None:
    run, events = load_folder(out)
    names = {facts.peer: facts.name for facts in run.peers}
    assert sorted(names.values()) == ["fast/0", "fast/1", "fast/2", "slow/0"] and set(events) == set(names)
    assert run.started == START_UNIX_S and run.ended == START_UNIX_S + 180.0
    assert [(i.what, names[i.peer]) for i in run.timeline if i.what != "start"] == [
        ("join", "slow/0"),
        ("kill", "fast/2"),
    ]
    commits = [e for one in events.values() for e in one if e["event"] == "round.commit"]
    assert {peer for commit in commits for peer in commit["contributors"]} <= set(names)
    assert all(START_UNIX_S <= e["time"] <= run.ended + 1 for one in events.values() for e in one)


def test_costs_have_no_loss_and_bytes_of_the_real_thing(out: Path) -> None:
    _, events = load_folder(out)
    everything = [e for one in events.values() for e in one]
    assert {e["loss"] for e in everything if "loss" in e} == {None}
    assert {e["tokens"] for e in everything if e["event"] == "step"} == {16384}
    rounds = [e for e in everything if e["event"] == "round.commit" and e["contributed"]]
    sent = [e["sent_bytes"] for e in rounds if len(e["contributors"]) > 1]
    assert sent and min(sent) > 1e6, "3 M parameters, half of a byte each at least"


def test_control_messages_are_as_long_as_they_are(out: Path) -> None:
    """Only bulk stands for more: a node that has done nothing but greet has sent kilobytes, and all of them little more than rounds and states."""
    _, events = load_folder(out)
    for one in events.values():
        before = [e for e in one if e["event"] == "net"]
        assert before[0]["sent_bytes"] < 100_000
    sent = sum([e for e in one if e["event"] == "net"][-1]["sent_bytes"] for one in events.values())
    rounds = sum(e["sent_bytes"] for one in events.values() for e in one if e["event"] == "round.commit")
    assert rounds < sent < 1.5 * rounds


def test_the_report_tells_it(out: Path) -> None:
    figures = json.loads((out / "report.json").read_text())
    assert figures["rounds_committed"] >= 3 and figures["peers_killed"] == 1 and figures["outer_loss"] is None
    assert {name: group["peers"] for name, group in figures["utilisation"].items()} == {"fast": 3, "slow": 1}
    assert 0 < figures["utilisation"]["fast"]["train"] <= 1
    assert [one["met"] for one in figures["expected"]] == [True, False]
    page = (out / "report.html").read_text()
    assert "<h2>Loss" not in page and "held-out loss" not in page, "nothing was learnt"
    assert "Not what was expected." in page and "members &gt;= 40" in page
