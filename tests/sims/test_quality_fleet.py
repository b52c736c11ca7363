"""Many runs in one batched model come to what each comes to by itself."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.sims.quality_toy import LR, TOY, toy_corpus

from farflung.sims import quality_train
from farflung.sims.batches import batch_of
from farflung.sims.quality_fleet import Fleet, fits, fleets, train_fleet
from farflung.sims.quality_making import grouped
from farflung.sims.quality_methods import Inner, by_names
from farflung.sims.quality_runs import Run
from farflung.sims.quality_train import train
from farflung.sims.quality_worker import Worker
from farflung.training import muon
from farflung.training.order import SampleOrder
from farflung.training.presets import preset

pytestmark = pytest.mark.usefixtures("small_corpus")


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from toy_corpus(monkeypatch)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_the_steps_of_a_fleet_are_those_of_its_workers(inner: Inner, groups: int) -> None:
    """Of seeds and learning rates of their own, with as many key heads as query heads and with fewer."""
    tier = replace(TOY, model=replace(TOY.model, num_kv_heads=TOY.model.num_heads // groups), microbatch=2)
    seeds, lrs = [0, 1, 1], [6e-3, 3e-3, 1.2e-2]
    data = quality_train.corpus(tier)
    workers = [Worker(tier, inner, seed=seed) for seed in seeds]
    fleet = Fleet(tier, inner, seeds)
    apart = torch.zeros(3, 1, dtype=torch.bool)
    for step in range(6):
        shares = [batch_of(data, SampleOrder(num_samples=data.num_samples, seed=s), step, tier.batch) for s in seeds]
        alone = [w.step(t, step=step, lr=lr) for w, t, lr in zip(workers, shares, lrs, strict=True)]
        losses, _ = fleet.step(torch.stack(shares), torch.tensor(lrs), apart)
        torch.testing.assert_close(losses, torch.tensor(alone), rtol=1e-4, atol=1e-5)
    for worker, row in zip(workers, fleet.workers(), strict=True):
        moved = worker.flat - Worker(tier, inner, seed=worker.seed).flat
        assert (row.flat - worker.flat).norm() < 2e-3 * moved.norm()
    windows = torch.from_numpy(data.heldout(tier.heldout))
    evaluated = fleet.evaluate(torch.stack([worker.flat for worker in workers]), windows)
    alone = [worker.evaluate(worker.flat, windows) for worker in workers]
    torch.testing.assert_close(evaluated, torch.tensor(alone, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_muons_products_are_in_what_suits_the_device(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "has_bf16", lambda device: has_bf16)
    fleet = Fleet(TOY, "muon", [0])
    assert {update.dtype for update in fleet._muon(torch.ones_like(fleet.flat)).values()} == {dtype}


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        ("adamw", "data-parallel adamw,solo adamw,averaging,noloco,streaming,co2,eager,sparseloco"),
        ("muon", "data-parallel muon,solo muon,diloco muon,default"),
    ],
)
def test_a_fleet_comes_to_what_its_runs_come_to_alone(inner: Inner, names: str) -> None:
    methods = by_names(names, TOY.steps - TOY.warm_steps, 6)
    runs = [Run(method=method, tier=TOY, lr=LR, seed=seed) for seed, method in enumerate(methods)]
    seen: list[int] = []
    together = train_fleet(runs, lambda step, loss: seen.append(step))
    assert seen == list(range(1, TOY.steps + 1))
    for run, (outcome, seconds) in zip(runs, together, strict=True):
        alone = train(run.method, run.tier, lr=run.lr, seed=run.seed)
        assert outcome.tune_loss == pytest.approx(alone.tune_loss, rel=2e-5), run.method.name
        assert outcome.eval_loss == pytest.approx(alone.eval_loss, rel=2e-5), run.method.name
        # what a lossy codec sends depends on the last bits of what it is given
        assert outcome.bits_per_param_per_step == pytest.approx(alone.bits_per_param_per_step, rel=0.01)
        assert outcome.peak_bits_per_step == pytest.approx(alone.peak_bits_per_step, rel=0.01) and seconds > 0


def test_a_run_of_a_fleet_that_diverges_leaves_the_others_alone() -> None:
    method = by_names("averaging", TOY.steps - TOY.warm_steps, 6)[0]
    runs = [Run(method=method, tier=TOY, lr=lr, seed=0) for lr in (LR, 1e30)]
    (sound, _), (broken, _) = train_fleet(runs)
    assert broken.eval_loss is broken.tune_loss is None and broken.bits_per_param_per_step == 0
    assert sound.eval_loss == pytest.approx(train_fleet(runs[:1])[0][0].eval_loss, rel=1e-5)


def test_a_worker_that_nobody_asked_for_may_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run alone has a row for each peer, and one worker."""
    run, step = Run(method=by_names("solo adamw")[0], tier=TOY, lr=LR, seed=0), Fleet.step

    def poisoned(self: Fleet, *args: Any) -> Any:
        if self._steps == TOY.warm_steps:
            self.flat[1] = float("nan")
        return step(self, *args)

    sound = train_fleet([run])[0][0]
    monkeypatch.setattr(Fleet, "step", poisoned)
    assert train_fleet([run])[0][0] == sound and sound.eval_loss is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_the_layers_and_the_step_compile_as_one_graph_each(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU; nothing is generated, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    tokens, lrs, apart = (
        torch.zeros(2, 4, 17, dtype=torch.int64),
        torch.full((2,), LR),
        torch.zeros(2, 1, dtype=torch.bool),
    )
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):  # a fleet raises it
        plain, compiled = (Fleet(TOY, inner, [0, 1], compiled=which) for which in (False, True))
        for _ in range(2):
            torch.testing.assert_close(
                compiled.step(tokens, lrs, apart), plain.step(tokens, lrs, apart), rtol=1e-5, atol=1e-6
            )


def test_who_goes_into_fleets() -> None:
    tier = TOY.on("cuda")
    assert tier.microbatch == TOY.batch // TOY.peers and TOY.on("cpu") is TOY
    runs = [
        Run(method=method, tier=tier, lr=lr, seed=0)
        for method in by_names("averaging,demo,default")
        for lr in (LR, 1e-3)
    ]
    averaging, demo, _ = by_names("averaging,demo,default")
    assert fits(averaging, tier) and not fits(demo, tier)
    assert not fits(averaging, TOY) and not fits(averaging, replace(tier, model=preset("10m")))
    assert not fits(averaging, replace(tier, bf16=True))
    assert not fits(averaging, replace(tier, model=replace(tier.model, qk_norm=True)))
    assert [[run.method.name for run in group] for group in grouped(runs, 1)] == [
        ["demo"], ["demo"], ["averaging", "averaging"], ["default", "default"]
    ]  # fmt: skip
    assert [len(group) for group in grouped(runs, 4)] == [1, 1, 1, 1, 1, 1], "a process each"
    assert [len(group) for group in fleets(runs[:1] * 5 + runs[4:5] * 2, 3)] == [2, 3, 2]
    assert [len(group) for group in fleets(runs[:1] * 100)] == [33, 33, 34] and fleets([]) == []
    assert grouped([replace(run, tier=TOY) for run in runs[:2]], 1) == [[replace(run, tier=TOY)] for run in runs[:2]]
