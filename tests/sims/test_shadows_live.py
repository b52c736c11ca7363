"""Where copies of stages lie, when they are refreshed and what they may cost, under virtual time."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.sims.pipeline_story import lives, until, until_done

from farflung.node import shadows
from farflung.node.shadows import Shadows
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ShadowRequest
from farflung.protocol.keys import PeerId
from farflung.protocol.pipeline_messages import Domains
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.recovery_shadow import Refresh

IN_A_REGION = {1: 1, 2: 3, 3: 0, 4: 0, 5: 2, 6: 2, 7: 2}
"""By peer, its stage: 1 and 3, which are not beside each other, have one each, and these two are in one region."""


async def lose_a_region(swarm: PipelineSwarm) -> None:
    """A quarter of the swarm, with all of two stages."""
    for peer in range(8):
        swarm.start(peer)
    await until(swarm, lambda: all(swarm.rounds().get(stage, 0) >= 2 for stage in range(4)))
    for peer in (1, 2):
        swarm.kill(peer)
    await asyncio.sleep(12.0)
    for peer in (8, 9):
        swarm.start(peer)
    await until_done(swarm, 0, *range(3, 10))


def lose_it_where(domains: dict[int, Domains]) -> PipelineSwarm:
    one = recipe(stages=4, total_steps=20, pipeline={"shadows": 1.0})
    return simulate(one, Counting(), signers(10), lose_a_region, wanted=IN_A_REGION, domains=domains)


def test_a_region_is_lost_and_its_stages_come_back_from_shadows_elsewhere() -> None:
    domains = {peer: Domains(region="a" if peer in (1, 2) else "bcd"[peer % 3]) for peer in range(10)}
    swarm = lose_it_where(domains)
    assert not swarm.broken
    assert [life[:2] for life in lives(swarm)] == [(1, 1), (3, 1)]
    assert [event["rung"] for event in swarm.happened("stage.made")] == ["shadow", "shadow"]
    assert {event["region"] for event in swarm.happened("node.start", 1)} == {"a"}, "as its person told"
    assert swarm.rounds()[0] == 5 and swarm.losses()[-1] < 0.6 * swarm.losses()[0]


@pytest.mark.thorough
def test_where_nobody_tells_a_region_two_stages_may_hold_each_others_shadows() -> None:
    swarm = lose_it_where({})
    assert "shadow" not in {event["rung"] for event in swarm.happened("stage.made")}


def test_a_stage_of_many_peers_of_one_owner_has_a_shadow_elsewhere() -> None:
    held: list[set[int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds().get(1, 0) >= 2)
        assert swarm.peers[0].pipeline.counts() == (1, 3)
        held.append({copy.stage for copy in swarm.peers[0].copies})
        await until_done(swarm, *range(4))

    for owner in ("ann", ""):
        of_one = {peer: Domains(owner=owner if peer else "bob") for peer in range(4)}
        one = recipe(total_steps=12, pipeline={"shadows": 1.0})
        swarm = simulate(one, Counting(), signers(4), story, wanted={1: 1, 2: 1, 3: 1}, domains=of_one)
        assert not swarm.broken
    assert held == [{1}, set()]


def test_shadows_stay_within_their_budget() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until_done(swarm, 0, 1)

    swarm = simulate(recipe(total_steps=16, pipeline={"shadows": 0.1}), Counting(), signers(2), story)
    assert not swarm.broken
    held = swarm.happened("shadow", 0)
    assert len(held) > 2 and not swarm.happened("shadow", 1)  # stage 0 has none
    first = held[0]["bytes"]  # which nobody else has, and so is over the budget
    assert all(event["received_bytes"] <= event["allowed_bytes"] + first for event in held)


def test_a_source_that_stands_still_keeps_no_other_copy_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer holds the copies of two stages; of one of them nothing comes."""
    fetch = shadows.fetch

    async def stands(network: Any, side: Any, holder: Any, stage: int, *args: Any, **options: Any) -> Any:
        if stage == 2:
            await asyncio.sleep(40.0)
            raise NetworkError("no answer to a request for a shadow")
        return await fetch(network, side, holder, stage, *args, **options)

    monkeypatch.setattr(shadows, "fetch", stands)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(3):
            swarm.start(peer)
        await until(swarm, lambda: len(swarm.happened("shadow", 0)) > 2, seconds=30.0)
        await until_done(swarm, *swarm.peers)

    one = recipe(stages=3, total_steps=16, pipeline={"shadows": 1.0})
    swarm = simulate(one, Counting(), signers(3), story, wanted={1: 1, 2: 2})
    assert not swarm.broken
    held = swarm.happened("shadow", 0)
    assert {event["stage"] for event in held} == {1}
    first = held[0]["bytes"]  # which nobody else has, and so is over the budget
    assert all(event["received_bytes"] <= event["allowed_bytes"] + first for event in held)


def test_a_stage_that_comes_down_to_one_peer_has_its_shadow_refreshed_at_once() -> None:
    """With two it was allowed to rest, and to lag behind."""
    rounds = []

    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until(swarm, lambda: swarm.happened("shadow"))
        swarm.start(2)
        await until(swarm, lambda: swarm.rounds().get(1, 0) >= 6)
        assert len(swarm.happened("shadow")) == 1
        swarm.kill(2)
        rounds.append(swarm.rounds()[1])
        await until(swarm, lambda: len(swarm.happened("shadow")) > 1)
        rounds.append(swarm.rounds()[1])
        await until_done(swarm, 0, 1)

    one = recipe(total_steps=32, pipeline={"shadows": 0.015})
    swarm = simulate(one, Counting(), signers(3), story, wanted={1: 1, 2: 1})
    assert not swarm.broken
    first, second = swarm.happened("shadow")[:2]
    assert "nobody a copy; at once" in first["reason"]
    assert "one peer is left that has it; at once" in second["reason"]
    assert second["bytes"] < 0.6 * first["bytes"]  # only what has changed
    assert rounds[1] <= rounds[0] + 1


def test_a_shadow_whose_holder_is_gone_is_fetched_by_another() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == dict.fromkeys(range(3), 2))
        held = [peer for peer in (2, 3) if 1 in {copy.stage for copy in swarm.peers[peer].copies}]
        assert len(held) == 1
        before = len(swarm.happened("shadow", 5 - held[0]))
        swarm.kill(held[0])
        await until(swarm, lambda: len(swarm.happened("shadow", 5 - held[0])) > before, seconds=30.0)
        await until_done(swarm, *swarm.peers)

    wanted = {1: 1, 2: 2, 3: 2}
    apart = {peer: Domains(owner=name) for peer, name in enumerate(("ann", "ann", "bob", "cleo"))}
    one = recipe(stages=3, total_steps=16, pipeline={"shadows": 0.2})
    swarm = simulate(one, Counting(), signers(4), story, wanted=wanted, domains=apart)
    assert not swarm.broken


def test_a_shadow_that_claims_to_be_of_later_is_refreshed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Shadows.own

    async def boast(self: Shadows, holder: PeerId, request: ShadowRequest) -> Refresh | None:
        sent = await own(self, holder, request)
        return None if sent is None else replace(sent, step=1 << 60)

    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until_done(swarm, 0, 1)

    monkeypatch.setattr(Shadows, "own", boast)
    swarm = simulate(recipe(total_steps=16, pipeline={"shadows": 1.0}), Counting(), signers(2), story)
    assert not swarm.broken
    held = swarm.happened("shadow", 0)
    assert len(held) > 2 and all(event["of_step"] <= 16 for event in held)


def test_without_a_budget_there_are_no_shadows() -> None:
    async def story(swarm: PipelineSwarm) -> None:
        swarm.start(0)
        swarm.start(1)
        await until_done(swarm, 0, 1)

    swarm = simulate(recipe(total_steps=4, pipeline={"shadows": 0.0}), Counting(), signers(2), story)
    assert not swarm.broken and not swarm.happened("shadow")
