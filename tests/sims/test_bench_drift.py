"""Peers of a pipeline's stage that train apart: who visits whom, what a round does, and the page."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sims.recovery_cases import use_small_corpus

from farflung.sims.bench_drift import run_drift
from farflung.sims.drift_rows import HEADINGS
from farflung.sims.pipeline_drift import MODEL, DriftTask, Way, dealt, take_round, train
from farflung.training.flat import flatten
from farflung.training.fragments import cut
from farflung.training.inner import InnerConfig
from farflung.training.pipeline_slice import StageSlice
from farflung.training.rules import Nesterov
from farflung.training.stage_replica import StageReplica

SMALL = DriftTask(
    model=replace(MODEL, num_layers=2, seq_len=16),
    columns=2,
    microbatches=4,
    batch=1,
    steps=4,
    windows=4,
    inner_steps=(2, 4),
    fragments=2,
)
WHOLE = Way(routes="columns", leave=0.0, inner_steps=2, fragments=1)


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_small_corpus(monkeypatch):
        yield


@given(st.integers(1, 4), st.integers(1, 3), st.floats(0.0, 1.0), st.integers(0, 99))
def test_every_peer_of_a_stage_gets_as_many_visits(columns: int, each: int, leave: float, seed: int) -> None:
    task = DriftTask(columns=columns, microbatches=columns * each)
    routes = dealt(task, columns, leave, random.Random(seed))
    assert [route[0] for route in routes] == [microbatch % columns for microbatch in range(columns * each)]
    for hop in zip(*routes, strict=True):
        assert Counter(hop) == dict.fromkeys(range(columns), each)
    if leave == 0.0:
        assert all(len(set(route)) == 1 for route in routes)


def test_routes_leave_their_column_as_often_as_they_are_dealt_out() -> None:
    task, rng = DriftTask(), random.Random(0)
    for leave in (1 / 3, 1.0):
        hops = [(route[0], column) for _ in range(500) for route in dealt(task, 3, leave, rng) for column in route[1:]]
        away = sum(home != column for home, column in hops) / len(hops)
        # of those dealt out, one in `columns` comes home again where all are; of two, half do, and a third share a column
        assert away == pytest.approx({1.0: 2 / 3, 1 / 3: 1 / 3 * 1 / 2 * 4 / 5}[leave], abs=0.02)


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_round_leaves_peers_with_the_mean_of_what_they_had(fragments: int) -> None:
    part = StageSlice((1, 1), 1)
    peers = [StageReplica(SMALL.model, part, SMALL.inner, Nesterov(lr=1.0, momentum=0.0), seed=0) for _ in range(3)]
    for number, peer in enumerate(peers):
        for parameter in peer.parameters:
            parameter.add_(float(number))
    before = peers[0].outer.params.clone()
    for one in cut(peers[0].layout.slots, fragments):
        take_round(peers, one)
    for peer in peers:
        torch.testing.assert_close(peer.outer.params, before + 1.0)
        torch.testing.assert_close(
            flatten(peer.layout, peer.parameters, torch.empty(peer.num_parameters)), before + 1.0
        )


@pytest.mark.parametrize("leave", [0.0, 1.0])
def test_peers_that_meet_after_each_plain_step_are_one_peer(monkeypatch: pytest.MonkeyPatch, leave: float) -> None:
    """Plain gradient steps without clipping: the mean of the steps is the step of the mean, wherever microbatches went."""
    plain = InnerConfig(
        schedule=replace(SMALL.inner.schedule, peak=0.3),
        optimizer="torch.optim.SGD",
        weight_decay=0.0,
        max_grad_norm=1e9,
    )
    monkeypatch.setattr(DriftTask, "inner", plain)
    monkeypatch.setattr(DriftTask, "outer", Nesterov(lr=1.0, momentum=0.0))
    together = train(SMALL, None, 0)
    often = train(SMALL, replace(WHOLE, leave=leave, inner_steps=1), 0)
    assert often.heldout == pytest.approx(together.heldout, rel=1e-5)
    assert often.local == pytest.approx(together.local, rel=1e-5)
    assert train(SMALL, replace(WHOLE, leave=leave, inner_steps=4), 0).heldout != pytest.approx(
        together.heldout, rel=1e-5
    )


def test_table_figures_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_drift(seeds=2, page=tmp_path, as_json=True, task=replace(SMALL, inner_steps=(2,)))
    told = json.loads(capsys.readouterr().out)
    assert len(found.rows) == 6 and len(told["rows"]) == 6 and len(told["together"]) == 2
    row = found.row("mesh", 2, "rotating")
    assert row.way.fragments == 2 and len(row.gaps) == 2
    assert row.gap == pytest.approx(
        sum(100 * (own.heldout / one.heldout - 1) for own, one in zip(row.runs, found.together, strict=True)) / 2
    )
    page = (tmp_path / "drift.md").read_text()
    assert page.count("| mesh |") == 2 and f"| {row.gap:+.2f} |" in page
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    assert f"| {' | '.join(HEADINGS)} |" in page


def test_a_task_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ValueError, match="end with a round"):
        replace(SMALL, steps=5)
