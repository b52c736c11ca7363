"""`farflung sim local`: what cannot be played is refused, what is told of a run is what a simulation tells, and processes end with it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.thorough import further

from farflung.node.identity import Identity
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer
from farflung.sims import regions
from farflung.sims.churn import make_schedule
from farflung.sims.demonodes import DemoNode
from farflung.sims.facts import load_events, load_folder
from farflung.sims.faults import Fault, Kill, Leave, Pause, Resume, Schedule, Start
from farflung.sims.from_events import fill_report, labour_of
from farflung.sims.links import path_between
from farflung.sims.local_plan import NODE_BYTES, check_playable, check_speed, orders_for
from farflung.sims.local_run import shortened, start_seconds
from farflung.sims.local_stage import StagePace
from farflung.sims.local_swarm import LocalSwarm
from farflung.sims.pipeline_log import logged_steps
from farflung.sims.recorder import Recorder
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario, parse_scenario
from farflung.sims.scenario_plan import key_seeds, prepare, read_scenario
from farflung.sims.scenario_run import make_playable
from farflung.sims.simulation import Report, simulate
from farflung.sims.spans import seconds_by_use
from farflung.sims.summary import total_bytes
from farflung.sims.swarm import START_UNIX_S
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_slice import StageSlice

SMALL = """
about = "Three peers, one of which is killed and comes back."
mode = "real"
duration_s = 60.0
seed = 3
[manifest.model]
preset = "tiny"
seq_len = 32
[manifest.data]
spec = "text:{text}"
[manifest.swarm]
batch_tokens = 64
inner_steps = 4
fragments = 1
total_steps = 400
min_round_s = 1.0
max_round_s = 20.0
[manifest.inner]
warmup_steps = 5
[[peers]]
name = "near"
count = 2
tokens_per_s = 128.0
latency_ms = 2.0
regions = ["Belgium", "Germany"]
[[peers]]
name = "far"
count = 1
tokens_per_s = 64.0
latency_ms = 10.0
regions = ["London"]
[[happenings]]
at = 25.0
what = "kill"
peers = ["near/1"]
for_s = 9.0
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("".join(f"{i} and {i * i}\n" for i in range(3000)))
    return SMALL.replace("{text}", str(file))


@pytest.fixture(scope="module")
def small(text: str) -> Scenario:
    return parse_scenario(text, name="small")


# ---- what cannot be played -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("count = 2", "count = 2000", "2001 peers, and at most 32 processes; lower peers.count"),
        ("count = 2", "count = 25", "26 processes take some 13.0 GB of memory, and 10.0 GB are free"),
        ("[[happenings]]", "[network]\nclock_skew_s = 2.0\n[[happenings]]", "network.clock_skew_s"),
        ("[[happenings]]", "[network]\nloss = 0.1\n[[happenings]]", "network.loss"),
        ("[[happenings]]", '[network]\ngreetings = "reckoned"\n[[happenings]]', 'network.greetings = "reckoned"'),
        ("[[happenings]]", "[costs]\nstart_s = 9.0\n[[happenings]]", "[costs]: processes take what they take"),
        ('what = "kill"', 'what = "partition"', "happenings[0].what = 'partition': local nodes share one loopback"),
        ('what = "kill"', 'what = "slow"', "a class of their own with a lower tokens_per_s"),
        ('regions = ["London"]', 'regions = ["London", "Australia"]\nup_mbit = 99.0', "Mbit/s between"),
    ],
)
def test_what_processes_cannot_do_is_refused_with_a_remedy(text: str, old: str, new: str, said: str) -> None:
    assert old in text
    scenario = parse_scenario(text.replace(old, new, 1), name="small")
    with pytest.raises(ConfigError) as refused:
        check_playable(scenario, free_bytes=10e9)
    assert said in str(refused.value) and "farflung sim run" in str(refused.value)


def test_what_trains_nothing_is_refused(text: str) -> None:
    text = re.sub(r"\[manifest\.data\]\nspec = .*\n", "", text.replace('mode = "real"', 'mode = "cost"'))
    with pytest.raises(ConfigError, match='mode = "cost" trains nothing, processes do; set mode = "real"'):
        check_playable(parse_scenario(text, name="small"), free_bytes=10e9)


def test_what_they_can_do_is_not(small: Scenario) -> None:
    check_playable(small, free_bytes=3 * NODE_BYTES)
    for name in ("local-3", "churn-8"):
        check_playable(load_scenario(SHIPPED / f"{name}.toml"), free_bytes=10e9)


def test_peers_faster_than_this_machine_are_refused(small: Scenario) -> None:
    recipe, _ = read_scenario(small, Ed25519Signer(bytes(32)).peer_id)
    check_speed(small, recipe.manifest, step_s=0.4, cores=2)  # two of half a second and one of a second: two processors
    with pytest.raises(
        ConfigError, match=r"take 4\.0 processors here, and there are 2; lower tokens_per_s by 2\.0 times"
    ):
        check_speed(small, recipe.manifest, step_s=0.8, cores=2)


# ---- what nodes are told -------------------------------------------------------------------------------------------


def test_nodes_are_as_slow_and_as_far_away_as_simulated_ones(small: Scenario) -> None:
    schedule = make_schedule(small, 0, Path())
    prepared = prepare(small, 0, schedule)
    keys = [Ed25519Signer(seed).peer_id.hex() for seed in key_seeds(small, 0)]
    recipe, _ = read_scenario(small, bytes.fromhex(keys[0]))
    roster = small.roster()
    where = [region for _, _, region in roster]
    links = prepared.plan.links
    assert links is not None
    for peer in range(3):
        orders = orders_for(small, recipe.manifest, keys, peer, invitation="", port=1, meter=False)
        assert orders.train_s == prepared.plan.outfit.seconds(peer, "train", 1.0)
        assert orders.evaluate_s == prepared.plan.outfit.seconds(peer, "evaluate", 1.0)
        assert orders.up_mbit * 125_000 == links(peer).up_bytes_per_s
        assert set(orders.one_way_s) == {key for key in keys if key != keys[peer]}
        for other in set(range(3)) - {peer}:
            path = path_between(links(peer), links(other), between=regions.between(where[peer], where[other]))
            access_ms = {"near": 2.0, "far": 10.0}
            both_s = (access_ms[roster[peer][0].name] + access_ms[roster[other][0].name]) / 1000.0
            assert path.latency_s == pytest.approx(both_s + regions.between(where[peer], where[other])[0])
            assert orders.one_way_s[keys[other]] == pytest.approx(path.latency_s)
            assert orders.jitter_s == path.jitter_s


def test_a_shorter_run_is_the_same_without_what_would_come_later(small: Scenario) -> None:
    assert shortened(small, None) is small and shortened(small, 2.0) is small
    short = shortened(small, 0.4)
    assert (short.duration_s, short.happenings) == (24.0, ())
    assert shortened(small, 0.5).happenings == small.happenings


# ---- what is told of a run -----------------------------------------------------------------------------------------


def played(small: Scenario, folder: Path, faults: tuple[Fault, ...]) -> list[Fault]:
    """What is told to have been done of these, all at once."""
    identities = [Identity(Ed25519PrivateKey.from_private_bytes(key)) for key in key_seeds(small, 0)]
    recipe, _ = read_scenario(small, identities[0].public_key)
    swarm = LocalSwarm(scenario=small, recipe=recipe, identities=identities, founder=0, folder=folder)
    asyncio.run(swarm.play(Schedule(num_peers=3, duration_s=0.0, faults=faults)))
    return [fault for _, fault in swarm.done]


def test_who_has_no_process_is_not_told_to_have_been_stopped(
    small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(self: LocalSwarm, *life: object) -> None:
        """For the goodbye of its last life."""

    monkeypatch.setattr(LocalSwarm, "_live", waits)
    faults = (Start(at=0.0, peer=0), Pause(at=0.0, peer=0), Resume(at=0.0, peer=0), Kill(at=0.0, peer=0))
    assert played(small, tmp_path, faults) == [faults[0], faults[3]]


@pytest.mark.parametrize("fault", [Kill(at=0.0, peer=0), Kill(at=0.0, peer=0, reset=True), Leave(at=0.0, peer=0)])
def test_who_has_ended_by_itself_is_not_told_to_have_been_ended(
    fault: Fault, small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(self: LocalSwarm, peer: int, node: DemoNode, *before: object) -> None:
        node.process = cast(asyncio.subprocess.Process, SimpleNamespace(returncode=0))

    monkeypatch.setattr(LocalSwarm, "_live", ends)
    start = Start(at=0.0, peer=0)
    assert played(small, tmp_path, (start, fault)) == [start]


def test_figures_from_events_are_those_that_a_simulation_keeps_itself(tmp_path: Path) -> None:
    # With the data of the package: whose turn it is follows from the manifest, so with a path that is another one each time the run might end between a decision and its log.
    small = parse_scenario(SMALL.replace('[manifest.data]\nspec = "text:{text}"\n', ""), name="small")
    schedule = make_schedule(small, 0, Path())
    prepared = prepare(small, 0, schedule)
    with (tmp_path / "events.jsonl").open("wb") as file:
        known = simulate(prepared.plan, sink=Recorder(file, small, make_playable(small, 0, schedule)))
    events = load_events([tmp_path / "events.jsonl"])
    keys = [signer.peer_id.hex() for signer in prepared.plan.outfit.signers]
    done = [(START_UNIX_S + fault.at, fault) for fault in schedule.faults]
    report = Report(0, 3, known.schedule)
    steps_s = [prepared.plan.outfit.seconds(peer, "train", 1.0) for peer in range(3)]
    fill_report(report, keys, steps_s, events, done, START_UNIX_S, START_UNIX_S + small.duration_s)
    for name in (
        "commits",
        "rounds",
        "contributed",
        "missed",
        "tokens",
        "members",
        "sent_bytes",
        "net_bytes",
        "round_seconds",
    ):
        assert getattr(report, name) == getattr(known, name), name
    assert report.net_bytes == sum(total_bytes(own, "sent_bytes") for own in events.values()) > report.sent_bytes
    assert any(isinstance(fault, Kill) for _, fault in done), "or this tests less"
    assert report.rounds >= 5 and report.labour[1].running_s == pytest.approx(51.0, abs=0.1)
    for told, true in zip(report.labour, known.labour, strict=True):
        assert told.running_s == pytest.approx(true.running_s, abs=0.1)
        assert true.steps - 2 <= told.steps <= true.steps, "a step that a kill or the end cut short was begun"
        assert true.training_s * (1 - 2 / true.steps) <= told.training_s <= true.training_s
    for key, told in zip(keys, report.labour, strict=True):
        trained = seconds_by_use(events[key])["train"]
        assert trained == pytest.approx(told.training_s, rel=0.01), "as reports have it: without the wait for the door"


def event(time: float, what: str, **more: Any) -> dict[str, Any]:
    return {"time": time, "event": what, **more}


def test_a_life_ends_with_a_goodbye_a_kill_or_the_run() -> None:
    events = [
        event(10.0, "node.start"),
        event(12.0, "step", seconds=0.5),
        event(30.0, "node.start"),  # killed at 20
        event(40.0, "node.stop"),
        event(50.0, "node.start"),
        event(51.0, "step", seconds=0.25),
    ]
    labour = labour_of(events, [20.0], 60.0, 0.4)
    assert (labour.running_s, labour.training_s, labour.steps) == (30.0, 0.8, 2)


def test_an_operation_of_a_pipeline_does_not_last_through_a_pause() -> None:
    operations = [["F", 0, 0, 0.0, 1000.0], ["B", 0, 0, 1500.0, 4000.0]]
    events = [event(1.0, "node.start"), event(10.0, "pipeline.step", seconds=4.0, ops=operations)]
    labour = labour_of(events, [], 60.0, 0.4, [(8.0, 9.5)])
    assert (labour.running_s, labour.training_s, labour.steps) == (59.0, 2.0, 2)


def test_starts_that_never_came_up_do_not_count() -> None:
    done = [(0.0, Start(at=0.0, peer=0)), (5.0, Start(at=5.0, peer=1)), (40.0, Start(at=40.0, peer=1))]
    events = {"aa": [event(8.0, "node.start")], "bb": [event(52.0, "node.start")]}
    assert start_seconds(["aa", "bb"], events, done) == 10.0
    assert start_seconds(["aa", "bb"], {}, done) is None


# ---- real processes ------------------------------------------------------------------------------------------------


def sim_local(file: Path, out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "farflung.sims.main", "sim", "local", str(file), "--json", "--out", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # Tests that run in the background of a shell have Ctrl-C ignored, and what they start would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def nodes_of(run: psutil.Process) -> list[psutil.Process]:
    """Its node processes; other children, a compiler for example, come and go while one looks."""
    found = []
    for child in run.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "farflung.sims.local_node" in child.cmdline():
                found.append(child)
    return found


def quick(text: str, *, seconds: float) -> str:
    """A run as short as this machine's start-up allows; what is expected of it is the caller's."""
    return text.replace("duration_s = 60.0", f"duration_s = {seconds}")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_three_processes_train_one_is_killed_and_all_of_it_is_told(text: str, tmp_path: Path) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    # All three must be members when one is killed: one of two would take the quorum along.
    late = quick(text, seconds=60.0).replace("at = 25.0", "at = 40.0")
    file.write_text(late + "\n[expect]\nmin_rounds = 1\n")
    with sim_local(file, out) as run:
        said, errors = run.communicate(timeout=180)
    assert run.returncode == 0, said + errors
    result = json.loads(said)
    assert result["violations"] == [] and result["passed"] and result["rounds"] >= 1
    facts, events = load_folder(out)
    names = {peer.peer: peer.name for peer in facts.peers}
    assert [(i.what, names[i.peer]) for i in facts.timeline if i.what != "start"] == [
        ("kill", "near/1"),
        ("join", "near/1"),
    ]
    assert facts.ledger is not None and set(events) <= set(names)
    for name in ("events.log", "report.html", "report.json", "result.json", "scenario.toml", "near-0.txt", "far-0.txt"):
        assert (out / name).exists(), name
    steps = {names[peer]: [e["seconds"] for e in told if e["event"] == "step"] for peer, told in events.items()}
    assert steps["near/0"], "it is there from the beginning; who comes later may come too late to train"
    for name, seconds in steps.items():
        assert min(seconds, default=1.0) >= (0.999 if name == "far/0" else 0.499), (
            "64 tokens at 64 tokens a second, and at 128"
        )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_that_hold_stages_are_played_and_drawn(text: str, tmp_path: Path) -> None:
    """One step at least needs all of them to have come up and found their stages."""
    file, out = tmp_path / "staged.toml", tmp_path / "out"
    staged = text.replace("[manifest.inner]", "[manifest.pipeline]\nstages = 2\nmicrobatches = 2\n[manifest.inner]")
    file.write_text(quick(staged, seconds=60.0).replace("at = 25.0", "at = 40.0"))
    with sim_local(file, out) as run:
        said, errors = run.communicate(timeout=350)
    assert run.returncode == 0, said + errors
    result = json.loads(said)
    assert result["violations"] == [] and result["passed"]
    facts, events = load_folder(out)
    steps = logged_steps(events)
    assert steps and sum(step.landed for step in steps) >= 2
    assert {event["stage"] for one in events.values() for event in one if event["event"] == "pipeline.step"} == {0, 1}
    model = read_scenario(load_scenario(file), bytes.fromhex(facts.peers[0].peer))[0].model
    for peer, told in events.items():
        token_s = 1.0 / (64.0 if peer == facts.peers[2].peer else 128.0)
        for event in told:
            if event["event"] == "pipeline.step":
                pace = StagePace.of(model, StageSlice((1, 2), event["stage"]), token_s)
                # as the node tells them, waits included: how it is drawn without is a matter of when its loop heard of each end
                for kind, _, _, began_ms, ended_ms in event["ops"]:
                    assert ended_ms - began_ms >= 1000 * pace.seconds(Kind(kind), 32) - 2
    assert "Steps of the pipeline" in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, *further(signal.SIGINT, signal.SIGTERM)])
def test_processes_end_with_whoever_started_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    file, temporary = tmp_path / "small.toml", tmp_path / "temporary"
    file.write_text(text)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with sim_local(file, tmp_path / "out") as run:
        ours = psutil.Process(run.pid)
        while len(nodes := nodes_of(ours)) < 3:
            assert run.poll() is None, f"it ended by itself: {run.communicate()}"
            time.sleep(0.05)
        everything = ours.children(recursive=True)
        run.send_signal(how)
        run.communicate(timeout=60)
    assert run.returncode != 0
    if how is signal.SIGTERM:
        assert run.returncode == 128 + how and not list(temporary.glob("farflung-*")), "it has tidied up"
    gone, left = psutil.wait_procs(everything, timeout=120)
    assert set(nodes) <= set(gone) and not left
    assert not list((tmp_path / "out").iterdir())
