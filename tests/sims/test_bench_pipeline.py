"""`farflung bench pipeline`: processes do what is simulated, learn what one process learns, and its page says what was measured."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from farflung.sims.bench_pipeline import codecs_of, missed, run_pipeline
from farflung.sims.main import app
from farflung.sims.pipeline_figures import Measured
from farflung.sims.pipeline_measure import DeathFigures, Feed, PlanFigures, computed, data_node_death, time_plan
from farflung.sims.pipeline_page import PAGE, checks, write_page
from farflung.sims.pipeline_skipping import MODEL, SkippingRow, SkippingTask, evaluate, routes, skipping_rows
from farflung.sims.pipeline_task import COLUMNS, FULL, SKIPPING, BenchTask
from farflung.sims.stage_group import stage_group
from farflung.training.inner import make_optimizer
from farflung.training.model import Decoder, ModelConfig
from farflung.training.pipeline_execute import execute
from farflung.training.pipeline_simulate import simulate

TASK = BenchTask(
    model=ModelConfig(
        vocab_size=264, dim=16, num_layers=3, num_heads=2, num_kv_heads=2, ffn_dim=32, seq_len=16, tie_embeddings=False
    ),
    peers=6,
    batch=2,
    microbatches=4,
    visits=2,
    slots=2,
    layer_s=0.01,
    proposals=200,
)


def test_plans_are_of_the_same_work_and_use_all_stages() -> None:
    plans = BenchTask(proposals=2000).plans()
    assert [sum(lane.microbatches for lane in plan.lanes) for plan in plans.values()] == [12, 12, 12]
    assert [{len(lane.route) for lane in plan.lanes} for plan in plans.values()] == [{6}, {6}, {4}]
    visits = [sum(hop.stage == stage for lane in plans[SKIPPING].lanes for hop in lane.route) for stage in range(6)]
    assert visits[0] == 6 and sum(visits) == 24 and min(visits) >= 2
    times = {name: simulate(plan, BenchTask().costs("fp32")).makespan_s for name, plan in plans.items()}
    assert times[SKIPPING] < times[FULL] <= times[COLUMNS]


def test_the_network_is_as_unequal_as_it_is_said_to_be() -> None:
    task = BenchTask()
    assert all(20 <= rate / 125_000 <= 200 for rate in task.up_bytes_per_s)
    assert all(0.005 <= way <= 0.13 for a, row in enumerate(task.latency_s) for b, way in enumerate(row) if a != b)
    assert [task.costs(codec).num_peers for codec in codecs_of(64)] == [12, 12, 12]
    exact, coarse = task.costs("fp32"), task.costs("tokenint8(width=64)")
    assert exact.transmit_s[0][1] == pytest.approx((64 * 512 * 4 + 32) / task.up_bytes_per_s[0], rel=1e-3)
    assert coarse.transmit_s[0][1] < 0.27 * exact.transmit_s[0][1]


@pytest.mark.slow
@pytest.mark.timeout(400)  # the group has 300 s to come up
def test_processes_learn_what_one_process_learns(tmp_path: Path) -> None:
    plans, feed = TASK.plans(), Feed(TASK)
    world = TASK.world(plans[SKIPPING], learns=True)
    assert world.inner is not None
    model = world.decoder()
    optimizer = make_optimizer(model, world.inner)
    parts = [[p for n, p in model.named_parameters() if f"layers.{stage}." in n] for stage in range(3)]
    parts[0] += [p for n, p in model.named_parameters() if "layers." not in n]
    with stage_group(6, tmp_path, within_s=300.0, far=TASK.far) as group:
        group.enter(world)
        for number in range(2):
            batches = feed.batches(number)
            seen = group.step(plans[SKIPPING], batches, number=number)
            data = [(one[:, :-1], one[:, 1:]) for one in batches]
            losses, means = execute(plans[SKIPPING], model, world.layers, data)
            assert [seen.losses[m] for m in range(4)] == pytest.approx(losses, rel=1e-4)
            for name, parameter in model.named_parameters():
                parameter.grad = means[name]
            for part in parts:  # peers clip what they hold
                nn.utils.clip_grad_norm_(part, world.inner.max_grad_norm)
            optimizer.step(world.inner.schedule.at(number))
            optimizer.zero_grad()
            assert seen.learnt_s >= seen.seconds >= max(seen.busy_s)
            simulated = simulate(plans[SKIPPING], TASK.costs("fp32"))
            assert len(seen.ran.ran) == len(simulated.ran)
            assert {one[:3] for one in seen.ran.sent} == {one[:3] for one in simulated.sent}
            assert all(-0.1 < one.begin_s < one.end_s <= seen.seconds + 1.0 for one in seen.ran.sent)
        for name, found in group.parameters().items():
            torch.testing.assert_close(found, dict(model.named_parameters())[name].detach(), rtol=1e-3, atol=1e-5)
        figures, _ = time_plan(group, TASK, feed, FULL, plans[FULL], codec="tokenint8(width=16)", steps=2)
        assert 2 * 18 < figures.bytes_per_token_and_boundary < 2 * 18 + 80  # headers weigh much on 32 tokens
        assert all(0 < share <= 1 for share in figures.utilisation)
        assert figures.measured_s >= 0.9 * figures.simulated_s
        lost = data_node_death(group, TASK, feed, figures, plans[FULL], lambda text: None)
        assert (lost.void, lost.cut, lost.plan) == (2, 0, FULL) and lost.simulated_without_s is None


def figures(plan: str, *, seconds: float | None, ratio: float = 1.02) -> PlanFigures:
    return PlanFigures(
        plan=plan,
        codec="fp32",
        simulated_s=2.0,
        measured_s=2.0 * ratio,
        steps=5,
        bytes_per_token_and_boundary=520.0,
        utilisation=(0.5, 0.25),
        utilisation_simulated=(0.5, 0.3),
        late_percent=0.0,
        learning_s=None if plan == COLUMNS else 0.5,
        steps_to_target=None if seconds is None else 10.0,
        seconds_to_target=seconds,
        curve=() if plan == COLUMNS else ((0.0, 5.5), (9.0, 2.5)),
    )


def test_columns_take_the_steps_of_other_full_routes_in_their_own_time() -> None:
    columns = computed(figures(COLUMNS, seconds=None, ratio=1.5), figures(FULL, seconds=30.0))
    assert columns.computed and columns.steps_to_target == 10.0
    assert columns.seconds_to_target == pytest.approx(10.0 * (3.0 + 0.5))
    never = computed(figures(COLUMNS, seconds=None), figures(FULL, seconds=None))
    assert not never.computed and never.seconds_to_target is None


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    plan = TASK.plans()[SKIPPING]
    timeline = simulate(plan, TASK.costs("fp32"))
    found = Measured(
        plans=(
            figures(COLUMNS, seconds=None),
            figures(FULL, seconds=40.0, ratio=1.2),
            figures(SKIPPING, seconds=20.0),
        ),
        codecs=(figures(FULL, seconds=40.0), figures(FULL, seconds=None)),
        deaths=(
            DeathFigures(
                plan=FULL,
                peer=7,
                stage=3,
                moment="after a backward",
                seconds=3.0,
                times_normal=1.4,
                rerouted=2,
                shortened=1,
                cut=0,
                void=0,
                simulated_without_s=2.5,
            ),
            DeathFigures(
                plan=SKIPPING,
                peer=6,
                stage=0,
                moment="a data node",
                seconds=2.0,
                times_normal=1.6,
                rerouted=0,
                shortened=0,
                cut=0,
                void=6,
                simulated_without_s=None,
            ),
        ),
        ran=timeline,
        simulated=timeline,
    )
    assert [check.met for check in checks(found)] == [False, True, False, True]
    assert [said.split(":")[0] for said in missed({"goals": [asdict(check) for check in checks(found)]})] == [
        "a step takes what is simulated, within 10 %",
        "a step in which a peer is lost takes at most 1.5 times as long",
    ]
    assert missed({}) == []
    row = SkippingRow(trained="whole", perplexity=10.0, left_out={25: (11.0, 10.5, 12.0), 50: (15.0, 12.0, 20.0)})
    write_page(tmp_path, TASK, found, [row])
    page = (tmp_path / PAGE).read_text()
    assert "+20.0 % at worst (full routed, fp32)" in page and "20 s and 40 s" in page
    assert "11.00 (10.50 to 12.00), +10.0 %" in page
    assert "| 1 | 25 % | 30 % | 25 % | 30 % | 25 % | 30 % |" in page
    assert "| full routed | 7 (stage 3) | after a backward | 3.00 | 1.40 | 2.50 | 2 | 1 | 0 | 0 |" in page
    assert "| skipping | 6 (stage 0) | a data node | 2.00 | 1.60 | - | 0 | 0 | 0 | 6 |" in page
    assert "1.60 times at worst (skipping, peer 6, a data node)" in page
    assert {file.name for file in tmp_path.iterdir()} == {PAGE, "pipeline-step.png", "pipeline-loss.png"}


def test_stages_are_left_out_in_all_choices() -> None:
    torch.manual_seed(0)
    model = Decoder(MODEL, seed=0)
    windows = torch.randint(0, 264, (2, 17))
    row = evaluate(model, windows, "not at all")
    for mean, least, most in row.left_out.values():
        assert least <= mean <= most
    assert row.perplexity == pytest.approx(math.exp(5.58), rel=0.1)
    nothing = Decoder(MODEL, seed=0)
    for name, parameter in nothing.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and "layers.0" not in name:
            parameter.data.zero_()  # layers that do nothing can be left out for nothing
    silent = evaluate(nothing, windows, "nothing")
    assert silent.left_out[50] == pytest.approx((silent.perplexity,) * 3, rel=1e-5)


def test_routes_that_skip_use_all_stages_about_as_often() -> None:
    rng = random.Random(1)
    plans = [routes(SkippingTask(), 6, rng) for _ in range(50)]
    visits = [sum(hop.stage == stage for p in plans for lane in p.lanes for hop in lane.route) for stage in range(8)]
    assert visits[0] == 200 and min(visits[1:]) > 120 and sum(visits) == 1200


def test_skipping_rows_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = skipping_rows(lambda text: None, SkippingTask(model=TASK.model, visits=(3, 2), steps=3, windows=4))
    assert [row.trained for row in rows] == ["whole", "33.3 % skipped"]
    monkeypatch.setattr("farflung.sims.bench_pipeline.skipping_rows", lambda say: rows)
    out = tmp_path / "figures.json"
    told = run_pipeline(as_json=True, out=out, skip_stages=True)
    assert json.loads(out.read_text()) == json.loads(json.dumps(told))
    assert told.keys() == {"skipped_at_inference"}


def test_a_page_has_both_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs no processes to trace"):
        run_pipeline(skip_stages=True, trace=tmp_path / "trace.json")
    args = ["bench", "pipeline", "--skip-stages", "--page", str(tmp_path)]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "leave --skip-stages out" in result.output and not list(tmp_path.iterdir())
