"""A simulated run leaves a folder that the report reads as if real nodes had written it."""

import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from farflung.protocol.errors import ConfigError
from farflung.sims.audit_samples import account
from farflung.sims.churn import make_schedule
from farflung.sims.costs import Costs
from farflung.sims.facts import Incident, load_folder
from farflung.sims.faults import (
    Delay,
    Drop,
    Duplicate,
    Heal,
    Kill,
    Leave,
    Partition,
    Pause,
    Resume,
    Skew,
    Slow,
    Start,
)
from farflung.sims.logs import Logs
from farflung.sims.recorder import Recorder
from farflung.sims.report import load_scenes, render
from farflung.sims.scenario import find_scenario, load_scenario, parse_scenario
from farflung.sims.scenario_run import make_playable
from farflung.sims.scenario_toml import SCENARIO, keep_scenario
from farflung.sims.sim_folder import timeline_of
from farflung.sims.sim_run import run_scenario
from farflung.sims.swarm import START_UNIX_S
from farflung.training.presets import num_parameters, preset
from farflung.training.tokenizer import ByteTokenizer

FOUR = """
about = "Four peers, one of which is killed."
mode = "cost"
method = "none"
duration_s = 180.0

[manifest.model]
preset = "3m"

[manifest.swarm]
batch_tokens = 16384
inner_steps = 10
min_round_s = 5.0
max_round_s = 60.0
uplink_codec = "int4(block=64)"
downlink_codec = "int8(block=128)"

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
min_training_share = 1.0
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "four.toml").write_text(FOUR)
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
    steps = [e for e in everything if e["event"] == "step"]
    assert {e["tokens"] for e in steps} == {16384}
    speeds = {10000.0, 40000.0}  # a step may wait for the learner's door
    assert all(any(speed / 2 < e["tokens_per_s"] < 1.01 * speed for speed in speeds) for e in steps)
    assert all(any(e["tokens_per_s"] == pytest.approx(speed, rel=0.01) for e in steps) for speed in speeds)
    rounds = [e for e in everything if e["event"] == "round.commit" and e["contributed"]]
    sent = [e["sent_bytes"] for e in rounds if len(e["contributors"]) > 1]
    assert sent and min(sent) > 1e6, "3 M parameters, half of a byte each at least"


def test_costs_have_the_bits_of_the_manifests_codecs_and_whole_states(out: Path) -> None:
    """What stands for the model is coded otherwise, and a byte of a state stands for another number of bytes than one of a contribution."""
    run, events = load_folder(out)
    figures = json.loads((out / "report.json").read_text())
    assert figures["bits_per_parameter"] == {
        "up": pytest.approx(4.25, abs=0.01),
        "down": pytest.approx(8.125, abs=0.01),
    }
    assert {e["up_bits"] > 0 for one in events.values() for e in one if e["event"] == "round.commit"} == {True, False}
    late = next(facts.peer for facts in run.peers if facts.name == "slow/0")
    synced = next(e for e in events[late] if e["event"] == "state.sync" and e["chunks_done"] == e["chunks"])
    parameters = num_parameters(preset("3m", vocab_size=ByteTokenizer().vocab_size))
    assert synced["bytes"] == pytest.approx(8 * parameters, rel=0.01)


def test_costs_have_no_loss_of_a_few_samples_either(tmp_path: Path) -> None:
    scenario = parse_scenario(FOUR, name="four")
    playable = make_playable(scenario, 1, make_schedule(scenario, 1, tmp_path))
    file = io.BytesIO()
    evaluated = {"event": "outer.eval", "time": 1.0, "peer": 0, "swarm": "sim", "version": 1, "loss": None}
    Recorder(file, scenario, playable)("", evaluated | {"few_loss": 1.25, "samples": 8, "tokens": 64, "seconds": 0.1})
    told = json.loads(file.getvalue())
    assert (told["loss"], told["few_loss"]) == (None, None) and told["peer"] == playable.keys[0]


def test_control_messages_are_as_long_as_they_are(out: Path) -> None:
    """Only bulk stands for more: a node that has done nothing but greet has sent kilobytes, and all of them little more than rounds and states."""
    _, events = load_folder(out)
    for one in events.values():
        before = [e for e in one if e["event"] == "net"]
        assert before[0]["sent_bytes"] < 100_000
    sent = sum([e for e in one if e["event"] == "net"][-1]["sent_bytes"] for one in events.values())
    rounds = sum(e["sent_bytes"] for one in events.values() for e in one if e["event"] == "round.commit")
    assert rounds < sent < 1.5 * rounds


BRIEF = """
about = "Two peers, one of which is there as it was recorded."
mode = "cost"
duration_s = 40.0
[manifest.model]
preset = "tiny"
[manifest.swarm]
batch_tokens = 1024
inner_steps = 4
min_round_s = 2.0
[[peers]]
name = "home"
count = 1
tokens_per_s = 2000.0
[[peers]]
name = "far"
count = 1
tokens_per_s = 2000.0
trace = "far.csv"
"""


def test_the_folder_says_what_was_run_and_that_can_be_run_again(tmp_path: Path) -> None:
    """With the seed, the method and the costs that took the place of the file's, and the trace, wherever the folder is."""
    file, out = tmp_path / "in" / "brief.toml", tmp_path / "out"
    file.parent.mkdir()
    file.write_text(BRIEF)
    (file.parent / "far.csv").write_text("start_s,end_s,host\n5,30,a\n")
    run_brief = partial(run_scenario, quiet=True)
    result = run_brief(str(file), seed=5, method="thrifty", out=out, costs=Costs(start_s=2.0, trained_per_s=1e9))
    assert run_brief(str(out / SCENARIO), seed=None, out=None)["log_sha256"] == result["log_sha256"]
    run, _ = load_folder(out)
    figures = json.loads((out / "report.json").read_text())
    told = {"seed": 5, "method": "thrifty"}
    assert (run.seed, run.method) == (5, "thrifty") and all(one | told == one for one in (result, figures))
    other = tmp_path / "other"
    assert run_brief(str(file), seed=6, out=other)["log_sha256"] != result["log_sha256"]
    page = re.sub(r"<[^>]*>", "|", render(load_scenes([out, other])))
    assert "|method, seed||thrifty, 5||default, 6|" in page
    before = (out / SCENARIO).read_bytes()
    with pytest.raises(ConfigError, match="name another folder"):
        run_brief(str(out / SCENARIO), seed=7, out=out)
    with pytest.raises(ConfigError, match="no method is called"):
        run_brief(str(file), seed=7, method="thrifti", out=out)
    assert (out / SCENARIO).read_bytes() == before


def test_what_was_played_in_part_is_kept_whole(tmp_path: Path) -> None:
    """Peers that come later than that are in it."""
    path = find_scenario("churn-8")
    keep_scenario(tmp_path, load_scenario(path), 3, path, minutes=1.0)
    kept = load_scenario(tmp_path / SCENARIO)
    assert structs.replace(kept, seed=0, name="churn-8") == load_scenario(path) and kept.seed == 3
    assert (tmp_path / SCENARIO).read_text().startswith("# the first 1 minutes were played\n")


def test_samples_are_followed_to_the_end(out: Path) -> None:
    """The judge has the commits of everybody, so no sample can be lost without a word."""
    run, events = load_folder(out)
    assert run.ledger is not None and set(run.ledger.held) <= set(events)
    assert json.loads((out / "report.json").read_text())["samples_lost"] == 0
    assert "Whether samples were lost is not known" not in (out / "report.html").read_text()
    some = structs.replace(run, ledger=structs.replace(run.ledger, held={}, suspended={}))
    lost = account(Logs(events=events, run=some)).lost
    assert lost is not None and lost > 0


def test_the_report_tells_it(out: Path) -> None:
    figures = json.loads((out / "report.json").read_text())
    assert figures["rounds_committed"] >= 3 and figures["peers_killed"] == 1 and figures["outer_loss"] is None
    assert {name: group["peers"] for name, group in figures["utilisation"].items()} == {"fast": 3, "slow": 1}
    assert 0 < figures["utilisation"]["fast"]["train"] <= 1
    assert [one["met"] for one in figures["expected"]] == [True, False]
    page = (out / "report.html").read_text()
    assert "<h2>Loss" not in page and "held-out loss" not in page, "nothing was learnt"
    assert "Not what was expected." in page and "training_share &gt;= 1" in page


def test_all_that_was_done_is_told() -> None:
    """As late as it was done: processes are not as punctual as virtual time."""
    faults = [
        Start(at=0.0, peer=0),
        Start(at=4.0, peer=1),
        Kill(at=8.0, peer=1),
        Start(at=20.0, peer=1),
        Pause(at=31.0, peer=1),
        Resume(at=32.0, peer=1),
        Partition(at=33.0, groups=((0,), (1,))),
        Partition(at=33.5, groups=((1,),), number=2),
        Heal(at=34.0),
        Heal(at=34.5, number=2),
        Drop(at=35.0, until=40.0, probability=0.25),
        Duplicate(at=36.0, until=40.0, probability=0.5),
        Delay(at=37.0, until=40.0, extra_s=2.0),
        Delay(at=38.0, until=40.0, extra_s=3.0, peer=0),
        Slow(at=39.0, until=40.0, peer=1, factor=4.0),
        Skew(at=41.0, peer=1, ahead_s=-5.0),
        Leave(at=42.0, peer=0),
        Kill(at=43.0, peer=1, reset=False),
    ]
    told = timeline_of([(1000.5 + fault.at, fault) for fault in faults], ["aa", "bb"])
    assert told == [
        Incident(time=1000.5, what="start", peer="aa"),
        Incident(time=1004.5, what="start", peer="bb"),
        Incident(time=1008.5, what="kill", peer="bb"),
        Incident(time=1020.5, what="join", peer="bb"),
        Incident(time=1031.5, what="pause", peer="bb"),
        Incident(time=1032.5, what="resume", peer="bb"),
        Incident(time=1033.5, what="partition", groups=[["aa"], ["bb"]]),
        Incident(time=1034.0, what="partition", groups=[["bb"]], number=2),
        Incident(time=1034.5, what="heal"),
        Incident(time=1035.0, what="heal", number=2),
        Incident(time=1035.5, what="drop", until=1040.5, much=0.25),
        Incident(time=1036.5, what="duplicate", until=1040.5, much=0.5),
        Incident(time=1037.5, what="delay", until=1040.5, much=2.0),
        Incident(time=1038.5, what="delay", peer="aa", until=1040.5, much=3.0),
        Incident(time=1039.5, what="slow", peer="bb", until=1040.5, much=4.0),
        Incident(time=1041.5, what="skew", peer="bb", much=-5.0),
        Incident(time=1042.5, what="stop", peer="aa"),
        Incident(time=1043.5, what="power", peer="bb"),
    ]


TROUBLED = """
about = "Four peers, one of which is stopped in the middle of a step, cut off and slowed."
mode = "cost"
method = "none"
duration_s = 180.0

[manifest.model]
preset = "3m"

[manifest.swarm]
batch_tokens = 16384
inner_steps = 10
min_round_s = 5.0
max_round_s = 60.0

[[peers]]
name = "home"
count = 4
tokens_per_s = 4000.0
up_mbit = 200.0
down_mbit = 500.0

[[happenings]]
at = 42.0
what = "pause"
peers = ["home/1"]
for_s = 40.0

[[happenings]]
at = 110.0
what = "partition"
peers = ["home/3"]
for_s = 20.0

[[happenings]]
at = 140.0
what = "slow"
peers = ["home/2"]
for_s = 20.0
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("troubled")
    (folder / "troubled.toml").write_text(TROUBLED)
    run_scenario(str(folder / "troubled.toml"), seed=1, out=folder / "out", quiet=True)
    return folder / "out"


def test_a_stopped_peer_does_not_train_in_the_report_either(troubled: Path) -> None:
    run, events = load_folder(troubled)
    stopped = next(facts.peer for facts in run.peers if facts.name == "home/1")
    longest = max(event["seconds"] for event in events[stopped] if event["event"] == "step")
    assert longest > 40.0, "it was stopped in the middle of a step, or this tests nothing"
    result = json.loads((troubled / "result.json").read_text())
    report = json.loads((troubled / "report.json").read_text())["utilisation"]["home"]
    assert report["train"] == pytest.approx(result["training_share"], abs=0.02)
    assert report["pause"] * report["hours"] == pytest.approx(40.0 / 3600, abs=0.001)


def test_who_was_not_up_was_not_stopped(tmp_path: Path) -> None:
    """Its process was still starting when the schedule would have had it stopped."""
    scenario = TROUBLED.replace("at = 42.0", "at = 5.0") + "\n[costs]\nstart_s = 30.0\n"
    (tmp_path / "late.toml").write_text(scenario.replace("duration_s = 180.0", "duration_s = 170.0"))
    result = run_scenario(str(tmp_path / "late.toml"), seed=1, out=tmp_path / "out", quiet=True)
    run, _ = load_folder(tmp_path / "out")
    assert not any(incident.what in ("pause", "resume") for incident in run.timeline)
    assert "pause peer 1 (it is not up)" in (tmp_path / "out" / "events.log").read_text()
    report = json.loads((tmp_path / "out" / "report.json").read_text())["utilisation"]["home"]
    assert report["pause"] == 0.0 and report["train"] == pytest.approx(result["training_share"], abs=0.02)


def test_the_page_shows_what_the_scenario_is_about(troubled: Path) -> None:
    page = (troubled / "report.html").read_text()
    assert "on the way; 1 pause, 1 partition, 1 slow-down." in page
    assert ">partition: home/3 | the others<" in page and ">cut off from most<" in page and ">stopped<" in page
    rows = re.sub(r"<[^>]*>", "|", page)
    assert "|42.0 s||82.0 s||stopped||home/1|" in rows and "|110.0 s||130.0 s||partition||home/3 | the others|" in rows
