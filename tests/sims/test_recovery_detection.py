"""How long it takes until a stage whose last peer has ended is begun anew, under virtual time; and what must not be taken for its end."""

import asyncio
from collections.abc import Callable

import pytest
from tests.sims.pipeline_story import lives, members_of, until, until_done
from tests.thorough import further

from farflung.protocol.lives import GONE_AFTER, LOST_AFTER
from farflung.sims.links import Disturbance
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate

HEARTBEAT_S = recipe().settings().heartbeat_s
WANTED = {1: 1, 2: 2, 3: 2}
"""Stage 1 has one peer; of stage 2 one may move, where that has none."""


def after_two_rounds(happens: Callable[[PipelineSwarm, int], None], *, then_s: float = 0.0) -> PipelineSwarm:
    """Something happens to the only peer of stage 1."""

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: swarm.rounds() == dict.fromkeys(range(3), 2))
        [victim] = members_of(swarm, 1)
        swarm.events.append((swarm.hub.now(), victim, {"event": "test.now", "time": swarm.hub.now()}))
        happens(swarm, victim)
        await asyncio.sleep(then_s)
        swarm.hub.resume(swarm.ids[victim])
        swarm.hub.heal()
        for number in list(swarm.hub._disturbances):
            swarm.hub.calm(number)
        await until_done(swarm, *swarm.peers)

    one = recipe(stages=3, total_steps=32, pipeline={"shadows": 1.0})
    swarm = simulate(one, Counting(), signers(4), story, wanted=WANTED, tied=False)
    assert not swarm.broken and swarm.rounds()[0] == 8
    return swarm


def seconds_to(swarm: PipelineSwarm, what: str) -> float:
    """From then until the first such event."""
    [began] = swarm.happened("test.now")
    return float(min(event["time"] for event in swarm.happened(what) if event["time"] > began["time"]) - began["time"])


def test_a_process_that_has_ended_is_replaced_after_few_heartbeats() -> None:
    swarm = after_two_rounds(lambda swarm, victim: swarm.kill(victim))
    assert [life[:2] for life in lives(swarm)] == [(1, 1)]
    assert seconds_to(swarm, "stage.anew") < (GONE_AFTER + 2) * HEARTBEAT_S
    assert swarm.happened("stage.made")[0]["rung"] == "shadow"


@pytest.mark.thorough
def test_a_machine_that_falls_silent_is_waited_for() -> None:
    """Nobody can tell it from a cut link."""
    swarm = after_two_rounds(lambda swarm, victim: swarm.kill(victim, reset=False))
    assert [life[:2] for life in lives(swarm)] == [(1, 1)]
    assert seconds_to(swarm, "stage.anew") > (LOST_AFTER - 1) * HEARTBEAT_S


def pause(swarm: PipelineSwarm, victim: int) -> None:
    swarm.hub.pause(swarm.ids[victim])


def cut(swarm: PipelineSwarm, victim: int) -> None:
    swarm.hub.partition([[swarm.ids[victim]]])


def flaky(swarm: PipelineSwarm, victim: int) -> None:
    swarm.hub.disturb(Disturbance(drop=0.95, delay_s=2.0, peers=(swarm.ids[victim],)))


@pytest.mark.parametrize("happens", [flaky, *further(pause, cut)])
def test_a_peer_that_is_slow_or_behind_a_bad_link_is_not_taken_for_lost(
    happens: Callable[[PipelineSwarm, int], None],
) -> None:
    """For three times as long as an ended one."""
    swarm = after_two_rounds(happens, then_s=3 * GONE_AFTER * HEARTBEAT_S)
    assert lives(swarm) == []
