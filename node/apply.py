"""The apply loop: commits enter the learner one after another, whatever has to be fetched for them.

A commit with a round needs the encoded means of its parts: from the round itself, from disk after a restart, or from other members. When they
cannot be had any more, or there is no state yet, the outer state is downloaded. Everything here happens in order and one at a time;
training pauses only while the learner really changes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflung.compression.codec import Payload
from farflung.compression.digest import digest_of
from farflung.compression.unreduced import heard_nbytes
from farflung.node.catchup import Catchup
from farflung.node.disk_room import RETRY_S, Room
from farflung.node.donor import Donor
from farflung.node.door import Doors
from farflung.node.evaluator import Budget, Extent, evaluator
from farflung.node.events import EventLog
from farflung.node.exchange import Exchange
from farflung.node.learner import Learner
from farflung.node.mean_files import PLAN_BYTES
from farflung.node.means import MeanStore
from farflung.node.pursuit import Pursuit
from farflung.node.residuals import Residuals
from farflung.node.rounds import Traffic
from farflung.node.storage import Held, Place, Storage
from farflung.node.terms import Terms
from farflung.node.trainer import Progress, Trainer
from farflung.protocol.chain import Certified, Commit, RoundResult
from farflung.protocol.effects import Repair
from farflung.protocol.errors import DiskFull
from farflung.protocol.keys import short
from farflung.protocol.ledger import split
from farflung.protocol.member import Member
from farflung.training.coupled import Update
from farflung.training.errors import NotEnoughMemory
from farflung.training.out_of_memory import let_go

FETCH_ATTEMPTS = 4
"""Rounds of asking everybody for a mean before the whole state is downloaded instead."""

CHECKPOINT_AGAIN_S = 60.0
"""After one that the disk had no room for, and then with the next commit: it takes as long as one that is written."""

Evaluate = Callable[[Extent], Awaitable[float | None]]
"""Held-out loss of the outer parameters, by so many samples; None where it cannot be told."""


class Keep:
    """Work for the apply loop: a checkpoint, for what it saves is of one commit between two others only."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A round that is about to be taken."""

    result: RoundResult
    means: dict[int, Payload]
    """By part."""
    updates: Sequence[Update]
    contributed: bool
    """Whether it counted what we have sent since we started."""
    told: dict[int, Tensor] | None
    """What that told the others, where the rest stays with us."""


class Applier:
    """Brings the learner along the history, and knows where it is."""

    donor: Donor

    def __init__(
        self,
        *,
        terms: Terms,
        member: Member,
        exchange: Exchange,
        means: MeanStore,
        residuals: Residuals,
        catchup: Catchup,
        trainer: Trainer,
        learner: Learner,
        doors: Doors,
        storage: Storage,
        log: EventLog,
        checkpoint_s: float,
        evaluate: Evaluate,
        evaluates_few: bool,  # whether a few samples cost less than all
        all_evaluate_last: bool,
        initial_is_genesis: bool,  # whether the chain's first commit is of the initial parameters
        applied: Callable[[int, int, bytes], None],
        lost_state: Callable[[], None],
    ) -> None:
        self.height = -1
        """Height of the last commit applied here."""
        self.version = -1
        """Version of the outer state in the learner; -1 before there is one."""
        self._terms = terms
        self._member = member
        self._exchange = exchange
        self._means_kept = means
        self._residuals = residuals
        self._catchup = catchup
        self._trainer = trainer
        self._learner = learner
        self._learn = doors.learner.run
        self._aside = doors.side.run
        self._hash = doors.digest.run
        self._storage = storage
        self._log = log
        self._checkpoint_s = checkpoint_s
        self._room = Room(log, "its checkpoints")
        self._evaluate_outer = evaluate
        self._budget = Budget(has_few=evaluates_few)
        self._all_evaluate_last = all_evaluate_last
        self._initial_is_genesis = initial_is_genesis
        self._checkpoint_at = 0.0
        self._keeps_later = False
        """What we began with is on no disk yet, and goes there when we are told (`Keep`), or with the first round: not because the view changes."""
        self._applied = applied
        self._lost_state = lost_state
        self.preparing = -1
        """Height of the commit whose means are being got and decoded, while training may go on; -1: none."""
        self._queue: asyncio.Queue[tuple[Certified | Repair | Keep, asyncio.Event | None] | None] = asyncio.Queue()
        self._pending = 0
        self._digest = b""
        self._written: asyncio.Event | None = None
        """Set once the commit at `height` is on disk; None: it was before."""
        self._finishing = False
        self.downloading = False
        """Whether it waits for others' chunks, which may take any time; the trainer is busy meanwhile."""
        self.steady = asyncio.Event()
        """Set while the learner's outer state is that of `version`; not while a commit or a download changes it."""
        self.steady.set()

    @property
    def idle(self) -> bool:
        """Whether everything known has been applied."""
        return self._pending == 0

    def push(self, work: Certified | Repair | Keep, on_disk: asyncio.Event | None = None) -> None:
        """Apply this after everything before it. `on_disk` is set once it is on disk; None: it is, or need not be."""
        self._pending += 1
        self._queue.put_nowait((work, on_disk))

    async def restore(self, history: list[Certified], held: Held | None) -> bool:
        """Go on from what is held, or load the last checkpoint, or take the fresh parameters as the genesis state. Returns whether there was a checkpoint."""
        place = held.place if held else await self._learn(self._storage.load_learner, self._learner)
        if place is not None:
            residuals = held.residuals if held else await self._learn(self._storage.load_residuals)
            await self._aside(self._residuals.load, residuals)
            self._keeps_later = held is not None
            self.height, self.version = place.height, place.version
            self._exchange.in_flight = place.in_flight
            self._trainer.progress = Progress(place.trained, place.steps, restored=place.steps, missed=place.missed)
            self._trainer.version = place.version
        elif self._initial_is_genesis and self._founded(history):
            self.height, self.version = 0, history[0].commit.version
        return place is not None

    def _founded(self, history: list[Certified]) -> bool:
        """Whether that is ours from its beginning."""
        return bool(history) and history[0].commit.height == 0 and self._member.me == self._member.settings.founder

    async def resume(self, history: list[Certified]) -> None:
        """After a start with a history: what the learner lacks of it is applied; where it stands is announced."""
        for certified in history:
            if certified.commit.height == self.height:
                self._trainer.counted_steps = certified.commit.steps  # no lap has ended since then
                await self._settle(certified.commit, None)
                await self._announce(certified.commit, changed=True)
            elif certified.commit.height > self.height:
                self.push(certified)

    def finish(self) -> None:
        """End `run` after what it is doing now, and begin no download."""
        self._finishing = True
        self._queue.put_nowait(None)

    @property
    def pursuit(self) -> Pursuit:
        """Whether we come nearer to what we lack."""
        return self._catchup.pursuit

    async def run(self) -> None:
        """Apply until `finish`."""
        self._checkpoint_at = asyncio.get_running_loop().time()
        while (due := await self._queue.get()) is not None and not self._finishing:
            work, on_disk = due
            if isinstance(work, Repair):
                await self._repair(work)
            elif isinstance(work, Keep):
                await self.checkpoint()
            elif work.commit.height > self.height:
                await self._apply(work, on_disk)
            self._pending -= 1
            self._trainer.wake()

    # ---- one commit --------------------------------------------------------------------------------------------

    async def _apply(self, certified: Certified, on_disk: asyncio.Event | None) -> None:
        commit = certified.commit
        before, delay_steps = self.version, None
        prepared = await self._prepare(commit)
        downloaded = prepared is None and commit.version > self.version
        if downloaded:
            if self._finishing:
                return
            self.downloading = True
            with self._log.span("download", commit.height):
                await self._download_state(commit)
            self.downloading = False
        async with self._trainer.busy:
            if prepared is not None:
                self.steady.clear()
                began = asyncio.get_running_loop().time()
                with self._log.span("apply", commit.height):
                    contributed = await self._take_round(commit, prepared)
                delay_steps = self._trainer.steps_since_offer if contributed else None
                tempo, seconds = self._member.tempo, asyncio.get_running_loop().time() - began
                tempo.taken_s = self._trainer.taken(seconds, tempo.moved(prepared.result))
                self.version = commit.version
            taken = None if prepared is None else prepared.result
            await self._settle(commit, taken)  # rounds that came with a downloaded state have been counted with it
            self.height, self._written = commit.height, on_disk
            # training may go on: digests, reports and the like need not be waited for
            self.steady.set()
        self._trainer.wake()
        if on_disk is not None:  # a checkpoint is never ahead of the history, nor what is said of us
            await on_disk.wait()
        if downloaded:  # on disk before others count on us: who loses the state with the power still has a vote
            while not await self.checkpoint():
                if self._finishing:
                    return
                await asyncio.sleep(RETRY_S)
        await self._announce(commit, changed=self.version != before)
        if commit.round is None:
            self._log.emit("view.commit", view=[p.hex() for p in commit.view], reason=_view_change(commit))
            await self._exchange.decided(commit.height, b"")
        else:  # also where a downloaded state had it in: of a round that is over nothing may stay under way
            self._means_kept.decide(commit.round.plan)
            traffic = self._exchange.forget(commit.round.plan)
            if prepared is not None:
                self._report_round(commit, commit.round, prepared.means, traffic, delay_steps)
            await self._exchange.decided(commit.height, commit.round.plan)
        await self._evaluate(commit)
        if self._keeps_later and commit.round is None and not self._finished():
            return
        await self._checkpoint_when_due()

    async def _prepare(self, commit: Commit) -> _Prepared | None:
        """What the round of a commit brings, while training goes on; None where there is none that follows from our state, or where its means cannot be had."""
        result = commit.round
        if result is None or commit.version != self.version + 1:  # a jump in the history may have left one out
            return None
        self.preparing = commit.height
        self._trainer.wake()
        try:
            holders = self._member.membership.live(p for p in commit.view if p != self._member.me)
            last = self._terms.settings.rules.ended_by(commit)
            means = await self._exchange.collect(result, holders, last=last, attempts=FETCH_ATTEMPTS)
            if means is None:
                return None
            # Others will count on it that we have the state: what was said to be held is on the disk itself by now, but not what was fetched, or came too late to be said.
            await self._aside(self._storage.sync_means, result.plan)
            with self._log.span("decode", commit.height):
                updates = await self._aside(self._exchange.decode, result, means, last=last)
            contributed = self._counted(result) > 0 and self._exchange.in_flight == result.plan
            told = await self._aside(self._residuals.told, result) if contributed else None
            return _Prepared(result, means, updates, contributed, told)
        finally:
            self.preparing = -1

    async def _take_round(self, commit: Commit, prepared: _Prepared) -> bool:
        """The outer step, and what it does to our progress; whether it counts what we have offered."""
        self._learner.outer.rule = self._terms.rule(commit)
        contributed = prepared.contributed and self._exchange.in_flight == prepared.result.plan  # not given up since
        await self._learn(self._learner.apply, prepared.updates, contributed=contributed, told=prepared.told)
        await self._aside(self._residuals.settle, prepared.result)
        if self._counted(prepared.result) and not contributed:
            self.give_up("a round counted it before this node was restarted, or began again")
            await self._learn(self._learner.discard_progress)
        return contributed

    async def _settle(self, commit: Commit, result: RoundResult | None) -> None:
        """What follows from a commit for our data."""
        counted = self._counted(result) if result is not None else 0
        if not self._trainer.settle(commit, self.version, counted):
            self.give_up("its samples were handed to others")
            await self._learn(self._learner.discard_progress)

    async def _announce(self, commit: Commit, *, changed: bool) -> None:
        """Say that we are at `commit`."""
        at = {"height": self.height, "version": self.version, "step": self._trainer.global_step}
        self._log.bind(**at, group=commit.group.hex())
        if changed:
            await self._say_where()
        else:
            self._applied(self.height, self.version, self._digest)

    async def _say_where(self) -> None:
        """Say where we stand, with the digest of the state."""
        digests = await self._hash(self._learner.outer.chunk_digests)
        self.donor.remember(self.version, digests)
        self._digest = digest_of(*digests)
        self._applied(self.height, self.version, self._digest)

    def _counted(self, result: RoundResult) -> int:
        """Our samples that a round counted."""
        return next((c.samples for c in result.contributors if c.peer == self._member.me), 0)

    def give_up(self, reason: str) -> None:
        """Give up local progress; the learner's parameters are the caller's business."""
        steps = self._trainer.progress.steps
        self._trainer.drop()
        self._exchange.take_back()
        if steps:
            self._log.emit("progress.dropped", steps=steps, reason=reason)

    def _report_round(
        self,
        commit: Commit,
        result: RoundResult,
        means: dict[int, Payload],
        traffic: Traffic,
        delay_steps: int | None,
    ) -> None:
        down_numel = sum(result.parts[k].stop - result.parts[k].start for k in means)
        ours = next((i for i, c in enumerate(result.contributors) if c.peer == self._member.me), None)
        parent = self._member.history.parent_of(commit.height)
        samples = {
            c.peer.hex(): [list(i) for i in split(parent.ledger.window(c.peer), c.samples)[0]]
            for c in result.contributors
            if parent is not None
        }
        self._log.emit(
            "round.commit",
            round=commit.height,
            contributors={c.peer.hex(): c.tokens for c in result.contributors},
            view=[p.hex() for p in commit.view],
            parts_left_out=sum(not part.digest for part in result.parts),
            seconds=result.seconds_ms / 1000.0,
            delay_steps=delay_steps,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            up_bits=traffic.up_bits,
            down_bits=8 * sum(heard_nbytes(mean, ours) for mean in means.values()) / down_numel,
            owed=traffic.owed,
            contributed=self._counted(result) > 0,
            samples=samples,
            digest=self._digest.hex(),
            lap=commit.lap,
            fragments=commit.width,
        )

    # ---- whole state -------------------------------------------------------------------------------------------

    async def _download_state(self, commit: Commit) -> None:
        """Get outer state of `commit`'s version or newer from those who hold it, and go on from there."""
        async with self._trainer.busy:
            # what was trained, and what was sent and waits: other fragments' progress, and what codecs left out
            previous = await self._learn(self._learner.outer.params.clone) if self.version >= 0 else None
            self.steady.clear()
            self._lost_state()
            version = await self._catchup.download(commit.version)
            missed = [
                c.commit.round
                for c in self._member.history
                if self.height < c.commit.height and c.commit.version <= version
                if c.commit.round is not None
            ]
            counted = [result for result in missed if self._counted(result)]
            if self.version >= 0:
                await self._aside(self._residuals.catch_up, missed, version - self.version)
            in_flight = [r for r in counted if r.plan == self._exchange.in_flight]
            if counted and not in_flight:
                previous = None
                self.give_up("rounds that we were away for had counted it")
            told = await self._aside(self._residuals.told, in_flight[0]) if in_flight else None  # one at most
            kept = [(p.start, p.stop) for result in in_flight for p in result.parts if p.digest]
            kept = kept if previous is not None else []
            await self._learn(self._learner.adopt_outer, previous, counted=kept, told=told)
            self._exchange.take_back()
            for result in in_flight:
                self._trainer.count(self._counted(result))
            self.version = self._trainer.version = version
            self.steady.set()

    async def _repair(self, work: Repair) -> None:
        """Replace the chunks in which we differ from the majority."""
        chunks = await self._catchup.fetch_repair(work) if work.version == self.version else None
        if chunks is None:
            return
        async with self._trainer.busy:
            self.steady.clear()
            previous = await self._learn(self._learner.outer.params.clone)
            for index, data in chunks.items():
                await self._learn(self._learner.outer.load_chunk, index, data)
            await self._learn(self._learner.adopt_outer, previous)
            self._exchange.take_back()
            if self._member.attendance.part is None:  # else the round that is under way says when it is over for us
                self._trainer.take_back()
            self.steady.set()
        reason = f"{len(work.donors)} members held other bytes"
        self._log.emit("state.repair", chunks=len(chunks), reason=reason)
        await self._say_where()

    # ---- now and then ------------------------------------------------------------------------------------------

    async def _evaluate(self, commit: Commit) -> None:
        """Held-out loss of the outer parameters once all fragments have moved, by whoever was chosen, as far as its time allows (`evaluation`);
        whole at the end."""
        if commit.version % self._member.settings.rules.turns(commit) and not self._finished():
            return
        stood_s, self._trainer.stood_s = self._trainer.stood_s, 0.0
        if commit.round is None or commit.version != self.version:
            return
        contributors = commit.round.contributors
        chosen = evaluator(contributors, self._member.membership.alive)
        if chosen != self._member.me and not (self._all_evaluate_last and self._finished()):
            return
        began = asyncio.get_running_loop().time()
        extent = self._budget.extent(began, stood_s, alone=len(contributors) == 1)
        if self._finished():
            extent = Extent.WHOLE
        if extent is Extent.NOTHING:
            return
        loss, lack = None, ""
        try:
            loss = await self._evaluate_outer(extent)
        except NotEnoughMemory as error:
            lack = str(error)
        if lack:
            await self._learn(let_go)
            self._log.emit("outer.skipped", reason=lack)
        ended = asyncio.get_running_loop().time()
        self._budget.spent(extent, ended - began, ended, failed=loss is None and not lack)
        if loss is not None:
            self._log.emit(
                "outer.eval",
                loss=loss if extent is Extent.WHOLE else None,
                few_loss=loss if extent is Extent.FEW else None,
                samples=extent.value,
                tokens=commit.tokens,
                seconds=round(ended - began, 3),
            )

    async def _checkpoint_when_due(self) -> None:
        due_at = self._checkpoint_at + self._checkpoint_s
        if asyncio.get_running_loop().time() >= due_at or self._finished():
            await self.checkpoint()

    async def checkpoint(self) -> bool:
        """Whether the disk has taken it. If not, the last one counts still, with the means since then, and it is due again soon."""
        now = asyncio.get_running_loop().time()
        try:
            await self.save_place()
        except DiskFull as error:
            self._room.lacks(error)
            self._checkpoint_at = now + min(CHECKPOINT_AGAIN_S, self._checkpoint_s) - self._checkpoint_s
            return False
        self._checkpoint_at, self._keeps_later = now, False
        self._room.over()
        return True

    def _finished(self) -> bool:
        return self._trainer.finished

    async def save_place(self) -> None:
        """Checkpoint the learner and where it stands, unless the disk has no room for the commit that it is of: without that the last checkpoint counts.
        Raises LocalError where the disk does not take it.
        """
        if self.version < 0 or not (self._written is None or self._written.is_set()):
            return
        # By the door through which means are written: the plans of all that are there are known by then.
        on_disk = await self._aside(self._storage.plans_with_means)
        async with self._trainer.busy:
            progress = self._trainer.progress
            in_flight, missed = self._exchange.in_flight, progress.missed
            place = Place(self.height, self.version, progress.trained, progress.steps, in_flight, missed)
            ahead = [c.commit for c in self._member.history if c.commit.height > self.height]
            needed = self._means_kept.needed() | {c.round.plan for c in ahead if c.round is not None}
            drop = on_disk - {plan[:PLAN_BYTES] for plan in needed}
            owed = await self._aside(self._residuals.state)
            await self._learn(self._storage.save_learner, self._learner, owed, place, drop)


def _view_change(commit: Commit) -> str:
    left = f"{', '.join(short(p) for p in commit.left)} left; " if commit.left else ""
    return f"{left}{len(commit.view)} members"
