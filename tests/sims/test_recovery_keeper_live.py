"""`ours` of `farflung bench recovery`: what nodes themselves keep, send and decide, beside the bench's pipeline."""

import asyncio
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.sims.recovery_cases import AT_RISK, SAFE, use_small_corpus

from farflung.compression.codec import CodecError
from farflung.node.events import EventLog
from farflung.node.shadows import FIRST, UNLISTED_S, WHOLE, fetch, serve_shelf
from farflung.node.stage_recipe import MOST_HOLDERS
from farflung.protocol.errors import NetworkError, Refused
from farflung.protocol.headers import ShadowRequest
from farflung.protocol.keys import PeerId
from farflung.protocol.manifest_sections import PipelineSpec
from farflung.sims import recovery_train
from farflung.sims.recovery_keepers import pipeline_nbytes
from farflung.sims.recovery_live import Live
from farflung.sims.recovery_methods import OURS
from farflung.sims.recovery_node import ROUND_STEPS, Node
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_tiers import Tier
from farflung.sims.recovery_train import Feed, advance, start, train
from farflung.sims.toy import VirtualDoor
from farflung.training.errors import Unrecoverable
from farflung.training.recovery_shadow import Refresh, Shadow, applied, empty, handed_over

DOOR = VirtualDoor(lambda name: 0.0)


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_small_corpus(monkeypatch):
        yield


def undisturbed(tier: Tier) -> Iterator[tuple[Pipeline, Live]]:
    pipeline, keeper = start(OURS, tier, seed=0)
    assert isinstance(keeper, Live)
    yield pipeline, keeper
    keeper.close()


@pytest.fixture
def begun() -> Iterator[tuple[Pipeline, Live]]:
    yield from undisturbed(SAFE)


def steps(pipeline: Pipeline, keeper: Live, until: int, *, first: int = SAFE.warm_steps) -> None:
    feed = Feed(SAFE, 0)
    for step in range(first, until):
        advance(pipeline, keeper, feed, step, frozenset())


def lose(pipeline: Pipeline, keeper: Live, lost: set[int], step: int) -> None:
    pipeline.lose(lost)
    keeper.recover(pipeline, frozenset(lost), step)


@pytest.mark.parametrize("lost", [{0}, {1, 2}, {0, 3}])
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


def test_a_lost_stage_is_almost_as_it_was(begun: tuple[Pipeline, Live]) -> None:
    """Not as at the last round, which is longer ago."""
    pipeline, keeper = begun
    steps(pipeline, keeper, ROUND_STEPS)
    at_round = [part.flat.clone() for part in pipeline.stages]
    now = 2 * ROUND_STEPS - 1
    steps(pipeline, keeper, now, first=ROUND_STEPS)
    for stage in (0, 3):
        before = pipeline.stages[stage].flat.clone()
        lose(pipeline, keeper, {stage}, now)
        after = pipeline.stages[stage]
        assert (after.flat - before).norm() < 0.2 * (at_round[stage] - before).norm()
        assert after.steps_since_bump is None
    assert keeper.rungs == {"shadow": 2}


def gives(source: Node, sent: Refresh) -> None:
    """Whoever asks a peer of stage 1 for a shadow of it gets `sent`."""

    async def hand_over(to: PeerId, request: ShadowRequest) -> Refresh:
        return sent

    serve_shelf(
        source.network,
        source.shelf,
        lambda peer: True,
        pytest.fail,
        roll=source.roll,
        side=DOOR,
        log=EventLog(None, swarm="s", peer="p"),
        stage=1,
        own=hand_over,
    )


def holder_of(keeper: Live, stage: int) -> Node:
    """Who has the shadow of a stage of the swarm."""
    [holder] = [node for node in keeper._nodes if stage in node.shelf.shadows]
    return holder


def ask(keeper: Live, holder: Node, source: Node, have: Shadow | None, *, founds: bool = False) -> tuple[Shadow, int]:
    """A refresh, and its bytes."""
    numel = source.recipe.own.num_parameters
    asked = fetch(holder.network, DOOR, source.id, source.stage, numel, have, founds=founds)
    return keeper._loop.run_until_complete(asked)


def test_only_what_has_changed_is_sent(begun: tuple[Pipeline, Live]) -> None:
    _, keeper = begun
    source, holder = keeper._nodes[1], keeper._nodes[3]
    first, whole = ask(keeper, holder, source, None)
    source.learner.replica.parameters[0].data.add_(0.1)
    second, nbytes = ask(keeper, holder, source, first)
    assert nbytes < 0.6 * whole
    trained = source.learner.local_params()
    assert (second.values - trained).norm() < 0.35 * (first.values - trained).norm()
    known = source.shelf.given[holder.id]
    assert known.name == second.name and torch.equal(known.values, second.values)
    with pytest.raises(NetworkError, match="no such shadow of stage 1"):
        ask(keeper, holder, source, first)
    assert ask(keeper, holder, source, None)[1] > 1.5 * nbytes, "a whole one"


def test_a_copy_to_keep_is_coarse_and_one_to_begin_with_is_fine(begun: tuple[Pipeline, Live]) -> None:
    _, keeper = begun
    source, holder = keeper._nodes[1], keeper._nodes[3]
    trained = source.learner.local_params()
    kept, coarse = ask(keeper, holder, source, None)
    begins, fine = ask(keeper, holder, source, None, founds=True)
    assert coarse < 0.6 * fine
    assert 0.02 < (kept.values - trained).norm() / trained.norm() < 0.1
    assert (begins.values - trained).norm() / trained.norm() < 0.01


def test_who_only_holds_a_stage_makes_no_differences(begun: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = begun
    steps(pipeline, keeper, SAFE.warm_steps + 2)
    holder, asks = holder_of(keeper, 1), keeper._nodes[1]
    held = holder.shelf.shadows[1]
    with pytest.raises(NetworkError, match="no such shadow of stage 1"):
        keeper._loop.run_until_complete(fetch(asks.network, DOOR, holder.id, 1, held.values.numel(), held))


def test_only_so_many_holders_are_remembered(begun: tuple[Pipeline, Live]) -> None:
    _, keeper = begun
    shelf, one = keeper._nodes[1].shelf, empty(5)
    shelf.given.clear()
    for number in [*range(MOST_HOLDERS), 0, MOST_HOLDERS]:
        shelf.give(bytes([number]) * 32, one)
    assert list(shelf.given) == [bytes([number]) * 32 for number in (*range(2, MOST_HOLDERS), 0, MOST_HOLDERS)]


def test_what_is_with_nobody_any_more_is_not_remembered(begun: tuple[Pipeline, Live]) -> None:
    """Somebody asks for a copy and keeps none; another has it, and is not forgotten. And nothing of it is kept for another stage."""
    pipeline, keeper = begun
    steps(pipeline, keeper, SAFE.warm_steps + 2)
    source, holder = keeper._nodes[1], holder_of(keeper, 1)
    asks = next(node for node in keeper._nodes if node not in (source, holder))
    ask(keeper, asks, source, None)
    assert {holder.id, asks.id} == set(source.shelf.given)

    async def look_after(seconds: float) -> None:
        source.shadows._forget_given()
        await asyncio.sleep(seconds)
        for node in keeper._nodes:  # still heard
            if node is not source:
                source.roll.heard(node.id, node.present(), asyncio.get_running_loop().time())
        source.shadows._forget_given()

    keeper._loop.run_until_complete(look_after(UNLISTED_S / 2))
    assert {holder.id, asks.id} == set(source.shelf.given), "it may be on its way"
    keeper._loop.run_until_complete(look_after(UNLISTED_S / 2))
    assert {holder.id} == set(source.shelf.given)
    source.shelf.serve(2)
    assert not source.shelf.given


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (Refresh(base=b"x" * 32, step=3, payload=bytes(FIRST.encode(torch.zeros(7)))), "elements is 7"),
        (Refresh(base=b"x" * 32, step=3, payload=b"nothing"), "not a shadow of stage 1"),
        (None, "continues shadow 787878787878"),
    ],
)
def test_what_is_no_refresh_is_refused(begun: tuple[Pipeline, Live], sent: Refresh | None, why: str) -> None:
    _, keeper = begun
    source, holder = keeper._nodes[1], keeper._nodes[3]
    whole = FIRST.encode(source.learner.local_params())
    gives(source, sent or Refresh(base=b"x" * 32, step=3, payload=bytes(whole)))
    with pytest.raises(Refused, match=why) as caught:
        ask(keeper, holder, source, None)
    assert caught.value.peer == source.id


def test_numbers_that_could_not_be_handed_on_are_no_shadow(begun: tuple[Pipeline, Live]) -> None:
    """They decode, but whoever asked for a copy of the copy would end who holds it: what a stream handler raises ends the node."""
    _, keeper = begun
    source, holder = keeper._nodes[1], keeper._nodes[3]
    payload = bytearray(FIRST.encode(source.learner.local_params()))
    payload[-4:] = struct.pack("<f", 3e38)  # the mean of the highest level
    sent = Refresh(base=empty(source.recipe.own.num_parameters).name, step=3, payload=bytes(payload))
    with pytest.raises(CodecError):
        handed_over(applied(empty(source.recipe.own.num_parameters), sent, FIRST), WHOLE)
    gives(source, sent)
    with pytest.raises(Refused, match="not a shadow of stage 1") as caught:
        ask(keeper, holder, source, None)
    assert caught.value.peer == source.id


def test_who_trains_with_what_are_no_numbers_has_no_shadow(begun: tuple[Pipeline, Live]) -> None:
    """It stops by itself, with a reason; until then who asks is told that there is none."""
    _, keeper = begun
    source, holder = keeper._nodes[1], keeper._nodes[3]
    source.learner.replica.parameters[0].data.fill_(math.nan)
    failed: list[dict[str, Any]] = []
    keeper._loop.set_exception_handler(lambda _, context: failed.append(context))
    with pytest.raises(NetworkError, match="no such shadow of stage 1"):
        ask(keeper, holder, source, None)
    assert not failed


def test_who_begins_a_stage_with_a_copy_goes_on_from_it(begun: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = begun
    holder = holder_of(keeper, 1)
    lose(pipeline, keeper, {0}, SAFE.warm_steps)
    held, founder = holder.shelf.shadows[1], keeper._nodes[1]
    assert holder.shelf.sources[1] == founder.id
    assert founder.shelf.given[holder.id].name == held.name
    assert torch.equal(held.values, pipeline.stages[0].flat)
    _, nbytes = ask(keeper, holder, founder, held)
    assert nbytes < 0.4 * WHOLE.expected_nbytes(held.values.numel())


def test_the_share_of_the_manifest_is_kept(begun: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = begun
    last = 2 * ROUND_STEPS
    steps(pipeline, keeper, last)
    allowed = PipelineSpec().shadows * (last - SAFE.warm_steps) * pipeline_nbytes(SAFE)
    assert 0.5 * allowed < keeper.sent.kept <= allowed


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
    rate = keeper._nodes[0].roll.losses.per_hour
    for step in range(SAFE.warm_steps, SAFE.warm_steps + 4):
        lose(pipeline, keeper, {step % 4}, step)
        steps(pipeline, keeper, step + 1, first=step)
    assert keeper._nodes[0].roll.losses.per_hour > 3 * rate


def test_the_same_run_twice() -> None:
    assert train(OURS, SAFE, rate=0.9, seed=0) == train(OURS, SAFE, rate=0.9, seed=0)


@pytest.fixture
def at_risk() -> Iterator[tuple[Pipeline, Live]]:
    """The ends are with stage 0, and may be lost."""
    yield from undisturbed(AT_RISK)


def test_a_data_node_comes_back_from_its_copy_with_the_ends(at_risk: tuple[Pipeline, Live]) -> None:
    """What its peer has is one vector, in the model's order, as a stage's of a swarm."""
    pipeline, keeper = at_risk
    initial, before = Pipeline(AT_RISK, OURS.checkfree, seed=1), [part.flat.clone() for part in pipeline.parts]
    [holder] = [node.stage for node in keeper._nodes if 0 in node.shelf.shadows]
    other = next(stage for stage in (1, 2, 3, 4) if stage != holder and stage not in keeper._nodes[0].shelf.shadows)
    lose(pipeline, keeper, {0, other}, AT_RISK.warm_steps)
    assert keeper.rungs == {"shadow": 2}
    for number in (0, other, -1):
        was, now, begun = before[number], pipeline.parts[number].flat, initial.parts[number].flat
        assert not torch.equal(now, was) and float((now - was).norm()) < 0.5 * float((begun - was).norm())
        assert not pipeline.parts[number].optimizer.tensors()
    assert all(torch.equal(pipeline.stages[s].flat, before[s]) for s in (1, 2, 3, 4) if s != other)
    assert math.isfinite(Feed(AT_RISK, 0).step(pipeline, AT_RISK.warm_steps))


def test_a_data_node_without_a_copy_has_initial_ends(at_risk: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = at_risk
    fresh = Pipeline(AT_RISK, OURS.checkfree, seed=0)
    for node in keeper._nodes:
        node.shelf.shadows.clear()
    lose(pipeline, keeper, {0}, AT_RISK.warm_steps)
    assert keeper.rungs == {"interpolation": 1} and pipeline.stages[0].steps_since_bump == 0
    assert torch.equal(pipeline.ends.flat, fresh.ends.flat)


def test_stages_are_lost_after_stage_0_was_begun_anew(at_risk: tuple[Pipeline, Live]) -> None:
    pipeline, keeper = at_risk
    for number, lost in enumerate([{0}, {2}, {0, 2}, {0}, {1}]):
        lose(pipeline, keeper, lost, AT_RISK.warm_steps + number)
        advance(pipeline, keeper, Feed(AT_RISK, 0), AT_RISK.warm_steps + number, frozenset())
    assert keeper.rungs.total() == 6
    for node in keeper._nodes:
        assert [node.roll.number(stage) for stage in range(5)] == [3, 1, 2, 0, 0]


@pytest.mark.parametrize("lost", [{0, 1, 2}, {1, 2, 3}, {0, 2, 4}])
def test_too_few_stages_that_are_left_wait_for_the_others(at_risk: tuple[Pipeline, Live], lost: set[int]) -> None:
    pipeline, keeper = at_risk
    with pytest.raises(Unrecoverable, match="the others wait"):
        lose(pipeline, keeper, lost, AT_RISK.warm_steps)


def test_a_run_that_stands_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recovery_train, "pattern", lambda *_: [frozenset[int](), frozenset({0, 1, 2}), frozenset[int]()]
    )
    outcome = train(OURS, AT_RISK, rate=0.5, seed=0)
    assert outcome.diverged and [step for step, _ in outcome.curve] == [0]
