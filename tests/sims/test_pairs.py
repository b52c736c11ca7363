"""Members that do not reach each other, though both reach all others: under virtual time, nobody stands for it and everybody counts."""

import asyncio
from collections import Counter

import pytest
from tests.thorough import further

from farflung.node.network import PeerId
from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Heal, Partition, Schedule, Start
from farflung.sims.swarm import Swarm

WARM_S, MEASURED_S = 60.0, 240.0


def measure(peers: int, pairs: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Of each peer: the share of the time in which it trained, and in how many of the rounds it counted."""
    pace = Pace(laps=Laps.fixed(10, 9), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)
    steps: list[list[int]] = []
    counted: Counter[PeerId] = Counter()
    ids: list[PeerId] = []
    rounds = 0

    async def watch(swarm: Swarm) -> None:
        nonlocal rounds
        ids.extend(swarm.ids)
        await asyncio.sleep(WARM_S)
        steps.append([labour.steps for labour in swarm.labour])
        first = swarm.peers[peers - 1].member.head.commit.height
        await asyncio.sleep(MEASURED_S)
        steps.append([labour.steps for labour in swarm.labour])
        for certified in swarm.peers[peers - 1].member.history:
            if certified.commit.height > first and certified.commit.round is not None:
                rounds += 1
                counted.update(one.peer for one in certified.commit.round.contributors)

    starts = [Start(at=0.0, peer=peer) for peer in range(peers)]
    cuts = [
        Partition(at=WARM_S, groups=((a,), (b,)), number=number, bridged=True) for number, (a, b) in enumerate(pairs)
    ]
    heals = [Heal(at=WARM_S + MEASURED_S + 10.0, number=number) for number in range(len(pairs))]
    schedule = Schedule(num_peers=peers, duration_s=WARM_S + MEASURED_S + 20.0, faults=(*starts, *cuts, *heals))
    report = run_schedule(2, schedule, watch, Wire(pace=pace, step_s=(1.0,) * peers))
    assert report.violations == []
    before, after = steps
    return [(b - a) / MEASURED_S for a, b in zip(before, after, strict=True)], [counted[p] / rounds for p in ids]


@pytest.mark.parametrize(("peers", "pairs"), [(4, [(0, 1)]), *further((6, [(0, 1), (2, 3), (4, 5)]))])
def test_who_cannot_reach_one_member_costs_nobody_much(peers: int, pairs: list[tuple[int, int]]) -> None:
    """One such pair of four kept all standing for more than half of the time, before owners went around it and messages took a detour. With three of six
    nobody reaches everybody."""
    busy, counted = measure(peers, pairs)
    assert min(busy) > 0.95, busy
    assert min(counted) > 0.4, counted
