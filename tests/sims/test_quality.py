"""`farflung bench quality`: its loop against the outer path that swarms have, its byte counts, its table and its file."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farflung.compression.registry import codec_of, parse_codec
from farflung.sims import quality, quality_train
from farflung.sims.batches import batch_of
from farflung.sims.quality import run_quality
from farflung.sims.quality_exchange import Averager
from farflung.sims.quality_methods import METHODS, Method, Outer, Wire, by_names, with_interval
from farflung.sims.quality_plot import frontier
from farflung.sims.quality_resume import Keeper
from farflung.sims.quality_rows import Row, Tuned, references, rows
from farflung.sims.quality_runs import Run, Runs, best, grid
from farflung.sims.quality_tiers import CI, TIERS, Tier
from farflung.sims.quality_train import Outcome, train
from farflung.sims.quality_words import budget, checks, goals, settings
from farflung.sims.quality_worker import Worker
from farflung.training.data import TokenWindows
from farflung.training.fragments import cut
from farflung.training.inner import InnerConfig
from farflung.training.model import ModelConfig
from farflung.training.order import SampleOrder
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov, Sgd
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.streaming import Timetable

TOY = Tier(
    name="toy",
    model=ModelConfig(vocab_size=32, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, seq_len=16),
    batch=4,
    microbatch=4,
    warm_steps=3,
    rise_steps=2,
    steps=15,
    adamw_lrs=(3e-3, 6e-3),
    muon_lrs=(6e-3,),
    seeds=1,
    heldout=8,
)
LR = 6e-3
ADAMW = by_names("data-parallel adamw")[0]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    runs = [generator.integers(0, 32, 4000).cumsum() % 32 for _ in range(2)]
    data = TokenWindows(runs[:1], runs[1:], seq_len=16, hash_content=lambda: "toy")
    monkeypatch.setattr(quality_train, "corpus", lambda tier: data)
    quality_train._warm_start.cache_clear()
    yield
    quality_train._warm_start.cache_clear()


def outer_params(method: Method, **changes: int) -> torch.Tensor:
    """What the bench's loop comes to."""
    found: list[torch.Tensor] = []
    tier = replace(TOY, **changes)  # type: ignore[arg-type]
    evaluate = Worker.evaluate

    def keep(self: Worker, params: torch.Tensor, windows: torch.Tensor) -> float:
        found.append(params.clone())
        return evaluate(self, params, windows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "evaluate", keep)
        train(method, tier, lr=LR, seed=0)
    return found[0]


def rounds(interval: int, *, lr: float = 0.7, momentum: float = 0.9, **settings: object) -> Method:
    table = Timetable(interval=interval)
    outer = Outer(timetable=table, rule=Nesterov(lr=lr, momentum=momentum), **settings)  # type: ignore[arg-type]
    return Method(name="rounds", inner="adamw", outer=outer)


def test_one_fragment_without_delay_is_plain_diloco_to_the_bit() -> None:
    """The reference is `Replica`, the path of live swarms: H = 4, three rounds after the start."""
    schedule = Schedule(peak=LR, warmup_steps=TOY.rise_steps, total_steps=TOY.steps)
    data, order = quality_train.corpus(TOY), SampleOrder(num_samples=249, seed=0)
    assert data.num_samples == 249
    replicas = [
        Replica(
            TOY.model, InnerConfig(schedule=schedule), Nesterov(lr=0.7, momentum=0.9), seed=0,
            runtime=Runtime(microbatch=4),
        )
        for _ in range(2)
    ]  # fmt: skip
    for step in range(TOY.warm_steps):
        for replica in replicas:
            replica.train_step(batch_of(data, order, step, TOY.batch), step)
    for replica in replicas:
        replica.pseudo_gradient()
        assert replica.sent is not None
        replica.outer.params.copy_(replica.sent)
        replica.discard_progress()
    for step in range(TOY.warm_steps, TOY.steps):
        for replica, share in zip(replicas, batch_of(data, order, step, TOY.batch).tensor_split(2), strict=True):
            replica.train_step(share, step)
        if (step + 1 - TOY.warm_steps) % 4 == 0:
            deltas = [replica.pseudo_gradient() for replica in replicas]
            mean = torch.zeros_like(deltas[0])
            for delta in deltas:
                mean = mean + delta * 0.5
            for replica in replicas:
                replica.apply([(0, replica.num_parameters, mean)], contributed=True)
    assert torch.equal(outer_params(rounds(4)), replicas[0].outer.params)


def test_one_peer_one_step_averaging_is_the_plain_loop() -> None:
    """To the last bits: theta - (theta - local) is local only up to a rounding."""
    plain = Method(name="plain", inner="adamw", whole_batch=True)
    alone = replace(rounds(1), whole_batch=True)
    assert alone.outer is not None
    alone = replace(alone, outer=replace(alone.outer, rule=Sgd(lr=1.0)))
    torch.testing.assert_close(outer_params(alone, peers=1), outer_params(plain, peers=1), rtol=2e-5, atol=2e-7)


def test_rebasing_without_delay_is_taking_the_outer_parameters() -> None:
    assert torch.equal(outer_params(rounds(4, mixing=None)), outer_params(rounds(4)))


def test_keeping_all_of_the_local_parameters_leaves_peers_alone_until_the_end() -> None:
    def kept(alpha: float) -> torch.Tensor:
        method = rounds(6, lr=1.0, momentum=0.0, mixing=alpha)
        return outer_params(method)

    assert not torch.equal(kept(1.0), kept(0.0))


def last_locals(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """(outer parameters at the end, mean of both peers' local parameters after the last step)."""
    seen: list[torch.Tensor] = []
    step = Worker.step

    def remember(self: Worker, tokens: torch.Tensor, **settings: Any) -> float:
        loss = step(self, tokens, **settings)
        seen.append(self.flat.clone())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "step", remember)
        params = outer_params(method)
    return params, (seen[-1] + seen[-2]) / 2


def test_the_final_flush_leaves_no_progress_behind() -> None:
    """Twelve steps in rounds of five: with outer averaging the end is the mean of the peers."""
    method = rounds(5, lr=1.0, momentum=0.0, mixing=None)
    params, mean = last_locals(method)
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-6)
    assert method.outer is not None
    table = Timetable(interval=5, fragments=2, delay=2)
    params, mean = last_locals(replace(method, outer=replace(method.outer, timetable=table)))
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-6)


def test_eager_updates_of_one_peer_are_not_late() -> None:
    method = rounds(4)
    assert method.outer is not None
    eager = replace(method, outer=replace(method.outer, eager=True))
    torch.testing.assert_close(outer_params(eager, peers=1), outer_params(method, peers=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_of_the_table_learns_and_is_the_same_twice(method: Method) -> None:
    outcome = train(method, TOY, lr=TOY.lrs(method)[-1], seed=0)
    again = train(method, TOY, lr=TOY.lrs(method)[-1], seed=0)
    assert outcome == again
    assert outcome.eval_loss is not None and outcome.eval_loss < 3.6 and outcome.tune_loss != outcome.eval_loss
    assert (outcome.bits_per_param_per_step > 0) == (method.outer is not None or method.whole_batch)


def test_a_run_that_diverges_is_an_outcome() -> None:
    outcome = train(replace(ADAMW, inner="muon"), TOY, lr=1e30, seed=0)
    assert outcome.eval_loss is None and outcome.tune_loss is None


# ---- bytes -------------------------------------------------------------------------------------------------------


def averager(wire: Wire, peers: int) -> tuple[Averager, int]:
    slots = Worker(TOY, "adamw", seed=0).layout.slots
    fragment = cut(slots, 1)[0]
    return Averager(wire, fragment, slots, peers), fragment.numel


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("topology", ["gather", "butterfly"])
def test_exact_codecs_give_the_mean_and_the_traffic_of_the_formulas(peers: int, topology: str) -> None:
    exchange, numel = averager(Wire(topology=topology), peers)  # type: ignore[arg-type]
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(m)) for m in range(peers)]
    averaged = exchange.mean(deltas)
    torch.testing.assert_close(averaged.mean, torch.stack(deltas).mean(dim=0))
    assert not any(residual.any() for residual in averaged.residuals)
    header = 32
    whole = 4 * numel + header
    expected = 2 * (peers - 1) * whole if topology == "gather" else 4 * (peers - 1) * (4 * numel / peers + header)
    assert averaged.nbytes == pytest.approx(expected)


@pytest.mark.parametrize("wire", [
    Wire(topology="gather", up="sign(block=128)", feedback=1.0),
    Wire(topology="butterfly", up="sign(block=128)", down="sign(block=128)", feedback=1.0, down_feedback=1.0),
])  # fmt: skip
def test_error_feedback_delivers_everything_in_the_end(wire: Wire) -> None:
    exchange, numel = averager(wire, 2)
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    wanted = torch.stack(deltas).mean(dim=0)
    total = torch.zeros(numel)
    misses = []
    for round_ in range(1, 41):
        total += exchange.mean(deltas).mean
        misses.append(float((total / round_ - wanted).norm() / wanted.norm()))
    assert misses[-1] < misses[0] / 4


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
@pytest.mark.parametrize("feedback", [None, 0.5])
def test_residuals_are_what_was_not_sent(topology: str, feedback: float | None) -> None:
    exchange, numel = averager(Wire(topology=topology, up="sign(block=128)", feedback=feedback), 2)  # type: ignore[arg-type]
    held = [torch.zeros(numel), torch.zeros(numel)]
    for round_ in range(3):
        deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(2 * round_ + m)) for m in range(2)]
        averaged = exchange.mean(deltas)
        given = [delta + (feedback or 0.0) * rest for delta, rest in zip(deltas, held, strict=True)]
        held = averaged.residuals
        counted = [whole - rest for whole, rest in zip(given, held, strict=True)]
        torch.testing.assert_close(averaged.mean, (counted[0] + counted[1]) / 2, rtol=1e-4, atol=1e-5)


def test_what_is_kept_is_sent_later_without_any_memory() -> None:
    """With an exact last exchange all progress arrives, whatever the codec before it left out."""
    wire = Wire(topology="gather", up="sign(block=128)", last="fp32")
    params, mean = last_locals(rounds(4, lr=0.7, momentum=0.5, mixing=None, kept=1.0, wire=wire))
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-5)


def test_the_codec_of_the_last_exchange_is_for_that_alone() -> None:
    one = train(rounds(4, wire=Wire(topology="gather", up="int4(block=128)")), TOY, lr=LR, seed=0)
    other = train(rounds(4, wire=Wire(topology="gather", up="int4(block=128)", last="fp32")), TOY, lr=LR, seed=0)
    assert one.peak_bits_per_step == other.peak_bits_per_step == pytest.approx(2 * 4.125, rel=0.01)
    assert one.bits_per_param_per_step == pytest.approx(3 * 2 * 4.125 / 12, rel=0.01)
    assert other.bits_per_param_per_step == pytest.approx((2 * 2 * 4.125 + 2 * 32) / 12, rel=0.01)


def test_payloads_are_those_of_the_registry() -> None:
    exchange, numel = averager(Wire(topology="gather", up="int4(block=64)"), 2)
    payload = exchange._encode(0, torch.randn(numel), 0, numel)
    assert codec_of(payload) == parse_codec("int4(block=64)")


def test_bytes_per_step_are_those_of_all_exchanges() -> None:
    outcome = train(rounds(4), TOY, lr=LR, seed=0)
    numel = Worker(TOY, "adamw", seed=0).layout.num_parameters
    per_round = 2 * (4 * numel / 2 + 32) * 2  # two parts up, two means down, sent and received, over two peers
    assert outcome.bits_per_param_per_step == pytest.approx(8 * 3 * per_round / numel / 12)
    assert outcome.peak_bits_per_step == pytest.approx(8 * per_round / numel)


# ---- the table ---------------------------------------------------------------------------------------------------


GRID = ((1e-3, 1.0),)


def outcome(loss: float | None, bits: float = 0.0) -> Outcome:
    return Outcome(
        tune_loss=loss,
        eval_loss=loss,
        bits_per_param_per_step=bits,
        peak_bits_per_step=bits,
        cosine=None,
        residual=None,
    )


def test_rows_compare_with_the_right_inner_optimiser_seed_by_seed() -> None:
    ours = Method(name="ours", inner="muon", outer=Outer(timetable=Timetable(), rule=Sgd()))
    compared = references([ours])
    assert [method.name for method in compared] == ["data-parallel adamw", "data-parallel muon", "solo muon"]
    losses = {"data-parallel adamw": (2.0, 2.2), "data-parallel muon": (1.0, 1.1), "solo muon": (2.0,), "ours": (1.2,)}
    tuned = [
        Tuned(method=m, grid=GRID, outcomes=tuple(outcome(loss, 0.032 if m is ours else 32) for loss in losses[m.name]))
        for m in [*compared, ours]
    ]
    row = rows(tuned, TOY)[-1]
    assert row.gap_percent_same_inner == pytest.approx(20) and row.gap_percent_adamw == pytest.approx(-40)
    assert row.recovered == pytest.approx(0.8) and row.dp_spread_percent == pytest.approx(100 * 0.1 / 1.05)
    assert row.bytes_ratio_vs_ddp_bf16 == pytest.approx(1000) and row.H == 30 and row.peers == 2
    broken = Tuned(method=ours, grid=GRID, outcomes=(outcome(None),))
    row = rows([*tuned[:-1], broken], TOY)[-1]
    assert row.eval_loss is row.gap_percent_adamw is row.recovered is row.bytes_ratio_vs_ddp_bf16 is None


def test_the_frontier_is_what_nothing_beats() -> None:
    assert frontier([(1.0, 0.0), (100.0, 4.0), (100.0, 3.0), (50.0, 3.5), (400.0, 9.0)]) == [
        (1.0, 0.0), (100.0, 3.0), (400.0, 9.0)
    ]  # fmt: skip
    assert frontier([]) == []


@pytest.mark.parametrize(
    ("gap", "of_adamw", "ratio", "met"),
    [
        (2.2, -5.0, 1001.0, [True, True, True]),
        (2.3, 0.1, 999.0, [False, False, False]),
        (None, None, None, [None, None, False]),
    ],
)
def test_goals_are_judged_against_streaming_of_the_same_run(
    gap: float | None, of_adamw: float | None, ratio: float | None, met: list[bool | None]
) -> None:
    def row(name: str, **values: float | None) -> Row:
        tuned = Tuned(method=replace(ADAMW, name=name), grid=GRID, outcomes=(outcome(1.0, 32.0),))
        return replace(rows([tuned], TOY)[0], **values)  # type: ignore[arg-type]

    streaming = row("streaming", gap_percent_same_inner=4.5)
    default = row("default", gap_percent_same_inner=gap, gap_percent_adamw=of_adamw, bytes_ratio_vs_ddp_bf16=ratio)
    default = replace(default, recovered=0.4)
    assert [check.met for check in checks([streaming, default])] == met
    thrifty = row("thrifty", gap_percent_same_inner=4.5, bytes_ratio_vs_ddp_bf16=3999.0, recovered=0.1)
    assert [check.met for check in checks([streaming, thrifty])] == [True, False]
    alone = replace(thrifty, recovered=-0.1)
    assert [check.met for check in checks([streaming, alone])] == [False, False], "no better than saying nothing"
    unknown = replace(thrifty, recovered=None)
    assert [check.met for check in checks([streaming, unknown])] == [None, False]
    assert checks([streaming]) == []
    both = goals([streaming, default, thrifty], "gap_percent_same_inner")
    assert (
        both == {"default": (1000.0, 2.25), "thrifty": (4000.0, 4.5)}
        and goals([default], "gap_percent_same_inner") == {}
    )
    assert goals([default], "gap_percent_adamw") == {"default": (1000.0, 0.0)}
    assert [check.met for check in checks([thrifty])] == [None, False]


def test_the_budget_is_what_the_ratio_leaves_of_a_run() -> None:
    tuned = [
        Tuned(method=replace(ADAMW, name=n), grid=GRID, outcomes=(outcome(1.0, 0.032),)) for n in ("default", "thrifty")
    ]
    here, longer = budget(rows(tuned, CI), CI)
    # 540 steps at 32 / 1000 bits, half of which is sent
    assert "are 8.64 bits" in here and "4,000 times fewer 2.16" in here and "`default` spends 8.64" in here
    assert "38.4 and 9.6 in nightly" in longer and budget(rows(tuned[:1], CI), CI) == []


@pytest.mark.parametrize(
    ("losses", "lr", "tried"),
    [
        ({1.5e-3: 1.6, 3e-3: 1.5, 6e-3: None}, 3e-3, [1.5e-3, 3e-3, 6e-3]),
        ({3e-3: 1.5, 6e-3: 1.4, 1.2e-2: 1.45}, 6e-3, [3e-3, 6e-3, 1.2e-2]),
        ({3e-3: 1.5, 6e-3: 1.4, 1.2e-2: 1.3, 2.4e-2: 1.2}, 2.4e-2, [3e-3, 6e-3, 1.2e-2, 2.4e-2]),
        ({7.5e-4: None, 1.5e-3: None, 3e-3: None, 6e-3: None}, 7.5e-4, [7.5e-4, 1.5e-3, 3e-3, 6e-3]),
    ],
)
def test_the_rate_is_chosen_on_its_own_part_and_the_grid_goes_on_at_an_edge(
    losses: dict[float, float | None], lr: float, tried: list[float]
) -> None:
    found = grid(ADAMW, TOY, lambda run: outcome(losses[run.lr]))
    assert best(found) == lr and [one for one, _ in found] == tried
    assert found == tuple((one, losses[one]) for one in tried)


def test_the_best_of_no_grid_at_all_is_the_lowest() -> None:
    assert best(((3e-3, None), (6e-3, None))) == 3e-3


def test_runs_are_kept_and_found_by_what_decides_them(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    run = Run(method=ADAMW, tier=TOY, lr=LR, seed=0)
    Runs(file).keep(run, outcome(1.25), 3.0)
    again = Runs(file)
    assert again.outcome(run) == outcome(1.25)
    assert again.outcome(replace(run, method=replace(ADAMW, name="other name"))) == outcome(1.25)
    for other in (replace(run, lr=1e-3), replace(run, seed=1), replace(run, tier=replace(TOY, steps=16))):
        assert again.outcome(other) is None
    file.write_text(file.read_text() + "half a li")
    with pytest.raises(ValueError, match="line 2"):
        Runs(file)


def test_the_whole_command_and_its_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TIERS, "ci", replace(TOY, name="ci"))
    out = tmp_path / "runs.jsonl"
    found = run_quality("ci", names="averaging,sparseloco", out=out, page=tmp_path / "docs", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in shown["rows"]] == [row.method for row in found]
    assert [row.method for row in found] == ["data-parallel adamw", "solo adamw", "averaging", "sparseloco"]
    assert (tmp_path / "docs" / "quality.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "docs" / "quality.md").read_text()
    assert (
        "| sparseloco | H 30; averaging, lr 1; topk(chunk=4096,k=64,bits=2) to everybody, error feedback 0.95 |" in page
    )
    assert all(f"{row.eval_loss:.4f}" in page for row in found)
    made = len(out.read_text().splitlines())
    assert made == sum(len(row.grid) for row in found) + 1, "each rate once, a second seed for data-parallel"
    assert all(2 <= len(row.grid) <= 4 for row in found), "two rates each, and two beyond them at most"
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".pt"] == []
    spread = found[0].dp_spread_percent
    assert spread is not None and f" | {spread:.2f} | " in page.partition("| averaging")[2].partition("\n")[0]
    monkeypatch.setattr(quality, "train", lambda *args, **kwargs: pytest.fail("nothing is left to run"))
    assert run_quality("ci", names="averaging,sparseloco", out=out) == found
    assert "fewer bytes" in capsys.readouterr().out


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_run_that_is_cut_comes_to_the_same_bits(method: Method, tmp_path: Path) -> None:
    """Cut after nine of fifteen steps, kept after each third, with exchanges in flight where there is a delay."""
    if method.outer is not None and method.outer.timetable.interval > 1:
        method = with_interval(method, 4)
    lr = TOY.lrs(method)[0]
    whole = train(method, TOY, lr=lr, seed=0)
    ticks = iter(range(1000))
    keeper = Keeper(tmp_path / "run.pt", every_s=3.0, clock=lambda: float(next(ticks)))

    def cut_at_nine(step: int, loss: float) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(method, TOY, lr=lr, seed=0, progress=cut_at_nine, keeper=keeper)
    assert keeper.file.exists()
    quality_train._warm_start.cache_clear()
    seen: list[int] = []
    again = Keeper(keeper.file)
    assert train(method, TOY, lr=lr, seed=0, progress=lambda step, _: seen.append(step), keeper=again) == whole
    assert seen[0] == 7 and seen[-1] == TOY.steps, "from the last state that was kept"
    again.drop()
    assert not keeper.file.exists()


def test_a_damaged_run_under_way_is_refused(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "run.pt", every_s=0.0)
    assert keeper.load() is None
    keeper.offer(lambda: {"step": 7})
    assert keeper.load() == {"step": 7}
    keeper.file.write_bytes(keeper.file.read_bytes()[:50])
    with pytest.raises(ValueError, match="remove it"):
        keeper.load()


def test_known_runs_are_still_found() -> None:
    """Runs take days: what decides them must not change its fingerprint unawares."""
    found = {method.name: Run(method=method, tier=CI, lr=6e-3, seed=0).fingerprint for method in METHODS}
    assert found["data-parallel adamw"] == "9b222af041838eef" and found["solo adamw"] == "83a941bd752582b0"
    assert found["streaming"] == "67e2555257f8813a" and found["default"] == "6b97ad8ddf1e0d4c"
    assert found["sparseloco"] == "de2d0b72e190eedc"


def test_another_interval_is_for_all_methods_with_rounds() -> None:
    chosen = {method.name: method for method in by_names(None, 2400, 100)}
    assert "streaming-100" not in chosen, "it is `streaming` then"
    tables = {name: method.outer.timetable for name, method in chosen.items() if method.outer is not None}
    assert {table.interval for name, table in tables.items() if name != "demo"} == {100}
    assert tables["demo"].interval == 1 and tables["co2"].delay == 100 and tables["streaming"].delay == 1
    assert [m.name for m in by_names("streaming-100", None, 50)] == ["streaming-100"]


def test_methods_need_enough_rounds_unless_they_are_asked_for() -> None:
    assert "streaming-100" not in [method.name for method in by_names(None, 540)]
    assert "streaming-100" in [method.name for method in by_names(None, 2400)]
    assert [method.name for method in by_names("streaming-100", 540)] == ["streaming-100"]


def test_ours_have_rarer_rounds_in_long_runs() -> None:
    def intervals(steps: int | None) -> list[int]:
        return [m.outer.timetable.interval for m in by_names("default,thrifty", steps) if m.outer is not None]

    assert {"default", "thrifty"} <= {method.name for method in by_names(None, 2400)}
    assert intervals(None) == intervals(540) == [30, 30] and intervals(2400) == [60, 240]


def test_peers_and_interval_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "ci", replace(TOY, name="ci"))
    found = run_quality("ci", names="averaging", peers=4, interval=6, page=tmp_path)
    assert found[-1].peers == 4 and found[-1].H == 6
    page = (tmp_path / "quality.md").read_text()
    assert "--tier ci --peers 4 --interval 6 --page docs" in page and "| averaging | H 6; averaging" in page
    with pytest.raises(ValueError, match="choose 2 to 12"):
        run_quality("ci", interval=13)
    with pytest.raises(ValueError, match="multiple of the peers"):
        run_quality("ci", peers=3)


def test_settings_of_every_method_in_words() -> None:
    said = {method.name: settings(method) for method in METHODS}
    assert said["data-parallel muon"] == "the batch of all peers in one worker"
    assert said["diloco"] == "H 30; Nesterov 0.7/0.9; fp32 to owners, fp32 back"
    assert said["streaming"] == (
        "H 30, 3 fragments, strided, applied a step late; Nesterov 0.4/0.9; e3m0(block=128) to everybody; "
        "0.5 of the local parameters stays"
    )
    assert "heavy ball 1/0.5, gap penalty 1" in said["co2"] and "eager" in said["eager"]


@pytest.mark.parametrize(("tier", "names", "said"), [("huge", None, "no tier"), ("ci", "adam", "no method")])
def test_unknown_names_are_refused(tier: str, names: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_quality(tier, names=names)


def test_a_gpu_tier_says_so_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        run_quality("gpu")


def test_the_tiers_are_what_they_say() -> None:
    assert CI.steps * CI.batch * CI.model.seq_len == 2_457_600
    assert Worker(CI, "adamw", seed=0).layout.num_parameters == 167_872
    assert Worker(TIERS["nightly"], "adamw", seed=0).layout.num_parameters == 505_440
