"""Swarms that are too large for one group, under virtual time, with the judge over all of them."""

import json
from dataclasses import replace

import pytest
from tests.sims.test_chaos import quiet
from tests.thorough import further

from farflung.sims.chaos import Wire, brisk_plan, toy_outfit
from farflung.sims.faults import Heal, Kill, Partition, Schedule, Start
from farflung.sims.simulation import Plan, Report, simulate

STEP_S = 3 * (0.7, 1.0, 1.3, 1.6, 0.9, 1.2, 0.8, 1.5, 1.1, 1.4, 0.75, 1.05)


def run(
    schedule: Schedule,
    max_group: int = 4,
    seed: int = 1,
    fragments: int = 1,
    vain_s: float = 180.0,
    calm_s: float = 60.0,
) -> Report:
    """With groups of so many at most."""
    outfit = toy_outfit(seed, schedule, Wire(step_s=STEP_S, fragments=fragments))
    rules = replace(outfit.terms.settings.rules, max_group=max_group, divides=True)
    terms = replace(outfit.terms, settings=replace(outfit.terms.settings, rules=rules, vain_s=vain_s))
    return simulate(
        Plan(seed=seed, schedule=schedule, outfit=replace(outfit, terms=terms), calm_s=calm_s, known_means=True),
        keep=True,
    )


def told(report: Report, kind: str) -> list[dict[str, object]]:
    return [json.loads(line[line.index("{") :]) for line in report.events if f" {kind} " in line]


def test_a_swarm_of_twelve_is_several_groups_of_four_that_meet() -> None:
    report = run(quiet(12, duration_s=200.0))
    assert report.violations == [] and report.members == 12
    groups = {event["group"] for event in told(report, "group.divided")}
    assert len(groups) >= 4 and "" in groups
    assert len(told(report, "group.met")) > 50


@pytest.mark.thorough
def test_all_of_a_crowd_become_members_in_many_groups_at_a_time() -> None:
    """When all who waited went on with one half, that had divided sixteen times when there were nineteen members, and nobody came in any more."""
    starts = [Start(at=0.5 * peer if peer < 3 else 8.0 + 0.1 * peer, peer=peer) for peer in range(30)]
    report = run(Schedule(num_peers=30, duration_s=100.0, faults=tuple(starts)), max_group=3, calm_s=0.0)
    assert report.violations == [] and report.members == 30
    views = [json.loads(line[line.index("{") :]) for line in report.events if " view.commit " in line]
    assert max(len(event["view"]) for event in views) == 3


@pytest.mark.thorough
def test_all_fragments_meet() -> None:
    """Every fourth round of each does: if it were every fourth round, it would be those of one fragment, or of two."""
    report = run(quiet(8, duration_s=400.0), fragments=2)
    met = [int(event["start"]) for event in told(report, "group.met")]  # type: ignore[call-overload]
    late = met[len(met) // 2 :]
    assert report.violations == [] and min(late) < Wire().numel // 2 <= max(late)


@pytest.mark.thorough
def test_whoever_was_away_when_its_group_became_two_finds_its_half() -> None:
    """Peer 1 is killed just before the first group becomes two, which has not missed it then, and comes back to them."""
    gone, back = 21.5, 70.0
    starts = [Start(at=0.5 * peer, peer=peer) for peer in range(5)]
    faults = (*starts, Start(at=20.5, peer=5), Kill(at=gone, peer=1), Start(at=back, peer=1))
    schedule = Schedule(num_peers=6, duration_s=160.0, faults=faults)
    report = run(schedule, max_group=5)
    lines = [line for line in report.events if " group.divided " in line]
    away = toy_outfit(1, schedule).signers[1].peer_id.hex()
    (halves,) = {frozenset((*half["view"], *half["others"])) for half in told(report, "group.divided")}  # type: ignore[misc]
    assert len(halves) == 5 and away in halves, "it is still a member"
    at = {line.split()[1]: float(line.split()[0]) for line in reversed(lines)}  # by peer, of it first
    assert at.pop("1") > back and all(gone < heard < back for heard in at.values())
    assert report.violations == [] and report.members == 6


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_parts_of_groups_that_do_not_hear_each_other_find_together_again(seed: int) -> None:
    faults = (
        Partition(at=60.0, groups=((0, 3, 5, 8), (1, 2, 4, 6, 7))),
        Heal(at=90.0),
        Kill(at=120.0, peer=2),
        Start(at=140.0, peer=2),
    )
    report = run(quiet(9, *faults, duration_s=260.0), max_group=3, seed=seed)
    assert report.violations == []
    assert len({event["group"] for event in told(report, "group.divided")}) >= 3


def test_a_newcomer_does_not_wait_for_a_group_that_can_decide_nothing() -> None:
    """Of the two peers of the smaller group the one without which the other decides nothing is killed for good. A newcomer begins with that group, and after a
    minute with the other one; the member waits."""
    starts = [Start(at=0.5 * peer, peer=peer) for peer in range(6)]
    schedule = Schedule(num_peers=7, duration_s=200.0, faults=(*starts, Kill(at=90.0, peer=2), Start(at=100.0, peer=6)))
    report = run(schedule, vain_s=60.0, calm_s=0.0, seed=11)  # never calm: a group stands, of peers 1 and 2
    assert report.violations == []
    (left,) = told(report, "node.stop")
    assert left["reason"] == "the group in which it waits for a place can take nobody in, and it goes to another one"
    first, second = (line for line in report.events if line.split()[1:3] == ["6", "history.jump"])
    names = [str(json.loads(line[line.index("{") :]).get("group", "")) for line in (first, second)]
    assert float(first.split()[0]) + 60.0 < float(second.split()[0]) < 170.0 and names[0] != names[1]
    trained = [line.split()[1] for line in report.events if " round.commit " in line and float(line.split()[0]) > 180.0]
    assert {"0", "6"} <= set(trained) and "1" not in trained


@pytest.mark.parametrize("back_at", [None, *further(200.0)])
def test_a_member_does_not_wait_for_ever_for_one_without_whom_its_group_decides_nothing(back_at: float | None) -> None:
    """Of the two peers of the smaller group that one is killed. The other one goes to the larger group when it has waited for 100 s. If its fellow comes back after that, it
    goes on where it was, for it decides alone, and follows nobody whose versions are other bytes than its own."""
    starts = [Start(at=0.5 * peer, peer=peer) for peer in range(6)]
    again = [] if back_at is None else [Start(at=back_at, peer=2)]
    schedule = Schedule(num_peers=6, duration_s=300.0, faults=(*starts, Kill(at=90.0, peer=2), *again))
    report = run(schedule, vain_s=20.0, calm_s=0.0, seed=11)  # of peers 1 and 2
    assert report.violations == []
    (left,) = (line for line in report.events if " node.stop " in line and "without a quorum for too long" in line)
    assert left.split()[1] == "1" and 190.0 < float(left.split()[0]) < 200.0
    last = {
        line.split()[1]: json.loads(line[line.index("{") :])
        for line in report.events
        if " round.commit " in line and float(line.split()[0]) > 260.0
    }
    assert set(last) == {"0", "1", "3", "4", "5"} | ({"2"} if back_at is not None else set())
    assert len(last["1"]["view"]) > 1 and ("2" not in last or len(last["2"]["view"]) == 1)


def test_a_member_whose_fellows_come_back_in_time_has_waited_for_them() -> None:
    starts = [Start(at=0.5 * peer, peer=peer) for peer in range(6)]
    schedule = Schedule(num_peers=6, duration_s=260.0, faults=(*starts, Kill(at=90.0, peer=2), Start(at=170.0, peer=2)))
    report = run(schedule, vain_s=20.0, seed=11)
    assert report.violations == [] and report.members == 6
    assert not [line for line in report.events if "without a quorum for too long" in line]


@pytest.mark.thorough
def test_where_a_network_fails_for_everybody_nobody_gives_up_what_it_has() -> None:
    """Each hears nobody for longer than a member waits for its group. Other groups are known by name, and of none is heard that it goes on."""
    failed, mended = 90.0, 230.0
    faults = (Partition(at=failed, groups=tuple((peer,) for peer in range(8))), Heal(at=mended))
    report = run(quiet(8, *faults, duration_s=400.0), vain_s=20.0)
    assert report.violations == [] and report.members == 8
    assert not [line for line in report.events if " node.stop " in line and float(line.split()[0]) < 400.0]
    rounds = [line for line in report.events if " round.commit " in line and float(line.split()[0]) > mended + 60.0]
    assert {line.split()[1] for line in rounds} == {str(peer) for peer in range(8)}


def test_who_has_just_started_is_met_at_the_state_that_it_began_with() -> None:
    """Brisk seed 7517: what is added for it is right, though its group has left that state behind, and it has as well when it is added."""
    assert simulate(brisk_plan(7517)).violations == []
