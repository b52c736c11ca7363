"""Everybody loses power at the same moment, as all machines of one home do: the swarm goes on with what it had, whichever moment of a round it is.

A machine that loses its power loses what its system had not written yet; a process that is killed does not.
"""

import json

import pytest

from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.faults import Fault, Kill, Schedule, Start
from farflung.sims.simulation import Report, simulate
from farflung.sims.toy import MemoryStorage

SEED, DURATION_S, AWAY_S = 3, 60.0, 5.0

MOMENTS = 12
"""Of one round, from its plan until it is committed everywhere."""


def play(peers: int, dark_at: float | None, seconds: float = DURATION_S) -> Report:
    """Peers of one speed; at some moment nobody has any power, and later everybody is started again."""
    faults: list[Fault] = [Start(at=0.1 * peer, peer=peer) for peer in range(peers)]
    if dark_at is not None:
        faults += [Kill(at=dark_at, peer=peer, reset=False) for peer in range(peers)]
        faults += [Start(at=dark_at + AWAY_S + 0.1 * peer, peer=peer) for peer in range(peers)]
    schedule = Schedule(num_peers=peers, duration_s=seconds, faults=tuple(faults))
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


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_the_swarm_goes_on_at_whatever_moment_all_lose_power(peers: int) -> None:
    for at in moments(peers):
        report = play(peers, at)
        assert report.violations == [] and report.members == peers, at
        assert report.rounds >= 9, f"{at}: {report.rounds} rounds"  # of a lap of four steps each


@pytest.mark.parametrize("peers", [2, 3])
def test_means_that_are_on_no_disk_when_they_count_are_lost_with_the_swarm(
    monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    """The check of the check."""
    monkeypatch.setattr(MemoryStorage, "sync_means", lambda self, plan: None)
    assert any(play(peers, at).rounds <= 3 for at in moments(peers))
