"""Swarms with a pipeline under virtual time whose manifest leaves routes to whoever sends, or lets them swap stages."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from tests.node.stage_lab import step_of, two_columns
from tests.sims.pipeline_story import stage_of, steps_done, until, until_done

from farflung.node.recipe import Recipe
from farflung.node.stage_job import Done, Job
from farflung.node.stage_work import StageWork
from farflung.protocol.droppable import Droppable
from farflung.sims.hub import MemoryHub
from farflung.sims.pipeline_judge import PipelineJudge
from farflung.sims.pipeline_log import logged_steps
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.pipeline_online import plan_step
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_schedules import opened
from farflung.training.pipeline_worker import Accumulated

ROUNDS = 3


def of_eight(**pipeline: object) -> Recipe:
    """Eight microbatches a step."""
    return recipe(stages=3, total_steps=4 * ROUNDS, pipeline={"microbatches": 8, "slots": 4, **pipeline})


DYNAMIC = of_eight(routing="dynamic")
WANTED = {1: 1, 2: 1, 3: 2, 4: 2}
"""Two peers of each stage but the first."""


def visits(swarm: PipelineSwarm, first: int = 0) -> Counter[int]:
    """By peer, backwards that it has done, in steps from that one on."""
    found = Counter[int]()
    for peer in range(len(swarm.signers)):
        for step in swarm.happened("pipeline.step", peer):
            if step["number"] >= first:
                found[peer] += sum(Kind(kind) is Kind.B for kind, *_ in step["ops"])
    return found


def test_a_slow_peer_gets_fewer_microbatches_and_a_death_costs_no_step() -> None:
    """Once it is measured. And in the step in which a peer dies every microbatch comes home, by a way that nobody has planned; the judges look at what counts."""
    hit: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 8)
        # the chain of two goes on without the second of them
        victim = max((1, 2), key=swarm.ids.__getitem__)
        work = swarm.peers[victim].pipeline.work
        await until(swarm, lambda: work.job is not None and work.job.goes)
        await asyncio.sleep(1.2)
        assert work.job is not None
        hit.extend((victim, work.job.number))
        swarm.kill(victim)
        await until_done(swarm, *({0, 1, 2, 3, 4} - {victim}))

    swarm = simulate(DYNAMIC, Counting(), signers(5), story, wanted=WANTED, speeds={3: 0.2})
    assert not swarm.broken
    assert swarm.rounds() == {0: ROUNDS, 1: ROUNDS, 2: ROUNDS}
    seen = visits(swarm, first=2)
    assert 0 < 3 * seen[3] < seen[4]
    victim, number = hit
    (struck,) = [step for step in swarm.happened("pipeline.step", 0) if step["number"] == number]
    assert struck["lost"] == [swarm.ids[victim].hex()] and struck["landed"] == 8 and not struck["cut"]
    by_peer = {key.hex(): swarm.happened("pipeline.step", peer) for peer, key in enumerate(swarm.ids)}
    for step in logged_steps(by_peer):
        assert step.landed == 8 and {len(way) for way in step.routes.values()} == {3}
    losses = swarm.losses()
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2])


def test_the_same_seed_is_the_same_story() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 4)

    first, again = (simulate(DYNAMIC, Counting(), signers(5), story, wanted=WANTED) for _ in range(2))
    assert first.events == again.events and first.events


def test_a_plan_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator plans all of a step, against the manifest: nobody takes part, itself included."""
    reasons: list[str] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: 0 in swarm.peers and "did not begin" in swarm.peers[0].pipeline.coordinator.reason)
        reasons.append(swarm.peers[0].pipeline.coordinator.reason)
        await asyncio.sleep(30.0)

    monkeypatch.setattr("farflung.node.pipeline.plan_step", lambda *of, open_hops, **options: plan_step(*of, **options))
    swarm = simulate(DYNAMIC, Counting(), signers(3), story, wanted={1: 1, 2: 2})
    assert "where the manifest leaves that to whoever sends" in reasons[0]
    assert not swarm.broken and not swarm.happened("pipeline.step")


def test_routes_that_swap_stages_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that makes steps shorter: with one peer for each stage microbatches need not queue in one order."""
    orders = Counter[tuple[int, ...]]()
    take = StageWork.take

    def noted(self: StageWork):  # type: ignore[no-untyped-def]
        job = take(self)
        if job is not None and job.own:
            orders.update(tuple(leg.stage for leg in route) for route in job.step.routes)
        return job

    monkeypatch.setattr(StageWork, "take", noted)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 6)
        victim = max((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        work = swarm.peers[victim].pipeline.work
        await until(swarm, lambda: work.job is not None and work.job.goes)
        await asyncio.sleep(1.0)
        swarm.kill(victim)
        await until_done(swarm, *(p for p in range(4) if p != victim))

    swarm = simulate(of_eight(swaps=1), Counting(), signers(4), story, wanted={1: 1, 2: 1, 3: 2})
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS, 2: ROUNDS}
    assert orders.keys() == {(0, 1, 2), (0, 2, 1)}
    assert all(step["cut"] == 0 for step in swarm.happened("pipeline.step"))
    losses = swarm.losses()
    assert sum(losses[-2:]) < 0.7 * sum(losses[:2])


@pytest.mark.parametrize(("hop", "wrong"), [(1, False), (2, True)])
def test_the_judge_knows_whose_stage_a_hop_of_an_open_route_is(hop: int, wrong: bool) -> None:
    """Peer 1 serves stage 1; that its sums are as large as they should be does not show what they are of."""
    found: list[str] = []
    step = step_of(opened(two_columns()), Droppable())
    job = cast(Job, SimpleNamespace(step=step, window=step.window, place=1, number=7))
    judge = PipelineJudge(found.append, cast(MemoryHub, None), [], {}, {})
    judge.on_event(1, {"event": "pipeline.step", "settled": [step.keys[0].hex()], "ops": [["B", 0, hop, 0, 1]]})
    judge.on_done(1, job, Done(accumulated=Accumulated(visits=Counter({1: 1})), samples=2, loss=1.0))
    assert found == (["invariant 7: peer 1 counts hop 2 of microbatch 0, which is of another stage"] if wrong else [])
