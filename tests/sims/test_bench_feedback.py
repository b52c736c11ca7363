"""The experiments on error feedback say what they are there to say. Short runs; the figures are the bench's."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from farflung.compression.registry import parse_codec
from farflung.sims import bench_feedback, feedback_curves
from farflung.sims.bench_feedback import SHORT, run_feedback
from farflung.sims.feedback_curves import Curve, cold_curves, downlink_curves, quadratic_curves, warm_curves
from farflung.sims.feedback_words import WORDS
from farflung.sims.main import app

CODECS = [parse_codec(spec) for spec in SHORT if not spec.startswith("deadzone")]
"""The dead zone would take minutes without its kernels."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WARM_STEPS": 25, "HELDOUT": 8, "INNER_STEPS": 3, "BATCH": 2}.items():
        monkeypatch.setattr(feedback_curves, name, value)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of everything, without computing anything."""

    def draw(*kinds: str) -> Any:
        def drawn(codecs: Sequence[Any]) -> list[Curve]:
            exact = [Curve(codec="fp32", feedback="none", values=(1.0, 0.25))]
            return exact + [Curve(codec=c.spec, feedback=kind, values=(1.0, 0.5)) for c in codecs for kind in kinds]

        return drawn

    monkeypatch.setattr(bench_feedback, "quadratic_curves", draw("none", "ef14", "ef21"))
    monkeypatch.setattr(bench_feedback, "downlink_curves", draw("none", "dropped", "kept"))
    monkeypatch.setattr(bench_feedback, "warm_curves", draw("none", "ef14"))
    monkeypatch.setattr(bench_feedback, "cold_curves", draw("none", "ef14", "ef14 after 4 rounds"))


def by_name(curves: Sequence[Curve]) -> dict[tuple[str, str], tuple[float, ...]]:
    return {(curve.codec.partition("(")[0], curve.feedback): curve.values for curve in curves}


@pytest.mark.thorough
def test_on_a_quadratic_feedback_converges_where_without_it_there_is_a_floor() -> None:
    curves = by_name(quadratic_curves(CODECS, rounds=200))
    assert curves["fp32", "none"][-1] < 1e-6
    for codec in ("sign", "topk"):
        plain = curves[codec, "none"]
        assert plain[-1] > 0.8 * plain[100], "stalls"
        for kind in ("ef14", "ef14, 30% of rounds fail", "ef21"):
            values = curves[codec, kind]
            assert values[-1] < plain[-1] / 10 and values[-1] < values[100] / 2, (codec, kind, "goes on")


def test_a_residual_that_moves_with_its_peer_beats_one_that_is_dropped() -> None:
    curves = by_name(downlink_curves(CODECS[:1], rounds=300))
    none, dropped, kept = (curves["sign", fate][-1] for fate in ("none", "dropped", "kept"))
    assert kept < dropped / 3 < none / 6


@pytest.mark.usefixtures("small")
def test_training_curves_have_a_value_per_round() -> None:
    topk = [parse_codec("topk")]
    warm = warm_curves(topk, rounds=2)
    assert [(c.feedback, len(c.values)) for c in warm] == [("none", 3), ("none", 3), ("ef14", 3)]
    assert len({c.values[0] for c in warm}) == 1 and warm[0].values[0] > warm[0].values[-1]
    cold = cold_curves(topk, rounds=2, late=1)
    assert [c.feedback for c in cold] == ["none", "none", "ef14", "ef14 after 1 rounds"]
    plain, early, late = (c.values for c in cold[1:])
    assert cold[0].values[0] > warm[0].values[0], "from random weights"
    assert plain[1] == early[1] == late[1], "nothing is owed in the first round"
    assert early[2] != plain[2] == late[2], "and feedback that starts in the second has nothing to add there"


@pytest.mark.usefixtures("canned")
def test_the_page_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = run_feedback(page=tmp_path / "new")
    text = (tmp_path / "new" / "feedback.md").read_text()
    pictures = re.findall(r"\]\(([^)]+\.png)\)", text)
    assert (
        sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(["feedback.md", *pictures])
        and len(pictures) == 1
    )
    assert (tmp_path / "new" / pictures[0]).read_bytes().startswith(b"\x89PNG")
    assert all(f"| {curve.codec} |" in text for found in curves.values() for curve in found)
    assert "None" not in text and "nan" not in text
    shown = capsys.readouterr().out
    assert "ef14 after 4 rounds" in shown and "deadzone(bits=1.0)" in shown


@pytest.mark.usefixtures("canned")
def test_json_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["bench", "feedback", "--json"])
    assert done.exit_code == 0, done.output
    curves = json.loads(done.stdout)
    assert curves.keys() == WORDS.keys()
    assert all(curve.keys() == {"codec", "feedback", "values"} for found in curves.values() for curve in found)
