"""`ours (live)` of `farflung bench recovery`: what nodes themselves keep, send and decide, beside the bench's pipeline."""

from collections.abc import Iterator

import pytest
import torch
from tests.sims.recovery_cases import SAFE, TOY, use_small_corpus
from torch import Tensor

from farflung.node.shadows import CODEC
from farflung.protocol.manifest_sections import PipelineSpec
from farflung.sims.recovery_keepers import pipeline_nbytes
from farflung.sims.recovery_live import Live
from farflung.sims.recovery_methods import LIVE
from farflung.sims.recovery_node import ROUND_STEPS
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_train import Feed, advance, start, train


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_small_corpus(monkeypatch):
        yield


@pytest.fixture
def begun() -> Iterator[tuple[Pipeline, Live]]:
    pipeline, keeper = start(LIVE, SAFE, rate=0.1, seed=0)
    assert isinstance(keeper, Live)
    yield pipeline, keeper
    keeper.close()


def steps(pipeline: Pipeline, keeper: Live, until: int, *, first: int = SAFE.warm_steps) -> None:
    feed = Feed(SAFE, 0)
    for step in range(first, until):
        advance(pipeline, keeper, feed, step, frozenset())


def lose(pipeline: Pipeline, keeper: Live, lost: set[int], step: int) -> None:
    pipeline.lose(lost)
    keeper.recover(pipeline, frozenset(lost), step)


def sent(state: Tensor) -> Tensor:
    """As a shadow has it."""
    return CODEC.decode(CODEC.encode(state), state.numel())


@pytest.mark.parametrize("lost", [{0}, {1, 2}, {0, 3}, {0, 1, 2, 3}])
def test_recoveries_use_what_survives(begun: tuple[Pipeline, Live], lost: set[int]) -> None:
    """What is lost is NaN in the pipeline, and its nodes are gone with what they held."""
    pipeline, keeper = begun
    before = [part.flat.clone() for part in pipeline.parts]
    lose(pipeline, keeper, lost, SAFE.warm_steps)
    for stage, part in enumerate(pipeline.stages):
        assert bool(part.flat.isfinite().all())
        assert torch.equal(part.flat, before[stage]) == (stage not in lost)
        assert bool(part.optimizer.tensors()) == (stage not in lost)
    assert torch.equal(pipeline.ends.flat, before[-1])
    assert keeper.rungs.total() == len(lost) and keeper.sent.recovered > 0
    steps(pipeline, keeper, SAFE.warm_steps + 2)


def test_a_lost_stage_is_as_it_was_at_the_last_round(begun: tuple[Pipeline, Live]) -> None:
    """And each stage was sent once for it."""
    pipeline, keeper = begun
    steps(pipeline, keeper, ROUND_STEPS)
    at_round = [part.flat.clone() for part in pipeline.stages]
    now = ROUND_STEPS + 15  # enough to have the bytes for it
    steps(pipeline, keeper, now, first=ROUND_STEPS)
    assert keeper.sent.kept == sum(len(CODEC.encode(flat)) for flat in at_round)
    for stage in (0, 3):
        lose(pipeline, keeper, {stage}, now)
        assert torch.equal(pipeline.stages[stage].flat, sent(at_round[stage]))
        assert pipeline.stages[stage].steps_since_bump is None
    assert keeper.rungs == {"shadow": 2}


def test_the_share_of_the_manifest_is_kept(begun: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = begun
    last = 2 * ROUND_STEPS
    steps(pipeline, keeper, last)
    allowed = PipelineSpec().shadows * (last - SAFE.warm_steps) * pipeline_nbytes(SAFE)
    assert 0.15 * allowed < keeper.sent.kept <= allowed


def test_who_holds_a_shadow_takes_it_along(begun: tuple[Pipeline, Live]) -> None:
    """Then the stage is made of its neighbours, and learns faster for a while."""
    pipeline, keeper = begun
    held = [(stage - 1, node.stage - 1) for node in keeper._nodes for stage in node.shelf.shadows if node.stage]
    stage, holder = held[0]
    lose(pipeline, keeper, {stage, holder}, SAFE.warm_steps)
    assert keeper.rungs.total() == 2 and keeper.rungs["shadow"] <= 1
    assert pipeline.stages[stage].steps_since_bump == 0
    steps(pipeline, keeper, SAFE.warm_steps + 1)
    assert any(stage + 1 in node.shelf.shadows for node in keeper._nodes)  # the alarm: there is a copy again


def test_a_newcomer_knows_who_is_a_newcomer(begun: tuple[Pipeline, Live]) -> None:
    """Its neighbours are of later lives, and it can be made of them."""
    pipeline, keeper = begun
    lose(pipeline, keeper, {0}, SAFE.warm_steps)
    lose(pipeline, keeper, {2}, SAFE.warm_steps)
    for node in keeper._nodes:
        node.shelf.shadows.clear()
    keeper.rungs.clear()
    lose(pipeline, keeper, {1}, SAFE.warm_steps)
    assert keeper.rungs == {"fitted mean": 1}


def test_nodes_measure_how_often_peers_are_lost(begun: tuple[Pipeline, Live]) -> None:
    """The ladder's rate is theirs, not the bench's."""
    pipeline, keeper = begun
    rate = keeper._nodes[0].roll.losses_per_hour
    for step in range(SAFE.warm_steps, SAFE.warm_steps + 4):
        lose(pipeline, keeper, {step % 4}, step)
        steps(pipeline, keeper, step + 1, first=step)
    assert keeper._nodes[0].roll.losses_per_hour > 3 * rate


def test_the_same_run_twice() -> None:
    assert train(LIVE, SAFE, rate=0.9, seed=0) == train(LIVE, SAFE, rate=0.9, seed=0)


def test_a_data_node_that_may_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 0"):
        Live(Pipeline(TOY, LIVE.checkfree, seed=0), seed=0, before=[])
