"""The training loop: batches off the window, standing when ready, and what a commit does to local progress."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from farflung.node.events import EventLog
from farflung.node.replica_trainer import ReplicaTrainer
from farflung.node.trainer import Host, Pace, Progress
from farflung.protocol.chain import Commit
from farflung.protocol.lap import Laps
from farflung.protocol.ledger import Holding, Ledger, Suspended
from farflung.protocol.messages import Ready
from farflung.sims import clock
from farflung.sims.toy import ToyLearner, VirtualDoor
from farflung.training.rules import Nesterov

ME, OTHER = b"m" * 32, b"o" * 32
PACE = Pace(laps=Laps.fixed(3), samples_per_step=2, tokens_per_sample=10, total_steps=300)


class Lab:
    """A trainer with a window of 18 samples: three rounds."""

    def __init__(self, window: int = 18, pace: Pace = PACE) -> None:
        self.learner = ToyLearner(8, Nesterov(lr=0.7, momentum=0.5))
        self.ready: list[Ready] = []
        self.withdrawn = 0
        self.given_up: list[str] = []
        self.may = True
        self.comes = False
        """Whether a commit is on its way in."""
        self.others_train = False
        self.moves = (0, 8)
        self.due_after_s: float | None = None
        """When a round is due for the others, on the trainer's clock."""
        self.trainer = ReplicaTrainer(
            ME,
            self.learner,
            VirtualDoor(lambda name: 1.0),
            EventLog(None, swarm="test", peer="me", clock=lambda: 0.0),
            pace,
            Host(
                may_train=lambda: self.may and not self.comes,
                awaits_means=lambda: self.may and self.comes,
                is_due=self._is_due,
                moves=lambda: self.moves,
                others_train=lambda: self.others_train,
                set_ready=self.ready.append,
                withdraw=self._withdraw,
                give_up=self._give_up,
                up_bytes_per_s=lambda: 5.0,
                down_bytes_per_s=lambda: 7.0,
            ),
        )
        self.trainer.window = ((0, window),) if window else ()

    def _is_due(self, step_s: float) -> bool:
        return self.due_after_s is not None and asyncio.get_running_loop().time() + step_s > self.due_after_s

    def _withdraw(self) -> None:
        self.withdrawn += 1

    def _give_up(self, reason: str) -> None:
        """As a node's applier does."""
        self.given_up.append(reason)
        self.trainer.drop()


def run(main: Callable[[Lab], Awaitable[None]], window: int = 18, delay_steps: int | None = 0) -> None:
    async def body() -> None:
        lab = Lab(window, replace(PACE, laps=Laps(least=3, most=3, delay=delay_steps)))
        async with asyncio.TaskGroup() as group:
            group.create_task(lab.trainer.run())
            await main(lab)
            lab.trainer.finish()

    clock.run(body())


def holding(*intervals: tuple[int, int], suspended: bool = False) -> Ledger:
    if suspended:
        return Ledger(99, (), (), (Suspended(ME, 1, intervals),))
    return Ledger(99, (Holding(ME, intervals), Holding(OTHER, ((90, 99),))))


def settle(lab: Lab, ledger: Ledger, version: int, samples: int, *, lap: int = 3) -> bool:
    """A commit after `version` laps of three steps, with which one of `lap` begins."""
    commit = Commit(
        height=version, parent=b"", version=version, tokens=0, steps=3 * version, lap=lap, width=1, view=(ME,), left=(),
        ledger=ledger,
    )  # fmt: skip
    return lab.trainer.settle(commit, version, samples)


def test_after_h_steps_it_stands_and_says_what_it_has() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(10.0)
        assert lab.learner.trained == list(range(6))
        (ready,) = lab.ready
        assert (ready.samples, ready.tokens, ready.up_bytes_per_s, ready.down_bytes_per_s) == (6, 60, 5.0, 7.0)
        assert ready.ready_ms == 3000
        assert lab.trainer.progress.trained == ((0, 6),) and lab.trainer.progress.steps == 3

    run(main)


@pytest.mark.parametrize(("delay_steps", "steps"), [(2, 3), (0, 2)])
def test_while_a_commit_is_on_its_way_in_training_goes_on_until_there_is_something_to_offer(
    delay_steps: int, steps: int
) -> None:
    """Not where training stands for rounds; and nothing is offered before."""

    async def main(lab: Lab) -> None:
        await asyncio.sleep(1.5)
        lab.comes = True
        await asyncio.sleep(10.0)
        assert lab.trainer.progress.steps == steps and not lab.ready
        lab.comes = False
        lab.trainer.wake()
        await asyncio.sleep(1.5)
        assert len(lab.ready) == (steps == 3)

    run(main, delay_steps=delay_steps)


def test_a_round_that_missed_us_leaves_the_progress_and_more_is_added() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(10.0)
        lab.trainer.over()
        await asyncio.sleep(10.0)
        assert [r.samples for r in lab.ready] == [6, 12]
        assert lab.learner.trained == list(range(12))

    run(main)


def test_a_round_that_counted_us_takes_the_counted_away() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(10.0)
        assert settle(lab, holding((6, 24)), 1, 6)
        assert lab.trainer.progress.trained == () and lab.trainer.progress.steps == 0
        assert lab.trainer.global_step == 3
        lab.trainer.over()
        await asyncio.sleep(10.0)
        assert lab.learner.trained[6:] == list(range(6, 12)) and lab.ready[1].ready_ms == 3000

    run(main)


def test_the_lap_that_a_commit_begins_is_what_counts_from_then_on() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(10.0)
        assert settle(lab, holding((6, 24)), 1, 6, lap=5)
        lab.trainer.over()
        await asyncio.sleep(0.5)
        assert lab.trainer.ready_in_s(round_planned=False) == pytest.approx(4.5)
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [6, 10] and lab.trainer.global_step == 3 + 5

    run(main)


def test_a_tau_that_is_not_fixed_ends_where_the_next_lap_would() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == [6] and lab.trainer.progress.steps == 3 + 2
        assert settle(lab, holding((6, 36)), 1, 6, lap=4)
        lab.trainer.over()
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == [6, 8] and lab.trainer.progress.steps == 4 + 3

    run(main, window=30, delay_steps=None)


def test_the_run_is_complete_when_all_its_steps_are_made() -> None:
    lab = Lab(pace=replace(PACE, laps=Laps(least=3, most=9), total_steps=11))
    finished = [settle(lab, holding((0, 18)), version, 0) and lab.trainer.finished for version in range(1, 5)]
    assert finished == [False, False, False, True], "after eleven, not after nine"


def test_while_a_round_is_under_way_some_steps_more_are_trained() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(20.0)
        assert lab.learner.trained == list(range(10)) and [r.samples for r in lab.ready] == [6]
        assert lab.trainer.steps_since_offer == 2
        assert settle(lab, holding((6, 24)), 1, 6)
        assert lab.trainer.progress.trained == ((6, 10),) and lab.trainer.global_step == 5
        lab.trainer.over()
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [6, 6] and lab.trainer.progress.steps == 5
        assert lab.ready[1].ready_ms > lab.ready[0].ready_ms, "from the offer before, the time of standing included"

    run(main, window=24, delay_steps=2)


def test_what_is_sent_is_what_was_offered_and_what_came_after_stays() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(20.0)
        assert len(lab.learner.trained) == 10
        delta = lab.learner.offered_gradient(0, lab.learner.num_parameters)
        alone = ToyLearner(8, Nesterov(lr=0.7, momentum=0.5))
        alone.train(range(6), 0)
        assert torch.equal(delta, alone.pseudo_gradient())
        later = alone.parameters[0].clone()
        alone.train(range(6, 10), 0)
        later = alone.parameters[0] - later
        lab.learner.apply([(0, 8, delta)], contributed=True)
        torch.testing.assert_close(lab.learner.parameters[0], lab.learner.outer.params + later, rtol=0, atol=1e-6)
        assert lab.learner.trained == list(range(6, 10))

    run(main, delay_steps=2)


def test_missed_while_training_on_the_next_offer_is_after_h_steps_more() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(20.0)
        lab.trainer.over()
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [6, 12]

    run(main, delay_steps=2)


def test_when_a_round_is_due_it_brings_what_it_has_and_trains_on() -> None:
    async def main(lab: Lab) -> None:
        lab.due_after_s = 2.5
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [4], "the third step would have been too late"
        assert lab.learner.trained == list(range(8)), "and two steps more, while the round is under way"
        assert lab.trainer.stood_s == 0.0, "nobody has set it going again"
        lab.due_after_s = None
        assert settle(lab, holding((4, 24)), 1, 4)
        lab.trainer.over()
        await asyncio.sleep(20.0)
        assert lab.trainer.stood_s > 10.0
        assert [r.samples for r in lab.ready] == [4, 6], "H steps since the offer, of which it had two"

    run(main, window=30, delay_steps=2)


def test_it_says_when_it_will_be_ready() -> None:
    async def main(lab: Lab) -> None:
        trainer = lab.trainer
        assert trainer.ready_in_s(round_planned=False) == 0.0, "its speed is not known yet"
        await asyncio.sleep(1.25)
        assert trainer.ready_in_s(round_planned=False) == pytest.approx(1.75)
        await asyncio.sleep(3.0)
        assert [r.samples for r in lab.ready] == [6] and trainer.ready_in_s(round_planned=False) == 0.0, "it waits"
        assert trainer.ready_in_s(round_planned=True) == pytest.approx(2.75), "for the one after, it has begun"

    run(main, delay_steps=2)


def test_a_missed_offer_is_in_the_next_one_and_is_not_repeated_before_there_is_more() -> None:
    async def main(lab: Lab) -> None:
        lab.due_after_s = 0.0
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [2]
        lab.trainer.over()
        await asyncio.sleep(0.5)
        assert [r.samples for r in lab.ready] == [2], "the same again would be no news"
        await asyncio.sleep(20.0)
        assert [r.samples for r in lab.ready] == [2, 4]

    run(main)


def test_nothing_is_offered_while_a_commit_waits_to_be_applied() -> None:
    """Its samples may have been counted: they are no longer at the front of our window."""

    async def main(lab: Lab) -> None:
        lab.due_after_s = 0.0
        await asyncio.sleep(2.5)
        lab.trainer.over()
        lab.may = False
        await asyncio.sleep(10.0)
        assert [r.samples for r in lab.ready] == [2]

    run(main, delay_steps=2)


def test_an_offer_is_none_when_a_commit_comes_while_it_is_made() -> None:
    """After a restart it may have counted what was sent before; once it is applied only the rest is offered."""

    async def main(lab: Lab) -> None:
        lab.trainer.progress = Progress(trained=((0, 6),), steps=3)  # as from a checkpoint
        await asyncio.sleep(0.5)  # the offer takes a second
        lab.may = False
        await asyncio.sleep(2.0)
        assert not lab.ready
        assert settle(lab, holding((6, 18)), 1, 6)
        lab.may = True
        lab.trainer.wake()
        await asyncio.sleep(5.0)
        assert [r.samples for r in lab.ready] == [6] and lab.trainer.progress.trained == ((6, 12),)

    run(main)


def test_progress_beyond_what_was_counted_stays() -> None:
    lab = Lab()
    lab.trainer.progress = Progress(((0, 10),), 5, 0.0)
    assert settle(lab, holding((6, 24)), 1, 6)
    assert lab.trainer.progress.trained == ((6, 10),) and lab.trainer.progress.steps == 2


@pytest.mark.parametrize("suspended", [False, True])
def test_progress_stays_while_its_samples_are_ours(suspended: bool) -> None:
    lab = Lab()
    lab.trainer.progress = Progress(((0, 6),), 3, 0.0)
    assert settle(lab, holding((0, 8), (30, 40), suspended=suspended), 4, 0)
    assert lab.trainer.progress.steps == 3 and lab.trainer.window == ((0, 8), (30, 40))


@pytest.mark.parametrize("window", [((30, 48),), ((2, 20),), ((0, 4), (30, 40)), ()])
def test_progress_whose_samples_went_to_others_is_dropped(window: tuple[tuple[int, int], ...]) -> None:
    lab = Lab()
    lab.trainer.progress = Progress(((0, 6),), 3, 0.0)
    ledger = holding(*window) if window else Ledger(99)
    assert not settle(lab, ledger, 4, 0)
    assert lab.trainer.progress.steps == 3 and lab.trainer.window == window, "the caller drops it"
    lab.trainer.drop()
    assert lab.trainer.progress == Progress()
    assert lab.withdrawn == 1, "nothing is left to contribute"


def test_of_what_the_next_round_moves_there_is_a_copy() -> None:
    async def main(lab: Lab) -> None:
        lab.moves = (2, 5)
        await asyncio.sleep(5.0)
        offered, local = lab.learner.offered, lab.learner.parameters[0]
        assert offered is not None and torch.equal(offered.values, local[2:5])
        lab.learner.apply([(2, 5, lab.learner.offered_gradient(2, 5))], contributed=True)
        settle(lab, holding((6, 18)), 1, 6)
        lab.moves = (5, 8)
        lab.trainer.over()
        await asyncio.sleep(5.0)
        offered = lab.learner.offered
        assert offered is not None and torch.equal(offered.values, local[5:8])

    run(main)


def test_what_is_taken_back_is_offered_anew() -> None:
    """As after a repair: the progress is there, and what was measured of it is not."""

    async def main(lab: Lab) -> None:
        lab.trainer.take_back()
        assert not lab.withdrawn, "nothing waits for a round"
        await asyncio.sleep(5.0)
        (first,) = lab.ready
        lab.learner.offered = None
        lab.trainer.take_back()
        assert lab.withdrawn == 1
        await asyncio.sleep(5.0)
        assert len(lab.ready) == 2 and lab.ready[1].samples == first.samples
        assert lab.learner.offered is not None

    run(main)


def test_after_a_drop_it_trains_on_the_new_window() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(10.0)
        assert not settle(lab, holding((40, 58)), 2, 0)
        lab.trainer.drop()
        lab.learner.discard_progress()
        await asyncio.sleep(10.0)
        assert lab.learner.trained == list(range(40, 46)) and len(lab.ready) == 2

    run(main)


def test_a_window_is_used_up_and_filled_again() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(30.0)
        assert lab.trainer.out_of_samples
        trained = len(lab.learner.trained)
        assert trained == 4, "no batch is cut short"
        settle(lab, holding((0, 10)), 1, 0)
        lab.trainer.over()
        await asyncio.sleep(30.0)
        assert lab.learner.trained == list(range(6)) or lab.learner.trained == list(range(10))

    run(main, window=5)


def test_with_no_samples_left_what_there_is_is_offered() -> None:
    """Only a round brings more: waiting for H steps would be waiting for ever."""

    async def main(lab: Lab) -> None:
        await asyncio.sleep(30.0)
        assert [r.samples for r in lab.ready] == [4]

    run(main, window=5)


def test_it_trains_only_when_it_may() -> None:
    async def main(lab: Lab) -> None:
        lab.may = False
        await asyncio.sleep(10.0)
        assert lab.learner.trained == []
        lab.may = True
        lab.trainer.wake()
        await asyncio.sleep(1.5)
        lab.may = False
        await asyncio.sleep(10.0)
        assert lab.trainer.progress.steps <= 2
        assert lab.learner.trained == list(range(2 * lab.trainer.progress.steps)), "a step is whole or not at all"

    run(main)


def test_a_commit_waits_for_the_step_that_is_running() -> None:
    async def main(lab: Lab) -> None:
        await asyncio.sleep(0.5)
        async with lab.trainer.busy:
            assert len(lab.learner.trained) == 2 == 2 * lab.trainer.progress.steps
            before = list(lab.learner.trained)
            await asyncio.sleep(5.0)
            assert lab.learner.trained == before

    run(main)


def test_finish_ends_the_loop_after_its_step() -> None:
    async def body() -> None:
        lab = Lab()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(lab.trainer.run())
            await asyncio.sleep(0.5)
            lab.trainer.finish()
            await asyncio.sleep(1.0)
            assert task.done() and lab.trainer.progress.steps == 1

    clock.run(body())


def test_the_log_has_every_step() -> None:
    events: list[dict[str, Any]] = []

    async def main(lab: Lab) -> None:
        lab.trainer._log.subscribe(events.append)
        await asyncio.sleep(10.0)

    run(main)
    assert [e["event"] for e in events] == ["step"] * 3
    assert [e["step"] for e in events] == [1, 2, 3] and all(e["tokens"] == 2 for e in events)
    assert [e["samples"] for e in events] == [((0, 2),), ((2, 4),), ((4, 6),)]


def test_the_log_has_what_the_learner_was_given_whatever_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(ReplicaTrainer, "_next_batch", lambda self: ((7, 8), (7, 8)))

    async def main(lab: Lab) -> None:
        lab.trainer._log.subscribe(events.append)
        await asyncio.sleep(1.5)
        assert lab.learner.trained[:2] == [7, 7]

    run(main)
    assert events[0]["samples"] == ((7, 8), (7, 8)), "a sample twice is there twice"
