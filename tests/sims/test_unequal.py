"""Peers of unequal speed under virtual time: nobody waits, and everybody's work counts."""

import asyncio
from collections import Counter

import pytest

from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.swarm import Swarm

SPEEDS = (1.0, 0.7, 0.4, 0.2)
WARM_S, MEASURED_S = 100.0, 200.0


def measure(
    delay_steps: int, step_s: float = 1.0, speeds: tuple[float, ...] = SPEEDS, may_miss: int = 2
) -> tuple[list[float], list[float]]:
    """Of each peer: the share of the time in which it trained, and its samples counted over those it trained."""
    times = tuple(step_s / speed for speed in speeds)
    laps = Laps.fixed(10, delay_steps)
    pace = Pace(laps=laps, samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)
    steps: list[list[int]] = []
    counted: Counter[bytes] = Counter()
    ids: list[bytes] = []

    async def watch(swarm: Swarm) -> None:
        ids.extend(swarm.ids)
        await asyncio.sleep(WARM_S)
        steps.append([labour.steps for labour in swarm.labour])
        first = swarm.peers[0].member.head.commit.height
        await asyncio.sleep(MEASURED_S)
        steps.append([labour.steps for labour in swarm.labour])
        commits = [certified.commit for certified in swarm.peers[0].member.history]
        assert commits[0].height <= first + 1, "all of them are still known"
        for commit in commits:
            if commit.height > first and commit.round is not None:
                for contribution in commit.round.contributors:
                    counted[contribution.peer] += contribution.samples

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(len(speeds)))
    schedule = Schedule(num_peers=len(speeds), duration_s=WARM_S + MEASURED_S + 20.0, faults=starts)
    report = run_schedule(2, schedule, watch, Wire(pace=pace, step_s=times))
    assert report.violations == []
    assert report.missed <= may_miss, "whoever is slow offers in time; at first speeds are not known"
    before, after = steps
    trained = [after[peer] - before[peer] for peer in range(len(speeds))]
    busy = [num * s / MEASURED_S for num, s in zip(trained, times, strict=True)]
    return busy, [counted[p] / (pace.samples_per_step * num) for p, num in zip(ids, trained, strict=True)]


def test_nobody_waits_for_anybody_and_all_work_counts() -> None:
    busy, counted = measure(delay_steps=9)
    assert min(busy) > 0.95, busy
    assert counted == pytest.approx([1.0] * 4, abs=0.15), (
        "what is trained comes into a round, but for a lap at either end"
    )


def test_without_overlap_the_fast_wait_for_a_lap_at_most() -> None:
    busy, counted = measure(delay_steps=0)
    assert busy[0] > 0.45, busy
    assert counted == pytest.approx([1.0] * 4, abs=0.15)


def test_without_overlap_nobody_waits_for_who_cannot_come_within_that() -> None:
    """It needs twenty laps for its own, and each of its steps is longer than one of the others: it has not even applied the newest commit when they are done."""
    busy, counted = measure(delay_steps=0, speeds=(1.0, 1.0, 1.0, 0.05))
    assert min(busy[:3]) > 0.8, busy
    assert counted[:3] == pytest.approx([1.0] * 3, abs=0.15)


def test_equal_peers_make_the_same_steps_in_every_round() -> None:
    busy, counted = measure(delay_steps=9, speeds=(0.5, 0.5, 0.5))
    assert min(busy) > 0.95, busy
    assert counted == pytest.approx([1.0] * 3, abs=0.15)


@pytest.mark.thorough
def test_rounds_that_follow_each_other_fast_wait_for_nobody_with_steps_as_long_as_two_of_them() -> None:
    """Somebody is late in every other one. A round has three seconds at least, by the manifest, and a lap takes one: waiting for that, the fast train for half of
    the time. Whatever misses a round comes into the next."""
    busy, counted = measure(delay_steps=9, step_s=0.1, speeds=(1.0, 1.0, 1.0, 0.05), may_miss=400)
    assert min(busy[:3]) > 0.65 and busy[3] > 0.95, busy
    assert counted == pytest.approx([1.0] * 4, abs=0.15)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.9, 0.6)])
def test_rounds_that_take_longer_than_a_lap_wait_for_messages_that_are_on_their_way(speeds: tuple[float, ...]) -> None:
    """A lap of half a second, by peers that are about as fast as each other, each of whom hears of the last commit at another moment."""
    pace = Pace(laps=Laps.fixed(10, 9), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(0.0)

    starts = tuple(Start(at=0.0, peer=peer) for peer in range(len(speeds)))
    wire = Wire(pace=pace, step_s=tuple(0.05 / speed for speed in speeds))
    report = run_schedule(2, Schedule(num_peers=len(speeds), duration_s=25.0, faults=starts), watch, wire)
    assert report.violations == [] and report.rounds > 40, report.rounds
    assert report.missed <= 5, "by peers, of all rounds: half of them were"
