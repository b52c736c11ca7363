"""A swarm with a pipeline as people run it: `create --stages 3`, processes that join over loopback, and two that are killed."""

import asyncio
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.node.processes import nodes
from tests.node.watching import watched

from farflung.node import daemon
from farflung.node.control import ControlError, request
from farflung.node.doctor import examine
from farflung.node.evaluating import evaluate_swarm
from farflung.node.options import CreatedSwarm, CreateOptions, DoctorOptions, EvalOptions, ExportOptions
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.stage_start import SavedStage, save_stage, saved_stage
from farflung.node.wanted import local_swarm
from farflung.protocol.appointment import appoint
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import Life
from farflung.protocol.manifest import open_manifest

TEXT = "".join(f"line {i}: the swarm trains on text number {i * i}.\n" for i in range(2000))

TOML = """
[model]
dim = 32
num_layers = 4
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
seq_len = 32

[inner]
lr = 5e-3
warmup_steps = 5

[outer]
momentum = 0.5

[swarm]
total_steps = 5000
inner_steps = 5
batch_tokens = 512
min_round_s = 1.0
"""


SWARM = r"[ade]/state/swarms/\w+"
OWN = r"(a/state/swarms/\w+/checkpoint|e/state/swarms/\w+/stage-2)"
NEW = r"d/state/swarms/\w+/stage-1-life-1"
ALLOWED = (
    rf"{SWARM}/(events\.jsonl|engine\.log)",  # logs: the second is opened by the first warning of a library
    rf"{SWARM}/(name|lock|peers\.json|port|stage|claim|invite|manifest)(\.new)?",  # who is in the swarm
    r"d/(config|cache/kernels)/\S+",  # a key, and compiled codecs: of every new machine
    rf"({OWN}|{NEW})/(vote|history\.msgpack)(\.new)?",  # what a node has voted for in its own chain, and that chain
    rf"{OWN}/means/\w+",  # of their own rounds: written, and opened again to be synced and to be served
    rf"{OWN}/(current(\.new)?|learner-[ab]/(\.tmp\w+|place\.msgpack\.new|(residuals/)?(\.tmp\w+|state\.(json|safetensors)\.partial)))",  # checkpoints of their own stages, as usual
    r"a/state/swarms/\w+/model/(\.tmp\w+|state\.(json|safetensors)\.partial)",  # the whole model that the founder has evaluated: written, never read
)
"""What nodes open while a stage is recovered, by the folders of their homes: what they write all the time, and of the stage that comes back its new chain only,
which has no state in it."""

OURS = re.compile(r"\w+\.(log|opened)|\w+\.watcher/\S+|\w+/state/swarms/\w+/events\.jsonl")
"""What this test reads."""

ELSEWHERE = re.compile(rf"/dev/\S+|\S+/__pycache__/\S+|{tempfile.gettempdir()}/(farflung-\S+|\w{{8}})")
"""Where nodes write beside their homes: what Python compiles, keys of connections, and whether there is a place for such things."""


def may_open(path: Path) -> bool:
    """Whether this file may be opened while a stage is recovered."""
    return any(re.fullmatch(one, str(path)) for one in ALLOWED)


def found(tmp_path: Path, **flags: Any) -> CreatedSwarm:
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / "swarm.toml").write_text(TOML)
    return daemon.create(
        CreateOptions(
            **{
                "name": "pipe",
                "config": tmp_path / "swarm.toml",
                "data": str(tmp_path / "corpus.txt"),
                "home": tmp_path / "a",
                "stages": 2,
                "local": True,
                "port": 0,
                **flags,
            }
        )
    )


def test_nonsense_is_refused_at_the_founding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model of 4 layers has at most 4 stages"):
        found(tmp_path, stages=5)
    with pytest.raises(ConfigError, match=r"pipeline\.microbatches = 3: must divide the 16 samples"):
        found(tmp_path, microbatches=3)
    with pytest.raises(ConfigError, match="leaves out none of 2 stages"):
        found(tmp_path, skip=0.2)
    with pytest.raises(ConfigError, match=r"pipeline\.routing"):
        found(tmp_path, routing="random")


def test_routing_is_said_at_the_founding(tmp_path: Path) -> None:
    made = found(tmp_path, routing="dynamic")
    manifest = open_manifest(made.manifest.read_bytes(), swarm=bytes.fromhex(made.hash_hex), peer=None)
    assert manifest.pipeline.dynamic


def test_a_machine_remembers_its_stage(tmp_path: Path) -> None:
    swarm = SwarmPaths(name="x", hash_hex="00", folder=tmp_path, socket=tmp_path / "s")
    assert saved_stage(swarm) is None
    key = Ed25519Signer(b"k" * 32)
    saved = SavedStage(Life(1, 0, key.peer_id), (appoint(key, bytes(32), 1, key.peer_id),))
    save_stage(swarm, saved)
    assert saved_stage(swarm) == saved
    (tmp_path / "stage").write_bytes(b"\xc1")
    with pytest.raises(ConfigError, match="remove it"):
        saved_stage(swarm)


def test_the_doctor_looks_at_a_stage(tmp_path: Path) -> None:
    made = found(tmp_path)
    options = DoctorOptions(swarm="pipe", home=tmp_path / "a", device="cpu")
    findings = examine(options)
    assert findings["model"] == "pipe, stage 0 of 2 (2 + 2 layers), the largest" and findings["microbatch"] == 4
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("pipe")
    save_stage(swarm, SavedStage(Life(1, 0, bytes.fromhex(made.founder)), ()))
    again = examine(options)
    assert (
        again["model"] == "pipe, stage 1 of 2 (2 + 2 layers), this machine's"
        and again["parameters"] < findings["parameters"]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_train_three_stages_though_one_of_a_stage_is_killed_and_then_its_last(tmp_path: Path) -> None:
    found(tmp_path, stages=3)
    with watched(tmp_path) as kernel, nodes() as start:
        a = start(tmp_path / "a", "pipe", watched=True)
        invitation = a.word("farflung1")
        b = start(tmp_path / "b", invitation, "--stage", "1", watched=True)
        b.until(lambda: "serves stage 1 of 3: layers 1 to 1" in b.log.read_text())
        e = start(tmp_path / "e", invitation, watched=True)
        e.until(lambda: "serves stage 2 of 3: layers 2 to 3" in e.log.read_text())  # nobody else did
        b.until(lambda: b.rounds() >= 1)
        c = start(tmp_path / "c", invitation, "--stage", "1", watched=True)
        c.until(lambda: c.rounds() >= 2 and c.events("round.commit")[-1]["contributed"])

        # One of the two is killed, and the other goes on.
        members = {event["peer"]: node for node in (b, c) for event in node.events("node.start")}
        second, first = members[max(members)], members[min(members)]
        second.process.kill()  # of two members, the first has the casting vote
        before = first.rounds()
        first.until(lambda: first.rounds() >= before + 2)
        steps = [event for event in a.events("step") if event["loss"] is not None]
        assert sum(e["loss"] for e in steps[-3:]) < 0.8 * sum(e["loss"] for e in steps[:3])
        digests: dict[int, set[str]] = {}
        for node in (b, c):
            for event in node.events("round.commit"):
                digests.setdefault(event["version"], set()).add(event["digest"])
        assert all(len(same) == 1 for same in digests.values()) and len(digests) >= 4
        assert local_swarm(a.paths, "pipe", ()).swarm is not None
        # Two rounds may take less than the silence after which a peer counts no more.
        a.until(lambda: a.events("pipeline.step")[-1]["peers"] == [1, 1, 1])
        # Samples are with the data nodes: the others have tickets only, and say so.
        told = asyncio.run(request(a.paths.find_swarm("pipe"), "ledger", sample=0))
        assert told["sample"]["stops"][0]["peer"] == told["held"][0]["peer"] and told["cursor"] > 0
        with pytest.raises(ControlError, match="this node serves stage 1"):
            asyncio.run(request(first.paths.find_swarm("pipe"), "ledger"))
        a.until(lambda: a.events("outer.eval"))  # comes to nothing where a round ends meanwhile
        with pytest.raises(ConfigError, match="go to the machine of one, the founder's for example"):
            daemon.export(ExportOptions(swarm="pipe", folder=tmp_path / "other", home=first.home))

        # It is killed as well. Another machine begins the stage anew, from its shadow at the founder's node, which is not
        # started anew, while the disks of the old machines are never read.
        a.until(lambda: a.events("shadow"))
        first.process.kill()
        first.process.wait()
        for home in (tmp_path / "b", tmp_path / "c"):
            shutil.rmtree(home)
        killed_at, before = time.time(), len(a.events("pipeline.step"))
        d = start(tmp_path / "d", invitation, "--stage", "1", watched=True)
        d.until(lambda: d.rounds() >= 1)
        [made] = d.events("stage.made")
        assert (made["rung"], made["stage"]) == ("shadow", 1)
        assert [len(node.events("node.start")) for node in (a, e)] == [1, 1], "nobody else begins anew"
        assert [node.events("stage.anew")[-1]["life"] for node in (a, e)] == [1, 1]
        told, founded = (
            asyncio.run(request(node.paths.find_swarm("pipe"), "status"))["recovered"][0] for node in (a, d)
        )
        assert told["founder"] == founded["founder"] == made["peer"] and told["life"] == founded["life"] == 1
        assert told["copy_step"] == a.events("shadow.given")[-1]["of_step"] and not told["rung"]
        assert (founded["rung"], founded["reason"]) == ("shadow", d.events("stage.recovery")[0]["reason"])
        assert "stage 1 is made: shadow" in d.log.read_text()
        assert any(step["landed"] for step in a.events("pipeline.step")[before:])
        served_at = min(step["time"] for step in d.events("pipeline.step"))
        homes = {node.home: node for node in (a, b, c, d, e)}
        for home, node in homes.items():  # so there is nothing of the run that could be read elsewhere
            wrote = [one.path for one in node.opened_since(0.0) if one.writes and not one.path.is_relative_to(home)]
            assert [path for path in wrote if not ELSEWHERE.fullmatch(str(path))] == []
        opened = [(one.at, one.path) for node in (a, d, e) for one in node.opened_since(killed_at)]
        opened += [one for one in kernel.opened if not OURS.fullmatch(str(one[1].relative_to(tmp_path)))]
        within = [(at, path) for at, path in opened if killed_at <= at <= served_at and path.is_relative_to(tmp_path)]
        files = [(at, path.relative_to(tmp_path)) for at, path in within if not path.is_dir()]
        assert {path.parts[0] for _, path in files} == {"a", "d", "e"}
        assert [path for _, path in files if not may_open(path)] == []
        print(f"{served_at - killed_at:.1f} s from the kill to the end of the first step with it")
    # The founder's machine has the whole model, as it was last evaluated.
    facts = daemon.export(ExportOptions(swarm="pipe", folder=tmp_path / "model", home=tmp_path / "a"))
    assert facts["rounds"] >= 1 and facts["pipeline stages"] == 3 and "held-out loss" in facts
    assert facts["rounds of each stage"].count(",") == 2 and facts["rounds between the stages"] >= 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    figures = evaluate_swarm(EvalOptions(swarm="pipe", skip_stages=("1",), device="cpu", home=tmp_path / "a"))
    (last,) = [e for e in a.events("outer.eval") if e["version"] == figures["version"]]
    assert figures["loss"] == pytest.approx(last["loss"], rel=1e-4) and figures["left_out"][0]["perplexity"] > 0.0
