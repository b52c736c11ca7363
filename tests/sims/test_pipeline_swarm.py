"""Swarms with a pipeline under virtual time: stages trained together, each with a chain of its own, whoever comes and goes."""

import asyncio
import math
from typing import Any

import pytest
from tests.sims.pipeline_story import stage_of, steps_done, until, until_done

from farflung.node.diary import NAME_BYTES
from farflung.node.learner import Learner
from farflung.node.status import PeerStatus
from farflung.node.storage import Place
from farflung.sims.links import LinkModel
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.toy import MemoryStorage
from farflung.training.pipeline_slice import assemble
from farflung.training.replica import Replica

ROUNDS = 3
RECIPE = recipe(total_steps=4 * ROUNDS)


def test_two_stages_of_two_peers_train() -> None:
    agreed: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        for round_ in range(1, ROUNDS):
            await until(swarm, lambda number=round_: min(swarm.rounds().values(), default=0) == number)
            await until(swarm, lambda: {s: len(held) for s, held in swarm.digests().items()} == {0: 1, 1: 1})
            agreed.append(round_)
        await until_done(swarm, *range(4))

    swarm = simulate(RECIPE, Counting(), signers(4), story)
    assert not swarm.broken
    assert swarm.rounds() == {0: ROUNDS, 1: ROUNDS} and agreed == list(range(1, ROUNDS))
    # who came where they were needed, and all have had their share of the work
    assert sorted(filter(None, (stage_of(swarm, peer) for peer in range(4)))) == [1, 1]
    for commit in swarm.happened("round.commit")[-4:]:
        assert len(commit["contributors"]) == 2 and commit["contributed"]
    losses = swarm.losses()
    assert sum(losses[-2:]) < 0.6 * sum(losses[:2])
    # nobody was lost, and every microbatch went through both stages and the head
    for step in swarm.happened("pipeline.step"):
        assert step["cut"] == 0 and not step["lost"] and step["visits"] == 3 * step["landed"]


@pytest.mark.parametrize("delay_steps", [0, "auto"])
def test_the_last_lap_is_what_is_left_of_the_run(delay_steps: Any) -> None:
    """At the same step of the pipeline for all stages, though each counts by its own chain."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until_done(swarm, *range(4))

    swarm = simulate(recipe(total_steps=11, delay_steps=delay_steps), Counting(), signers(4), story)
    assert not swarm.broken and swarm.rounds() == {0: 3, 1: 3}
    counted = {number: chain.history[max(chain.history)].steps for number, chain in swarm.judge.chains.items()}
    assert set(counted.values()) == {11} and len(counted) == 2
    assert 11 <= steps_done(swarm) <= 11 + 3 * (delay_steps == "auto")
    for commit in swarm.happened("round.commit")[-4:]:
        assert len(commit["contributors"]) == 2 and commit["contributed"]


def test_one_peer_each_is_enough_and_another_may_come_late() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
        swarm.start(2)
        await until_done(swarm, 0, 1, 2)

    swarm = simulate(RECIPE, Counting(), signers(3), story, wanted={2: 1})
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    assert swarm.happened("round.commit", 2)[-1]["contributed"]


@pytest.mark.parametrize(("checkpoint_s", "saved"), [(None, [1, 2, 3]), (1e6, [3])])
def test_peers_save_their_learner_as_often_as_nodes_do(
    monkeypatch: pytest.MonkeyPatch, checkpoint_s: float | None, saved: list[int]
) -> None:
    """A node with so small a stage does after every round."""
    versions: dict[MemoryStorage, list[int]] = {}
    save = MemoryStorage.save_learner

    def noted(self: MemoryStorage, learner: Learner, residuals: Any, place: Place, drop: Any) -> None:
        versions.setdefault(self, []).append(place.version)
        save(self, learner, residuals, place, drop)

    monkeypatch.setattr(MemoryStorage, "save_learner", noted)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(2):
            swarm.start(peer)
        await until_done(swarm, *range(2))

    swarm = simulate(recipe(total_steps=12), Counting(), signers(2), story, checkpoint_s=checkpoint_s)
    assert not swarm.broken and swarm.rounds() == {0: 3, 1: 3}
    assert [sorted(set(one)) for one in versions.values()] == [saved, saved]


def test_each_peer_can_tell_of_those_of_all_stages() -> None:
    rows: dict[int, dict[int, PeerStatus]] = {}

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
        victim = max((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        swarm.kill(victim)
        await asyncio.sleep(12.0)
        now = asyncio.get_running_loop().time()
        for peer, node in swarm.peers.items():
            others = node.others(node.member.head.commit.view, now)
            rows[peer] = {swarm.ids.index(who): row for who, row in others.items()}
        rows[victim] = {}

    swarm = simulate(RECIPE, Counting(), signers(4), story)
    (victim,) = (peer for peer, seen in rows.items() if not seen)
    for peer, seen in rows.items():
        if peer == victim:
            continue
        assert seen.keys() == set(range(4)) - {peer}
        for other, row in seen.items():
            assert row.stage == stage_of(swarm, other) and row.forward_s > 0.0 and row.member
            assert (row.state == "alive") == (other != victim) and (other == victim or row.version >= 1)


def test_routes_may_skip_a_stage() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until_done(swarm, 0, 1, 2)

    skipping = recipe(stages=3, total_steps=8, pipeline={"skip": 0.33})
    swarm = simulate(skipping, Counting(), signers(3), story)
    assert not swarm.broken and swarm.rounds() == {0: 2, 1: 2, 2: 2}
    assert sorted(stage_of(swarm, peer) or 0 for peer in range(3)) == [0, 1, 2]
    for step in swarm.happened("pipeline.step"):
        assert step["visits"] == 3 * step["landed"]  # two stages and the head


@pytest.mark.parametrize("far", [1, 2])
def test_routes_take_the_nearer_of_two_peers(far: int) -> None:
    """They differ in nothing but latency, and the far one was there first: once heartbeats have measured the other, all microbatches go to that."""
    near = 3 - far
    known: list[dict[int, float]] = []
    since: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        swarm.hub.set_link(swarm.ids[far], LinkModel(latency_s=0.375, jitter_s=0.0))
        swarm.start(0)
        swarm.start(far)
        await until(swarm, lambda: steps_done(swarm) >= 3)
        swarm.start(near)
        trip_s = swarm.peers[0].pipeline.roll.ways.trip_s
        await until(swarm, lambda: trip_s(swarm.ids[near]) and near in swarm.peers and swarm.peers[near].trains)
        since.append(steps_done(swarm) + 3)
        await until(swarm, lambda: steps_done(swarm) >= since[0] + 5)
        known.append({peer: trip_s(swarm.ids[peer]) for peer in (1, 2)})

    swarm = simulate(recipe(pipeline={"microbatches": 1}), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    assert not swarm.broken
    assert known == [{near: pytest.approx(0.1, abs=0.02), far: pytest.approx(0.8, abs=0.02)}]

    def receivers(first: int, stop: float) -> set[str]:
        steps = [step for step in swarm.happened("pipeline.step", 0) if first <= step["number"] < stop]
        return {receiver for step in steps for _, _, _, receiver, *_ in step["sent"]}

    names = {peer: swarm.ids[peer][:NAME_BYTES].hex() for peer in (near, far)}
    assert receivers(0, 3) == {names[far]} and receivers(since[0], math.inf) == {names[near]}


def test_the_whole_outer_model_is_evaluated_and_kept() -> None:
    """What a data node gets from the other stages is what they hold: one process with the whole model finds the same loss."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until_done(swarm, 0, 1, 2)

    whole = recipe(stages=3, total_steps=8)
    swarm = simulate(whole, Counting(), signers(3), story)
    assert not swarm.broken
    last = swarm.happened("outer.eval", 0)[-1]
    version, stages = swarm.disks[0].models[-1]
    assert last["version"] == version == 2 and set(stages) == {0, 1, 2}
    sizes = whole.manifest.pipeline.sizes(4)
    replica = Replica(whole.model, whole.inner, whole.outer, seed=0)
    replica.outer.params.copy_(assemble(whole.model, sizes, stages))
    assert replica.evaluate(Counting().heldout(64)) == pytest.approx(last["loss"], rel=1e-5)
    assert last["loss"] < swarm.losses()[0]


@pytest.mark.parametrize(("after_s", "reset"), [(0.3, True), (1.0, False), (1.9, True)])
def test_a_stage_peer_dies_in_a_step(after_s: float, reset: bool) -> None:
    """As a process (its connections reset) or as a machine: the step ends without it, and so do all after it."""
    victims: list[int] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 5)
        # of two, the chain goes on without the second: half of the votes with the first one's are a quorum
        victim = max((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        job = swarm.peers[victim].pipeline
        await until(swarm, lambda: job.work.job is not None and job.work.job.goes)
        await asyncio.sleep(after_s)
        victims.append(victim)
        swarm.kill(victim, reset=reset)
        await until_done(swarm, *(p for p in range(4) if p != victim))

    swarm = simulate(RECIPE, Counting(), signers(4), story)
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    killed = swarm.ids[victims[0]].hex()
    hit = [step for step in swarm.happened("pipeline.step") if killed in step["lost"]]
    assert hit and all(step["cut"] == 0 for step in hit)
    losses = swarm.losses()
    assert sum(losses[-2:]) < 0.6 * sum(losses[:2])


@pytest.mark.parametrize(("skip", "reset"), [(0.25, True), (0.25, False), (0.0, True)])
def test_the_only_peer_of_a_stage_dies_before_its_forward(skip: float, reset: bool) -> None:
    """Where routes skip they lose a hop, and every microbatch comes home; else all of them are cut short."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 2)
        work = swarm.peers[2].pipeline.work
        await until(swarm, lambda: work.job is not None and work.job.goes)
        assert work.job is not None
        number = work.job.number
        swarm.kill(2, reset=reset)
        await until(swarm, lambda: swarm.happened("pipeline.step", 0)[-1]["number"] == number)
        await asyncio.sleep(1.0)  # what it has brought is trained on

    some = recipe(stages=4, pipeline={"skip": skip})
    swarm = simulate(some, Counting(), signers(4), story, wanted={1: 1, 2: 2, 3: 3})
    assert not swarm.broken
    hit = swarm.happened("pipeline.step", 0)[-1]
    assert hit["lost"] == [swarm.ids[2].hex()]
    dropped, cut = ([note[1] for note in hit["notes"] if note[0] == what] for what in ("dropped", "cut"))
    if not skip:
        assert hit["cut"] == len(cut) == 4 and not hit["landed"] and not dropped
        return
    assert not hit["cut"] and not cut and hit["landed"] == 4
    assert dropped and len(set(dropped)) == len(dropped)
    assert hit["visits"] == 4 * 4 - len(dropped)  # of three stages and the head
    before, last = swarm.happened("step", 0)[-2:]
    assert last["step"] == hit["number"] + 1 and last["samples"] == ((16, 24),)  # all of its batch
    assert last["loss"] == pytest.approx(before["loss"], rel=0.1)


def test_a_chain_without_quorum_waits_and_the_pipeline_does_not() -> None:
    """The first of two members of a stage's view dies: the other has no quorum, trains on, and brings it all in when the first is back."""
    versions: list[dict[int, int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
        first = min((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        swarm.kill(first)
        await until(swarm, lambda: swarm.rounds()[0] == 3)
        versions.append(swarm.rounds())
        swarm.start(first)
        await until_done(swarm, *range(3))

    swarm = simulate(recipe(total_steps=16), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    assert not swarm.broken
    assert versions[0][1] <= 2 and swarm.rounds()[1] > versions[0][1]


def test_a_stage_without_peers_waits_for_one_that_comes_back() -> None:
    reasons: list[str] = []

    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until(swarm, lambda: swarm.rounds() == {0: 2, 1: 2})
        swarm.kill(1)
        await asyncio.sleep(30.0)
        reasons.append(swarm.peers[0].pipeline.coordinator.reason)
        before = steps_done(swarm)
        await asyncio.sleep(30.0)
        assert steps_done(swarm) == before
        swarm.start(1)
        await until_done(swarm, 0, 1)

    swarm = simulate(RECIPE, Counting(), signers(2), story)
    assert reasons == ["nobody serves stage 1"]
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}


def test_whoever_has_no_visits_is_not_waited_for() -> None:
    """One slot and one lane: of three data nodes one is used in a step. The rounds of stage 0, after four, do not wait for who was in none."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until_done(swarm, *range(4))

    narrow = recipe(total_steps=12, pipeline={"slots": 1})
    swarm = simulate(narrow, Counting(), signers(4), story, wanted={1: 1, 2: 0, 3: 0})
    assert not swarm.broken and swarm.rounds() == {0: 3, 1: 3}
    assert any(event["state"] == "waiting" for event in swarm.happened("node.state"))
    rounds = [event for event in swarm.happened("round.commit") if event["stage"] == 0]
    assert min(len(event["contributors"]) for event in rounds) < 3


def test_who_alone_knows_the_newest_step_goes_back_to_what_the_others_know() -> None:
    """All others were started again in the middle of a lap, and count from the last round on: it need not wait for its turn to be over."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(5):
            swarm.start(peer)
        await until(swarm, lambda: min(swarm.rounds().get(stage, 0) for stage in (0, 1)) >= 1)
        await until(swarm, lambda: steps_done(swarm) % 8 >= 6)
        leader = next(peer for peer in swarm.peers if swarm.peers[peer].pipeline.leads)
        others = [peer for peer in range(5) if peer != leader]
        for peer in others:
            swarm.kill(peer)
        await asyncio.sleep(1.0)
        for peer in others:
            swarm.start(peer)
        began, newest = len(swarm.events), steps_done(swarm)
        await until(swarm, lambda: steps_done(swarm) > newest, 40.0)  # less than a turn
        steps = [event["number"] for _, who, event in swarm.events[began:] if event["event"] == "pipeline.step"]
        assert min(steps) < newest - 2, "nobody else knew of it"

    placed = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    assert not simulate(recipe(total_steps=80, inner_steps=8), Counting(), signers(5), story, wanted=placed).broken


def test_both_sides_of_a_partition_train_and_one_history_remains() -> None:
    """Each side has a peer of every stage, and of each chain only one side has a quorum."""
    apart: list[dict[int, int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == {0: 1, 1: 1})
        sides = [[p for p in range(4) if stage_of(swarm, p) == stage] for stage in (0, 1)]
        first, second = zip(*sides, strict=True)
        swarm.hub.partition([[swarm.ids[p] for p in first], [swarm.ids[p] for p in second]])
        await asyncio.sleep(60.0)
        apart.append(swarm.rounds())
        swarm.hub.heal()
        await until_done(swarm, *range(4))

    swarm = simulate(recipe(total_steps=32), Counting(), signers(4), story, seed=2)
    assert not swarm.broken and swarm.rounds()[0] == 8
    assert swarm.rounds()[1] in (7, 8), (
        "after the partition stage 0 may have a round of one peer before the chains go together"
    )
    assert max(apart[0].values()) > 1
    assert {len(held) for held in swarm.digests().values()} <= {1}


def test_links_that_lose_and_repeat_messages() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until_done(swarm, *range(4))

    bad = LinkModel(latency_s=0.025, jitter_s=0.05, drop=0.05, duplicate=0.05, reorder=0.1)
    swarm = simulate(recipe(total_steps=12), Counting(), signers(4), story, link=bad)
    assert not swarm.broken and swarm.rounds() == {0: 3, 1: 3}
