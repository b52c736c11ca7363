"""A stage that has lost its quorum but not all its peers, under virtual time: its next life begins with what one of them has."""

import asyncio
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import lives, until, until_done

from farflung.protocol.errors import LocalError
from farflung.protocol.lives import LOST_AFTER, NO_QUORUM_AFTER
from farflung.sims.learners import freeze_replica
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import HAND_S, SECONDS, PipelineSwarm, simulate
from farflung.sims.toy import MemoryStorage

HEARTBEAT_S = recipe().settings().heartbeat_s
DETECTED_S = (NO_QUORUM_AFTER + LOST_AFTER) * HEARTBEAT_S
"""Of silence in the chain and then between stages, before a commit can begin a life."""


def by_key(swarm: PipelineSwarm, *peers: int) -> list[int]:
    """Of two members the first can go on alone, the other cannot."""
    return sorted(peers, key=lambda peer: swarm.ids[peer])


def together(swarm: PipelineSwarm, *peers: int) -> bool:
    """Whether these are all the members of their chain, and all of them were in its last round."""
    if any(peer not in swarm.peers or not swarm.peers[peer].member.started for peer in peers):
        return False
    ids, rounds = {swarm.ids[peer] for peer in peers}, swarm.happened("round.commit", peers[0])
    made = bool(rounds) and set(rounds[-1]["contributors"]) == {peer.hex() for peer in ids}
    return made and all(set(swarm.peers[peer].member.head.commit.view) == ids for peer in peers)


async def begin(swarm: PipelineSwarm, count: int, *stages: tuple[int, ...]) -> None:
    """Start so many peers, and wait until those of each of these stages are together."""
    for peer in range(count):
        swarm.start(peer)
    await until(swarm, lambda: all(together(swarm, *peers) for peers in stages))


def serves(swarm: PipelineSwarm, peer: int, life: int) -> bool:
    """Whether a peer has the state of this life of its stage."""
    serving = swarm.peers.get(peer)
    return serving is not None and serving.pipeline.life.number == life and bool(serving.holds[1])


def state(swarm: PipelineSwarm, peer: int) -> dict[str, Any]:
    """All that a peer trains with: outer parameters and momentum, local parameters, moments; but for what is in flight."""
    life = swarm.peers[peer].pipeline.life
    found = freeze_replica(swarm._views[life].learners[peer].replica)
    del found["sent"]
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the bit."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        match value, other[name]:
            case dict() as a, dict() as b:
                alike = same(a, b)
            case torch.Tensor() as a, torch.Tensor() as b:
                alike = torch.equal(a, b)
            case a, b:
                alike = a == b
        if not alike:
            return False
    return True


def large(peer: int, recipe: object, name: str, share: float) -> float:
    """Seconds that a call takes where states are large: whoever leaves is still there for a moment."""
    return 2.0 if name in ("apply", "save_learner") else SECONDS.get(name, HAND_S)


def rungs(swarm: PipelineSwarm) -> list[tuple[str, str]]:
    """(peer, how it made its stage), in order."""
    return [(event["peer"], event["rung"]) for event in swarm.happened("stage.made")]


def test_a_stage_of_two_loses_its_first_and_the_other_begins_with_what_it_has() -> None:
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        await begin(swarm, 3, (1, 2))
        killed_at = swarm.hub.now()
        swarm.kill(first)
        await until(swarm, lambda: lives(swarm))
        digest, held = swarm.peers[other].holds[1], state(swarm, other)
        await until(swarm, lambda: serves(swarm, other, 1))
        seen["seconds"] = swarm.hub.now() - killed_at
        seen["exact"] = swarm.peers[other].holds[1] == digest and same(state(swarm, other), held)
        seen["progress"] = not torch.equal(held["local"], held["params"])
        await until_done(swarm, 0, other)

    swarm = simulate(recipe(total_steps=24), Counting(), signers(3), story, wanted={1: 1, 2: 1}, seconds=large)
    _, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    [said] = swarm.happened("stage.lost", other)
    assert said["stage"] == 1 and said["reason"].startswith("no quorum: 1 of 2 members reachable; ")
    assert len(swarm.happened("stage.lost")) == 1
    [made] = swarm.happened("stage.made", other)
    assert (made["rung"], made["holders"], made["bytes"]) == ("own disk", [], 0)
    [decided] = swarm.happened("stage.recovery", other)
    assert decided["reason"].startswith(
        "stage 1: what this machine's disk has of an earlier life of the stage, expected"
    )
    assert decided["reason"].endswith("everybody waits meanwhile"), "nobody serves it"
    assert seen["exact"] and seen["progress"]  # what it had trained by itself, too
    assert DETECTED_S < seen["seconds"] < DETECTED_S + 30.0
    assert swarm.rounds() == {0: 6, 1: 6}  # the new life counts on
    assert swarm.losses()[-1] < 0.7 * swarm.losses()[0]


def test_a_survivor_whose_disk_is_damaged_begins_with_what_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_learner(self: MemoryStorage, learner: object) -> None:
        raise LocalError("the checkpoint is damaged")

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        await begin(swarm, 3, (1, 2))
        swarm.kill(first)
        monkeypatch.setattr(MemoryStorage, "load_learner", load_learner)
        await until_done(swarm, 0, other)

    swarm = simulate(recipe(total_steps=28), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    _, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    [unmade], [made] = swarm.happened("stage.unmade"), swarm.happened("stage.made")
    assert (unmade["rung"], unmade["reason"]) == ("own disk", "the checkpoint is damaged")
    assert made["rung"] != "own disk"


def test_what_a_survivor_has_is_not_lost_for_checkfree_either() -> None:
    """Its rule is for stages of which nobody is left."""

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        await begin(swarm, 3, (1, 2))
        swarm.kill(first)
        await until_done(swarm, 0, other)

    by_rule = recipe(total_steps=28, pipeline={"shadows": 0.0, "recovery": "checkfree"})
    swarm = simulate(by_rule, Counting(), signers(3), story, wanted={1: 1, 2: 1})
    _, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    [made] = swarm.happened("stage.made")
    assert made["rung"] == "own disk"


def test_the_lost_member_comes_back_in_time_and_nothing_begins() -> None:
    """The survivor has said already that the stage is lost, and takes it back."""

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        await begin(swarm, 3, (1, 2))
        swarm.kill(first)
        await until(swarm, lambda: swarm.happened("stage.lost"))
        assert swarm.peers[other].pipeline.present().lost == (1,)
        swarm.start(first)
        await until_done(swarm, 0, first, other)

    swarm = simulate(recipe(total_steps=24), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    first, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == []
    assert [bool(event["reason"]) for event in swarm.happened("stage.lost", other)] == [True, False]
    assert set(swarm.happened("round.commit", first)[-1]["contributors"]) == {swarm.ids[1].hex(), swarm.ids[2].hex()}


def test_the_lost_member_comes_back_too_late_and_is_a_newcomer() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        await begin(swarm, 3, (1, 2))
        swarm.kill(first)
        await until(swarm, lambda: serves(swarm, other, 1))
        swarm.start(first)
        await until(swarm, lambda: serves(swarm, first, 1))
        await until_done(swarm, 0, first, other)

    swarm = simulate(recipe(total_steps=28), Counting(), signers(3), story, wanted={1: 1, 2: 1})
    first, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    assert swarm.happened("node.stop", first)[0]["reason"] == "stage 1 was begun anew while it did not hear us"
    assert set(swarm.happened("round.commit", first)[-1]["contributors"]) == {swarm.ids[1].hex(), swarm.ids[2].hex()}


@pytest.mark.thorough
def test_a_stage_of_three_loses_two() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        first, second, _ = by_key(swarm, 1, 2, 3)
        await begin(swarm, 4, (1, 2, 3))
        swarm.kill(first)
        swarm.kill(second, reset=False)
        await until_done(swarm, 0, by_key(swarm, 1, 2, 3)[2])

    swarm = simulate(recipe(total_steps=64), Counting(), signers(4), story, wanted=dict.fromkeys((1, 2, 3), 1))
    survivor = by_key(swarm, 1, 2, 3)[2]
    assert not swarm.broken and lives(swarm) == [(1, 1, survivor)]
    assert "1 of 3 members reachable" in swarm.happened("stage.lost", survivor)[0]["reason"]
    assert rungs(swarm) == [(swarm.happened("stage.made", survivor)[0]["peer"], "own disk")]
    assert swarm.rounds() == {0: 16, 1: 16}


@pytest.mark.thorough
def test_the_founder_of_the_next_life_dies_in_the_middle_of_it() -> None:
    """Of the two that were left the other one has the state on its disk, and is called before a newcomer that has nothing."""
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, second, third, fourth = by_key(swarm, 1, 2, 3, 4)
        await begin(swarm, 5, (1, 2, 3, 4))
        swarm.kill(first)
        swarm.kill(second)
        await until(swarm, lambda: lives(swarm))
        seen["digest"] = swarm.peers[fourth].holds[1]
        swarm.kill(third)
        swarm.start(5)
        await until(swarm, lambda: serves(swarm, fourth, 2))
        seen["new digest"] = swarm.peers[fourth].holds[1]
        await until_done(swarm, 0, fourth, 5)

    swarm = simulate(
        recipe(total_steps=72), Counting(), signers(6), story, wanted=dict.fromkeys(range(1, 6), 1), seconds=large
    )
    third, fourth = by_key(swarm, 1, 2, 3, 4)[2:]
    assert not swarm.broken
    assert lives(swarm) == [(1, 1, third), (1, 2, fourth)]  # alike but for their keys
    assert swarm.happened("node.stop", fourth)[0]["reason"] == "stage 1 was begun anew while its chain had no quorum"
    assert [rung for _, rung in rungs(swarm)] == ["own disk"] and swarm.happened("stage.made", fourth)
    assert seen["new digest"] == seen["digest"]


@pytest.mark.thorough
def test_the_founder_is_killed_on_its_way_and_started_again() -> None:
    """However long that takes, it takes up what its disk has of the old life, the rounds after its checkpoint too, and then begins the new one; with that,
    where nobody has a copy of what it trained after them."""
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 1, 2)
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: together(swarm, 1, 2) and swarm.rounds()[1] >= 2)
        swarm.kill(first)
        await until(swarm, lambda: swarm.happened("stage.anew", other))
        survivor = swarm.peers[other]
        assert survivor.leaving and not swarm.happened("node.stop", other)
        seen["digest"], place = survivor.holds[1], swarm.disks[other].storages[survivor.pipeline.life].load_place()
        seen["lacks"] = swarm.rounds()[1] - (0 if place is None else place.version)
        swarm.kill(other)
        await asyncio.sleep(5.0)
        swarm.start(other)
        await until(swarm, lambda: serves(swarm, other, 1))
        seen["new digest"] = swarm.peers[other].holds[1]
        await until_done(swarm, 0, other)

    alone = recipe(total_steps=24, pipeline={"shadows": 0.0})
    swarm = simulate(
        alone, Counting(), signers(3), story, wanted={1: 1, 2: 1}, seconds=large, checkpoint_s=600.0
    )  # none comes while it is found out that the stage is lost
    _, other = by_key(swarm, 1, 2)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    assert seen["lacks"] > 1 and seen["new digest"] == seen["digest"]
    assert swarm.rounds() == {0: 6, 1: 6}


def test_the_smaller_side_of_a_partition_begins_nothing() -> None:
    """One of three data nodes is cut off with a member of stage 1 that alone is no quorum: they agree that the stage is lost, and may not decide it."""
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 3, 4)
        await begin(swarm, 5, (0, 1, 2), (3, 4))
        swarm.hub.partition([[swarm.ids[p] for p in (1, other)], [swarm.ids[p] for p in (0, 2, first)]])
        await asyncio.sleep(DETECTED_S + 40.0)
        seen["agree"] = [swarm.peers[peer].pipeline.present().lost for peer in (1, other)]
        seen["others"] = [swarm.peers[peer].pipeline.present().lost for peer in (0, 2, first)]
        swarm.hub.heal()
        await until(swarm, lambda: together(swarm, 0, 1, 2) and together(swarm, 3, 4))

    wanted = {1: 0, 2: 0, 3: 1, 4: 1}
    swarm = simulate(recipe(total_steps=200), Counting(), signers(5), story, wanted=wanted)
    assert not swarm.broken and lives(swarm) == []
    assert seen == {"agree": [(1,), (1,)], "others": [(), (), ()]}


@pytest.mark.thorough
def test_an_old_life_on_the_smaller_side_ends_when_the_sides_meet() -> None:
    """The member that could go on alone is there, with a data node, and does. The other side has the quorum of stage 0, and begins the next life."""
    seen: dict[str, Any] = {}

    async def story(swarm: PipelineSwarm) -> None:
        first, other = by_key(swarm, 3, 4)
        await begin(swarm, 5, (0, 1, 2), (3, 4))
        swarm.hub.partition([[swarm.ids[p] for p in (1, first)], [swarm.ids[p] for p in (0, 2, other)]])
        await until(swarm, lambda: serves(swarm, other, 1))
        seen["old"] = swarm.peers[first].pipeline.life.number, swarm.peers[first].pipeline.watch.stranded
        swarm.hub.heal()
        await until(swarm, lambda: serves(swarm, first, 1) and together(swarm, 3, 4) and together(swarm, 0, 1, 2))

    wanted = {1: 0, 2: 0, 3: 1, 4: 1}
    swarm = simulate(recipe(total_steps=200), Counting(), signers(5), story, wanted=wanted)
    first, other = by_key(swarm, 3, 4)
    assert not swarm.broken and lives(swarm) == [(1, 1, other)]
    assert seen["old"] == (0, False)
    [stopped] = swarm.happened("node.stop", first)
    assert stopped["reason"] == "stage 1 was begun anew while it did not hear us"
