"""What is lost together and for good, under virtual time: both ends of the pipeline, and a quarter of the swarm that stands in one region.

Nobody who was killed comes back. Of the ends the first is stage 0, with the data nodes, who count the run, or the first stage of layers behind it.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial

import pytest
from tests.sims.pipeline_story import lives, members_of, stage_of, steps_done, until, until_done
from tests.thorough import further

from farflung.node.renewal import Renewal
from farflung.protocol.keys import short
from farflung.protocol.pipeline_messages import Domains
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate

FIRST, LAST = 1, 4
STEPS = 24


async def lose_together(swarm: PipelineSwarm, killed: Callable[[], list[int]], newcomers: list[int]) -> None:
    """After two rounds of every stage; everybody else trains on to the end."""
    stages = range(swarm.recipe.manifest.pipeline.stages)
    await until(swarm, lambda: all(swarm.rounds().get(stage, 0) >= 2 for stage in stages))
    before = steps_done(swarm)
    for peer in killed():
        swarm.kill(peer)
    await asyncio.sleep(12.0)
    for peer in newcomers:
        swarm.start(peer)
    await until(swarm, lambda: steps_done(swarm) >= before + 4)
    await until_done(swarm, *swarm.peers)


async def lose_both_ends(swarm: PipelineSwarm, first: int = FIRST, last: int = LAST) -> None:
    for peer in range(5):
        swarm.start(peer)
    await lose_together(swarm, lambda: [peer for stage in (first, last) for peer in members_of(swarm, stage)], [5, 6])


def trained_on(swarm: PipelineSwarm) -> None:
    """To the end of the run: all its steps, in all stages, with losses that are numbers and fall."""
    assert not swarm.broken
    assert steps_done(swarm) == STEPS and set(swarm.rounds().values()) == {STEPS // 4}
    losses = swarm.losses()
    assert len(losses) >= STEPS and all(map(math.isfinite, losses))
    assert sum(losses[-4:]) < sum(losses[8:12])  # the last round, and the first one after the loss


def rungs(swarm: PipelineSwarm) -> dict[int, str]:
    return {event["stage"]: event["rung"] for event in swarm.happened("stage.made")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shadows", "made"),
    [
        # the copy of stage 1 lies with the peer of stage 4, for only that and stage 3 are not beside it; that of stage 4 with another
        (1.0, {FIRST: "fitted mean", LAST: "shadow"}),
        (0.0, {FIRST: "fitted mean", LAST: "interpolation"}),  # of both neighbours, and of the only one
    ],
)
def test_the_first_and_the_last_stage_are_lost_together(shadows: float, made: dict[int, str]) -> None:
    one = recipe(stages=5, layers=5, total_steps=STEPS, pipeline={"shadows": shadows})
    swarm = simulate(one, Counting(), signers(7), lose_both_ends, wanted={peer: peer for peer in range(5)})
    trained_on(swarm)
    assert sorted(life[:2] for life in lives(swarm)) == [(FIRST, 1), (LAST, 1)]
    assert rungs(swarm) == made
    assert [len(swarm.happened("node.start", peer)) for peer in (0, 2, 3)] == [1, 1, 1]


@pytest.mark.thorough
def test_both_ends_come_back_from_copies_that_were_not_lost_with_them() -> None:
    """As where the person of each machine tells its region: the two ends stand in one."""
    one = recipe(stages=5, layers=5, total_steps=STEPS, pipeline={"shadows": 1.0})
    domains = {peer: Domains(region="a" if peer in (FIRST, LAST) else "bcd"[peer % 3]) for peer in range(7)}
    swarm = simulate(one, Counting(), signers(7), lose_both_ends, wanted={peer: peer for peer in range(5)}, domains=domains)  # fmt: skip
    trained_on(swarm)
    assert rungs(swarm) == {FIRST: "shadow", LAST: "shadow"}


@pytest.mark.parametrize(("shadows", "ends"), [(1.0, "copied"), *further((0.0, "new initial weights"))])
def test_stage_0_and_the_last_stage_are_lost_together(shadows: float, ends: str) -> None:
    """The three stages that are left are enough: they begin stage 0 anew, and that the other one."""
    one = recipe(stages=5, layers=5, total_steps=STEPS, pipeline={"shadows": shadows})
    swarm = simulate(one, Counting(), signers(7), partial(lose_both_ends, first=0), wanted={peer: peer for peer in range(5)})  # fmt: skip
    assert not swarm.broken and swarm.rounds()[0] == STEPS // 4
    assert [life[:2] for life in lives(swarm)] == [(0, 1), (LAST, 1)]
    made = {event["stage"]: event for event in swarm.happened("stage.made")}
    assert made[0]["ends"] == ends and set(made) == {0, LAST}
    assert [len(swarm.happened("node.start", peer)) for peer in (1, 2, 3)] == [1, 1, 1]
    losses = swarm.losses()
    assert all(map(math.isfinite, losses)) and sum(losses[-4:]) < sum(losses[8:12])


@pytest.mark.thorough
def test_stage_0_waits_for_no_stage_that_only_its_own_chain_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has a copy of it, and somebody one of the stage beside it, which was lost too."""
    shadows = Renewal._shadows
    monkeypatch.setattr(Renewal, "_shadows", lambda self: shadows(self) if self._life.stage else [])
    one = recipe(stages=5, layers=5, total_steps=STEPS, pipeline={"shadows": 1.0})
    swarm = simulate(one, Counting(), signers(7), partial(lose_both_ends, first=0, last=1), wanted={peer: peer for peer in range(5)})  # fmt: skip
    assert not swarm.broken and swarm.rounds()[0] == STEPS // 4
    assert rungs(swarm) == {0: "interpolation", 1: "shadow"} and not swarm.happened("stage.waits")
    assert "from " in swarm.happened("stage.recovery")[0]["reason"]  # of the nearest that is there


REGION = (3, 4, 5, 10)
"""A quarter of sixteen: a data node, all of stage 1, and one peer of stage 2."""

STAGES = {**dict.fromkeys(range(4), 0), 4: 1, 5: 1, **dict.fromkeys(range(6, 11), 2), **dict.fromkeys(range(11, 16), 3)}


@pytest.mark.thorough
@pytest.mark.parametrize("shadows", [1.0, 0.0])
def test_a_quarter_of_the_swarm_is_lost_with_its_region(shadows: float) -> None:
    """Three stages are hit, and one has nobody left. No machine comes: one of a rich stage begins the lost one anew, another moves to be its second
    peer, and all others keep their place."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(16):
            swarm.start(peer)
        await lose_together(swarm, lambda: list(REGION), [])

    one = recipe(stages=4, total_steps=STEPS, pipeline={"shadows": shadows, "microbatches": 8})
    domains = {peer: Domains(region="d" if peer in REGION else "abc"[peer % 3]) for peer in range(16)}
    swarm = simulate(one, Counting(), signers(16), story, wanted=STAGES, tied=False, domains=domains)
    trained_on(swarm)
    [(stage, number, founder)] = lives(swarm)
    assert (stage, number) == (1, 1) and STAGES[founder] in (2, 3)
    [made] = swarm.happened("stage.made")
    assert made["rung"] in (("shadow",) if shadows else ("fitted mean", "neighbour mean"))  # a fit takes time, too
    assert not set(made["holders"]) & {short(swarm.ids[peer]) for peer in REGION}
    moved = [peer for peer in range(16) if peer not in REGION and len(swarm.happened("node.start", peer)) > 1]
    assert len(moved) == 2 and founder in moved and {stage_of(swarm, peer) for peer in moved} == {1}
