"""Who evaluates after a cycle, and how much of the held-out samples it reads: the choice, the budget, and a node that keeps to both."""

import asyncio
from dataclasses import replace

import pytest
from tests.node.applying import PACE, Applying, change, founded, genesis, hold, round_after
from tests.node.lab import Lab, in_lab, peer
from tests.protocol.bus import beat

from farflung.node.evaluator import FAILED_SHARE, FEW_SHARE, SHARE, Budget, Extent, evaluator
from farflung.protocol.chain import Contribution

CYCLE_S = 100.0


def contributions(*ready_ms: int) -> list[Contribution]:
    return [Contribution(peer(n), 4, 4, ms) for n, ms in enumerate(ready_ms)]


def test_the_contributor_that_was_ready_soonest_and_lives_evaluates() -> None:
    three = contributions(900, 500, 700)
    assert evaluator(three, lambda who: True) == peer(1)
    assert evaluator(three, lambda who: who != peer(1)) == peer(2), "the first is dead"
    assert evaluator(three, lambda who: False) is None
    assert evaluator(contributions(500, 500), lambda who: True) == peer(0), "everybody names the same one"


def test_all_samples_where_standing_pays_for_them() -> None:
    budget = Budget(has_few=True)
    assert budget.extent(5.0, 0.0, alone=False) is Extent.WHOLE, "nothing is known yet"
    budget.spent(Extent.WHOLE, 10.0, 15.0, failed=False)
    assert budget.extent(15.0 + CYCLE_S, 10.0, alone=False) is Extent.WHOLE
    assert budget.extent(15.0 + CYCLE_S, 10.0, alone=True) is Extent.WHOLE
    assert budget.extent(15.0 + 10.0 / SHARE, 0.0, alone=True) is Extent.WHOLE, "or the time since the last one"
    assert budget.extent(15.0 + 9.0 / SHARE, 0.0, alone=True) is not Extent.WHOLE


def test_a_few_where_there_is_little_time_and_nothing_where_that_would_be_felt() -> None:
    budget = Budget(has_few=True)
    budget.spent(Extent.WHOLE, 8.0, 0.0, failed=False)  # an eighth of a second each: the few take one second
    few_s = 8.0 * Extent.FEW.value / Extent.WHOLE.value
    assert budget.extent(few_s / FEW_SHARE, 0.0, alone=False) is Extent.FEW, "no time to stand, but others train on"
    assert budget.extent(0.9 * few_s / FEW_SHARE, 0.0, alone=False) is Extent.NOTHING
    assert budget.extent(few_s / SHARE, 0.0, alone=True) is Extent.NOTHING, "alone it saves up for the whole"
    assert budget.extent(0.0, few_s, alone=True) is Extent.FEW, "what it stood counts whole"


def test_a_few_now_and_then_do_not_put_off_the_whole() -> None:
    budget, now = Budget(has_few=True), 1000.0
    read: list[Extent] = []
    for _ in range(100):
        now += CYCLE_S
        read.append(budget.extent(now, 0.0, alone=False))
        budget.spent(read[-1], 0.1 * read[-1].value, now, failed=False)
    assert read[0] is Extent.WHOLE and Extent.NOTHING not in read
    assert read.count(Extent.WHOLE) == 1 + 99 // 13, "6.4 s are saved up in 1,280"


def test_a_lone_node_spends_no_more_than_its_share() -> None:
    budget, now, spent = Budget(has_few=True), 1000.0, 0.0
    for _ in range(5000):
        now += 10.0
        extent = budget.extent(now, 0.0, alone=True)
        if extent is not Extent.NOTHING:
            cost = 0.05 * extent.value
            now, spent = now + cost, spent + cost
            budget.spent(extent, cost, now, failed=False)
    assert 0.5 * SHARE < spent / now <= 1.1 * SHARE


def test_where_only_the_whole_can_be_had_there_are_no_few() -> None:
    budget = Budget(has_few=False)
    budget.spent(Extent.WHOLE, 9.0, 0.0, failed=False)
    assert budget.extent(1.0 / FEW_SHARE, 0.0, alone=False) is Extent.NOTHING
    assert budget.extent(9.0 / SHARE, 0.0, alone=False) is Extent.WHOLE
    budget.spent(Extent.WHOLE, 9.0, 0.0, failed=True)
    assert budget.extent(FAILED_SHARE * 9.0 / SHARE, 0.0, alone=False) is Extent.WHOLE, "it is tried again sooner"


# ---- a node ---------------------------------------------------------------------------------------------------


async def cycles(one: Applying, first: int, last: int) -> None:
    """Rounds of these versions, of the whole view, one each `CYCLE_S`."""
    for version in range(first, last + 1):
        await asyncio.sleep(CYCLE_S)
        await hold(one.node, version)
        await one.take(round_after(one.member.head.commit))


def test_every_cycle_has_an_evaluation_also_by_who_never_stands() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        one.sample_s = 0.05  # a few take 0.4 s of the 100, all of them 3.2
        await founded(one)
        one.member.membership.heard(peer(1), 0.0, beat())
        await one.take(change(one.member.head.commit, 0, 1))
        await cycles(one, 1, 6)
        assert [version for version, _ in one.extents] == [1, 2, 3, 4, 5, 6]
        assert [extent for _, extent in one.extents] == [Extent.WHOLE] + [Extent.FEW] * 5
        said = one.named("outer.eval")
        assert [e["samples"] for e in said] == [64] + [8] * 5
        assert [e["loss"] is None for e in said] == [False] + [True] * 5
        assert all((e["few_loss"] is None) == (e["samples"] == 64) for e in said)
        one.trainer.stood_s = 3.7
        await cycles(one, 7, 7)
        assert one.extents[-1] == (7, Extent.WHOLE) and one.trainer.stood_s == 0.0

    in_lab(2, main)


def test_the_last_evaluation_is_whole_whatever_it_costs() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        one.sample_s = 3.0
        await founded(one)
        one.trainer.pace = replace(PACE, total_steps=3 * PACE.laps.least)
        await cycles(one, 1, 3)
        assert one.extents == [(1, Extent.WHOLE), (3, Extent.WHOLE)]

    in_lab(1, main)


def test_an_evaluation_without_room_is_left_out_and_tried_again() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        one.lacks_room = True
        await founded(one)
        await cycles(one, 1, 1)
        assert [e["reason"] for e in one.named("outer.skipped")] == ["cuda has no room for an evaluation"]
        one.lacks_room = False
        await cycles(one, 2, 2)
        assert [version for version, _ in one.extents] == [1, 2]
        assert [e["version"] for e in one.named("outer.eval")] == [2] and len(one.named("outer.skipped")) == 1

    in_lab(1, main)


@pytest.mark.parametrize("first_lives", [True, False])
def test_who_is_chosen_and_dead_is_stood_in_for(first_lives: bool) -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[1])
        one.member.settings.founder = one.node.id
        await one.start([genesis()])
        if first_lives:
            one.member.membership.heard(peer(0), 0.0, beat())
        await one.take(change(one.member.head.commit, 0, 1))
        await cycles(one, 1, 1)
        assert [version for version, _ in one.extents] == ([] if first_lives else [1])

    in_lab(2, main)


def test_where_few_cost_as_much_the_whole_has_their_share() -> None:
    """A pipeline's model has to be fetched, and is kept with each evaluation."""
    for has_few, share in ((True, SHARE), (False, FEW_SHARE)):
        budget = Budget(has_few=has_few)
        budget.spent(Extent.WHOLE, 10.0, 100.0, failed=False)
        assert budget.extent(100.0 + 9.9 / share, 0.0, alone=True) is not Extent.WHOLE
        assert budget.extent(100.0 + 10.1 / share, 0.0, alone=True) is Extent.WHOLE
