"""The experiments on error feedback say what they are there to say. Short runs; the figures are the bench's."""

from collections.abc import Sequence

import pytest
import torch
from tests.compression.stand_ins import BIASED, KeepLargest, KeepSigns

from farflung.sims import bench_feedback
from farflung.sims.bench_feedback import Curve, downlink_curves, measure_feedback, quadratic_curves, training_curves


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def by_name(curves: Sequence[Curve]) -> dict[tuple[str, str], tuple[float, ...]]:
    return {(curve.codec.partition("(")[0], curve.feedback): curve.values for curve in curves}


def test_on_a_quadratic_feedback_converges_where_without_it_there_is_a_floor() -> None:
    curves = by_name(quadratic_curves(BIASED, rounds=200))
    assert curves["fp32", "none"][-1] < 1e-6
    for codec in ("keepsigns", "keeplargest"):
        plain = curves[codec, "none"]
        assert plain[-1] > 0.9 * plain[100], "stalls"
        for kind in ("ef14", "ef14, 30% of rounds fail", "ef21"):
            values = curves[codec, kind]
            assert values[-1] < plain[-1] / 10 and values[-1] < values[100] / 2, (codec, kind, "goes on")


def test_a_residual_that_moves_with_its_peer_beats_one_that_is_dropped() -> None:
    curves = by_name(downlink_curves([KeepSigns()], rounds=300))
    none, dropped, kept = (curves["keepsigns", fate][-1] for fate in ("none", "dropped", "kept"))
    assert kept < dropped / 5 < none / 50


def test_training_curves_have_a_value_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_feedback, "WARM_STEPS", 30)
    monkeypatch.setattr(bench_feedback, "HELDOUT", 8)
    curves = training_curves([KeepLargest()], rounds=2, kinds=["ef14"])
    assert [(c.feedback, len(c.values)) for c in curves] == [("none", 3), ("ef14", 3)]
    assert curves[0].values[0] == curves[1].values[0] > curves[0].values[-1]


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("quadratic", "downlink", "training"):
        monkeypatch.setattr(bench_feedback, f"{name}_curves", lambda codecs: asked.append(codecs) or [])
    assert measure_feedback(BIASED) == {"quadratic": [], "downlink": [], "training": []}
    assert asked == [BIASED] * 3
