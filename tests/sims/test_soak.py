"""The command that soaks: what it says and how it ends, with runs that simulate nothing."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from farflung.sims import soak as soaking
from farflung.sims import soaked
from farflung.sims.chaos import BRISK_CALM_S, BRISK_CHURN_S, BRISK_PEERS, brisk_plan
from farflung.sims.simulation import Report
from farflung.sims.soak import rate_and_rest, soak


def fine(seed: int, *, keep: bool) -> Report:
    return Report(seed, 3, [], events=["a line"] if keep else [])


def broken_at_7(seed: int, *, keep: bool) -> Report:
    return Report(seed, 3, [], violations=["invariant 1: bits differ"] if seed == 7 else [])


command = partial(soak, "a soak", "", told=lambda report: f"{report.num_peers} peers")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which takes no seconds to start."""

    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...
        def shutdown(self, *, cancel_futures: bool) -> None: ...

        map = staticmethod(map)

        @staticmethod
        def submit(run: Callable[[int], Report], seed: int) -> Future[Report]:
            done = Future[Report]()
            done.set_result(run(seed))
            return done

    monkeypatch.setattr(soaking, "ProcessPoolExecutor", Pool)


def said(capsys: pytest.CaptureFixture[str], args: list[str], code: int, run: soaking.Run[Report]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        command({"fine": fine, "other": run}, args=["--kind", "other", *args])
    assert ended.value.code == code
    return capsys.readouterr().out.splitlines()


def test_each_of_a_few_seeds_has_a_line_and_of_many_every_hundred(capsys: pytest.CaptureFixture[str]) -> None:
    few = said(capsys, ["--seeds", "2", "--first", "5"], 0, fine)
    assert few[:2] == ["seed    5: 3 peers, ok", "seed    6: 3 peers, ok"]
    many = said(capsys, ["--seeds", "250"], 0, fine)
    assert [line.split(" seeds")[0] for line in many[:-1]] == [
        "other: 100 of 250", "other: 200 of 250", "other: 250 of 250",
    ]  # fmt: skip
    assert many[-1].startswith("250 passed, 0 failed")


def test_a_seed_that_fails_among_many_is_told_and_named_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, ["--seeds", "120"], 1, broken_at_7)
    assert lines[:2] == ["seed    7: 3 peers, VIOLATED", "    invariant 1: bits differ"]
    assert lines[-1] == "failed: 7"


def test_whoever_interrupts_hears_where_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(seed: int, *, keep: bool) -> Report:
        if seed == 13:
            raise KeyboardInterrupt
        return fine(seed, keep=keep)

    lines = said(capsys, ["--first", "10", "--seeds", "9"], soaking.INTERRUPTED, interrupted)
    assert lines[-1] == "interrupted: go on with --first 13 --seeds 6"


def test_a_soak_goes_on_where_it_was_interrupted_and_runs_again_what_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[int]()

    def interrupted_at(seed_of_interruption: int, seed: int, *, keep: bool) -> Report:
        ran.append(seed)
        if seed == seed_of_interruption:
            raise KeyboardInterrupt
        return broken_at_7(seed, keep=keep)

    kept = ["--kept", str(tmp_path / "out" / "soak.jsonl"), "--first", "5"]
    lines = said(capsys, [*kept, "--seeds", "5"], soaking.INTERRUPTED, partial(interrupted_at, 8))
    assert lines[-1] == "interrupted: go on with the same command"
    lines = said(capsys, [*kept, "--seeds", "5"], 1, partial(interrupted_at, 99))
    assert ran == [5, 6, 7, 8, 7, 8, 9], "7 had failed"
    assert lines[0] == "other: 2 of 5 seeds have passed before, by the same code"
    ran.clear()
    said(capsys, [*kept, "--seeds", "2", "--twice"], 0, partial(interrupted_at, 99))
    assert sorted(ran) == [5, 5, 6, 6], "they had not been run twice"
    said(capsys, [*kept, "--seeds", "2", "--twice"], 0, partial(interrupted_at, 99))
    assert len(ran) == 4
    monkeypatch.setattr(soaked, "code_digest", lambda: "changed")
    said(capsys, [*kept, "--seeds", "2"], 0, partial(interrupted_at, 99))
    assert ran[4:] == [5, 6]


def test_any_line_of_our_code_makes_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "node" / "a.py"
    module.parent.mkdir()
    module.write_text("x = 1\n")
    monkeypatch.setattr(soaked, "__file__", str(tmp_path / "sims" / "soaked.py"))
    first = soaked.code_digest()
    (tmp_path / "README.md").write_text("of no consequence")
    assert soaked.code_digest() == first
    module.write_text("x = 2\n")
    assert soaked.code_digest() != first


def test_the_log_is_kept_for_who_wants_to_see_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a line" in said(capsys, ["--seed", "3", "--events"], 0, fine)
    assert "a line" not in said(capsys, ["--seed", "3"], 0, fine)


def test_rate_and_time_left() -> None:
    assert rate_and_rest(100, 10_000, 50.0) == "2.00 seeds/s, 82 min left"
    assert rate_and_rest(90, 100, 45.0) == "2.00 seeds/s, 5 s left"


def test_brisk_swarms_are_small_short_and_end_in_a_calm_that_is_judged() -> None:
    for seed in range(50):
        plan = brisk_plan(seed)
        assert 3 <= plan.schedule.num_peers <= BRISK_PEERS
        assert plan.schedule.duration_s == BRISK_CHURN_S + BRISK_CALM_S
        assert plan.schedule.calm_from <= BRISK_CHURN_S
        assert plan.calm_s == BRISK_CALM_S
