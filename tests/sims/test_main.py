"""The `farflung` program has the node's commands and its own, and a broken invariant is not exit code 0."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import farflung.sims
from farflung.sims.main import app

SOUND: dict[str, Any] = {
    "invariants_broken": [],
    "judged": [],
    "outer_loss": 1.5,
    "solo_loss": 1.75,
    "outer_better": True,
}
LOST = {"which": 6, "detail": "3 samples lost"}


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, f"farflung.sims.{name}", module)  # type: ignore[arg-type]
    monkeypatch.setattr(farflung.sims, name, module, raising=False)


def test_all_commands_are_listed() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    for command in ("create", "join", "status", "peers", "leave", "export", "id", "demo", "bench", "sim"):
        assert command in shown
    benches = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in benches for name in ("overhead", "round", "overlap", "churn", "codec", "quality"))


def test_a_bench_of_what_does_not_exist_says_what_does() -> None:
    result = CliRunner().invoke(app, ["bench", "quality", "--methods", "adam"], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "no method is called adam" in result.output


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({}, 0, ""),
        ({"invariants_broken": [LOST]}, 1, "BROKEN: invariant 6, each sample once: 3 samples lost"),
        ({"judged": ["node 2 ended with status 1"]}, 1, "BROKEN: node 2 ended with status 1"),
        (
            {"solo_loss": 1.25, "outer_better": False},
            0,
            "1.5000, is NOT lower than that of the best worker alone, 1.2500",
        ),
    ],
)
def test_demo_exits_nonzero_when_an_invariant_broke_and_says_when_one_worker_learnt_as_much(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], code: int, said: str
) -> None:
    fake(monkeypatch, "demo", run_demo=lambda out, minutes, quiet: SOUND | changed)
    result = CliRunner().invoke(app, ["demo", "--json", "--minutes", "1"])
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout) == SOUND | changed
    assert said in result.stderr and bool(said) == bool(result.stderr)


def test_benchmarks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, bool]] = []
    fake(
        monkeypatch,
        "bench_overhead",
        run_overhead=lambda as_json: called.append(("overhead", as_json)),
        missed=lambda _: [],
    )
    fake(
        monkeypatch,
        "bench_round",
        run_round=lambda as_json: called.append(("round", as_json)),
        missed=lambda _: ["too slow"],
    )
    assert CliRunner().invoke(app, ["bench", "overhead", "--json"]).exit_code == 0
    result = CliRunner().invoke(app, ["bench", "round"])
    assert result.exit_code == 1 and result.stderr == "MISSED: too slow\n"
    assert called == [("overhead", True), ("round", False)]
