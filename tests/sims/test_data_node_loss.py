"""Data nodes that die, come back, or lose each other in a step of a pipeline, under virtual time; and who plans then."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import msgspec
import pytest
from tests.sims.pipeline_story import coordinator_of, stage_of, steps_done, until, until_done

from farflung.node.pipeline_driver import Driver, Outcome
from farflung.node.stage_job import Job
from farflung.node.stage_work import StageWork
from farflung.protocol.coordination import Coordinator, Post
from farflung.protocol.keys import PeerId
from farflung.protocol.pipeline_messages import StepAnswer, StepPlan
from farflung.protocol.turns import TURN_S
from farflung.protocol.visit import Phase
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.pipeline_online import Forecast, Server, plan_step
from farflung.training.pipeline_plan import Plan

ROUNDS = 3
RECIPE = recipe(total_steps=4 * ROUNDS)


@pytest.mark.parametrize("moment", ["before the word", "in the step"])
def test_the_coordinator_dies(moment: str) -> None:
    """Another data node takes over; of three, two are still a quorum of their chain."""
    leaders: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        leader = coordinator_of(swarm)
        leaders.append(leader)
        pipeline = swarm.peers[leader].pipeline
        gone = moment == "in the step"
        await until(
            swarm,
            lambda: (attempt := pipeline.coordinator.attempt) is not None and attempt.gone == gone,
        )
        swarm.kill(leader)
        await until_done(swarm, *(p for p in range(4) if p != leader))

    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 0})
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    killed = swarm.ids[leaders[0]].hex()
    said = [step["coordinator"] for step in swarm.happened("pipeline.step")]
    assert killed in said and said[-1] != killed


@pytest.mark.parametrize("fault", ["plans break a rule", "plans nothing"])
def test_a_data_node_whose_plans_come_to_nothing_is_passed_over(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, and is the first in the order. Nobody takes part in what breaks a rule, so nothing counts twice or wrongly, and another one's steps go on."""
    broken: list[bytes] = []
    propose, participants = Coordinator.propose, Coordinator.participants

    def lie(machine: Coordinator, plan: StepPlan, now: float) -> list[Post]:
        if machine.roll.me in broken:
            lanes = (*plan.lanes, plan.lanes[0])  # more microbatches than the manifest's
            plan = msgspec.structs.replace(plan, lanes=lanes)
        return propose(machine, plan, now)

    def idle(machine: Coordinator, now: float, *, free: bool) -> list[list[bytes]] | None:
        found = participants(machine, now, free=free)
        return None if machine.roll.me in broken else found

    refusals: list[str] = []
    answered = Coordinator.answered

    def noted(machine: Coordinator, sender: bytes, answer: StepAnswer, now: float) -> list[Post]:
        if machine.roll.me in broken and not answer.accepts and answer.reason != "busy":
            refusals.append(answer.reason)
        return answered(machine, sender, answer, now)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 3)
        broken.append(swarm.ids[coordinator_of(swarm)])
        await until_done(swarm, *range(4))

    monkeypatch.setattr(Coordinator, "answered", noted)
    monkeypatch.setattr(
        *((Coordinator, "propose", lie) if fault == "plans break a rule" else (Coordinator, "participants", idle))
    )
    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 0})
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    passed = swarm.happened("pipeline.passed")
    assert {event["peer"] for event in passed} == {broken[0].hex()} and f"{TURN_S:.0f} s" in passed[0]["reason"]
    planned = [step["coordinator"] for step in swarm.happened("pipeline.step")]
    assert broken[0].hex() in planned and planned[-1] != broken[0].hex()
    assert all("microbatches, where the manifest says" in reason for reason in refusals)
    assert bool(refusals) == (fault == "plans break a rule")


def test_plans_go_on_from_those_of_the_last_step_whoever_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[bytes, Plan | None]] = []

    @wraps(plan_step)
    def noted(servers: Sequence[Server], *rest: Any, before: Plan | None, **options: Any) -> Forecast:
        given.append((leaders[-1] if leaders else b"", before))
        return plan_step(servers, *rest, before=before, **options)

    leaders: list[bytes] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        leader = coordinator_of(swarm)
        leaders.append(swarm.ids[leader])
        swarm.kill(leader)
        await until(swarm, lambda: steps_done(swarm) >= 9)

    monkeypatch.setattr("farflung.node.pipeline.plan_step", noted)
    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 0})
    assert not swarm.broken
    assert given[0][1] is None
    another = [plan for killed, plan in given if killed]
    assert another and None not in another, "who takes over was in the last step, and knows its plan"
    assert leaders[0].hex() in (another[0].peers if another[0] else ())


def test_a_data_node_is_started_anew_in_the_middle_of_a_step() -> None:
    """The new process knows nothing of the step, and the others must not wait for its word."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        home = next(p for p in swarm.peers if stage_of(swarm, p) == 0 and p != coordinator_of(swarm))
        pipeline = swarm.peers[home].pipeline
        await until(swarm, lambda: pipeline.work.job is not None and pipeline.work.job.goes)
        await asyncio.sleep(0.5)
        swarm.kill(home)
        await asyncio.sleep(0.1)
        swarm.start(home)
        await until_done(swarm, *range(4))

    swarm = simulate(RECIPE, Counting(), signers(4), story)
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    longest = max(step["seconds"] for step in swarm.happened("pipeline.step"))
    assert longest < 15.0  # virtual seconds; others take 2 to 4


@pytest.mark.parametrize("right", [True, False])
def test_a_data_node_dies_that_had_given_up_a_peer(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to a peer breaks, another does its visit as well, and then the data node dies: neither counts it. The judge sees it where both do."""
    found: list[tuple[int, int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        given_up, mate = (swarm.peers[peer].pipeline.work for peer in (2, 3))
        await until(swarm, lambda: given_up.job is not None and given_up.job.goes)
        swarm.slow(2, 4.0)  # what its mate does again shall be about as soon
        job = given_up.job
        assert job is not None

        def computing() -> list[int]:
            visits = given_up.server._open[job.window].desk._visits
            return [job.step.home(m) for (m, _), visit in visits.items() if visit.backward is Phase.RUNNING]

        await until(swarm, computing)
        place = computing()[0]
        home = swarm.ids.index(job.step.keys[place])
        driver = swarm.peers[home].pipeline.work._driver
        assert driver is not None
        driver.lost(job.place, "connection reset")
        swarm.slow(home, 8.0)

        def counted(work: StageWork) -> set[tuple[int, int]]:
            return work.server._open[job.window].desk.counted.get(place, set())

        await until(swarm, lambda: counted(given_up) & counted(mate))
        swarm.kill(home)
        for peer in (2, home):
            swarm.slow(peer, 1.0)
        found.append((home, job.number))
        await until(swarm, lambda: steps_done(swarm) >= job.number + 2)

    if not right:
        watch_home = StageWork._watch_home

        def counts_for_the_dead(self: StageWork, job: Job, began_at: float, home: PeerId, now: float) -> None:
            if not self._roll.alive(home, now):
                self.server._open[job.window].settle(job.step.place[home], counts=True)
            watch_home(self, job, began_at, home, now)

        monkeypatch.setattr(StageWork, "_watch_home", counts_for_the_dead)
    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 0, 2: 1, 3: 1})
    assert len(swarm.broken) == (not right) and all("both count" in one for one in swarm.broken)
    if right:
        home, number = found[0]
        steps = [step for step in swarm.happened("pipeline.step") if step["number"] == number]
        assert len(steps) == 3 and all(step["settled"] == [swarm.ids[1 - home].hex()] for step in steps)


def test_data_nodes_that_lose_each_other_do_not_wait_for_each_other() -> None:
    """The connections of one of two break, all at once, and it is there again before anybody takes it for dead: it has told nobody, and is told nothing."""
    kept: list[tuple[int, int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        one, other = (swarm.peers[peer].pipeline.work for peer in range(4) if stage_of(swarm, peer) == 0)
        await until(swarm, lambda: one._driver is not None and other._driver is not None)
        assert one.job is not None and one._driver is not None and other._driver is not None
        job = one.job
        for place in range(len(job.step.keys)):
            if place != job.place:
                one._driver.lost(place, "connection reset")
        other._driver.lost(job.place, "connection reset")
        await until(swarm, lambda: steps_done(swarm) >= job.number + 3, seconds=30.0)
        kept.append((job.number, swarm.ids.index(job.me)))

    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 1})
    assert not swarm.broken
    number, one = kept[0]
    steps = {peer: next(s for s in swarm.happened("pipeline.step", peer) if s["number"] == number) for peer in range(4)}
    assert steps[one]["cut"] and steps[one]["settled"] == [swarm.ids[one].hex()]
    for peer in {*range(4)} - {one}:
        assert len(steps[peer]["settled"]) == 1 and swarm.ids[one].hex() not in steps[peer]["settled"]


def test_data_nodes_that_lose_each_other_in_a_circle_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three each has lost the next one, so each waits for the word of the one that has lost it."""
    monkeypatch.setattr("farflung.node.stage_recipe.HOMES", 3)  # or they would take turns at the one peer of stage 1
    numbers: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        works = [swarm.peers[peer].pipeline.work for peer in range(4) if stage_of(swarm, peer) == 0]
        await until(swarm, lambda: all(work._driver is not None for work in works))
        assert len(works) == 3 and works[0].job is not None
        numbers.append(works[0].job.number)
        for work, other in zip(works, [*works[1:], works[0]], strict=True):
            assert work._driver is not None and other.job is not None
            work._driver.lost(other.job.place, "connection reset")
        await until(swarm, lambda: steps_done(swarm) >= numbers[0] + 3, seconds=60.0)

    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 0, 2: 0, 3: 1})
    assert not swarm.broken
    steps = [step for step in swarm.happened("pipeline.step") if step["number"] == numbers[0]]
    assert len(steps) == 4


def test_nobody_is_lost_between_the_word_and_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers look around several times a second; the data nodes' last heartbeats may be of before the step."""
    told_to_go = StageWork._told_to_go

    async def and_look(self: StageWork, job: Job) -> bool:
        goes = await told_to_go(self, job)
        for entry in self._roll.entries.values():
            if entry.present is not None:
                entry.present = msgspec.structs.replace(entry.present, window=b"")
        self.watch(self._now())
        return goes

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until_done(swarm, *range(4))

    monkeypatch.setattr(StageWork, "_told_to_go", and_look)
    swarm = simulate(RECIPE, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 1})
    assert not swarm.broken
    assert all(len(step["settled"]) == 2 for step in swarm.happened("pipeline.step") if step["number"] > 4)


def test_a_microbatch_whose_gradient_came_home_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut while stage 0 computed its backward: it has not landed, and is in the sums all the same."""
    run, cut = Driver.run, list[int]()

    async def without_one(self: Driver) -> Outcome:
        outcome = await run(self)
        if not cut and len(outcome.losses) > 1:
            cut.append(max(outcome.losses))
            return replace(outcome, losses={m: loss for m, loss in outcome.losses.items() if m not in cut})
        return outcome

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(2):
            swarm.start(peer)
        await until_done(swarm, 0, 1)

    monkeypatch.setattr(Driver, "run", without_one)
    swarm = simulate(RECIPE, Counting(), signers(2), story, wanted={1: 1})
    assert not swarm.broken and cut
    steps = [event["samples"] for event in swarm.happened("step", 0)]
    trained = [number for samples in steps for start, stop in samples for number in range(start, stop)]
    assert trained == list(range(8 * RECIPE.manifest.total_steps))
