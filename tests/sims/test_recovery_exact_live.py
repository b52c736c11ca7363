"""Exact copies where lost stages come back by CheckFree's rule alone (`node/exact.py`), under virtual time: of what neighbours train, and of embedding and head."""

import asyncio
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import begin, lives, lose_home, members_of, steps_done, until, until_done
from tests.thorough import further
from torch import Tensor

from farflung.compression.digest import digest_of
from farflung.node import exact, framing, renewal
from farflung.node.exact import EXACT, ExactCopy, Mark
from farflung.node.network import PeerId
from farflung.node.recipe import Recipe
from farflung.node.stage_learner import StageLearner
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ExactHeader
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.pipeline_slice import ends_of, layers_of
from farflung.training.recovery_rules import weighted_mean

WANTED = {1: 1, 2: 2, 3: 3}


def by_checkfree(stages: int = 4, total_steps: int = 40, inner_steps: int = 4) -> Recipe:
    pipeline = {"shadows": 0.0, "recovery": "checkfree"}
    return recipe(stages=stages, total_steps=total_steps, inner_steps=inner_steps, pipeline=pipeline)


def ends(learner: StageLearner) -> Tensor:
    """Embedding, last norm and head, as it trains them."""
    return ends_of(learner.replica.model.config, learner.replica.part, learner.local_params())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The ends that founders of stage 0 have begun with."""
    found: list[Tensor] = []
    begins = StageLearner.begin_with

    def seen(self: StageLearner, layers: Tensor) -> None:
        begins(self, layers)
        if self.stage == 0:
            found.append(ends(self))

    monkeypatch.setattr(StageLearner, "begin_with", seen)
    return found


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The ends after each step of a data node."""
    found: list[Tensor] = []
    step = StageLearner.step

    def noted(self: StageLearner, *given: Any, **more: Any) -> Any:
        report = step(self, *given, **more)
        if self.stage == 0:
            found.append(ends(self))
        return report

    monkeypatch.setattr(StageLearner, "step", noted)
    return found


async def replace_home(swarm: PipelineSwarm) -> None:
    await lose_home(swarm, 4, 4)
    await until_done(swarm, 1, 2, 3, 4)


@pytest.mark.thorough
def test_a_mean_is_of_what_neighbours_train_and_not_of_their_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    means: list[tuple[Tensor, Tensor]] = []
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def noted(before: Tensor, after: Tensor, *norms: float | None) -> Tensor:
        means.append((before, after))
        return weighted_mean(before, after, *norms)

    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 4)
        await until(swarm, lambda: steps_done(swarm) % 4 == 3)  # in the middle of a lap
        swarm.kill(members_of(swarm, 2)[0])
        await asyncio.sleep(12.0)
        for stage in (1, 3):
            learner = swarm.peers[stage]._stage_learner
            config, part = learner.replica.model.config, learner.replica.part
            held[stage] = (
                layers_of(config, part, learner.local_params()),
                layers_of(config, part, learner.outer.params),
            )
        swarm.start(4)
        await until_done(swarm, 0, 1, 3, 4)

    monkeypatch.setattr(renewal, "weighted_mean", noted)
    swarm = simulate(by_checkfree(), Counting(), signers(5), story, wanted=WANTED)
    assert not swarm.broken and lives(swarm) == [(2, 1, 4)]
    [given] = means
    for one, (local, outer) in zip(given, (held[1], held[3]), strict=True):
        assert torch.equal(one, local) and not torch.equal(local, outer)


@pytest.mark.parametrize("speeds", [{}, *further({0: 0.2})])
def test_embedding_and_head_come_back_to_the_bit(
    begun: list[Tensor], stepped: list[Tensor], speeds: dict[int, float]
) -> None:
    """The stages beside stage 0 have them as its data node had them after its last step; its layers are those of its only neighbour."""
    before = -1

    async def story(swarm: PipelineSwarm) -> None:
        nonlocal before
        await lose_home(swarm, 4, 4)
        before = len(stepped) - 1
        await until_done(swarm, 1, 2, 3, 4, seconds=1200.0)

    swarm = simulate(by_checkfree(), Counting(), signers(5), story, wanted=WANTED, speeds=speeds)
    assert not swarm.broken and lives(swarm) == [(0, 1, 4)]
    [made] = swarm.happened("stage.made")
    assert (made["rung"], made["ends"]) == ("interpolation", "copied") and len(made["holders"]) == 1
    [restored] = begun
    assert any(torch.equal(restored, one) for one in stepped[before - 1 : before + 1])  # a round may follow the last
    for peer in (1, 3):
        kept = [event["of_step"] for event in swarm.happened("ends", peer)]
        assert kept and kept == sorted(kept)
    assert not swarm.happened("ends", 2)
    losses = swarm.losses()
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.thorough
def test_a_link_that_breaks_once_is_no_reason_to_begin_with_new_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, failed = exact._asked, set[PeerId]()

    async def breaks(network: Any, side: Any, holder: PeerId, numel: int, newer_than: Mark, *, ends: bool) -> Any:
        if newer_than == exact.NONE and holder not in failed:
            failed.add(holder)
            raise NetworkError("the link broke")
        return await asked(network, side, holder, numel, newer_than, ends=ends)

    monkeypatch.setattr(exact, "_asked", breaks)
    swarm = simulate(by_checkfree(), Counting(), signers(5), replace_home, wanted=WANTED)
    [made] = swarm.happened("stage.made")
    assert not swarm.broken and len(failed) == 2 and made["ends"] == "copied"


@pytest.mark.thorough
def test_a_stage_0_that_is_lost_again_before_its_round_does_not_begin_with_what_the_last_one_did(
    begun: list[Tensor], stepped: list[Tensor]
) -> None:
    """It counts on from the last round, and so from less than the copies of the life before may have had."""

    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 4, rounds=1)
        await until(swarm, lambda: steps_done(swarm) % 20 == 10)
        swarm.kill(0)
        await asyncio.sleep(12.0)
        swarm.start(4)
        await until(swarm, lambda: begun)
        before = len(stepped)
        await until(swarm, lambda: len(stepped) == before + 4)
        await asyncio.sleep(3.0)
        swarm.kill(4)
        await asyncio.sleep(12.0)
        swarm.start(5)
        await until(swarm, lambda: len(begun) == 2, seconds=600.0)

    swarm = simulate(by_checkfree(total_steps=80, inner_steps=20), Counting(), signers(6), story, wanted=WANTED)
    assert not swarm.broken and lives(swarm) == [(0, 1, 4), (0, 2, 5)]
    first, second = begun
    assert not torch.equal(first, second)
    assert any(torch.equal(second, one) for one in stepped[-2:])


@pytest.mark.thorough
def test_who_has_copies_and_does_not_answer_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    read, silent = framing.read_header, False

    async def hangs(stream: Any, *kinds: Any) -> Any:
        if silent and kinds == (ExactHeader,):
            await asyncio.sleep(1e9)
        return await read(stream, *kinds)

    async def story(swarm: PipelineSwarm) -> None:
        nonlocal silent
        await lose_home(swarm, 4, 4)
        silent = True
        await until(swarm, lambda: swarm.happened("stage.unmade"), seconds=900.0)
        silent = False
        await until_done(swarm, 1, 2, 3, 4)

    monkeypatch.setattr(framing, "read_header", hangs)
    swarm = simulate(by_checkfree(), Counting(), signers(5), story, wanted=WANTED)
    [unmade], [made] = swarm.happened("stage.unmade"), swarm.happened("stage.made")
    assert not swarm.broken and made["ends"] == "new initial weights"
    assert unmade["rung"] == "embedding and head" and "could not be asked" in unmade["reason"]


@pytest.mark.thorough
def test_a_copy_of_a_step_that_nobody_has_made_does_not_count(begun: list[Tensor]) -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 4)
        shelf = swarm.peers[3]._shelf.ends
        swarm.kill(0)
        assert shelf.copy is not None
        lie = EXACT.encode(torch.full((len(shelf.copy.payload) // 4 - 8,), 7.0))
        shelf.copy = ExactCopy(payload=lie, name=digest_of(lie), mark=(1 << 61, 1))
        await asyncio.sleep(12.0)
        swarm.start(4)
        await until_done(swarm, 1, 2, 3, 4)

    swarm = simulate(by_checkfree(), Counting(), signers(5), story, wanted=WANTED)
    [made], [restored] = swarm.happened("stage.made"), begun
    assert made["ends"] == "copied" and not bool((restored == 7.0).all())


def test_of_two_stages_stage_0_cannot_be_begun_anew_and_nobody_keeps_copies() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        await begin(swarm, 2)
        await until_done(swarm, 0, 1)

    swarm = simulate(by_checkfree(stages=2, total_steps=12), Counting(), signers(2), story, wanted={1: 1})
    assert not swarm.broken and not swarm.happened("ends")
