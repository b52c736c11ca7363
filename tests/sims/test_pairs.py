"""Members that do not reach each other, though both reach all others: under virtual time, nobody stands for it and everybody counts."""

import asyncio
from collections import Counter

import pytest

from farflung.node.network import PeerId
from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.swarm import Swarm

WARM_S, MEASURED_S = 60.0, 240.0


def measure(
    peers: int, pairs: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[float]]:
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
        cut, apart = swarm.hub.cut, {frozenset((ids[a], ids[b])) for a, b in pairs}
        monkeypatch.setattr(swarm.hub, "cut", lambda a, b: frozenset((a, b)) in apart or cut(a, b))
        steps.append([labour.steps for labour in swarm.labour])
        first = swarm.peers[peers - 1].member.head.commit.height
        await asyncio.sleep(MEASURED_S)
        steps.append([labour.steps for labour in swarm.labour])
        for certified in swarm.peers[peers - 1].member.history:
            if certified.commit.height > first and certified.commit.round is not None:
                rounds += 1
                counted.update(one.peer for one in certified.commit.round.contributors)

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(peers))
    schedule = Schedule(num_peers=peers, duration_s=WARM_S + MEASURED_S + 20.0, faults=starts)
    report = run_schedule(2, schedule, watch, Wire(pace=pace, step_s=(1.0,) * peers))
    # Until a pair is known, a round may leave out a part; the judge takes that for wrong, since nobody has gone: it knows of no cut.
    assert [v for v in report.violations if "left parts out" not in v] == []
    before, after = steps
    return [(b - a) / MEASURED_S for a, b in zip(before, after, strict=True)], [counted[p] / rounds for p in ids]


@pytest.mark.parametrize(("peers", "pairs"), [(4, {(0, 1)}), (6, {(0, 1), (2, 3)})])
def test_who_cannot_reach_one_member_costs_nobody_much(
    peers: int, pairs: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before owners went around such pairs, one in four kept all standing for more than half of the time."""
    busy, counted = measure(peers, pairs, monkeypatch)
    assert min(busy) > 0.8, busy
    assert min(counted) > 0.7, counted
