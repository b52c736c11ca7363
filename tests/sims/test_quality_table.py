"""`farflung bench quality`: its table, its goals, the runs that it makes and keeps, and the command."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from tests.sims.quality_toy import ADAMW, LR, TOY, toy_corpus

from farflung.sims import quality_making, quality_train
from farflung.sims.kept import Kept
from farflung.sims.quality import _show, run_quality
from farflung.sims.quality_making import make
from farflung.sims.quality_methods import METHODS, Method, Outer, by_names, with_interval
from farflung.sims.quality_page import _lines
from farflung.sims.quality_plot import frontier
from farflung.sims.quality_rows import Row, references, rows
from farflung.sims.quality_runs import Run, Tuned, best, conduct, keeper_of, mean, num_seeds, seeds_tried, tuning
from farflung.sims.quality_tiers import CI, NIGHTLY, TIERS
from farflung.sims.quality_train import Outcome, finished
from farflung.sims.quality_words import _half, budget, checks, goals, settings
from farflung.sims.quality_worker import Worker
from farflung.training.errors import DataError
from farflung.training.rules import Nesterov, Sgd
from farflung.training.streaming import Timetable


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from toy_corpus(monkeypatch)


GRID = ((1e-3, 1.0),)


def outcome(loss: float | None, bits: float = 0.0) -> Outcome:
    return Outcome(
        tune_loss=loss,
        eval_loss=loss,
        bits_per_param_per_step=bits,
        peak_bits_per_step=bits,
        cosine=None,
        residual=None,
        machine="a machine",
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
    assert (
        row.eval_losses == (1.2,)
        and row.gaps_same_inner == (pytest.approx(20),)
        and row.gaps_adamw[0] == pytest.approx(-40)
    )
    twice = replace(tuned[-1], outcomes=(outcome(None), outcome(1.32, 0.064)))
    row = rows([*tuned[:-1], twice], TOY)[-1]
    assert row.eval_loss is None and row.gaps_same_inner == (None, pytest.approx(20)), (
        "what the second seed came to is shown"
    )
    assert row.bytes_ratio_vs_ddp_bf16 == pytest.approx(500), (
        "and its bytes: a run that diverged has sent nothing worth counting"
    )
    broken = Tuned(method=ours, grid=GRID, outcomes=(outcome(None),))
    row = rows([*tuned[:-1], broken], TOY)[-1]
    assert row.eval_loss is row.gap_percent_adamw is row.recovered is row.bytes_ratio_vs_ddp_bf16 is None


def test_the_frontier_is_what_nothing_beats() -> None:
    assert frontier([(1.0, 0.0), (100.0, 4.0), (100.0, 3.0), (50.0, 3.5), (400.0, 9.0)]) == [
        (1.0, 0.0), (100.0, 3.0), (400.0, 9.0)
    ]  # fmt: skip
    assert frontier([]) == []


def judged(
    name: str,
    gaps: tuple[float | None, ...],
    *,
    of_adamw: tuple[float | None, ...] = (),
    ratio: float | None = None,
    recovered: float | None = None,
) -> Row:
    """A row of a method that the goals compare, with these gaps by seed."""
    tuned = Tuned(method=replace(ADAMW, name=name), grid=GRID, outcomes=(outcome(1.0, 32.0),))
    return replace(
        rows([tuned], TOY)[0],
        gaps_same_inner=gaps,
        gap_percent_same_inner=mean(gaps),
        gaps_adamw=of_adamw,
        bytes_ratio_vs_ddp_bf16=ratio,
        recovered=recovered,
    )


def test_what_seeds_say_differently_is_neither_met_nor_missed() -> None:
    """Also where their mean is on one side: Streaming's gap moves by more than what a bound leaves."""
    streaming = judged("streaming", (5.4, 3.7))
    met, missed, differ = ((2.6, 1.8), (2.8, 1.9), (1.7, 2.5))
    for gaps, verdict in ((met, "met"), (missed, "missed"), (differ, "seeds differ")):
        check = checks([streaming, judged("default", gaps, recovered=0.5)])[0]
        assert check.verdict == verdict
    assert "+2.10 %, bound +2.28 %; gap less bound by seed: -1.00, +0.65" in check.measured
    half_run = checks([streaming, judged("default", (1.0, None), recovered=0.5)])[0]
    assert half_run.met is None and "diverged" in half_run.measured


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
    streaming = judged("streaming", (4.5,))
    default = judged("default", (gap,), of_adamw=(of_adamw,), ratio=ratio, recovered=0.4)
    assert [check.met for check in checks([streaming, default])] == met
    thrifty = judged("thrifty", (4.5,), ratio=3999.0, recovered=0.1)
    assert [check.met for check in checks([streaming, thrifty])] == [True, False]
    alone = replace(thrifty, recovered=-0.1)
    assert [check.met for check in checks([streaming, alone])] == [False, False], "no better than saying nothing"
    unknown = replace(thrifty, recovered=None)
    assert [check.met for check in checks([streaming, unknown])] == [None, False]
    assert checks([streaming]) == []
    rarer = judged("streaming-100", (9.0,))
    beside_both = checks([streaming, rarer, default])
    assert len(beside_both) == len(met) + 1 and "with H = 100" in beside_both[1].target
    assert beside_both[0].met == met[0] and beside_both[1].met is (None if gap is None else True)
    assert "bound +4.50 %" in beside_both[1].measured or gap is None
    assert [check.met for check in checks([rarer, thrifty])] == [True, False], "where only the rarer rounds were run"
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
    kept: Kept[Outcome] = Kept(None, lambda entry: Outcome(**entry))

    def make(runs: list[Run], _: int) -> None:
        for run in runs:
            kept.keep(run, outcome(losses[run.lr]), 1.0)

    (tuned,) = conduct([tuning(ADAMW, TOY)], make, kept)
    assert best(tuned.grid) == lr and [one for one, _ in tuned.grid] == tried
    assert tuned.grid == tuple((one, losses[one]) for one in tried) and len(tuned.outcomes) == 2


def test_what_the_goals_are_told_by_has_more_seeds() -> None:
    """As many as the tier has; a method that is only shown half of them, and one of data-parallel training's rates two."""
    tier = replace(CI, seeds=4)
    many = {method.name: num_seeds(method, tier) for method in METHODS}
    assert {name for name, seeds in many.items() if seeds == 4} == {
        "data-parallel adamw", "data-parallel muon", "solo adamw", "solo muon", "streaming", "streaming-100", "default", "thrifty"
    }  # fmt: skip
    assert set(many.values()) == {2, 4}
    assert [num_seeds(method, replace(CI, seeds=1)) for method in METHODS[:3]] == [2, 2, 1]
    assert [seeds_tried(method, tier) for method in METHODS[:3]] == [2, 2, 1]


def test_the_best_of_no_grid_at_all_is_the_lowest() -> None:
    assert best(((3e-3, None), (6e-3, None))) == 3e-3


def test_runs_are_found_by_what_decides_them() -> None:
    run = Run(method=ADAMW, tier=TOY, lr=LR, seed=0)
    assert run.fingerprint == replace(run, method=replace(ADAMW, name="other name")).fingerprint
    others = (replace(run, lr=1e-3), replace(run, seed=1), replace(run, tier=replace(TOY, steps=16)))
    assert len({one.fingerprint for one in (run, *others)}) == 4


def test_the_whole_command_and_its_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TIERS, "ci", replace(TOY, name="ci"))
    out = tmp_path / "runs.jsonl"
    found = run_quality("ci", names="averaging,sparseloco", out=out, page=tmp_path / "docs", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in shown["rows"]] == [row.method for row in found]
    assert [row.method for row in found] == ["data-parallel adamw", "solo adamw", "averaging", "sparseloco"]
    assert (tmp_path / "docs" / "quality_ci.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "docs" / "quality_ci.md").read_text()
    assert (
        "| sparseloco | H 30; averaging, lr 1; topk(chunk=4096,k=64,bits=2) to everybody, error feedback 0.95 |" in page
    )
    assert "--tier ci --methods averaging,sparseloco --page docs" in page and " times all of it" in page
    assert all(f"{row.eval_loss:.4f}" in page for row in found)
    made = len(out.read_text().splitlines())
    seeds = [len(row.grid) * (2 if "parallel" in row.method else 1) for row in found]
    assert made == sum(seeds), "each rate once, and with a second seed for data-parallel"
    assert all(2 <= len(row.grid) <= 4 for row in found), "two rates each, and two beyond them at most"
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".pt"] == []
    spread = found[0].dp_spread_percent
    assert spread is not None and f" | {spread:.2f} | " in page.partition("| averaging")[2].partition("\n")[0]
    monkeypatch.setattr(quality_making, "train", lambda *args, **kwargs: pytest.fail("nothing is left to run"))
    assert run_quality("ci", names="averaging,sparseloco", out=out) == found
    assert "fewer bytes" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.slow
def test_runs_side_by_side_are_those_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which each has the real corpus; so has this one."""
    monkeypatch.undo()
    tiny = replace(TOY, name="ci", model=replace(TOY.model, vocab_size=264))
    monkeypatch.setitem(TIERS, "ci", tiny)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(quality_making, "train", lambda *args, **kwargs: pytest.fail("not in this process"))
        together = run_quality("ci", names="averaging", interval=6, jobs=2, out=tmp_path / "two.jsonl")
    assert together == run_quality("ci", names="averaging", interval=6, out=tmp_path / "one.jsonl")
    assert [row.method for row in together] == ["data-parallel adamw", "solo adamw", "averaging"]
    lines = [file.read_text().splitlines() for file in tmp_path.glob("*.jsonl")]
    kept = [sorted(json.loads(line)["fingerprint"] for line in some) for some in lines]
    assert kept[0] == kept[1]


def test_when_a_run_fails_those_under_way_are_kept_and_no_other_is_begun(tmp_path: Path) -> None:
    runs = [Run(method=ADAMW, tier=TOY, lr=LR, seed=seed) for seed in range(5)]
    kept = Kept(tmp_path / "runs.jsonl", lambda entry: Outcome(**entry))
    keeper = keeper_of(runs[1], kept.file)
    assert keeper is not None
    keeper.file.write_text("of a run that was cut off")
    begun: list[int] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, made: Any, group: list[Run], file: Path | None) -> Any:  # type: ignore[override]
            begun.append(group[0].seed)
            return super().submit(self._one, group[0].seed)

        def _one(self, seed: int) -> list[tuple[Outcome, float]]:
            if seed == 0:
                raise OSError("the disk is full")
            time.sleep(0.2)
            return [(outcome(1.0), 2.0)]

    with Pool(2) as pool, Progress(disable=True) as shown, pytest.raises(OSError, match="disk is full"):
        make(runs, kept, pool, 2, shown, shown.add_task("", total=5))  # type: ignore[arg-type]
    assert begun == [0, 1] and kept.outcome(runs[1]) == outcome(1.0) and not keeper.file.exists()
    assert len(kept.file.read_text().splitlines()) == 1 if kept.file else False


def test_known_runs_are_still_found() -> None:
    """Runs take days: what decides them must not change its fingerprint unawares."""
    found = {method.name: Run(method=method, tier=CI, lr=6e-3, seed=0).fingerprint for method in METHODS}
    assert found["data-parallel adamw"] == "0db17264599e20b6" and found["solo adamw"] == "43285c8258b5b79b"
    assert found["streaming"] == "48c97e4e503c7e2f" and found["default"] == "7c4a683b3a0721be"
    assert found["sparseloco"] == "364f12c59ef2cc31"


def test_another_interval_is_for_all_methods_with_rounds() -> None:
    chosen = {method.name: method for method in by_names(None, 2400, 100)}
    assert "streaming-100" not in chosen, "it is `streaming` then"
    tables = {name: method.outer.timetable for name, method in chosen.items() if method.outer is not None}
    assert {table.interval for name, table in tables.items() if name != "demo"} == {100}
    assert tables["demo"].interval == 1 and tables["co2"].delay == 100 and tables["streaming"].delay == 1
    assert tables["default"].delay == 5
    assert with_interval(by_names("default")[0], 9).outer.timetable.delay == 2, "before the next round"  # type: ignore[union-attr]
    assert [m.name for m in by_names("streaming-100", None, 50)] == ["streaming-100"]


def test_rare_rounds_leave_few_methods_and_close_ones_all() -> None:
    assert {method.name for method in by_names(None, 540, 300)} == {
        "data-parallel adamw", "data-parallel muon", "solo adamw", "solo muon", "demo",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no method is called nothing"):
        by_names("nothing", 540, 300)
    close = {method.name: method.outer for method in by_names(None, 540, 2)}
    assert isinstance(close["default"], Outer) and close["default"].timetable.fragments == 2


def test_two_peers_do_not_meet_two_by_two() -> None:
    assert "noloco" not in [method.name for method in by_names(None, 540, None, 2)]
    assert "noloco" in [method.name for method in by_names(None, 540, None, 4)]
    assert [method.name for method in by_names("noloco", 540, None, 2)] == ["noloco"]


def test_a_rate_that_is_no_inner_optimisers_does_not_move_the_start() -> None:
    demo, adamw = by_names("demo,solo adamw")
    assert {CI.warm_lr(demo, lr) for lr in CI.lrs(demo)} == {6e-3}
    assert CI.warm_lr(adamw, 3e-3) == 3e-3


def test_the_page_tells_the_settings_of_the_methods_that_ran() -> None:
    (ours,) = by_names("default", 2400)
    tuned = Tuned(method=ours, grid=GRID, outcomes=(outcome(1.0, 0.03),))
    alone = [Tuned(method=m, grid=GRID, outcomes=(outcome(1.0, 32.0),)) for m in references([ours])]
    found = rows([*alone, tuned], NIGHTLY)
    page = "\n".join(_lines(NIGHTLY, found, {one.method.name: one.method for one in [*alone, tuned]}, 10_000, ""))
    assert "| default | H 60, 3 fragments, strided, applied 5 steps late; Nesterov 0.7/0.5; trellis(bits=0.89)" in page


def test_half_of_a_gap_below_zero_is_asked_for_whole() -> None:
    assert _half(4.0) == 2.0 and _half(-0.05) == -0.05


def test_data_parallel_rates_are_chosen_by_all_seeds() -> None:
    """The first seed alone likes the higher rate."""
    losses = {(3e-3, 0): 1.5, (3e-3, 1): 1.5, (6e-3, 0): 1.4, (6e-3, 1): 1.9, (1.5e-3, 0): 1.6, (1.5e-3, 1): 1.6}
    kept: Kept[Outcome] = Kept(None, lambda entry: Outcome(**entry))

    def make(runs: list[Run], _: int) -> None:
        for run in runs:
            kept.keep(run, outcome(losses[run.lr, run.seed]), 1.0)

    (tuned,) = conduct([tuning(ADAMW, TOY)], make, kept)
    assert best(tuned.grid) == 3e-3 and [one.eval_loss for one in tuned.outcomes] == [1.5, 1.5]


def test_what_came_to_no_number_has_diverged() -> None:
    found = finished(ADAMW, TOY, float("nan"), 1.5, None)
    assert found.tune_loss is None and found.eval_loss is None


def test_a_narrow_terminal_has_whole_words(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = [Tuned(method=m, grid=GRID, outcomes=(outcome(1.0, 32.0),)) for m in references([ADAMW])]
    _show(rows(tuned, TOY), TOY, Console(width=80, force_terminal=False))
    said = capsys.readouterr().out
    assert "data-parallel adamw" in said and "1.0000" in said and "…" not in said


def test_methods_need_enough_rounds_unless_they_are_asked_for() -> None:
    assert "streaming-100" not in [method.name for method in by_names(None, 540)]
    assert "streaming-100" in [method.name for method in by_names(None, 2400)]
    assert [method.name for method in by_names("streaming-100", 540)] == ["streaming-100"]


def test_ours_have_rarer_rounds_in_long_runs() -> None:
    def intervals(steps: int | None) -> list[int]:
        return [m.outer.timetable.interval for m in by_names("default,thrifty", steps) if m.outer is not None]

    assert {"default", "thrifty"} <= {method.name for method in by_names(None, 2400)}
    assert intervals(None) == intervals(540) == [30, 30] and intervals(2400) == [60, 240]


def test_our_outer_rate_grows_with_the_peers() -> None:
    for peers, lr in ((None, 0.7), (2, 0.7), (8, 0.989949)):
        (ours,) = by_names("thrifty", 540, None, peers)
        assert isinstance(ours.outer, Outer) and ours.outer.rule == Nesterov(lr=lr, momentum=0.5)


def test_peers_and_interval_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "ci", replace(TOY, name="ci"))
    found = run_quality("ci", names="averaging", peers=4, interval=6, seeds=3, page=tmp_path)
    assert found[-1].peers == 4 and found[-1].H == 6 and found[-1].seeds == 2, "half as many, rounded up"
    page = (tmp_path / "quality_ci.md").read_text()
    assert (
        "--tier ci --methods averaging --peers 4 --interval 6 --seeds 3 --page docs" in page
        and "| averaging | H 6; averaging" in page
    )
    with pytest.raises(ValueError, match="choose 2 to 12"):
        run_quality("ci", interval=13)
    with pytest.raises(ValueError, match="multiple of the peers"):
        run_quality("ci", peers=3)


def test_without_tuning_each_method_runs_at_the_middle_of_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = replace(TOY, name="ci", adamw_lrs=(1e-3, 2e-3, 4e-3), seeds=1)
    monkeypatch.setitem(TIERS, "ci", tier)
    out = tmp_path / "runs.jsonl"
    found = run_quality("ci", names="averaging", interval=6, untuned=True, out=out, page=tmp_path)
    assert {row.lr for row in found} == {2e-3} and {len(row.grid) for row in found} == {1}
    assert len(out.read_text().splitlines()) == 4, (
        "data-parallel training with its two seeds, a peer alone, and averaging"
    )
    page = (tmp_path / "quality_ci.md").read_text()
    assert " --untuned " in page and "not tuned here" in page and "nothing is tuned" in page
    assert "the best of a grid" not in page and "at an edge" not in page and "in bold" not in page
    tuned = run_quality("ci", names="averaging", interval=6, out=out, page=tmp_path)
    assert all(len(row.grid) > 2 for row in tuned), "of the same runs and more"
    assert "the best of a grid" in (tmp_path / "quality_ci.md").read_text()


def test_another_text_is_read_as_bytes_and_named_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}. " for number in range(2000)))
    tier = replace(TOY, name="ci", model=replace(TOY.model, vocab_size=264))
    monkeypatch.setitem(TIERS, "ci", tier)
    monkeypatch.setattr(quality_train, "corpus", lambda tier: quality_train._corpus(tier.data, tier.model.seq_len))
    out = tmp_path / "runs.jsonl"
    run_quality("ci", names="averaging", interval=6, data=f"text:{text}", out=out, page=tmp_path)
    page = (tmp_path / "quality_ci.md").read_text()
    assert f" tokens of `text:{text}`, " in page and f"--data text:{text} " in page and "embedded corpus" not in page
    runs = len(out.read_text().splitlines())
    text.write_text("another " * 5000 + text.read_text())
    quality_train._corpus.cache_clear()  # as in another process
    run_quality("ci", names="averaging", interval=6, data=f"text:{text}", out=out)
    assert len(out.read_text().splitlines()) == 2 * runs, "what was trained on the old text is no run of the new one"
    with pytest.raises(DataError, match="no such file"):
        run_quality("ci", data=f"text:{tmp_path / 'none'}")


def test_settings_of_every_method_in_words() -> None:
    said = {method.name: settings(method) for method in METHODS}
    assert said["data-parallel muon"] == "the batch of all peers in one worker"
    assert said["diloco"] == "H 30; Nesterov 0.7/0.9; fp32 to owners, fp32 back"
    assert said["streaming"] == (
        "H 30, 3 fragments, strided, applied a step late; Nesterov 0.4/0.9; e3m0(block=128) to everybody; "
        "0.5 of the local parameters stays"
    )
    assert "heavy ball 1/0.5; " in said["co2"] and "heavy ball 1/0.5, gap penalty 1" in said["co2 gap"]
    assert "gossip 0.7/0.5" in said["noloco"] and "length and direction merged apart" in said["rda"]
    assert "eager" in said["eager"]


@pytest.mark.parametrize(("tier", "names", "said"), [("huge", None, "no tier"), ("ci", "adam", "no method")])
def test_unknown_names_are_refused(tier: str, names: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_quality(tier, names=names)


def test_a_gpu_tier_says_so_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        run_quality("gpu")


def test_the_tiers_are_what_they_say() -> None:
    assert CI.steps * CI.batch * CI.model.seq_len == 2_457_600
    assert Worker(CI, "adamw", seed=0).layout.num_parameters == 167_872
    assert Worker(TIERS["nightly"], "adamw", seed=0).layout.num_parameters == 505_440
