"""Peers that cannot make a step for a while, under virtual time: the others go on, and nothing that they have trained is lost."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import until
from torch import Tensor

from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.swarm import Swarm
from farflung.training.errors import DataUnavailable, NoRoom, NotNow
from farflung.training.inner import StepReport
from farflung.training.pipeline_worker import Batch

HINDERED_S = 120.0
SAMPLES_PER_STEP = 2


def hinder(swarm: Swarm, number: int, error: NotNow) -> Callable[[], None]:
    """The peer's steps fail from now on, until what is returned is called."""
    learner = swarm.learners[number]
    usual = learner.train

    def train(numbers: Sequence[int], global_step: int) -> StepReport:
        raise error

    learner.train = train

    def over() -> None:
        learner.train = usual

    return over


@pytest.mark.parametrize("delay_steps", [0, 9])
def test_rounds_go_on_without_a_peer_whose_device_is_full_and_it_comes_back(delay_steps: int) -> None:
    laps = Laps.fixed(10, delay_steps)
    pace = Pace(laps=laps, samples_per_step=SAMPLES_PER_STEP, tokens_per_sample=8, total_steps=1 << 40)

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(100.0)
        peer, rounds = swarm.peers[2], list[dict[str, Any]]()
        peer.log.subscribe(lambda event: rounds.append(event) if event["event"] == "round.commit" else None)
        while peer.trainer.progress.steps in (0, *range(5, 30)):  # in the middle of a lap
            await asyncio.sleep(0.5)
        over = hinder(swarm, 2, NoRoom("gpu has no room for 1 sequences at a time"))
        await asyncio.sleep(HINDERED_S / 2)
        assert peer.member.membership.state == "waiting"
        assert peer.state_reason == "the device is full: gpu has no room for 1 sequences at a time"
        await asyncio.sleep(HINDERED_S / 2)
        over()
        async with asyncio.timeout(2.0):  # commits are applied meanwhile; one may just have come
            while peer.applier.height != peer.member.head.commit.height:
                await asyncio.sleep(0.1)
        assert len(rounds) >= 0.8 * HINDERED_S / 10, "laps of ten seconds: no round waits for it"
        assert sum(one["contributed"] for one in rounds) in (1, 2), "what it had offered or trained before"
        assert peer.trainer.progress.steps == 0 and not swarm.learners[2].trained
        rounds.clear()
        await asyncio.sleep(100.0)
        assert sum(one["contributed"] for one in rounds) >= 5 and rounds[-1]["contributed"]
        assert peer.member.membership.state in ("training", "ready", "round")

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(3))
    report = run_schedule(
        2, Schedule(num_peers=3, duration_s=360.0, faults=starts), watch, Wire(pace=pace, step_s=(1.0, 1.0, 1.0))
    )
    assert report.violations == [] and report.dropped_steps == 0


def test_when_nobody_can_read_the_data_all_wait_and_go_on_where_they_were() -> None:
    pace = Pace(laps=Laps.fixed(10, 0), samples_per_step=SAMPLES_PER_STEP, tokens_per_sample=8, total_steps=1 << 40)

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(100.0)
        overs = [hinder(swarm, number, DataUnavailable("hf:some/set cannot be read")) for number in range(3)]
        await asyncio.sleep(60.0)
        heads = [swarm.peers[number].member.head.commit.height for number in range(3)]
        await asyncio.sleep(1800.0)
        assert [swarm.peers[number].member.head.commit.height for number in range(3)] == heads, (
            "no rounds of a few steps"
        )
        assert {peer.state_reason for peer in swarm.peers.values()} == {
            "the data cannot be read: hf:some/set cannot be read"
        }
        for over in overs:
            over()
        await asyncio.sleep(150.0)
        assert all(peer.member.head.commit.height >= heads[0] + 5 for peer in swarm.peers.values())

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(3))
    report = run_schedule(
        2, Schedule(num_peers=3, duration_s=2130.0, faults=starts), watch, Wire(pace=pace, step_s=(1.0, 1.0, 1.0))
    )
    assert report.violations == [] and report.dropped_steps == 0


PIPELINE = recipe(total_steps=4 * 40)


def test_a_pipeline_goes_on_without_a_peer_whose_device_is_full_and_it_comes_back() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: min(swarm.rounds().values(), default=0) == 2)
        peer, worker = swarm.peers[2], swarm.learner(2).worker
        usual = worker.forward

        def full(*_: object) -> Tensor:
            raise torch.OutOfMemoryError("no room")

        worker.forward = full
        await asyncio.sleep(30.0)
        began = len(swarm.happened("step", 1)), len(swarm.happened("step", 2))
        said = list[tuple[str, str]]()
        for _ in range(int(HINDERED_S)):
            await asyncio.sleep(1.0)
            said.append((peer.member.membership.state, peer.state_reason))
        full_for = sum(reason.startswith("the device is full: cpu has no room for a forward") for _, reason in said)
        assert full_for > HINDERED_S / 2, "then it tries again, and for a while nobody sends it anything"
        assert {state for state, _ in said} == {"waiting"}
        assert len(swarm.happened("step", 1)) > began[0] + 10
        worker.forward = usual
        ended = len(swarm.happened("step", 2))
        assert ended <= began[1] + 4
        await asyncio.sleep(HINDERED_S)
        assert len(swarm.happened("step", 2)) > ended + 5

    swarm = simulate(PIPELINE, Counting(), signers(3), story, wanted={0: 0, 1: 1, 2: 1})
    assert not swarm.broken


def test_a_data_node_that_cannot_read_the_data_waits_and_the_pipeline_goes_on_where_it_was() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(2):
            swarm.start(peer)
        await until(swarm, lambda: min(swarm.rounds().values(), default=0) == 1)
        learner = swarm.learner(0)
        usual = learner.batch

        def batch(numbers: Sequence[int]) -> Batch:
            raise DataUnavailable("hf:some/set cannot be read")

        learner.batch = batch
        await asyncio.sleep(300.0)
        assert swarm.peers[0].state_reason == "the data cannot be read: hf:some/set cannot be read"
        learner.batch = usual
        steps = len(swarm.happened("step", 1))
        await asyncio.sleep(HINDERED_S)
        assert len(swarm.happened("step", 1)) > steps + 5

    swarm = simulate(PIPELINE, Counting(), signers(2), story, wanted={0: 0, 1: 1})
    assert not swarm.broken
