"""Laps that are chosen live (`protocol.lap`), by whole nodes under virtual time: rounds hide behind training, also when links change."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.thorough import further

from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.links import LinkModel
from farflung.sims.simulation import Meddler, Report, simulate
from farflung.sims.swarm import Swarm

PEERS = 3
SHORT = 1000.0
"""What a byte stands for: messages are far shorter than parts of models, and would be longer than those of a toy."""
FAST = LinkModel(up_bytes_per_s=1e6, byte_means=SHORT)
SLOW = LinkModel(up_bytes_per_s=300.0, byte_means=SHORT)
"""A contribution has 1.6 kB: a round takes some 10 s, where it took 0.7."""
FAR = LinkModel(up_bytes_per_s=1e6, latency_s=0.2, byte_means=SHORT)

PACE = Pace(laps=Laps(least=4, most=400), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)

SETTLE_S, MEASURED_S = 120.0, 60.0
"""After links became slow the first plans fail, each with more time than the one before: some 100 s until rounds hide again."""


def run(
    laps: Laps, total_steps: int, duration_s: float, step_s: tuple[float, ...], meddler: Meddler, fragments: int = 1
) -> Report:
    pace = Pace(laps=laps, samples_per_step=2, tokens_per_sample=8, total_steps=total_steps)
    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    schedule = Schedule(num_peers=PEERS, duration_s=duration_s, faults=starts)
    wire = Wire(fragments=fragments, pace=pace, step_s=step_s)
    return simulate(toy_plan(2, schedule, wire, calm_s=0.0), keep=True, meddler=meddler)


def test_where_round_trips_take_the_time_everything_moves_at_once() -> None:
    """With 0.4 s from peer to peer a round takes some four, whatever it moves: in turn each of three fragments would wait for three of them. Over a link that
    takes as long for its bytes, they take turns again."""
    wide: list[tuple[int, int]] = []

    async def watch(swarm: Swarm) -> None:
        for link in (FAR, SLOW):
            set_links(swarm, link)
            await asyncio.sleep(2 * SETTLE_S)
            wide.append((swarm.peers[0].member.head.commit.width, swarm.peers[0].member.head.commit.lap))

    report = run(
        Laps(least=4, most=200, widths=(1, 3)), 1 << 40, 4 * SETTLE_S + 5.0, (1.0,) * PEERS, watch, fragments=3
    )
    assert report.violations == [] and report.members == PEERS
    assert [width for width, _ in wide] == [3, 1], wide
    changes = [json.loads(line[line.index("{") :]) for line in report.events if " lap " in line]
    assert any("that moves 3 of 3 fragments" in change["reason"] for change in changes), changes


def test_training_goes_on_while_means_are_decoded() -> None:
    """Decoding takes six seconds of every twenty, beside what trains; standing for it, peers would train for three quarters of the time."""
    pace = Pace(laps=Laps.fixed(20, 19), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)
    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    wire = Wire(fragments=1, pace=pace, step_s=(1.0,) * PEERS)
    plan = toy_plan(2, Schedule(num_peers=PEERS, duration_s=305.0, faults=starts), wire, calm_s=0.0)
    usual = plan.outfit.seconds
    outfit = replace(
        plan.outfit, seconds=lambda index, name, share: 6.0 if name == "decode" else usual(index, name, share)
    )
    busy: list[float] = []

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(100.0)
        before = [labour.training_s for labour in swarm.labour]
        rounds = swarm.peers[0].member.head.commit.version
        await asyncio.sleep(200.0)
        busy.extend((now.training_s - b) / 200.0 for now, b in zip(swarm.labour, before, strict=True))
        assert swarm.peers[0].member.head.commit.version - rounds >= 8

    report = simulate(replace(plan, outfit=outfit), keep=True, meddler=watch)
    assert report.violations == [] and min(busy) > 0.95, busy


def test_a_lap_is_long_enough_for_what_a_round_takes_from_training() -> None:
    """A copy of what is offered, and an outer step, of 0.6 s each: in laps that only hide the exchange, of five steps of a second, a fifth of the time. A peer that is
    slower is kept from it longer, and has no say."""
    wire = Wire(fragments=1, pace=PACE, step_s=(1.0, 1.0, 4.0))
    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    plan = toy_plan(2, Schedule(num_peers=PEERS, duration_s=405.0, faults=starts), wire, calm_s=0.0)
    usual = plan.outfit.seconds

    def seconds(index: int, name: str, share: float) -> float:
        taken = 6.0 if index == 2 else 0.6
        return taken if name in ("offer", "apply") else usual(index, name, share)

    busy: list[float] = []
    laps: set[int] = set()

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(150.0)
        before = [labour.training_s for labour in swarm.labour]
        await asyncio.sleep(250.0)
        busy.extend((now.training_s - b) / 250.0 for now, b in zip(swarm.labour, before, strict=True))
        laps.update(c.commit.lap for c in swarm.peers[0].member.history if c.commit.view == tuple(sorted(swarm.ids)))

    plan = replace(plan, outfit=replace(plan.outfit, seconds=seconds))
    report = simulate(plan, keep=True, meddler=watch)
    assert report.violations == [] and report.members == PEERS
    assert min(busy[:2]) > 0.93, busy
    assert 35 <= max(laps) <= 60, laps


def test_rounds_that_take_most_from_training_by_what_they_move_are_no_wider_for_that() -> None:
    pace = replace(PACE, laps=Laps(least=4, most=400, widths=(1, 3)))
    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    wire = Wire(fragments=3, pace=pace, step_s=(1.0,) * PEERS)
    plan = toy_plan(2, Schedule(num_peers=PEERS, duration_s=505.0, faults=starts), wire, calm_s=0.0)
    usual = plan.outfit.seconds

    def seconds(index: int, name: str, share: float) -> float:
        return 1.5 * share if name in ("offer", "apply") else usual(index, name, share)

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(500.0)
        chosen.extend((c.commit.width, c.commit.lap) for c in swarm.peers[0].member.history)

    chosen: list[tuple[int, int]] = []
    report = simulate(replace(plan, outfit=replace(plan.outfit, seconds=seconds)), keep=True, meddler=watch)
    assert report.violations == [] and report.members == PEERS
    assert {width for width, _ in chosen} == {1} and 30 <= chosen[-1][1] <= 45, chosen


@pytest.mark.parametrize(("step_s", "share"), [(10.0, 0.4), *further((7.5, 0.9), (30.0, 0.15))])
def test_a_peer_with_steps_as_long_as_laps_comes_into_as_many_rounds_as_it_can(step_s: float, share: float) -> None:
    """Whenever one of its steps ends a commit is on its way in; were it to begin the next one then, it would never offer."""
    counted: list[bool] = []

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(595.0)
        rounds = [c.commit.round for c in swarm.peers[0].member.history if c.commit.round is not None]
        counted.extend(swarm.ids[2] in {one.peer for one in result.contributors} for result in rounds[-50:])

    report = run(Laps.fixed(8, 7), 1 << 40, 600.0, (1.0, 1.0, step_s), watch)
    assert report.violations == [] and len(counted) == 50
    assert sum(counted) / 50 >= share, sum(counted)


def set_links(swarm: Swarm, link: LinkModel) -> None:
    for peer in swarm.ids:
        swarm.hub.set_link(peer, link)


@pytest.mark.parametrize("step_s", [(1.0, 1.4, 2.5), *further(((1.0, 1.0, 1.0),))])
def test_laps_follow_the_links_and_training_goes_on(step_s: tuple[float, ...]) -> None:
    busy: list[float] = []
    laps: list[int] = []

    async def watch(swarm: Swarm) -> None:
        for link in (FAST, SLOW, FAST):
            set_links(swarm, link)
            await asyncio.sleep(SETTLE_S)
            before = [labour.training_s for labour in swarm.labour]
            await asyncio.sleep(MEASURED_S)
            laps.append(swarm.peers[0].member.head.commit.lap)
            busy.extend((now.training_s - b) / MEASURED_S for now, b in zip(swarm.labour, before, strict=True))

    report = run(Laps(least=4, most=200), 1 << 40, 3 * (SETTLE_S + MEASURED_S) + 5.0, step_s, watch)
    assert report.violations == []
    assert laps[0] == laps[2] == 4 and 12 <= laps[1] <= 40, laps
    assert min(busy) > 0.95, busy
    changes = [json.loads(line[line.index("{") :]) for line in report.events if " lap " in line]
    assert {4, laps[1]} <= {change["steps"] for change in changes}
    assert all("steps hide one" in change["reason"] for change in changes)


def test_rounds_of_the_founder_alone_say_nothing_about_those_of_several() -> None:
    """They take no time, whatever they move: the first that take some were no wider than those for that."""
    seen: list[tuple[int, int, int]] = []

    async def watch(swarm: Swarm) -> None:
        set_links(swarm, FAR)
        await asyncio.sleep(150.0)
        history = [c.commit for c in swarm.peers[0].member.history]
        several = [c.round is not None and len(c.round.contributors) > 1 for c in history]
        seen.extend((c.lap, c.width, len(c.view)) for c in history[several.index(True) :])

    report = run(Laps(least=1, most=200, widths=(1, 3)), 1 << 40, 151.0, (1.0,) * PEERS, watch, fragments=3)
    assert report.violations == [] and report.members == PEERS
    assert min(lap for lap, _, _ in seen) >= 6, seen
    assert seen[-1][1] == 3


def test_a_state_that_takes_longer_than_means_are_kept_still_arrives() -> None:
    """Of a founder alone every round is over at once, and eight of the shortest laps are 32 s."""
    longest: list[int] = []

    async def watch(swarm: Swarm) -> None:
        set_links(swarm, SLOW)
        while not swarm.peers or len(swarm.peers[0].member.head.commit.view) < PEERS:
            await asyncio.sleep(1.0)
        longest.append(max(c.commit.lap for c in swarm.peers[0].member.history))

    report = run(Laps(least=4, most=200), 1 << 40, 400.0, (1.0,) * PEERS, watch)
    assert report.violations == [] and report.members == PEERS
    assert longest[0] > 20


@pytest.mark.parametrize("laps", [Laps.fixed(4, 3), *further(Laps.fixed(4), Laps.fixed(2, 1), Laps(least=4, most=400))])
def test_a_newcomer_from_far_away_comes_in_though_laps_of_the_founder_alone_are_shorter_than_it_takes_to_follow(
    laps: Laps,
) -> None:
    """It is told of a round after 0.4 s, has its mean 3.2 s later, and the founder hears of that after 0.4 s more: it came to the head whenever a lap of 4 s was just over."""
    pace = replace(PACE, laps=laps)
    starts = (Start(at=0.0, peer=0), Start(at=10.0, peer=1))
    wire = Wire(fragments=1, pace=pace, step_s=(1.0, 1.0))
    plan = toy_plan(2, Schedule(num_peers=2, duration_s=150.0, faults=starts), wire, calm_s=0.0)
    contributed: list[bool] = []

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(149.0)
        rounds = [c.commit.round for c in swarm.peers[0].member.history if c.commit.round is not None]
        contributed.extend(len(result.contributors) == 2 for result in rounds[-3:])

    report = simulate(replace(plan, links=lambda peer: FAR), keep=True, meddler=watch)
    assert report.violations == [] and report.members == 2
    assert all(contributed), contributed


@pytest.mark.parametrize("limits", [Laps.fixed(7), Laps.fixed(7, 6)])
def test_the_last_of_equal_laps_is_what_is_left_of_the_run(limits: Laps) -> None:
    """Else the learning rate would end in the middle of its fall."""
    done: list[tuple[int, int, int]] = []

    async def watch(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or not all(p.trainer.finished for p in swarm.peers.values()):
            await asyncio.sleep(1.0)
        commits = [c.commit for c in swarm.peers[0].member.history]
        done.extend(
            (c.steps, c.round.parts[-1].stop - c.round.parts[0].start, len(c.round.contributors))
            for c in commits
            if c.round
        )

    report = run(limits, 24, 200.0, (1.0,) * PEERS, watch, fragments=3)
    assert report.violations == [] and report.members == PEERS
    assert [steps for steps, _, _ in done] == [7, 14, 21, 24]
    assert done[-1][1] > 2 * max(moved for _, moved, _ in done[:-1]), "the last round moves everything"
    assert done[-1][2] == PEERS


@pytest.mark.parametrize("step_s", [(1.0, 1.0, 1.0), (1.0, 1.0, 3.0)])
def test_nobody_is_left_out_of_the_last_round_for_it_comes_after_one_step(step_s: tuple[float, ...]) -> None:
    """What is left out of it is lost. What others have said of the lap before, of seven steps, is too long ago."""
    contributors: list[int] = []

    async def watch(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or not all(p.trainer.finished for p in swarm.peers.values()):
            await asyncio.sleep(1.0)
        commits = [c.commit for c in swarm.peers[0].member.history if c.commit.round]
        assert [commit.steps for commit in commits] == [7, 14, 21, 22]
        contributors.extend(len(commit.round.contributors) for commit in commits if commit.round)

    report = run(Laps.fixed(7, 6), 22, 200.0, step_s, watch, fragments=3)
    assert report.violations == [] and contributors[-1] == PEERS, contributors


def test_the_run_ends_where_it_should_though_laps_change() -> None:
    total, limits = 150, Laps(least=7, most=60)
    done: list[tuple[int, int]] = []
    counted: list[int] = []

    async def watch(swarm: Swarm) -> None:
        await asyncio.sleep(10.0)
        set_links(swarm, SLOW)
        while len(swarm.peers) < PEERS or not all(p.trainer.finished for p in swarm.peers.values()):
            await asyncio.sleep(1.0)
            counted.extend(peer.trainer.counted_steps for peer in swarm.peers.values())
        done.extend((c.commit.steps, c.commit.lap) for c in swarm.peers[0].member.history)

    report = run(limits, total, 400.0, (1.0,) * PEERS, watch)
    assert report.violations == []
    assert done[0] == (0, limits.least) and max(lap for _, lap in done) > 10, "it begins with the least"
    assert done[-1][0] == total, "the last lap is as long as what was left"
    assert set(counted) <= {steps for steps, _ in done} and done[-1][0] in counted, (
        "the learning rate counts what commits say"
    )
