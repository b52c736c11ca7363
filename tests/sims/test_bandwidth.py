"""`farflung sim bandwidth`: the published table comes out, and utilisation behaves as utilisation must."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from farflung.compression.rate import RateCodec
from farflung.compression.registry import parse_codec
from farflung.sims import bandwidth, bandwidth_table
from farflung.sims.bandwidth import Method, Model, link_bits, needed_speed, our_methods, utilisation
from farflung.sims.bandwidth_table import (
    MODELS,
    PUBLISHED,
    RATIO,
    THRESHOLDS,
    Row,
    agreement,
    all_rows,
    differences,
    grid,
    points_off,
    published_methods,
)
from farflung.sims.main import app
from farflung.sims.quality_methods import Wire, by_names
from farflung.training.methods import LONG_RUN, training_method
from farflung.training.streaming import Timetable


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return all_rows()


def test_the_published_table_comes_out(rows: list[Row]) -> None:
    found = agreement(rows)
    assert found.entries == len(PUBLISHED) * len(THRESHOLDS) == 75
    assert found.share >= 0.85
    assert found.exact >= 60
    assert len(differences(rows)) == found.entries - found.exact


def test_without_the_fitted_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SHARE", 1.0)
    assert agreement(bandwidth_table.all_rows()).within_one == 74


def test_the_grid_has_the_published_figures() -> None:
    speeds = grid()
    assert np.allclose(speeds[1:] / speeds[:-1], RATIO)
    assert speeds[0] == pytest.approx(0.00091, rel=0.02) and speeds[-1] == pytest.approx(1000.0)
    for figures in PUBLISHED.values():
        for figure in figures:
            assert np.abs(speeds - figure).min() <= 0.06, "rounded to a decimal"


def test_a_figure_that_is_off_is_counted_and_told(rows: list[Row]) -> None:
    one = next(row for row in rows if row.published_gbit_s is not None)
    assert one.points_off is not None
    speed = one.gbit_s[0]
    assert speed is not None and points_off(speed * RATIO**2, speed) == 2 and points_off(None, speed) is None
    wrong = replace(one, gbit_s=(None, *one.gbit_s[1:]), points_off=(None, 2, *one.points_off[2:]))
    assert agreement([wrong]).within_one == agreement([one]).within_one - 2
    assert "more than the grid has; published 86.8" in differences([wrong])[0]


def test_blocking_rounds_have_the_closed_form() -> None:
    """With one fragment nearly all of the exchange is waited for: the digest's formula, less the overlap with one backward pass."""
    model, method = MODELS[0], published_methods(MODELS[0])[1]
    assert method.name == "diloco"
    speeds = grid()
    exchange_s = bandwidth.SHARE * model.parameters * method.bits / (speeds * 1e9)
    closed = 100 * model.step_s / (100 * model.step_s + exchange_s)
    assert np.abs(utilisation(model, method, speeds) - closed).max() < 0.01


def test_our_rows_are_those_of_the_quality_bench(rows: list[Row]) -> None:
    for method in by_names("default,thrifty", LONG_RUN):
        assert method.outer is not None
        table = method.outer.timetable
        latest = table.interval // table.fragments - 1
        for name, delay in ((f"{method.name}, {table.delay} late", table.delay), (method.name, latest)):
            mine = [row for row in rows if row.method == name]
            assert [row.model for row in mine] == ["1B", "10B", "100B"]
            assert {(r.interval, r.fragments, r.delay) for r in mine} == {(table.interval, table.fragments, delay)}
    for method in our_methods():
        ours = training_method(method.name.split(",")[0], LONG_RUN)
        up, down = (parse_codec(spec) for spec in (ours.codec, ours.mean_codec))
        assert isinstance(up, RateCodec) and isinstance(down, RateCodec)
        assert up.bits <= down.bits
        assert method.bits == pytest.approx(up.bits, rel=0.1), "of two peers, half of a contribution each way"


def test_bits_of_the_busier_direction() -> None:
    assert link_bits(Wire(topology="gather", up="fp32"), 2) == pytest.approx(32, rel=1e-3)
    assert link_bits(Wire(topology="gather", up="fp32"), 4) == pytest.approx(96, rel=1e-3)
    assert link_bits(Wire(topology="butterfly", up="fp32", down="fp32"), 4) == pytest.approx(48, rel=1e-3)
    assert link_bits(Wire(topology="butterfly", up="fp32", down="int8(block=128)"), 2) == pytest.approx(20, rel=5e-3)


models = st.builds(
    lambda layers, step_s, parameters: Model(name="m", parameters=parameters, layers=layers, step_s=step_s),
    st.integers(1, 12), st.floats(0.01, 10.0), st.floats(1e6, 1e10),
)  # fmt: skip


@st.composite
def methods(draw: st.DrawFn) -> Method:
    interval = draw(st.integers(1, 12))
    table = Timetable(
        interval=interval, fragments=draw(st.integers(1, interval)), delay=draw(st.integers(0, interval - 1))
    )
    return Method(name="m", timetable=table, bits=draw(st.floats(0.5, 32.0)))


SPEEDS = np.logspace(-4, 4, 40)


@given(models, methods())
@settings(deadline=None, max_examples=40)
def test_utilisation_is_a_share_that_rises_with_speed(model: Model, method: Method) -> None:
    reached = utilisation(model, method, SPEEDS)
    assert (reached > 0).all() and (reached <= 1 + 1e-9).all()
    assert (np.diff(reached) >= -1e-9).all()


@given(models, methods(), st.floats(1.0, 100.0))
@settings(deadline=None, max_examples=40)
def test_only_the_ratio_of_bits_to_speed_counts(model: Model, method: Method, factor: float) -> None:
    larger = replace(model, parameters=model.parameters * factor)
    assert np.allclose(utilisation(larger, method, SPEEDS * factor), utilisation(model, method, SPEEDS))
    slower = replace(model, step_s=model.step_s * factor)
    assert np.allclose(utilisation(slower, method, SPEEDS), utilisation(model, method, SPEEDS * factor))


@given(models, methods())
@settings(deadline=None, max_examples=40)
def test_a_longer_delay_never_hurts_and_fewer_bits_never_do(model: Model, method: Method) -> None:
    reached = utilisation(model, method, SPEEDS)
    table = method.timetable
    later = replace(method, timetable=replace(table, delay=min(table.delay + 1, table.interval)))
    assert (utilisation(model, later, SPEEDS) >= reached - 1e-9).all()
    assert (utilisation(model, replace(method, bits=method.bits / 2), SPEEDS) >= reached - 1e-9).all()


@given(models, methods())
@settings(deadline=None, max_examples=40)
def test_a_link_cannot_be_busier_than_always(model: Model, method: Method) -> None:
    """However much is hidden, H steps take at least as long as the link needs for what is sent in them."""
    busy_s = bandwidth.SHARE * model.parameters * method.bits / (SPEEDS * 1e9)
    limit = method.timetable.interval * model.step_s / busy_s
    assert (utilisation(model, method, SPEEDS) <= limit * (1 + 1e-9)).all()


def test_needed_speed() -> None:
    speeds, reached = np.array([1.0, 2.0, 4.0]), np.array([0.2, 0.5, 0.9])
    assert needed_speed(speeds, reached, 0.5) == 2.0
    assert needed_speed(speeds, reached, 0.51) == 4.0
    assert needed_speed(speeds, reached, 0.95) is None


def test_the_command(tmp_path: Path) -> None:
    words = ["sim", "bandwidth", "--json", "--plot", str(tmp_path / "p.png"), "--page", str(tmp_path / "docs")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["agreement"]["share"] >= 0.85 and told["agreement"]["entries"] == 75
    assert len(told["rows"]) == 27 and {"default", "thrifty"} <= {row["method"] for row in told["rows"]}
    assert len(told["rows"][0]["utilisation"]) == len(told["speeds_gbit_s"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "docs" / "bandwidth.md").read_text()
    assert all(said in page for said in told["differences"]) and (tmp_path / "docs" / "bandwidth.png").exists()
    shown = CliRunner().invoke(app, ["sim", "bandwidth"], env={"COLUMNS": "160"}).output
    assert "75 published entries" in shown and "thrifty" in shown
