"""The command that soaks: what it says and how it ends, with runs that simulate nothing."""

from functools import partial

import pytest

from farflung.sims import soak as soaking
from farflung.sims.chaos import BRISK_CALM_S, BRISK_CHURN_S, BRISK_PEERS, brisk_plan
from farflung.sims.simulation import Report
from farflung.sims.soak import rate_and_rest, soak


def fine(seed: int, *, keep: bool) -> Report:
    return Report(seed, 3, [], events=["a line"] if keep else [])


def broken_at_7(seed: int, *, keep: bool) -> Report:
    return Report(seed, 3, [], violations=["invariant 1: bits differ"] if seed == 7 else [])


command = partial(soak, "", told=lambda report: f"{report.num_peers} peers")


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
