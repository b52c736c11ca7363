"""Everybody loses power at the same moment, as all machines of one home do: the swarm goes on with what it had, whichever moment of a round it is.

A machine that loses its power loses what its system had not written yet; a process that is killed does not.
"""

import json

import pytest
from tests.thorough import further

from farflung.sims.blackout import blackout
from farflung.sims.chaos import Wire, run_dark, toy_plan
from farflung.sims.faults import Drop, Fault, Heal, Kill, Leave, Partition, Pause, Resume, Schedule, Start
from farflung.sims.simulation import Report, simulate
from farflung.sims.toy import MemoryStorage

SEED, DURATION_S, AWAY_S = 3, 60.0, 5.0

MOMENTS = 12
"""Of one round, from its plan until it is committed everywhere."""


def play(peers: int, dark_at: float | None, seconds: float = DURATION_S) -> Report:
    """Peers of one speed; at some moment nobody has any power, and later everybody is started again."""
    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(peers))
    schedule = Schedule(num_peers=peers, duration_s=seconds, faults=starts)
    if dark_at is not None:
        schedule = blackout(schedule, dark_at, away_s=AWAY_S, then_s=seconds - dark_at - AWAY_S)
    return simulate(toy_plan(SEED, schedule, Wire(step_s=(1.0,) * peers), calm_s=0.0), keep=True)


def moments(peers: int) -> list[float]:
    """Of the first round that counts contributions of all."""
    planned: dict[int, float] = {}
    for line in play(peers, None, 20.0).events:
        about = json.loads(line[line.index("{") :])
        at = float(line.split()[0])
        if " round.plan " in line and len(about["contributors"]) == peers:
            planned.setdefault(about["round"], at)
        if " round.commit " in line and planned:
            first = min(planned.values())
            return [first + (at + 0.1 - first) * k / MOMENTS for k in range(MOMENTS)]
    raise AssertionError("no such round")


@pytest.mark.parametrize("peers", [1, 2, *further(3)])
def test_the_swarm_goes_on_at_whatever_moment_all_lose_power(peers: int) -> None:
    for at in moments(peers):
        report = play(peers, at)
        assert report.violations == [] and report.members == peers, at
        assert report.rounds >= 9, f"{at}: {report.rounds} rounds"  # of a lap of four steps each


@pytest.mark.parametrize("seed", [2, *further(5, 11)])
def test_the_swarm_goes_on_after_other_misfortune(seed: int) -> None:
    """Owners of parts had died in rounds, which count without these parts then."""
    report = run_dark(seed)
    assert report.violations == [] and report.rounds > 20


def lonely(kind: str) -> Report:
    """One misses a round and catches up with what others give it; these leave, and then it loses power, long before a checkpoint."""
    missed: tuple[Fault, ...] = (Pause(at=20.0, peer=2), Resume(at=29.0, peer=2))
    if kind == "kill":
        missed = (Kill(at=20.0, peer=2), Start(at=27.0, peer=2))
    faults = (
        *(Start(at=0.1 * peer, peer=peer) for peer in range(3)),
        *missed,
        Leave(at=45.0, peer=0),
        Leave(at=45.3, peer=1),
        Kill(at=65.0, peer=2, reset=False),
        Start(at=70.0, peer=2),
    )
    wire = Wire(step_s=(1.0,) * 3, checkpoint_s=300.0)
    return simulate(toy_plan(SEED, Schedule(num_peers=3, duration_s=130.0, faults=faults), wire, calm_s=40.0))


@pytest.mark.parametrize("kind", ["pause", "kill"])
def test_what_was_fetched_is_on_the_disk_itself_before_others_count_on_it(kind: str) -> None:
    report = lonely(kind)
    assert report.violations == [] and report.members == 1 and report.rounds > 25


@pytest.mark.parametrize("peers", [2, 3])
def test_means_that_are_on_no_disk_when_they_count_are_lost_with_the_swarm(
    monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    """The check of the check."""
    monkeypatch.setattr(MemoryStorage, "sync_means", lambda self, plan: None)
    assert any(play(peers, at).rounds <= 3 for at in moments(peers))


def test_a_blackout_ends_all_that_went_wrong_and_brings_everybody_back() -> None:
    before: tuple[Fault, ...] = (
        Start(at=0.0, peer=0),
        Start(at=0.0, peer=1),
        Start(at=0.0, peer=2),
        Start(at=0.0, peer=3),
        Kill(at=1.0, peer=1),
        Leave(at=2.0, peer=2),
        Partition(at=3.0, groups=((0,), (3,)), number=7),
        Drop(at=4.0, until=60.0, probability=0.5),
        Pause(at=5.0, peer=3),
    )
    late = (Resume(at=20.0, peer=3), Start(at=21.0, peer=1))
    dark = blackout(Schedule(num_peers=5, duration_s=90.0, faults=(*before, *late)), 10.0, away_s=5.0, then_s=30.0)
    assert dark.duration_s == 45.0 and dark.faults == (
        *before[:7],
        Drop(at=4.0, until=10.0, probability=0.5),
        before[8],
        Heal(at=10.0, number=7),
        Kill(at=10.0, peer=0, reset=False),
        Kill(at=10.0, peer=3, reset=False),
        *(Start(at=15.0, peer=peer) for peer in range(4)),
    )
