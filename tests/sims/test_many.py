"""A round of as many members as a group may have, by whole nodes under virtual time."""

import asyncio
import json

from farflung.sims.chaos import BLOCK, Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.simulation import simulate
from farflung.sims.swarm import Swarm

MEMBERS = 64
VICTIM = 7
WIRE = Wire(numel=12 * BLOCK, fragments=1, step_s=(2.0,) * MEMBERS)
"""Twelve parts, so that most members own none: what a test has time for."""


def test_rounds_of_64_members_go_on_when_one_dies_in_the_middle() -> None:
    killed: list[int] = []

    async def kill_in_the_second_round(swarm: Swarm) -> None:
        while not all(_sends_in(swarm, index, 2) for index in range(MEMBERS)):
            await asyncio.sleep(0.01)
        swarm.hub.kill(swarm.ids[VICTIM])
        swarm.kill(VICTIM)
        killed.append(VICTIM)

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(MEMBERS))
    schedule = Schedule(num_peers=MEMBERS, duration_s=36.0, faults=starts)
    report = simulate(toy_plan(2, schedule, WIRE, calm_s=0.0), keep=True, meddler=kill_in_the_second_round)
    assert report.violations == [] and killed
    commits = [json.loads(line[line.index("{") :]) for line in report.events if " 0 round.commit " in line]
    assert [len(commit["contributors"]) for commit in commits] == [MEMBERS, MEMBERS - 1]
    assert [len(commit["view"]) for commit in commits] == [MEMBERS, MEMBERS - 1]
    assert [commit["parts_left_out"] for commit in commits] == [0, 0]
    assert report.contributed == 2 * MEMBERS - 1 and report.missed == 0, "nobody else lost anything"


def _sends_in(swarm: Swarm, index: int, version: int) -> bool:
    """Whether a peer is in the middle of the round that makes this version, with all the others."""
    peer = swarm.peers.get(index)
    accepted = None if peer is None else peer.member.attendance.part
    return (
        peer is not None
        and accepted is not None
        and peer.trainer.version == version - 1
        and len(accepted.plan.contributors) == MEMBERS
    )
