"""Scenarios with a pipeline: `sim run` under virtual time, and what `sim local` tells each process."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner

from farflung.node.events import Event
from farflung.node.recipe import Recipe
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import stage_recipe
from farflung.protocol.effects import Reduce
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.participation import Participation
from farflung.sims import sim_run
from farflung.sims.churn import make_schedule
from farflung.sims.facts import load_folder
from farflung.sims.failure import load_failure
from farflung.sims.faults import Start
from farflung.sims.local_plan import check_playable, orders_for
from farflung.sims.local_run import found_locally
from farflung.sims.local_stage import PacedStageLearner, StagePace
from farflung.sims.main import app
from farflung.sims.pipeline_log import logged_steps
from farflung.sims.pipeline_scenario import has_pipeline, prepare_pipeline, simulate_pipeline
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario, parse_scenario
from farflung.sims.scenario_plan import read_scenario
from farflung.sims.sim_run import play_scenario
from farflung.sims.simulation import Report
from farflung.training.inner import StepReport
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_worker import Accumulated
from farflung.training.runtime import Runtime

SMALL = """
about = "Three peers hold two stages; one of stage 1 is killed and comes back."
mode = "real"
method = "none"
duration_s = 60.0
[manifest.model]
preset = "tiny"
seq_len = 16
[manifest.data]
spec = "text:{text}"
[manifest.swarm]
batch_tokens = 64
inner_steps = 3
total_steps = 1000
min_round_s = 1.0
max_round_s = 20.0
[manifest.pipeline]
stages = 2
microbatches = 4
[manifest.inner]
warmup_steps = 5
[[peers]]
name = "home"
count = 1
tokens_per_s = 64.0
[[peers]]
name = "far"
count = 2
tokens_per_s = 48.0
regions = ["Iowa", "London"]
join_s = [1.0, 3.0]
[[happenings]]
at = 16.0
what = "kill"
peers = ["far/1"]
for_s = 8.0
[expect]
min_rounds = 2
min_members = 3
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("".join(f"{i} and {i * i}\n" for i in range(2000)))
    return SMALL.replace("{text}", str(file))


@pytest.fixture(scope="module")
def small(text: str) -> Scenario:
    return parse_scenario(text, name="small")


@pytest.fixture(scope="module")
def recipe(small: Scenario) -> Recipe:
    return read_scenario(small, Ed25519Signer(bytes(32)).peer_id)[0]


@pytest.mark.thorough
def test_short_steps_go_on_after_each_round(text: str) -> None:
    """Whoever is busy with its stage's round for a moment is not waited for for long."""
    quick = text.replace("tokens_per_s = 64.0", "tokens_per_s = 640.0").replace(
        "tokens_per_s = 48.0", "tokens_per_s = 640.0"
    )
    scenario = parse_scenario(
        quick.split("[[happenings]]")[0].replace('["Iowa", "London"]', '["Belgium"]'), name="quick"
    )
    steps: list[float] = []

    def note(line: str, event: Event) -> None:
        if event["event"] == "pipeline.step":
            steps.append(event["time"])

    report = simulate_pipeline(prepare_pipeline(scenario, 0, make_schedule(scenario, 0, SHIPPED)), sink=note)
    assert report.violations == [] and report.rounds >= 5
    assert max(after - before for before, after in pairwise(steps)) < 5.0


def test_a_pipeline_is_run_judged_and_reported_and_twice_the_same(text: str, tmp_path: Path) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(text)
    shown = CliRunner().invoke(app, ["sim", "run", str(file), "--json", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["passed"] and result["violations"] == [] and result["rounds"] >= 2 and result["members"] == 3
    assert 0.0 < result["training_share"] < 1.0
    facts, events = load_folder(out)
    assert [peer.region for peer in facts.peers] == ["Belgium", "Iowa", "London"]
    assert {event["stage"] for event in events[facts.peers[0].peer] if event["event"] == "step"} == {0}
    steps = logged_steps(events)
    assert len(steps) >= 6 and sum(step.landed for step in steps) >= 20
    page = (out / "report.html").read_text()
    assert "Steps of the pipeline" in page and ">Iowa<" in page
    assert facts.ledger is not None and json.loads((out / "report.json").read_text())["samples_lost"] == 0
    seconds = {
        (one.op.kind, step.timeline.peers[one.peer]): one.end_s - one.begin_s
        for step in steps
        for one in step.timeline.ran
    }
    scenario = parse_scenario(text, name="small")
    model = read_scenario(scenario, Ed25519Signer(bytes(32)).peer_id)[0].model
    pace = StagePace.of(model, StageSlice((1, 2), 0), 1.0 / 64.0)
    # others may be computed before it, at the same door
    assert seconds[Kind.F, facts.peers[0].peer] == pytest.approx(pace.seconds(Kind.F, 16), abs=3e-3)
    assert seconds[Kind.B, facts.peers[0].peer] == pytest.approx(pace.seconds(Kind.B, 16), abs=3e-3)
    again = play_scenario(scenario, 0, make_schedule(scenario, 0, tmp_path), out=None, quiet=True)
    assert again["log_sha256"] == result["log_sha256"]


def test_rounds_are_timed_where_they_are_counted_and_contributions_where_they_are_missed() -> None:
    """(stage, life, height, version, seconds): two members of stage 0 say the same, stage 1 is ahead, and stage 0 is begun anew from version 1."""
    said = [
        (1, 0, 1, 1, 9.0),
        (1, 0, 2, 2, 9.0),
        (0, 0, 1, 1, 2.0),
        (0, 0, 1, 1, 2.0),
        (0, 0, 2, 2, 3.0),
        (0, 1, 1, 2, 4.0),
    ]
    report = Report(0, 4, [])
    for stage, life, height, version, seconds in said:
        named = {
            "event": "round.commit",
            "peer": "aa",
            "stage": stage,
            "life": life,
            "height": height,
            "round": height,
            "version": version,
        }
        report.note(0.0, named | {"seconds": seconds, "sent_bytes": 5, "contributed": True})
    report.note(0.0, {"event": "round.missed", "peer": "aa", "stage": 1})
    assert report.round_seconds == [2.0, 3.0, 4.0]
    assert (report.contributed, report.missed, report.sent_bytes) == (6, 1, 30), "of all stages, to be compared"


@pytest.mark.thorough
def test_a_scenario_may_leave_routes_to_whoever_sends(text: str, tmp_path: Path) -> None:
    """One of two that stage 1 has is killed; and the same seed is the same log."""
    text = text.replace("count = 2", "count = 2\nstage = 1", 1)
    scenario = parse_scenario(text.replace("stages = 2", 'stages = 2\nrouting = "dynamic"', 1), name="small")
    result = play_scenario(scenario, 0, make_schedule(scenario, 0, tmp_path), out=tmp_path / "out", quiet=True)
    assert result["passed"] and result["violations"] == []
    _, events = load_folder(tmp_path / "out")
    steps = logged_steps(events)
    assert sum(step.landed for step in steps) >= 20
    assert any(len({way[1] for way in step.routes.values()}) == 2 for step in steps)
    again = play_scenario(scenario, 0, make_schedule(scenario, 0, tmp_path), out=None, quiet=True)
    assert again["log_sha256"] == result["log_sha256"]
    planned = parse_scenario(text, name="small")
    other = play_scenario(planned, 0, make_schedule(planned, 0, tmp_path), out=None, quiet=True)
    assert other["log_sha256"] != result["log_sha256"]


def test_what_breaks_a_pipeline_is_made_small_and_played_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of two contributors is half of what it should be; the kill and the return have nothing to do with that."""
    smaller = "dim = 16\nnum_layers = 2\nnum_heads = 2\nnum_kv_heads = 1\nffn_dim = 24\nseq_len = 16"
    scenario = parse_scenario(text.replace("seq_len = 16", smaller), name="small")
    reduce = Participation._reduce

    def wrong(self: Participation, *what: Any, **how: Any) -> Reduce:
        asked = reduce(self, *what, **how)
        return replace(asked, weights=tuple((peer, weight / 2) for peer, weight in asked.weights))

    monkeypatch.setattr(Participation, "_reduce", wrong)
    monkeypatch.setattr(sim_run, "SHORTEN_RUNS", 3)
    result = play_scenario(scenario, 0, make_schedule(scenario, 0, tmp_path), out=tmp_path, quiet=True)
    assert not result["passed"] and "invariant 4: the mean of round" in result["violations"][0]
    failure = load_failure(Path(result["folder"]))
    assert 0 < len(failure.faults) < len(make_schedule(scenario, 0, tmp_path).faults)
    replayed = CliRunner().invoke(app, ["sim", "replay", result["folder"]])
    assert replayed.exit_code == 0 and "invariant 4" in replayed.output and "the same log" in replayed.output


def test_a_peer_of_a_pipeline_that_crashes_is_a_violation(
    small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: StageLearner, *what: Any, **how: Any) -> StepReport:
        raise KeyError("nothing")

    monkeypatch.setattr(StageLearner, "step", crash)
    plan = prepare_pipeline(small, 0, make_schedule(small, 0, tmp_path))
    report = simulate_pipeline(plan, keep=True)
    assert report.violations == ["invariant 8: a peer crashed: KeyError: 'nothing'"]
    assert report.broken_at is not None and "invariant.broken" in report.events[-1]


def test_in_the_calm_a_pipeline_has_to_get_well(
    small: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was killed for good is back; the run ends when all is well, or says what is not."""
    gone = (structs.replace(small.happenings[0], peers=("far",), for_s=None),)
    calm = structs.replace(small, duration_s=180.0, calm_s=140.0, happenings=gone)
    plan = prepare_pipeline(calm, 0, make_schedule(calm, 0, tmp_path))
    report = simulate_pipeline(plan, keep=True)
    assert report.violations == [] and sum("start peer" in line for line in report.events) == 5
    assert 40.0 < float(report.events[-1].split()[0]) < 120.0
    monkeypatch.setattr("farflung.node.stage_peer.StagePeer.trains", False)
    report = simulate_pipeline(replace(plan, calm_s=5.0))
    assert report.violations[0].startswith("invariant 0: no round of stage 0 in the calm stretch; ")
    assert "; nobody trains in stage 0; " in report.violations[0]


@pytest.mark.parametrize(
    ("old", "new"), [('mode = "real"', 'mode = "cost"'), ("count = 2", 'count = 2\nattacks = ["forge"]')]
)
def test_what_a_pipeline_cannot_be_simulated_with_is_refused(text: str, old: str, new: str) -> None:
    text = re.sub(r"\[manifest\.data\]\nspec = .*\n", "", text)  # which `cost` takes none of
    scenario = parse_scenario(text.replace(old, new, 1), name="small")
    with pytest.raises(ConfigError, match="change that, or leave out"):
        play_scenario(scenario, 0, make_schedule(scenario, 0, Path()), out=None, quiet=True)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("count = 2", "count = 1", "1 of its 2 peers can take stages 1, 2"),
        ("count = 2", "count = 2\nstage = 2", "0 of its 3 peers can take stages 1, which"),
        ("count = 2", "count = 2\nstage = 0", "0 of its 3 peers can take stages 1, 2, which"),
    ],
)
def test_stages_that_nobody_can_take_are_refused(text: str, old: str, new: str, said: str) -> None:
    three = text.replace("stages = 2", "stages = 3").replace('["Iowa", "London"]', '["Iowa"]')
    whole = parse_scenario(three, name="small")
    prepare_pipeline(whole, 0, make_schedule(whole, 0, Path()))
    few = parse_scenario(three.replace(old, new).split("[[happenings]]")[0], name="small")
    schedule = make_schedule(few, 0, Path())
    with pytest.raises(ConfigError, match=f"small has 3 stages: {said}"):
        prepare_pipeline(few, 0, schedule)
    with pytest.raises(ConfigError, match=f"small has 3 stages: {said}"):
        found_locally(few, 0, schedule, Path())


def test_processors_that_pipelines_would_not_share_are_refused(small: Scenario) -> None:
    shared = structs.replace(small, costs=structs.replace(small.costs, processors=2))
    with pytest.raises(ConfigError, match=r"leave costs\.processors out"):
        prepare_pipeline(shared, 0, make_schedule(shared, 0, Path()))


def test_a_start_takes_as_long_as_it_costs_and_who_leaves_before_it_serves_is_gone(small: Scenario) -> None:
    late = structs.replace(
        small,
        duration_s=30.0,
        costs=structs.replace(small.costs, start_s=5.0),
        happenings=(structs.replace(small.happenings[0], at=6.5, what="leave", for_s=None),),
    )
    schedule = make_schedule(late, 0, Path())
    begun = {fault.peer: fault.at for fault in schedule.faults if isinstance(fault, Start)}
    assert 1.5 < begun[2] < 3.0, "it leaves before it has started"
    report = simulate_pipeline(prepare_pipeline(late, 0, schedule), keep=True)
    assert report.violations == []
    up = [(float(line.split()[0]), line.split()[1]) for line in report.events if " node.start " in line]
    assert {peer for _, peer in up} == {"0", "1"} and all(at >= begun[int(peer)] + 5.0 for at, peer in up)


def test_a_peer_needs_the_memory_of_one_stage(text: str) -> None:
    """The largest preset in three stages, of which none needs what the whole model does."""
    big = (
        text.replace('preset = "tiny"', 'preset = "350m"')
        .replace("stages = 2", "stages = 12")
        .replace("batch_tokens = 64", "batch_tokens = 256")
        .replace("seq_len = 16", "seq_len = 64")
    )
    own = 'name = "far"\nmemory_gb = '
    founder = Ed25519Signer(bytes(32)).peer_id
    read_scenario(parse_scenario(big.replace('name = "far"', own + "3.0"), name="big"), founder)
    with pytest.raises(ConfigError, match=r"have 0\.9 GB.*cut it into"):
        read_scenario(parse_scenario(big.replace('name = "far"', own + "0.9"), name="big"), founder)
    whole = big.replace("[manifest.pipeline]\nstages = 12\nmicrobatches = 4\n", "")
    with pytest.raises(ConfigError, match=r"have 3 GB"):
        read_scenario(parse_scenario(whole.replace('name = "far"', own + "3.0"), name="big"), founder)


def test_the_shipped_scenario_can_be_played_both_ways() -> None:
    scenario = load_scenario(SHIPPED / "pipeline-6.toml")
    assert has_pipeline(scenario) and not has_pipeline(load_scenario(SHIPPED / "local-3.toml"))
    check_playable(scenario, free_bytes=10e9)


@pytest.mark.parametrize(("name", "free"), [("stage-lost-6x1", 2), ("stage-lost-6x2", 6), ("stage-0-lost-6x2", 6)])
def test_peers_are_told_their_stage(name: str, free: int) -> None:
    scenario = load_scenario(SHIPPED / f"{name}.toml")
    check_playable(scenario, free_bytes=10e9)
    roster = scenario.roster()
    recipe, _ = read_scenario(scenario, bytes(32))
    keys = [str(number) for number in range(len(roster))]
    told = [
        orders_for(scenario, recipe.manifest, keys, peer, invitation="", port=1, meter=False).stage
        for peer in range(len(roster))
    ]
    assert {own.name: stage for (own, _, _), stage in zip(roster, told, strict=True)}["three"] == 3
    assert told.count(None) == free
    wrong = (structs.replace(scenario.peers[0], name="x", stage=6),)
    with pytest.raises(ConfigError, match=r"peers 'x': stage = 6; give 0 to 5"):
        structs.replace(scenario, peers=wrong)
    with pytest.raises(ConfigError, match=r"peers 'x': there is no pipeline"):
        structs.replace(scenario, peers=wrong, manifest={})


@pytest.mark.thorough
@pytest.mark.slow  # half a minute
@pytest.mark.timeout(300)
def test_the_one_free_peer_takes_over_a_lost_stage(tmp_path: Path) -> None:
    """It is a data node, and proposes the new life itself."""
    scenario = load_scenario(SHIPPED / "stage-lost-6x1.toml")
    result = play_scenario(scenario, 0, make_schedule(scenario, 0, SHIPPED), out=tmp_path, quiet=True)
    assert result["passed"], result
    [one] = json.loads((tmp_path / "report.json").read_text())["recoveries"]
    assert one["stage"] == 3 and one["iterations"] == pytest.approx(result["recovery_iterations"], abs=0.01)


def test_a_stage_takes_its_share_of_the_time_of_a_step(small: Scenario, recipe: Recipe) -> None:
    """All stages together, forward and backward without recomputing, and the head take as long as the tokens do."""
    sizes = recipe.manifest.pipeline.sizes(recipe.model.num_layers)
    paces = [StagePace.of(recipe.model, StageSlice(sizes, stage), 0.5) for stage in range(len(sizes))]
    once = sum(pace.seconds(Kind.F, 10) + pace.seconds(Kind.B, 10) * 2 / 3 for pace in paces)
    assert once + paces[0].seconds(Kind.LOSS, 10) == pytest.approx(10 * 0.5)
    assert paces[1].layers == pytest.approx(2 * paces[0].layers)  # two layers, and one
    keys = [Ed25519Signer(bytes([number]) * 32).peer_id.hex() for number in range(3)]
    orders = orders_for(small, recipe.manifest, keys, 1, invitation="", port=1, meter=False)
    assert orders.token_s == 1.0 / 48.0 and orders.stage is None


def test_a_paced_stage_computes_the_same_and_takes_longer(recipe: Recipe, tmp_path: Path) -> None:
    stage = stage_recipe(recipe, 1)
    learner = stage.learner(None, Runtime())
    slow = PacedStageLearner(learner, 1e-4, tmp_path / "late.txt")
    x = torch.randn(2, 16, recipe.model.dim)
    assert torch.equal(slow.worker.forward(1, x), learner.worker.forward(1, x))
    sums, others = Accumulated(), Accumulated()
    gradient = torch.ones_like(x)
    one, other = slow.worker.backward(1, x, gradient, sums), learner.worker.backward(1, x, gradient, others)
    assert one is not None and other is not None and torch.equal(one, other) and sums.visits == others.visits
    (tmp_path / "late.txt").unlink(missing_ok=True)
    fast = PacedStageLearner(learner, 0.0, tmp_path / "late.txt")
    fast.worker.forward(1, x)
    assert float((tmp_path / "late.txt").read_text()) > 0.0  # nothing is as fast as that
