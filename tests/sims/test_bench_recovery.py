"""`farflung bench recovery`: losses are real, recoveries use what survives, and the computed methods are what training
would give.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sims.recovery_cases import AT_RISK, SAFE, TOY, use_small_corpus
from typer.testing import CliRunner

from farflung.sims import bench_recovery, recovery_train
from farflung.sims.bench_recovery import parse_rates, run_recovery
from farflung.sims.check import Check
from farflung.sims.main import app
from farflung.sims.recovery_clock import Curve, at, first_at, progress, rolled_back, seconds
from farflung.sims.recovery_failures import events, pattern
from farflung.sims.recovery_jobs import make_all
from farflung.sims.recovery_methods import METHODS, OURS, SINGLE, SWAPS_ALONE, Method, by_names
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_rows import rows, runs_of, single_runs_of
from farflung.sims.recovery_runs import Run
from farflung.sims.recovery_tiers import CI, PUBLISHED, TIERS, Clock
from farflung.sims.recovery_train import Feed, Outcome, Progress, advance, start, train
from farflung.sims.recovery_words import checks
from farflung.training.errors import NonFinite
from farflung.training.model import next_token_loss
from farflung.training.recovery_checkfree import CheckFree
from farflung.training.recovery_fit import Fit
from farflung.training.recovery_rise import RISE_STEPS

NAMED = {method.name: method for method in [*SINGLE, *METHODS]}
BROUGHT_BACK = sorted(NAMED.keys() - {"none", "checkpoint", "redundant", OURS.name})


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_small_corpus(monkeypatch):
        yield


def trained(checkfree: CheckFree | None = None, steps: int = 3) -> Pipeline:
    pipeline = Pipeline(TOY, checkfree or CheckFree(), seed=0)
    feed = Feed(TOY, 0)
    for step in range(steps):
        feed.step(pipeline, step)
    return pipeline


def vectors(pipeline: Pipeline) -> list[torch.Tensor]:
    return [part.flat.clone() for part in pipeline.parts]


def test_the_stages_in_order_are_the_model() -> None:
    pipeline = trained()
    windows = recovery_train._windows(TOY)
    with torch.no_grad():
        whole = float(next_token_loss(pipeline.model(windows[:, :-1]), windows[:, 1:]))
    assert pipeline.evaluate(windows) == pytest.approx(whole, rel=1e-6)
    assert sum(part.flat.numel() for part in pipeline.parts) == sum(p.numel() for p in pipeline.model.parameters())


def test_half_of_the_microbatches_take_the_swapped_order() -> None:
    plain, swapped = trained(steps=1), trained(CheckFree(plus=True), steps=1)
    for stage in range(4):
        assert torch.equal(plain.boundaries[stage][0][0], swapped.boundaries[stage][0][0])
        assert not torch.equal(plain.boundaries[stage][1][0], swapped.boundaries[stage][1][0])
    # the odd microbatch enters stage 1 first, and what comes out of it enters stage 0
    assert torch.equal(swapped.boundaries[1][1][1], swapped.boundaries[0][1][0])


def test_a_copy_goes_on_as_the_original_does() -> None:
    one = trained()
    other = one.copy()
    feed = Feed(TOY, 0)
    assert feed.step(one, 3) == feed.step(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(vectors(one), vectors(other), strict=True))


def test_a_loss_that_nobody_recovers_ends_training() -> None:
    pipeline = trained()
    pipeline.lose([2])
    assert bool(pipeline.stages[2].flat.isnan().all()) and pipeline.stages[2].norm is None
    assert not pipeline.stages[2].optimizer.tensors() and not bool(pipeline.ends.flat.isnan().any())
    with pytest.raises(NonFinite):
        Feed(TOY, 0).step(pipeline, 3)
    pipeline = trained()
    pipeline.lose([0])
    assert bool(pipeline.ends.flat.isnan().all())


@pytest.mark.parametrize("name", BROUGHT_BACK)
@pytest.mark.parametrize("lost", [{0}, {1}, {3}, {1, 2}, {0, 3}, {0, 1, 2, 3}])
def test_recoveries_use_what_survives(name: str, lost: set[int]) -> None:
    """What is lost is NaN, so a recovery that read any of it would show."""
    method = NAMED[name]
    pipeline, keeper = start(method, TOY, seed=0)
    feed = Feed(TOY, 0)
    advance(pipeline, keeper, feed, 3, frozenset())
    before = vectors(pipeline)
    pipeline.lose(lost)
    keeper.recover(pipeline, frozenset(lost), 4)
    assert all(bool(vector.isfinite().all()) for vector in vectors(pipeline))
    for stage, vector in enumerate(before[:-1]):
        assert torch.equal(vector, pipeline.stages[stage].flat) == (stage not in lost)
        assert bool(pipeline.stages[stage].optimizer.tensors()) == (stage not in lost)
    assert keeper.rungs.total() == len(lost)
    advance(pipeline, keeper, feed, 4, frozenset())


def test_the_rung_that_is_asked_for_is_taken() -> None:
    for name, lost, rung in (
        ("fitted mean", {1}, "fitted mean"),
        ("neighbour mean", {1}, "mean"),
        ("neighbour mean", {1, 2}, "random"),
        ("swap twin", {3}, "copy"),
        ("interpolation", {1, 2}, "interpolation"),
        ("random", {1}, "random"),
        ("copy", {1}, "copy"),
    ):
        pipeline, keeper = start(NAMED[name], TOY, seed=0)
        pipeline.lose(lost)
        keeper.recover(pipeline, frozenset(lost), 3)
        assert keeper.rungs == {rung: len(lost)}, name


def test_a_recovered_stage_learns_faster_for_a_while() -> None:
    pipeline, keeper = start(NAMED["checkfree"], TOY, seed=0)
    pipeline.lose([1])
    keeper.recover(pipeline, frozenset({1}), 3)
    assert [part.steps_since_bump for part in pipeline.parts] == [None, 0, None, None, None]
    Feed(TOY, 0).step(pipeline, 3)
    assert pipeline.stages[1].steps_since_bump == 1


def test_a_stage_that_nodes_bring_back_begins_with_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of the published rules does."""
    for name, rises in (("ours", True), ("checkfree", False)):
        pipeline, keeper = start(NAMED[name], SAFE, seed=0)
        pipeline.lose([1])
        keeper.recover(pipeline, frozenset({1}), 3)
        assert [part.rises for part in pipeline.parts] == [False, rises, False, False, False]
        before = pipeline.stages[1].flat.clone()
        Feed(SAFE, 0).step(pipeline, 3)
        moved = (pipeline.stages[1].flat - before).abs().max().item()
        usual = Feed(SAFE, 0)._schedule.at(3)
        assert moved == pytest.approx(usual / RISE_STEPS if rises else 1.1 * usual, rel=0.05)
        keeper.close()


def test_a_fit_comes_nearer_to_what_the_neighbours_saw() -> None:
    pipeline = trained()
    mean = (pipeline.stages[0].flat + pipeline.stages[2].flat) / 2
    pipeline.replace(1, mean, bump=True)
    first, last = pipeline.fit(1, Fit(steps=30))
    assert last < first


def test_checkpoints_are_read_off_the_undisturbed_curve() -> None:
    """A real rollback, with all optimisers' state, replays to the same bits."""
    failures = [frozenset[int](), frozenset({1}), frozenset[int](), frozenset({0}), frozenset[int](), frozenset[int]()]
    undisturbed = train(NAMED["none"], TOY, rate=0.0, seed=0)
    pipeline, _ = start(NAMED["none"], TOY, seed=0)
    feed, windows = Feed(TOY, 0), recovery_train._windows(TOY)
    saved, reached, curve = pipeline.copy(), 0, [(0, pipeline.evaluate(windows))]
    for step, lost in enumerate(failures, start=1):
        if lost:
            pipeline, reached = saved.copy(), reached // TOY.checkpoint_every * TOY.checkpoint_every
        feed.step(pipeline, TOY.warm_steps + reached)
        reached += 1
        if reached % TOY.checkpoint_every == 0:
            saved = pipeline.copy()
        assert reached == progress(failures, TOY.checkpoint_every)[step]
        if step % TOY.eval_every == 0:
            curve.append((step, pipeline.evaluate(windows)))
    computed = rolled_back(undisturbed.curve, failures, TOY.checkpoint_every)
    for (step, loss), (other, expected) in zip(curve, computed, strict=True):
        assert step == other
        if progress(failures, 2)[step] % TOY.eval_every == 0:  # where the curve has a point
            assert loss == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 8))
def test_progress_never_runs_ahead_of_the_steps(lost: list[bool], every: int) -> None:
    reached = progress([frozenset({0}) if one else frozenset() for one in lost], every)
    assert reached[0] == 0 and len(reached) == len(lost) + 1
    for step, (before, after) in enumerate(pairwise(reached)):
        assert after == (before - before % every if lost[step] else before) + 1


CURVE: Curve = ((0, 5.0), (10, 3.0), (20, 3.5), (30, 2.0))


def test_reading_a_curve() -> None:
    assert at(CURVE, 5) == pytest.approx(4.0) and at(CURVE, 30) == 2.0
    assert first_at(CURVE, 3.0) == pytest.approx(10.0)
    assert first_at(CURVE, 2.75) == pytest.approx(25.0)
    assert first_at(CURVE, 1.0) is None
    with pytest.raises(ValueError, match="not within"):
        at(CURVE, 31)


def test_the_modelled_clock() -> None:
    failures = [frozenset({1, 3}), frozenset[int](), frozenset({0})]
    safe, unsafe = (
        {method.name: seconds(tier, method, 3, failures, 0.02) for method in METHODS} for tier in (SAFE, TOY)
    )
    for hours in (safe, unsafe):
        assert hours["none"] == pytest.approx(3 * 91.3)
        assert hours["redundant"] == pytest.approx(3 * 151.04)
        assert hours["checkpoint"] == hours["checkfree"] == pytest.approx(3 * 91.3 + 60)
    recovery_s = (safe["ours"] - 3 * 91.3 * 1.02) / 2
    assert recovery_s == pytest.approx(30 + 2 + 3.9, abs=0.1)  # silence, listening, a byte a parameter
    assert unsafe["ours"] - safe["ours"] == pytest.approx(150)  # a data node is waited for
    assert Clock().link_bytes_s == pytest.approx(22.2e6, rel=0.01)


def test_failures_have_the_stated_rate_and_leave_a_neighbour() -> None:
    long = replace(CI, steps=20_000, rates=(0.33,))
    drawn = pattern(long, 0.33, seed=1)
    assert drawn == pattern(long, 0.33, seed=1) != pattern(long, 0.33, seed=2)
    lost = sum(map(len, drawn)) / (long.steps * long.stages)
    assert lost == pytest.approx(1 - 0.67 ** (91.3 / 3600), rel=0.1)
    assert not any(stage + 1 in one for one in drawn for stage in one)
    assert {stage for one in drawn for stage in one} == set(range(6))


def test_events_name_rungs_that_there_are() -> None:
    for tier in (CI, PUBLISHED):
        for event in events(tier):
            assert set(event.rungs) <= {method.name for method in SINGLE}
            assert OURS.name in event.rungs
    named = {event.name: event.stages for event in events(CI)}
    assert named["adjacent"] == ((2, 3),) and named["both ends"] == ((0, 5),) and named["region"] == ((1, 5),)


def test_runs_are_known_by_what_decides_them() -> None:
    run = Run(method=METHODS[0], tier=TOY, rate=0.0, seed=0)
    same = replace(run, method=replace(run.method, name="other"), tier=replace(TOY, name="other", seeds=5))
    assert run.fingerprint == same.fingerprint
    others = [
        replace(run, seed=1),
        replace(run, rate=0.1),
        replace(run, once=(1,)),
        replace(run, method=SWAPS_ALONE),
        replace(run, tier=replace(TOY, lr=1e-3)),
    ]
    assert len({one.fingerprint for one in [run, *others]}) == 6
    assert json.loads(json.dumps(run.about)) == {"tier": "toy", "method": "none", "rate": 0.0, "seed": 0, "once": None}


def test_a_run_is_kept_as_soon_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cut goes on with what is missing, and ends with the same rows."""
    monkeypatch.setitem(TIERS, "toy", TOY)
    made: list[str] = []
    make = Run.make

    def cut(run: Run, progress: Progress) -> Outcome:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(run.fingerprint)
        return make(run, progress)

    def on(run: Run, progress: Progress) -> Outcome:
        assert run.fingerprint not in made
        return make(run, progress)

    monkeypatch.setattr(Run, "make", cut)
    out = tmp_path / "runs.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_recovery("toy", names="copy", out=out)
    assert [json.loads(line)["fingerprint"] for line in out.read_text().splitlines()] == made
    monkeypatch.setattr(Run, "make", on)
    whole = run_recovery("toy", names="copy", out=out)
    monkeypatch.setattr(Run, "make", make)
    assert run_recovery("toy", names="copy") == whole


@pytest.mark.thorough
@pytest.mark.slow
def test_several_at_a_time_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes have the whole corpus, and so has this one here."""
    monkeypatch.undo()
    runs = [Run(method=NAMED[name], tier=TOY, rate=0.5, seed=seed) for seed in (0, 1) for name in ("copy", "ours")]
    here = list(make_all(runs, jobs=1, progress=lambda step, loss: None))
    there = list(make_all(runs, jobs=2, progress=lambda step, loss: None))
    assert len(there) == len(runs)
    assert {run: outcome for run, outcome, _ in there} == {run: outcome for run, outcome, _ in here}
    assert not active_children()


@pytest.mark.slow
def test_what_is_under_way_elsewhere_is_ended_when_it_is_given_up() -> None:
    long = replace(TOY, steps=200_000)
    runs = [Run(method=NAMED["none"], tier=tier, rate=0.0, seed=0) for tier in (TOY, long, long)]
    making = make_all(runs, jobs=2, progress=lambda step, loss: None)
    assert next(making)[0] == runs[0]
    making.close()
    assert not active_children()


def test_the_whole_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(TIERS, "toy", replace(AT_RISK, name="toy"))
    out = tmp_path / "runs.jsonl"
    found, once, goals = run_recovery("toy", out=out, page=tmp_path / "docs", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == len(found) == 2 + len(METHODS) - 1
    assert len(told["goals"]) == len(goals)
    assert len(told["single_losses"]) == len(once) == sum(len(event.rungs) for event in events(AT_RISK))
    page = (tmp_path / "docs" / "recovery_toy.md").read_text()
    assert (tmp_path / "docs" / "recovery_toy.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"| {method.name} |" in page for method in METHODS) and "## Goals" in page
    none, swaps, *rest = found
    assert none.gap_percent == 0.0 and none.hours_to_target == pytest.approx(3 * 91.3 / 3600, rel=0.5)
    assert swaps.method == SWAPS_ALONE.name
    named = {row.method: row for row in rest}
    redundant = named["redundant"]
    assert redundant.gap_percent == 0.0 and none.hours_to_target is not None
    assert redundant.hours_to_target == pytest.approx(none.hours_to_target * 151.04 / 91.3)
    assert sum(named["ours"].rungs.values()) >= named["ours"].losses > 0
    assert goals == checks(found, once, AT_RISK) and len(goals) == 6

    def never(run: Run, progress: object) -> None:
        pytest.fail(f"nothing is left to run, but {run}")

    monkeypatch.setattr(Run, "make", never)
    whole = run_recovery("toy", single_seeds=0, out=out, page=tmp_path, as_json=True)
    without = (tmp_path / "recovery_toy.md").read_text()
    assert whole[:2] == (found, []) and "Single losses" not in without and "--single-seeds 0 --page" in without
    with pytest.raises(pytest.fail.Exception):
        run_recovery("toy", seeds=2, single_seeds=1, out=out)  # of whole runs there is a seed more to make
    rarely = run_recovery("toy", checkpoint_every=5, out=out, page=tmp_path, as_json=True)[0]
    assert [row.method for row in rarely if row not in found] == ["checkpoint"]
    assert "--checkpoint-every 5 --page" in (tmp_path / "recovery_toy.md").read_text()
    with pytest.raises(ValueError, match="checkpoints come every iteration"):
        run_recovery("toy", checkpoint_every=0)
    assert run_recovery("toy", out=out, as_json=True) == (found, once, goals)
    some, of_ours, _ = run_recovery("toy", names="ours", out=out, page=tmp_path, as_json=True)
    assert [row.method for row in some] == ["none", "ours"]
    assert {one.rung for one in of_ours} == {"ours", "fitted mean", "interpolation"}
    assert '--methods "none,ours"' in (tmp_path / "recovery_toy.md").read_text()


def test_rows_of_runs_that_diverged_have_no_figures() -> None:
    methods = by_names("checkfree")
    made = {}
    for run in runs_of(methods, TOY):
        outcome = train(NAMED["none"], TOY, rate=0.0, seed=0)
        if run.method.name == "checkfree":
            outcome = replace(outcome, diverged=True, curve=outcome.curve[:2])
        made[run.fingerprint] = outcome
    none, *diverged = rows(methods, TOY, lambda run: made[run.fingerprint])
    assert none.final_loss is not None
    assert all(row.final_loss is None and row.gap_percent is None and not row.curve for row in diverged)


@pytest.mark.parametrize(
    ("tier", "names", "said"),
    [("cy", None, "no tier"), ("ci", "magic", "no method")],
)
def test_wrong_requests_are_refused(tier: str, names: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_recovery(tier, names=names)


def test_none_is_always_compared_with() -> None:
    assert [method.name for method in by_names("ours,copy")] == ["none", "copy", "ours"]
    plus: Method = NAMED["checkfree+"]
    tier = replace(TOY, rates=(0.5,))
    assert [run.method for run in runs_of([METHODS[0], plus], tier)] == [METHODS[0], plus, SWAPS_ALONE]
    assert {run.method.name for run in single_runs_of([METHODS[0], plus], tier) if run.once} == {"swap twin"}


def test_ours_is_trained_first() -> None:
    assert [run.method.name for run in runs_of(METHODS, SAFE)[:3]] == ["none", "ours", "checkfree"]


def test_safe_ends_are_not_lost_and_nobody_keeps_copies_of_them() -> None:
    for name in ("checkfree", "copy", "fitted mean"):
        pipeline, keeper = start(NAMED[name], SAFE, seed=0)
        ends = pipeline.ends.flat.clone()
        pipeline.lose([0])
        keeper.recover(pipeline, frozenset({0}), 3)
        assert torch.equal(pipeline.ends.flat, ends) and pipeline.ends.optimizer.tensors()
        advance(pipeline, keeper, Feed(SAFE, 0), 3, frozenset())
        assert keeper.sent.kept == 0


@pytest.mark.parametrize(("given", "rates"), [(None, ()), ("10", (0.1,)), ("10,16.5", (0.1, 0.165))])
def test_rates_are_percents(given: str | None, rates: tuple[float, ...]) -> None:
    assert parse_rates(given) == pytest.approx(rates)


@pytest.mark.parametrize("given", ["0", "100", "ten", "10,,16", ""])
def test_wrong_rates_are_refused(given: str) -> None:
    with pytest.raises(ValueError):
        parse_rates(given)


@pytest.mark.parametrize(("met", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_goal_that_is_missed_is_a_failure(met: bool | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    goals = [Check(target="be quick", measured="it was slow", met=met)]
    monkeypatch.setattr(bench_recovery, "run_recovery", lambda *args, **kwargs: ([], [], goals))
    done = CliRunner().invoke(app, ["bench", "recovery"])
    assert done.exit_code == code
    assert ("MISSED: be quick: it was slow" in done.output) == (met is False)
