"""Commits enter the learner one after another: from means that are held, fetched or on disk."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from tests.node.applying import (
    PACE,
    RULES,
    SWARM,
    Applying,
    change,
    expected,
    founded,
    genesis,
    hold,
    plan_of,
    round_after,
    train,
)
from tests.node.lab import PLAN_ID, Lab, Node, accept, in_lab

from farflung.node.apply import CHECKPOINT_AGAIN_S
from farflung.node.trainer import Progress
from farflung.protocol import chain
from farflung.protocol.chain import Certified
from farflung.protocol.errors import DiskFull
from farflung.sims.toy import VirtualDoor

# ---- where it begins ------------------------------------------------------------------------------------------


def test_the_founder_begins_with_the_fresh_state() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        assert (one.applier.height, one.applier.version) == (0, 0)
        assert one.said == [(0, 0, one.digest)] and one.trainer.window == ((0, 24),)

    in_lab(1, main)


def test_nobody_else_does() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[1])
        assert not await one.applier.restore([genesis()], None)
        assert one.applier.version == -1

    in_lab(2, main)


# ---- one commit after another ---------------------------------------------------------------------------------


def test_rounds_move_the_state_and_everybody_is_told() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        first = round_after(genesis().commit)
        second = round_after(first.commit)
        for version in (1, 2):
            await hold(one.node, version)
        await one.take(first, second)
        assert [(h, v) for h, v, _ in one.said] == [(0, 0), (1, 1), (2, 2)]
        assert one.said[-1][2] == one.digest == expected(2)
        assert [e["round"] for e in one.named("round.commit")] == [1, 2]
        assert one.node.means.needed() == {plan_of(1), plan_of(2)}
        assert one.trainer.window == one.member.head.commit.ledger.window(one.node.id)

    in_lab(1, main)


def test_a_change_of_view_moves_nothing_but_the_window() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        before = one.digest
        await one.take(change(genesis().commit, 0, 1))
        assert one.said[-1] == (1, 0, before) and one.digest == before
        assert [e["reason"] for e in one.named("view.commit")] == ["2 members"]

    in_lab(2, main)


def test_a_part_that_was_left_out_does_not_move() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        await hold(one.node, 1, [1])
        await one.take(round_after(genesis().commit, kept=[1]))
        assert one.digest == expected(1, kept=[1])
        assert one.named("round.commit")[0]["parts_left_out"] == 1

    in_lab(1, main)


def test_what_is_not_here_is_fetched_from_members() -> None:
    async def main(lab: Lab) -> None:
        one, other = (Applying(lab, n) for n in lab.nodes)
        both = change(genesis().commit, 0, 1)
        await one.start([genesis(), both])
        other.member.settings.founder = other.node.id  # it holds the fresh state, too
        await other.start([genesis()])
        other.said.append((1, 0, b"d" * 32))
        one.hears(other)
        await hold(one.node, 1, [0])
        await hold(other.node, 1)
        await one.take(round_after(both.commit))
        assert one.digest == expected(1) and not one.node.errors

    in_lab(2, main)


def test_a_digest_that_takes_long_holds_up_no_mean_of_the_next_round() -> None:
    async def main(lab: Lab) -> None:
        node = lab.nodes[0]
        node.doors = replace(node.doors, digest=VirtualDoor(lambda name: 60.0))
        one = Applying(lab, node)
        await one.start([genesis()])
        said = list(one.said)
        await hold(node, 1)
        first = round_after(genesis().commit)
        one.member.history.append(first)
        one.applier.push(first)
        await asyncio.sleep(1.0)
        async with asyncio.timeout(1.0):
            await hold(node, 2)
        assert one.applier.version == 1 and one.said == said
        await one.idle()
        assert one.said[-1] == (1, 1, one.digest) and one.digest == expected(1)

    in_lab(1, main)


def test_what_follows_from_a_commit_waits_for_the_disk_and_the_outer_step_does_not() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0], checkpoint_s=0.0)
        await one.start([genesis()])
        said, saved = list(one.said), one.node.disk.load_place()
        first, on_disk = round_after(genesis().commit), asyncio.Event()
        await hold(one.node, 1)
        one.member.history.append(first)
        one.applier.push(first, on_disk)
        await asyncio.sleep(60.0)
        assert one.applier.version == 1 and not one.applier.idle
        assert one.said == said and one.node.disk.load_place() == saved and not one.named("round.commit")
        on_disk.set()
        await one.idle()
        assert one.digest == expected(1) and one.named("round.commit")
        place = one.node.disk.load_place()
        assert place is not None and place.version == 1

    in_lab(1, main)


def test_the_same_commit_twice_counts_once() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        first = round_after(genesis().commit)
        await hold(one.node, 1)
        await one.take(first)
        one.applier.push(first)
        await one.idle()
        assert one.digest == expected(1) and one.applier.version == 1

    in_lab(1, main)


# ---- local progress -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_a_round_counted_is_no_progress_any_more(in_flight: bool) -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 0, 1, 2, 3)
        if in_flight:  # else: it was sent by a process that was killed since
            one.node.learner.pseudo_gradient()
            one.node.exchange.in_flight = plan_of(1)
            train(one, 0, 1, 2, 3, 4, 5)
            one.node.learner.trained = [0, 1, 2, 3, 4, 5]
        await hold(one.node, 1)
        await one.take(round_after(genesis().commit, samples=4))
        kept = [4, 5] if in_flight else []
        assert one.node.learner.trained == kept
        assert one.trainer.progress.trained == (((4, 6),) if in_flight else ())
        dropped = [e["reason"] for e in one.named("progress.dropped")]
        assert dropped == ([] if in_flight else ["a round counted it before this node was restarted, or began again"])

    in_lab(1, main)


def test_what_is_given_up_while_it_is_taken_for_its_round_is_not_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is done beside training. The node ended when the round that counts it came."""

    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 0, 1, 2, 3)
        one.node.learner.offer()
        accept(lab)
        taken = one.node.learner.offered_gradient

        def take(start: int, stop: int) -> torch.Tensor:
            found = taken(start, stop)
            one.node.learner.start_over()
            one.applier.give_up("a step came to no number")
            return found

        monkeypatch.setattr(one.node.learner, "offered_gradient", take)
        one.node.exchange.start(PLAN_ID, one.node.exchange.contribute(PLAN_ID), lab.group)
        await asyncio.sleep(5.0)
        assert one.node.exchange.in_flight == b"" and one.node.learner.sent is None and not one.node.arrived
        one.node.exchange.forget(PLAN_ID)

    in_lab(1, main)


def test_what_is_given_up_while_the_means_of_its_round_are_decoded_is_not_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 0, 1, 2, 3)
        one.node.learner.pseudo_gradient()
        one.node.exchange.in_flight = plan_of(1)

        def told(result: object) -> None:
            one.node.learner.start_over()
            one.applier.give_up("a step came to no number")

        monkeypatch.setattr(one.node.residuals, "told", told)
        await hold(one.node, 1)
        await one.take(round_after(genesis().commit, samples=4))
        assert one.applier.version == 1 and one.trainer.progress.trained == ()
        assert torch.equal(one.node.learner.parameters[0], one.node.learner.outer.params)

    in_lab(1, main)


def test_progress_on_samples_of_others_is_dropped_with_a_reason() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 100, 101)
        await one.take(change(genesis().commit, 0, 1))
        assert one.node.learner.trained == [] and one.trainer.progress == Progress()
        assert [e["reason"] for e in one.named("progress.dropped")] == ["its samples were handed to others"]

    in_lab(2, main)


# ---- restarts -------------------------------------------------------------------------------------------------


def restarted(lab: Lab, old: Applying) -> Applying:
    """A new process on the same disk."""
    old.task.cancel()
    lab.hub.kill(old.node.id)
    node = Node(lab, old.node.number)
    node.disk = old.node.disk
    node.means._storage = old.node.disk
    return Applying(lab, node)


def test_a_restart_replays_from_its_own_disk() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        history = [genesis()]
        await one.start(history)
        for version in (1, 2, 3):
            history.append(round_after(history[-1].commit))
            await hold(one.node, version)
            await one.take(history[-1])
            if version == 1:
                await one.applier.save_place()
        again = restarted(lab, one)
        await again.start(history)
        assert again.applier.version == 3 and again.digest == one.digest == expected(3)
        assert [v for _, v, _ in again.said] == [1, 2, 3]

    in_lab(1, main)


def test_steps_since_the_last_round_are_counted_after_a_restart_as_before() -> None:
    """Of the learning rate: only laps that have ended since then stand in their place."""

    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        history = [genesis(), round_after(genesis().commit)]
        await one.start(history[:1])
        await hold(one.node, 1)
        await one.take(history[1])
        train(one, 4, 5)
        assert one.trainer.global_step == PACE.laps.least + 1
        await one.applier.save_place()
        again = restarted(lab, one)
        await again.start(history)
        assert again.trainer.progress.steps == 1 and again.trainer.global_step == PACE.laps.least + 1

    in_lab(1, main)


def test_steps_that_a_round_has_missed_are_known_as_such_after_a_restart() -> None:
    """Else the learning rate counted them and the lap in their place, and they were to be offered at once, as a lap that is due."""

    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        history = [genesis(), change(genesis().commit, 0, 1)]
        await one.start(history)
        train(one, *range(2 * PACE.laps.least))
        both = round_after(history[-1].commit).commit.round
        assert both is not None
        result = msgspec.structs.replace(both, contributors=both.contributors[1:])
        view = history[-1].commit.view
        moved = chain.successor(SWARM, history[-1].commit, RULES, view=view, left=(), result=result)
        history.append(Certified(moved, 0, ()))
        await hold(one.node, 1)
        await one.take(history[-1])
        assert one.trainer.global_step == PACE.laps.least
        await one.applier.save_place()
        again = restarted(lab, one)
        await again.start(history)
        assert again.trainer.progress.steps == PACE.laps.least and again.trainer.global_step == PACE.laps.least

    in_lab(2, main)


def test_means_that_arrive_while_a_checkpoint_is_written_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have been voted for by then; until now they were dropped as those of plans that are over."""

    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        disk, save = one.node.disk, one.node.disk.save_learner
        disk.save_mean(plan_of(7), 0, b"of a plan that is over")

        def saving(*arguments: Any) -> None:
            disk.save_mean(plan_of(1), 0, b"of the next round")
            save(*arguments)

        monkeypatch.setattr(disk, "save_learner", saving)
        await one.applier.save_place()
        assert list(disk.means) == [(plan_of(1), 0)]

    in_lab(1, main)


def test_a_restart_before_the_first_checkpoint() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        first = round_after(genesis().commit)
        await one.start([genesis()])
        await hold(one.node, 1)
        await one.take(first)
        again = restarted(lab, one)
        await again.start([genesis(), first])
        assert again.digest == expected(1)

    in_lab(1, main)


def test_a_checkpoint_when_due() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0], checkpoint_s=0.0)
        await one.start([genesis()])
        await hold(one.node, 1)
        await one.take(round_after(genesis().commit))
        assert one.node.disk.learner is not None
        place = one.node.disk.learner[1]
        assert (place.height, place.version) == (1, 1)

    in_lab(1, main)


def test_a_checkpoint_that_the_disk_has_no_room_for_is_tried_again_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0], checkpoint_s=0.0)
        await one.start([genesis()])
        history = [genesis()]

        async def next_round() -> None:
            history.append(round_after(history[-1].commit))
            await hold(one.node, len(history) - 1)
            await one.take(history[-1])

        await next_round()
        saved, tries = one.node.disk.load_place(), list[int]()

        def full(*_: Any) -> None:
            tries.append(one.applier.version)
            raise DiskFull("no", remedy="/s/learner-a cannot be written: free space in /s")

        one.applier._checkpoint_s = 300.0
        one.applier._checkpoint_at -= 300.0
        with monkeypatch.context() as patched:
            patched.setattr(one.node.disk, "save_learner", full)
            await next_round()
            await next_round()
            assert tries == [2], "not in every round"
            await asyncio.sleep(CHECKPOINT_AGAIN_S)
            await next_round()
            assert tries == [2, 4]
        assert one.digest == expected(4) and one.node.disk.load_place() == saved
        assert [e["reason"] for e in one.named("disk.full")] == 2 * ["/s/learner-a cannot be written: free space in /s"]
        assert {key for key in one.node.disk.means} >= {(plan_of(version), 0) for version in (2, 3, 4)}
        await asyncio.sleep(CHECKPOINT_AGAIN_S)
        await next_round()
        assert one.node.disk.load_place() != saved and one.named("disk.full")[-1]["reason"] == ""

    in_lab(1, main)


def test_a_downloaded_state_is_said_to_be_here_once_the_disk_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(lab: Lab) -> None:
        donor, late = Applying(lab, lab.nodes[0]), Applying(lab, lab.nodes[1])
        history = await founded(donor)
        for version in (1, 2):
            history.append(round_after(history[-1].commit))
            await hold(donor.node, version)
            await donor.take(history[-1])
        late.hears(donor)
        usual = late.node.disk.save_learner

        def full(*_: Any) -> None:
            raise DiskFull("no", remedy="free space in /s")

        late.node.disk.save_learner = full  # type: ignore[method-assign]
        late.member.history.replace(None, history)
        late.applier.push(history[-1])
        await asyncio.sleep(60.0)
        assert late.named("disk.full") and not late.said
        late.node.disk.save_learner = usual  # type: ignore[method-assign]
        await late.idle()
        assert late.said[-1] == (history[-1].commit.height, 2, donor.digest)

    in_lab(2, main)


# ---- the end --------------------------------------------------------------------------------------------------


def test_finish_ends_it_between_two_commits() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        await hold(one.node, 1)
        one.applier.finish()
        one.applier.push(round_after(genesis().commit))
        await asyncio.wait([one.task])
        assert one.task.done() and one.applier.version == 0

    in_lab(1, main)
