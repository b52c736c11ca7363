"""Schedules of faults: drawn ones are sound and end in calm, played ones happen, and all of it twice alike.

Run as a script, this module prints the log of one simulation; the test of hash seeds compares such runs.
"""

import asyncio
import copy
import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.node.network import Stream
from farflung.protocol.errors import NetworkError
from farflung.sims.chaos import drawn_schedule
from farflung.sims.clock import VirtualLoop, process_context, run
from farflung.sims.fault_drawing import ChurnModel, draw_schedule
from farflung.sims.fault_playing import play
from farflung.sims.faults import (
    Delay,
    Drop,
    Duplicate,
    Fault,
    Heal,
    Kill,
    Leave,
    Partition,
    Pause,
    Presence,
    Resume,
    Schedule,
    Skew,
    Slow,
    Start,
    describe,
    put_right,
)
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork

PEERS = [bytes([number]) * 32 for number in range(24)]


class Chatter:
    """Processes that do a little of everything: heartbeats to all, bulk to one, a record, until they are ended."""

    def __init__(self, hub: MemoryHub, group: asyncio.TaskGroup, num_peers: int) -> None:
        self.hub = hub
        self.group = group
        self.num_peers = num_peers
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.heard: Counter[int] = Counter()
        self.bulk_bytes = 0
        self.broken = 0
        self.slowed: list[tuple[int, float]] = []

    def start(self, peer: int) -> None:
        living: Coroutine[None, None, None] = self.live(peer)
        self.tasks[peer] = self.group.create_task(living, context=process_context(PEERS[peer]))

    def leave(self, peer: int) -> None:
        self.tasks[peer].cancel()

    def kill(self, peer: int, *, reset: bool = True) -> None:
        self.tasks[peer].cancel()

    def slow(self, peer: int, factor: float) -> None:
        self.slowed.append((peer, factor))

    async def live(self, peer: int) -> None:
        network = MemoryNetwork(self.hub, PEERS[peer])
        network.on_message(lambda sender, message: self.heard.update([peer]))
        network.serve("bulk", self.take)
        try:
            while True:
                await network.put_record("peers", str(peer), b"here", self.hub.now() + 60)
                for other in range(self.num_peers):
                    if other != peer:
                        network.send(PEERS[other], b"alive")
                await self.bulk(network, PEERS[(peer + 1) % self.num_peers])
                await network.get_records("peers")
                await asyncio.sleep(2.0)
        finally:
            await network.close()

    async def bulk(self, network: MemoryNetwork, other: bytes) -> None:
        try:
            async with asyncio.timeout(20.0):
                stream = await network.open_stream(other, "bulk")
                try:
                    await stream.write(bytes(200_000))
                finally:
                    await stream.close()
        except (NetworkError, TimeoutError):
            self.broken += 1

    async def take(self, stream: Stream) -> None:
        await stream.readinto(memoryview(bytearray(200_000)))
        self.bulk_bytes += 200_000


def simulate(schedule: Schedule, seed: int, link: LinkModel) -> tuple[list[str], MemoryHub, Chatter]:
    """Play a schedule over chattering processes: every event and every fault in order, and what came of it."""
    log: list[str] = []

    async def main() -> tuple[MemoryHub, Chatter]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        hub = MemoryHub(loop, random.Random(seed), link, on_event=lambda event: log.append(repr(event)))
        async with asyncio.TaskGroup() as group:
            chatter = Chatter(hub, group, schedule.num_peers)
            for at, line in await play(schedule, hub, PEERS, chatter):
                log.append(f"{at} {line}")
            for peer in hub.running():
                chatter.kill(PEERS.index(peer))
        return hub, chatter

    hub, chatter = run(main(), start=1_700_000_000.0)
    return log, hub, chatter


LOSSY = LinkModel(drop=0.05, duplicate=0.05, reorder=0.1, record_miss=0.1)


def fingerprint(seed: int) -> str:
    churn = ChurnModel(calm_s=60.0, mean_gap_s=6.0, mean_outage_s=15.0)
    schedule = draw_schedule(random.Random(seed), 6, 200.0, churn)
    log, _, _ = simulate(schedule, seed, LOSSY)
    return f"{len(log)} events, {hashlib.sha256(''.join(log).encode()).hexdigest()}"


# --- drawn schedules ---


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_peers=st.integers(3, 24), duration_s=st.floats(400.0, 4000.0))
def test_drawn_schedules_are_sound_and_end_in_calm(seed: int, num_peers: int, duration_s: float) -> None:
    schedule = draw_schedule(random.Random(seed), num_peers, duration_s)
    assert schedule == draw_schedule(random.Random(seed), num_peers, duration_s)
    assert schedule.calm_from <= duration_s - ChurnModel().calm_s + 1e-9
    running: set[int] = set()
    gone_for_good: set[int] = set()
    ended_at: dict[int, float] = {}
    paused: set[int] = set()
    cuts: set[int] = set()
    for fault in schedule.faults:
        match fault:
            case Start(peer=peer, at=at):
                assert at - ended_at.get(peer, -1e9) >= ChurnModel().min_rejoin_s - 1e-9
                running.add(peer)
                gone_for_good.discard(peer)
            case Leave(peer=peer, at=at):
                running.remove(peer)
                gone_for_good.add(peer)
                ended_at[peer] = at
            case Kill(peer=peer, at=at):
                running.remove(peer)
                paused.discard(peer)
                ended_at[peer] = at
            case Pause(peer=peer):
                paused.add(peer)
            case Resume(peer=peer):
                paused.remove(peer)
            case Partition(groups=groups, number=number, bridged=bridged):
                assert number not in cuts and len(groups) >= 2 and all(groups)
                named = sorted(peer for group in groups for peer in group)
                assert len(named) == len(set(named)) and (bridged or named == list(range(num_peers)))
                cuts.add(number)
            case Heal(number=number):
                cuts.remove(number)
            case _:
                pass
        assert running or fault.at == 0.0
    assert not paused and not cuts
    assert running == {f.peer for f in schedule.faults if isinstance(f, Start)} - gone_for_good
    assert len(schedule.describe().splitlines()) == len(schedule.faults)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = Counter(
        type(fault).__name__ for seed in range(20) for fault in draw_schedule(random.Random(seed), 8, 1500.0).faults
    )
    assert set(drawn) == {
        "Start", "Leave", "Kill", "Pause", "Resume", "Partition", "Heal", "Drop", "Duplicate", "Delay", "Skew",
    }  # fmt: skip
    majority_down = 0
    for seed in range(100):
        up = 0
        for fault in draw_schedule(random.Random(seed), 5, 1500.0).faults:
            up += isinstance(fault, Start) - isinstance(fault, Kill | Leave)
            majority_down += up <= 2 and isinstance(fault, Kill)
    assert majority_down > 20


def test_what_cannot_be_drawn_is_refused() -> None:
    for num_peers, duration_s in ((2, 1000.0), (25, 1000.0), (5, 310.0)):
        with pytest.raises(ValueError):
            draw_schedule(random.Random(0), num_peers, duration_s)
    with pytest.raises(ValueError):
        ChurnModel(mean_gap_s=0.0)


@pytest.mark.parametrize(
    "faults",
    [
        (Kill(at=1.0, peer=0),),
        (Start(at=1.0, peer=0), Start(at=2.0, peer=0)),
        (Start(at=2.0, peer=0), Start(at=1.0, peer=1)),
        (Start(at=1.0, peer=3),),
        (Start(at=101.0, peer=0),),
        (Drop(at=1.0, until=101.0, probability=0.5),),
        (Drop(at=1.0, until=2.0, probability=1.5),),
        (Delay(at=1.0, until=2.0, extra_s=-1.0),),
        (Delay(at=1.0, until=2.0, extra_s=1.0, peer=9),),
        (Slow(at=1.0, until=2.0, peer=0, factor=0.0),),
        (Resume(at=1.0, peer=0),),
        (Start(at=0.0, peer=0), Pause(at=1.0, peer=0), Leave(at=2.0, peer=0)),
        (Partition(at=1.0, groups=((0, 1), (1, 2))),),
        (Partition(at=1.0, groups=((0,),)), Partition(at=2.0, groups=((1,),))),
    ],
)
def test_scripts_that_make_no_sense_are_refused(faults: tuple[Fault, ...]) -> None:
    with pytest.raises(ValueError):
        Schedule(num_peers=3, duration_s=100.0, faults=faults)


HITS: dict[str, Callable[[int], Fault]] = {
    "start": lambda peer: Start(at=1.0, peer=peer),
    "leave": lambda peer: Leave(at=1.0, peer=peer),
    "kill": lambda peer: Kill(at=1.0, peer=peer),
    "pause": lambda peer: Pause(at=1.0, peer=peer),
    "resume": lambda peer: Resume(at=1.0, peer=peer),
    "slow": lambda peer: Slow(at=1.0, until=2.0, peer=peer, factor=2.0),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(HITS)), st.integers(0, 2)), max_size=40))
def test_what_presence_allows_makes_a_schedule_and_nothing_else_does(hits: list[tuple[str, int]]) -> None:
    presence = Presence()
    taken: list[Fault] = []
    for kind, peer in hits:
        fault = HITS[kind](peer)
        before = copy.deepcopy(presence)
        if presence.allows(fault):
            presence.happen(fault)
            taken.append(fault)
        else:
            with pytest.raises(ValueError, match="in no state for it"):
                presence.happen(fault)
            with pytest.raises(ValueError, match="in no state for it"):
                Schedule(num_peers=3, duration_s=9.0, faults=(*taken, fault))
            assert presence == before
    Schedule(num_peers=3, duration_s=9.0, faults=tuple(taken))
    assert set(presence.paused) <= set(presence.running) and not set(presence.killed) & set(presence.running)
    assert set(presence.awake) == set(presence.running) - set(presence.paused)


def test_faults_read_well() -> None:
    assert describe(Kill(at=12.34, peer=3)) == "    12.3 s  kill peer 3"
    assert describe(Kill(at=0.0, peer=3, reset=False)).endswith("peer 3 loses power")
    assert describe(Partition(at=0.0, groups=((0, 2), (1,)))).endswith("s  partition 0 2 | 1")
    assert describe(Partition(at=0.0, groups=((0, 2),), number=1)).endswith("s  partition 1: 0 2")
    apart = Partition(at=0.0, groups=((0,), (2,)), number=1, bridged=True)
    assert describe(apart).endswith("s  apart 1: 0 | 2")
    assert describe(Heal(at=0.0)).endswith("heal the partition")
    assert describe(Heal(at=0.0, number=1)).endswith("heal partition 1")
    assert describe(Drop(at=0.0, until=9.0, probability=0.25)).endswith("drop 25% of messages until 9.0 s")
    assert describe(Delay(at=0.0, until=9.0, extra_s=1.5)).endswith("delay everything by 1.50 s until 9.0 s")
    assert describe(Skew(at=0.0, peer=1, ahead_s=-0.5)).endswith("set the clock of peer 1 -0.50 s off")


# --- played schedules ---


def test_a_script_is_played_to_the_letter_and_each_fault_has_its_effect() -> None:
    faults: tuple[Fault, ...] = (
        Skew(at=0.0, peer=1, ahead_s=1.5),
        *(Start(at=0.0, peer=peer) for peer in range(4)),
        Drop(at=10.0, until=30.0, probability=0.5),
        Duplicate(at=20.0, until=30.0, probability=0.5),
        Delay(at=30.0, until=40.0, extra_s=0.7, peer=2),
        Slow(at=45.0, until=60.0, peer=1, factor=3.0),
        Partition(at=50.0, groups=((0, 1), (2, 3))),
        Heal(at=70.0),
        Pause(at=80.0, peer=3),
        Resume(at=100.0, peer=3),
        Kill(at=110.0, peer=0),
        Pause(at=115.0, peer=2),
        Kill(at=120.0, peer=2, reset=False),
        Start(at=130.0, peer=0),
        Leave(at=140.0, peer=1),
    )
    schedule = Schedule(num_peers=4, duration_s=200.0, faults=faults)
    assert schedule.calm_from == 140.0
    log, hub, chatter = simulate(schedule, 0, LinkModel())
    played = [line for line in log if not line.startswith("NetEvent")]
    assert len(played) == len(faults) + 4
    assert [round(float(line.split()[0]) - 1.7e9, 6) for line in played] == sorted(
        [fault.at for fault in faults] + [30.0, 30.0, 40.0, 60.0]
    )
    assert hub.running() == [] and hub.unix_time(PEERS[1]) - hub.now() == 1.5
    for counted in (
        ("drop", "lost"), ("drop", "cut"), ("drop", "receiver gone"), ("duplicate", ""), ("queue", ""), ("deliver", ""),
        ("kill", "reset"), ("kill", "silent"), ("resume", ""), ("refuse", "connection refused"), ("get", ""),
        ("stream-end", "bulk"),
    ):  # fmt: skip
        assert hub.counts[counted] > 0, counted
    assert hub.counts["kill", "silent"] == hub.counts["kill", "reset"] == 1
    assert chatter.bulk_bytes > 0 and chatter.broken > 0
    assert chatter.slowed == [(1, 3.0), (1, 1.0)]
    assert not hub._connections


def test_what_is_slow_twice_is_so_by_both_and_each_ends_by_itself() -> None:
    faults = (
        Start(at=0.0, peer=0),
        Slow(at=10.0, until=40.0, peer=0, factor=2.0),
        Slow(at=20.0, until=30.0, peer=0, factor=3.0),
        Slow(at=25.0, until=60.0, peer=1, factor=5.0),
        Slow(at=35.0, until=50.0, peer=0, factor=4.0),
    )
    _, _, chatter = simulate(Schedule(num_peers=2, duration_s=70.0, faults=faults), 0, LinkModel())
    assert [factor for peer, factor in chatter.slowed if peer == 0] == [2.0, 6.0, 2.0, 8.0, 4.0, 1.0]
    assert [factor for peer, factor in chatter.slowed if peer == 1] == [5.0, 1.0]


def test_of_two_partitions_each_is_healed_by_itself() -> None:
    faults = (
        *(Start(at=0.0, peer=peer) for peer in range(3)),
        Partition(at=10.0, groups=((0,),)),
        Partition(at=20.0, groups=((1,),), number=1),
        Heal(at=30.0),
        Heal(at=40.0, number=1),
        Heal(at=45.0, number=7),  # nothing to heal
    )
    schedule = Schedule(num_peers=3, duration_s=60.0, faults=faults)
    apart: list[tuple[float, tuple[bool, ...]]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel())

        def look() -> None:
            apart.append((hub.now(), tuple(hub.cut(PEERS[a], PEERS[b]) for a, b in ((0, 1), (0, 2), (1, 2)))))

        for at in (15.0, 25.0, 35.0, 50.0):
            hub.at(at, look)
        async with asyncio.TaskGroup() as group:
            chatter = Chatter(hub, group, 3)
            await play(schedule, hub, PEERS, chatter)
            for peer in range(3):
                chatter.kill(peer)

    run(main())
    assert apart == [
        (15.0, (True, True, False)),
        (25.0, (True, True, True)),
        (35.0, (True, False, True)),
        (50.0, (False, False, False)),
    ]
    assert put_right(faults[:5], 60.0) == [Heal(at=60.0), Heal(at=60.0, number=1)]


def test_of_what_is_not_there_nothing_is_told_as_done() -> None:
    """A process that ends by itself cannot be stopped, as the schedule would have it; all the rest goes on."""
    faults = (
        *(Start(at=0.0, peer=peer) for peer in range(2)),
        Drop(at=5.0, until=8.0, probability=0.0),
        Pause(at=10.0, peer=0),
        Resume(at=20.0, peer=0),
        Pause(at=30.0, peer=1),
        Resume(at=40.0, peer=1),
        Heal(at=50.0, number=7),
    )
    schedule = Schedule(num_peers=2, duration_s=60.0, faults=faults)
    told: list[tuple[str, Fault | None]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel())
        async with asyncio.TaskGroup() as group:
            chatter = Chatter(hub, group, 2)
            hub.at(25.0, lambda: chatter.tasks[1].cancel())
            await play(schedule, hub, PEERS, chatter, lambda *what: told.append(what))
            chatter.kill(0)

    run(main())
    assert told[-3:] == [
        ("pause peer 1 (it is not up)", None),
        ("resume peer 1 (it is not paused)", None),
        ("heal partition 7 (it is not open)", None),
    ]
    assert [fault for _, fault in told if fault is not None] == list(faults[:5])


def test_in_a_drawn_schedule_a_pause_is_ended_by_its_own_resume() -> None:
    """Chaos seed 489: one was killed while it stood still, and stopped again in its next life before it would have gone on, at 279.0 s."""
    faults = [fault for fault in drawn_schedule(489).faults if isinstance(fault, Pause | Resume | Kill)]
    of_one = [fault for fault in faults if fault.peer == 4]
    assert [type(fault) for fault in of_one] == [Pause, Kill, Pause, Resume]
    assert round(of_one[-1].at, 1) == 289.6


def test_the_same_seed_gives_the_same_log() -> None:
    first = fingerprint(1)
    assert int(first.split()[0]) > 1000
    assert fingerprint(1) == first
    assert fingerprint(2) != first


@pytest.mark.thorough
def test_the_log_does_not_depend_on_the_hash_seed() -> None:
    logs = {
        subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert logs == {fingerprint(3) + "\n"}


@pytest.mark.parametrize("seed", range(12))
def test_after_any_churn_the_calm_is_calm(seed: int) -> None:
    churn = ChurnModel(calm_s=120.0, mean_gap_s=5.0, mean_outage_s=20.0)
    schedule = draw_schedule(random.Random(seed), 3 + seed, 300.0, churn)
    log, hub, _ = simulate(schedule, seed, LinkModel())
    # The last minute: streams of dead links have timed out by then, and everybody hears everybody who is there.
    late = [line for line in log if line.startswith("NetEvent(at=") and float(line[12:].split(",")[0]) > 1.7e9 + 245]
    assert any("what='deliver'" in line for line in late)
    before_the_end = [line for line in late if float(line[12:].split(",")[0]) < 1.7e9 + 299.9]
    reasons = {line.rsplit("detail=", 1)[1] for line in before_the_end if "what='drop'" in line}
    assert reasons <= {"'receiver gone')"}
    assert not any("what='stream-broken'" in line for line in before_the_end)
    assert not hub._connections


if __name__ == "__main__":
    print(fingerprint(3))
