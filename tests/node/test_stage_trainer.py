"""The training loop of a peer of a pipeline: steps of any size, samples that did not come home, and when a round is due."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from farflung.node.events import EventLog
from farflung.node.hindrance import LONGEST_S
from farflung.node.stage_job import Done, Job
from farflung.node.stage_recipe import stage_recipe
from farflung.node.stage_trainer import StageTrainer
from farflung.node.trainer import Host, Pace, Progress
from farflung.protocol.chain import Commit
from farflung.protocol.lap import Laps
from farflung.protocol.ledger import Holding, Ledger
from farflung.protocol.messages import Ready
from farflung.sims import clock
from farflung.sims.pipeline_small import Counting, recipe
from farflung.sims.toy import VirtualDoor
from farflung.training.errors import DataUnavailable, NonFinite, NoRoom, NotNow
from farflung.training.inner import StepReport
from farflung.training.pipeline_worker import Accumulated
from farflung.training.runtime import Runtime

ME = b"m" * 32
PACE = Pace(laps=Laps.fixed(3), samples_per_step=8, tokens_per_sample=8, total_steps=300)


@dataclass
class Asked:
    """As much of a job as the trainer looks at."""

    number: int
    own_samples: int


@dataclass
class Script:
    """Steps that come as they are told, `stage_trainer.Steps`: (own samples, that come home, missed places)."""

    told: list[tuple[int, int, tuple[int, ...]]]
    step: int = 0
    finished: bool = False
    seen: list[tuple[int, ...]] = field(default_factory=list)
    lacks: list[NotNow] = field(default_factory=list)
    """What its next steps come to."""
    unreadable: list[NotNow] = field(default_factory=list)
    """What it comes to when samples are read for nothing."""
    read_for_nothing: list[tuple[int, ...]] = field(default_factory=list)
    news: int = 0

    def take(self) -> Job | None:
        return cast(Job, Asked(self.step, self.told[0][0])) if self.told else None

    async def carry_out(self, job: Job, numbers: Sequence[int]) -> Done | None:
        _, samples, places = self.told.pop(0)
        self.seen.append(tuple(numbers))
        if self.lacks:
            raise self.lacks.pop(0)
        await asyncio.sleep(2.0)
        self.step = job.number + 1
        missed = tuple(numbers[place] for place in places)
        return Done(accumulated=Accumulated(), samples=samples, loss=1.0, missed=missed)

    async def read(self, numbers: Sequence[int]) -> None:
        self.read_for_nothing.append(tuple(numbers))
        if self.unreadable:
            raise self.unreadable.pop(0)

    def changed(self) -> None:
        self.news += 1


class Lab:
    """A trainer of stage 0 with a window of 60 samples."""

    def __init__(self, *told: tuple[int, int, tuple[int, ...]]) -> None:
        self.script = Script(list(told))
        self.ready: list[Ready] = []
        self.trainer = StageTrainer(
            ME,
            stage_recipe(recipe(), 0).learner(Counting(), Runtime()),
            VirtualDoor(lambda name: 0.1),
            EventLog(None, swarm="test", peer="me", clock=lambda: 0.0),
            PACE,
            Host(
                may_train=lambda: True,
                awaits_means=lambda: False,
                is_due=lambda step_s: False,
                moves=lambda: (0, self.trainer._stage.num_parameters),
                others_train=lambda: False,
                set_ready=self.ready.append,
                withdraw=lambda: None,
                give_up=lambda reason: None,
                up_bytes_per_s=lambda: 5.0,
                down_bytes_per_s=lambda: 7.0,
            ),
            self.script,
        )
        self.trainer.window = ((0, 60),)


def run(lab: Lab, main: Callable[[], Awaitable[Any]]) -> None:
    async def body() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(lab.trainer.run())
            await main()
            lab.trainer.finish()

    clock.run(body())


def test_a_round_is_due_when_the_pipeline_has_made_its_steps_whoever_missed_some() -> None:
    lab = Lab((4, 4, ()), (0, 0, ()), (2, 2, ()))

    async def main() -> None:
        await asyncio.sleep(30.0)
        (ready,) = lab.ready
        assert (ready.samples, ready.tokens) == (6, 48)  # of two steps; nothing came by in the other
        assert lab.trainer.progress.steps == 2 and not lab.trainer.free and not lab.trainer.settled

    run(lab, main)


def test_what_is_being_offered_is_not_a_lap_away() -> None:
    """Without overlap nobody waits for who says so: the round was planned without a stage peer whose copy takes a moment longer than another's."""
    lab = Lab((4, 4, ()), (2, 2, ()), (2, 2, ()))

    async def main() -> None:
        await asyncio.sleep(2.2)
        assert lab.trainer.ready_in_s(round_planned=False) == pytest.approx(4.0, abs=0.3), "two steps"
        while lab.script.step < 3:
            await asyncio.sleep(0.02)
        while not lab.ready:
            if lab.trainer.progress.steps == 3:
                assert lab.trainer.ready_in_s(round_planned=False) == 0.0
            await asyncio.sleep(0.02)

    run(lab, main)


def test_samples_that_did_not_come_home_come_first_in_the_next_step() -> None:
    lab = Lab((8, 4, (0, 1, 4, 5)), (6, 6, ()), (0, 0, ()))
    events: list[dict[str, Any]] = []
    lab.trainer._log.subscribe(events.append)

    async def main() -> None:
        await asyncio.sleep(30.0)
        assert [e["samples"] for e in events if e["event"] == "step"] == [
            ((2, 4), (6, 8)),
            ((0, 2), (4, 6), (8, 10)),
        ], "those that came home"
        assert lab.script.seen == [tuple(range(8)), (0, 1, 4, 5, 8, 9), ()]
        assert lab.trainer.progress.trained == ((0, 10),)  # what is offered is what was trained
        assert lab.ready[0].samples == 10

    run(lab, main)


def test_what_no_round_took_is_offered_again_when_no_samples_are_left() -> None:
    """Without another step there will never be anything else to offer. While there are samples, training goes on first."""
    lab = Lab((8, 8, ()), (8, 8, ()), (8, 8, ()), (8, 8, ()))
    lab.trainer.window = ((0, 20),)

    async def main() -> None:
        await asyncio.sleep(15.0)
        lab.trainer.over()  # there was no quorum
        await asyncio.sleep(15.0)
        assert lab.trainer.out_of_samples
        offers = [ready.samples for ready in lab.ready]
        lab.trainer.over()
        await asyncio.sleep(1.0)
        assert [ready.samples for ready in lab.ready] == [*offers, 16] and not lab.trainer.free

    run(lab, main)


def counted(first: int, held: tuple[int, int]) -> Commit:
    """A commit after which we hold these samples."""
    ledger = Ledger(99, (Holding(ME, (held,)),))
    return Commit(
        height=1,
        parent=b"",
        version=1,
        steps=first,
        lap=3,
        width=1,
        tokens=0,
        view=(ME,),
        left=(),
        ledger=ledger,
        round=None,
    )


def test_what_did_not_come_home_before_a_round_is_next_after_it() -> None:
    """The round counts as many places as samples came home; those behind stand for the others."""
    lab = Lab((8, 4, (0, 1, 6, 7)))

    async def main() -> None:
        await asyncio.sleep(10.0)
        assert lab.trainer.settle(counted(3, (4, 60)), 1, 4)
        lab.script.told += [(4, 2, (0, 1)), (4, 4, ())]
        lab.trainer.wake()
        await asyncio.sleep(10.0)
        assert lab.script.seen == [tuple(range(8)), (0, 1, 6, 7), (0, 1, 8, 9)]  # 2 to 5 had come home
        assert lab.trainer.progress.trained == ((4, 10),)
        assert lab.ready[-1].samples == 6  # with the four counted: all of the first ten, each once

    run(lab, main)


def test_what_did_not_come_home_is_forgotten_when_others_have_its_places() -> None:
    lab = Lab((8, 4, (0, 1, 6, 7)))

    async def main() -> None:
        await asyncio.sleep(10.0)
        assert lab.trainer.settle(counted(3, (20, 60)), 1, 4)
        lab.script.told.append((4, 4, ()))
        lab.trainer.wake()
        await asyncio.sleep(10.0)
        assert lab.script.seen[1] == (20, 21, 22, 23)

    run(lab, main)


def test_steps_of_different_sizes_are_counted_as_they_were() -> None:
    lab = Lab((4, 4, ()), (2, 2, ()), (6, 6, ()))

    async def main() -> None:
        await asyncio.sleep(30.0)
        assert lab.trainer.progress.steps == 3 and lab.ready[0].samples == 12
        lab.trainer.count(6)
        assert lab.trainer.progress.steps == 1 and lab.trainer.progress.trained == ((6, 12),)

    run(lab, main)


def test_after_a_restart_nobody_remembers_their_sizes() -> None:
    lab = Lab()
    lab.trainer.progress = Progress(((0, 10),), 3)

    async def main() -> None:
        await asyncio.sleep(1.0)
        assert not lab.ready  # what was trained before waits for the end of this lap
        lab.script.step = 3
        lab.trainer.wake()
        await asyncio.sleep(1.0)
        assert lab.ready[0].samples == 10
        lab.trainer.count(7)
        assert lab.trainer.progress.steps == 1

    run(lab, main)


def test_a_step_that_cannot_be_made_now_takes_no_samples_and_the_pipeline_does_without_us_for_a_while() -> None:
    lab = Lab((8, 4, (0, 1, 4, 5)), (6, 6, ()))
    # the first step fails, is planned anew when the pause is over, and the next one goes on from there
    lab.script.lacks = [DataUnavailable("no hub")]
    lab.script.told.insert(0, (8, 8, ()))

    async def hindered() -> None:
        await asyncio.sleep(1.0)
        assert not lab.trainer.free and lab.trainer.hindrance.reason == "the data cannot be read: no hub"
        assert lab.trainer.progress.steps == 0
        news = lab.script.news
        await asyncio.sleep(LONGEST_S + 15.0)
        assert lab.script.news > news, "the others hear that we are free again"
        assert lab.script.seen == [tuple(range(8)), tuple(range(8)), (0, 1, 4, 5, 8, 9)]
        assert not lab.trainer.hindrance.reason and lab.trainer.progress.trained == ((0, 10),)

    run(lab, hindered)


def test_who_could_not_read_the_data_reads_it_before_it_says_that_it_is_free() -> None:
    lab = Lab((8, 8, ()))
    lab.script.lacks = [DataUnavailable("no hub")]
    lab.script.unreadable = [DataUnavailable("still no hub"), DataUnavailable("none yet")]

    async def main() -> None:
        await asyncio.sleep(1.0)
        news = lab.script.news
        for tried in range(2):
            for _ in range(int(LONGEST_S)):
                assert not lab.trainer.free
                await asyncio.sleep(1.0)
            assert len(lab.script.read_for_nothing) == tried + 1
        assert lab.trainer.hindrance.reason == "the data cannot be read: none yet" and lab.script.news == news
        await asyncio.sleep(LONGEST_S)
        assert lab.trainer.free and lab.script.news > news
        assert lab.script.read_for_nothing == 3 * [tuple(range(8))]

    run(lab, main)


def test_what_was_given_to_a_step_that_there_was_no_room_for_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab((8, 4, (0, 1, 4, 5)), (6, 6, ()), (6, 6, ()))
    usual, times = lab.trainer._stage.step, [0]

    def step(*args: Any, **kwargs: Any) -> StepReport:
        times[0] += 1
        if times[0] == 2:
            raise NoRoom("for the mean gradient")
        return usual(*args, **kwargs)

    monkeypatch.setattr(lab.trainer._stage, "step", step)

    async def main() -> None:
        await asyncio.sleep(LONGEST_S + 30.0)
        assert lab.script.seen == [tuple(range(8)), (0, 1, 4, 5, 8, 9), (0, 1, 4, 5, 8, 9)]
        assert lab.trainer.progress.trained == ((0, 10),)

    run(lab, main)


def diverging(lab: Lab, monkeypatch: pytest.MonkeyPatch, *bad: int) -> list[tuple[str, Any]]:
    """Its steps of these numbers come to no number. Returns what it tells of all: event and samples."""
    usual = lab.trainer._stage.step
    told: list[tuple[str, Any]] = []

    def step(accumulated: Accumulated, numbers: Sequence[int], global_step: int, *, loss: float) -> StepReport:
        if global_step in bad:
            raise NonFinite(global_step=global_step, loss=loss, grad_norm=float("inf"))
        return usual(accumulated, numbers, global_step, loss=loss)

    def note(event: dict[str, Any]) -> None:
        if event["event"].startswith("step"):
            told.append((event["event"], event["samples"]))

    monkeypatch.setattr(lab.trainer._stage, "step", step)
    lab.trainer._log.subscribe(note)
    return told


def test_a_step_that_comes_to_no_number_is_left_out_and_its_samples_are_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab((4, 4, ()), (8, 4, (4, 5, 6, 7)), (8, 8, ()))
    told = diverging(lab, monkeypatch, 1)

    async def main() -> None:
        await asyncio.sleep(30.0)
        assert told == [("step", ((0, 4),)), ("step.dropped", ((4, 12),)), ("step", ((4, 12),))]
        assert lab.trainer.progress.trained == ((0, 12),) and lab.trainer.progress.steps == 2
        assert [ready.samples for ready in lab.ready] == [12], "what was trained before it is kept"

    run(lab, main)


def test_steps_that_come_to_no_number_again_and_again_end_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a round has counted something meanwhile."""
    lab = Lab(*[(4, 4, ())] * 4)
    lab.trainer.pace = replace(PACE, laps=Laps.fixed(9))
    told = diverging(lab, monkeypatch, 1, 2, 3, 5, 6, 7, 8)

    async def main() -> None:
        await asyncio.sleep(30.0)
        assert [event for event, _ in told] == ["step", *["step.dropped"] * 3]
        assert lab.trainer.settle(counted(3, (4, 60)), 1, 4)
        lab.script.told += [(4, 4, ())] * 5
        lab.trainer.wake()
        await asyncio.sleep(30.0)

    with pytest.raises(ExceptionGroup) as caught:
        run(lab, main)
    assert caught.group_contains(NonFinite, match="step 8: loss 1.0, gradient norm inf")
    assert [event for event, _ in told] == [*["step", *["step.dropped"] * 3] * 2]
