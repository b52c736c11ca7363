"""The training loop of a node: step, and when a round is due offer what was learnt. Read `run` top to bottom.

What a step is, and when a round is due, is another matter for a peer that holds the whole model (`replica_trainer`) than for one of a
pipeline (`stage_trainer`).

Until the round is over, training goes on for `delay` more steps, and stands then. Streaming DiLoCo's tau (2501.18512, digest
1.5), with two differences: a result is applied when it is there and not at a fixed step, for peers are unequal, and what was
trained meanwhile stays whole (`training.coupled`) and is not mixed away. With 0 it is DiLoCo: training stands at once.
"""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.hindrance import Hindrance
from farflung.node.learner import Learner
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.lap import ROUNDS, Laps
from farflung.protocol.ledger import count, is_prefix, join, split
from farflung.protocol.messages import Ready
from farflung.protocol.types import LONGEST_S, Intervals
from farflung.training.coupled import Slice
from farflung.training.errors import NonFinite, NotNow
from farflung.training.inner import StepReport
from farflung.training.out_of_memory import let_go

DIVERGES = 3
"""Steps that may come to no number between two rounds that count something we have trained; another one ends the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What the manifest says about the rhythm of training."""

    laps: Laps
    samples_per_step: int
    tokens_per_sample: int
    total_steps: int
    """Of the whole run."""

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        return self.samples_per_step * self.tokens_per_sample


@dataclass(slots=True)
class Progress:
    """Local training since the outer state last counted it."""

    trained: Intervals = ()
    """Samples used, a prefix of this node's window."""
    steps: int = 0
    began_at: float = 0.0
    """When this interval of training began."""
    restored: int = 0
    """Of the steps, those that a checkpoint brought."""
    missed: int = 0
    """And those in the place of which stand laps of the swarm that have ended without them: the run counts those, and not ours once more. Not of a pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The node around a trainer: what it asks and tells."""

    may_train: Callable[[], bool]
    """Whether all commits are applied, so that what we train is measured from what all others have, and the run goes on."""
    awaits_means: Callable[[], bool]
    """Whether the newest commit is applied as soon as its means are here and decoded, and the run goes on."""
    is_due: Callable[[float], bool]
    """Whether a round wants what we have, given the seconds of our steps."""
    moves: Callable[[], Slice]
    """Which elements the next round moves: as long as there is none, that stays so."""
    others_train: Callable[[], bool]
    """Whether other members do, so that a round comes without any step of ours."""
    set_ready: Callable[[Ready], None]
    withdraw: Callable[[], None]
    """What we were ready with is no longer there."""
    give_up: Callable[[str], None]
    """The learner has no local progress any more, for this reason: nor have we, nor is any in flight."""
    up_bytes_per_s: Callable[[], float]
    down_bytes_per_s: Callable[[], float]


class Trainer(ABC):
    """Trains when it may, and reports when it is ready for a round."""

    def __init__(
        self,
        me: PeerId,
        learner: Learner,
        door: Door,
        log: EventLog,
        pace: Pace,
        host: Host,
    ) -> None:
        self.me = me
        self.pace = pace
        self.progress = Progress()
        self.window: Intervals = ()
        self.version = 0
        self.lap = pace.laps.least
        """Steps of the fastest peer between the last round and the next."""
        self.counted_steps = 0
        """Of the run, by the rounds until now."""
        self.loss = float("nan")
        self.tokens_per_s = 0.0
        """Of late: exponential mean, half of it the last step."""
        self.hindrance = Hindrance()
        """Why the last step could not be made, if it could not."""
        self.stood_s = 0.0
        """Spent waiting for rounds, until somebody sets it back."""
        self._taking_s = 0.0
        """In which nothing was trained for the round that is under way."""
        self._taken_s: deque[float] = deque(maxlen=ROUNDS)
        """And for those before, for each fragment that they moved."""
        self._learner = learner
        self._door = door
        self._log = log
        self._host = host
        self.has_stepped = asyncio.Event()
        """Set after the first step."""
        self.busy = asyncio.Lock()
        """Held while the learner and `progress` change together: a step, or the application of a commit."""
        self._finishing = False
        self._offering = False
        """From an offer until its round is over for us."""
        self._offered_steps = 0
        """Steps of `progress` that have been offered, whatever became of it."""
        self._offered_at = 0.0
        self._step_at: float | None = None
        """When the step under way began."""
        self._microbatch: int | None = None
        """Of the last step, as it was logged."""
        self._diverged = 0
        """Steps that came to no number, since a round last counted something that was trained."""
        self._changed = asyncio.Event()

    # ---- what a step is ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Inner steps of the run so far, as the learning rate counts them."""

    @abstractmethod
    async def _step(self) -> bool:
        """One inner step; False when there is nothing to train on, or it may not be. Raises NotNow, with nothing changed."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether to offer now what has been trained."""

    @abstractmethod
    def _steps_left(self) -> int:
        """Until there is something to offer."""

    @abstractmethod
    def _steps_in(self, samples: int) -> int:
        """The last steps of `progress`, that had so many samples together."""

    # ---- the loop ----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.pace.laps.finished(self.pace.total_steps - self.counted_steps)

    def ready_in_s(self, *, round_planned: bool) -> float:
        """Seconds until we have made a lap for a round; 0 while what was offered waits for its plan, and while our speed is unknown."""
        if (self._offering and not round_planned) or self.tokens_per_s == 0.0:
            return 0.0
        step_s = self.pace.step_tokens / self.tokens_per_s
        since = 0.0 if self._step_at is None else asyncio.get_running_loop().time() - self._step_at
        return min(LONGEST_S, max(0.0, self._steps_left() * step_s - min(since, step_s)))

    def wake(self) -> None:
        """Something changed on which `run` may be waiting."""
        self._changed.set()

    def finish(self) -> None:
        """End `run` after the step it is doing now."""
        self._finishing = True
        self.wake()

    async def run(self) -> None:
        """Train until `finish`."""
        while not self._finishing:
            async with self.busy:
                if self._is_ready():
                    await self._offer()
                trained = await self._try_step()
            if not trained:
                began, stands = asyncio.get_running_loop().time(), self._stands()
                await self._change()
                self.stood_s += asyncio.get_running_loop().time() - began if stands else 0.0

    async def _try_step(self) -> bool:
        """`_step`, unless what has hindered the last one is likely to hinder it as well: commits are applied, and all else goes on meanwhile."""
        if self.hindrance.forbids(self._now()):
            return False
        failed = self.hindrance.tries
        try:
            trained = await self._step()
        except NotNow as error:
            self.hinder(error)
        else:
            if self.hindrance.tries != failed:
                self.hindrance.put_off(self._now())
            elif trained:
                self.hindrance.over()
            return trained
        self._step_at = None
        await self._door.run(let_go)  # whoever has filled the device gets what torch keeps of it for later
        self.wake()  # what was trained before may be offered now
        return False

    def hinder(self, error: NotNow) -> None:
        """A step could not be made, or not all of it."""
        self.hindrance.met(f"{error.what}: {error}", self._now())

    def _diverge(self, event: str, numbers: Sequence[int], error: NonFinite) -> None:
        """A step on these samples came to no number, which is told as such an event. Raises the error where too many have."""
        self._diverged += 1
        if self._diverged > DIVERGES:
            raise error
        self._log.emit(event, reason=str(error), samples=join([(number, number + 1) for number in numbers]))

    @property
    def steps_since_offer(self) -> int:
        """Steps that the parameters hold beyond what was last offered."""
        return self.progress.steps - self._offered_steps

    def _stands(self) -> bool:
        return self._offering and self.steps_since_offer >= self.pace.laps.delay_of(self.lap)

    def _note(self, report: StepReport, began: float, tokens: int, numbers: Sequence[int]) -> None:
        """A step that began then has ended.

        `tokens`: all that were trained on meanwhile, here or elsewhere; `numbers`: the samples that went through the model from here,
        as the learner was given them, whatever the window says.
        """
        seconds = max(asyncio.get_running_loop().time() - began, 1e-9)
        known = not math.isnan(report.loss)
        if known:
            self.loss = report.loss
        tokens_per_s = tokens / seconds
        self.tokens_per_s = (tokens_per_s + (self.tokens_per_s or tokens_per_s)) / 2
        self.has_stepped.set()
        self._log.bind(step=self.global_step)
        if report.microbatch != self._microbatch:
            self._log.emit("microbatch", sequences=report.microbatch, before=self._microbatch)
            self._microbatch = report.microbatch
        self._log.emit(
            "step",
            loss=report.loss if known else None,
            tokens=report.tokens,
            samples=join([(number, number + 1) for number in numbers]),
            tokens_per_s=tokens_per_s,
            grad_norm=report.grad_norm,
            lr=report.lr,
            seconds=round(seconds, 3),
        )

    async def _offer(self) -> None:
        """Offer the progress to the swarm."""
        self._offered_at = asyncio.get_running_loop().time()
        await self._door.run(self._learner.offer, *self._host.moves())
        self._taking_s += self._now() - self._offered_at
        if not self._host.may_train():
            return  # a commit has come meanwhile, and may count this: what was sent before a restart. Once it is applied we look again
        self._offering, self._offered_steps = True, self.progress.steps
        samples = count(self.progress.trained)
        self._host.set_ready(
            Ready(
                tokens=samples * self.pace.tokens_per_sample,
                samples=samples,
                up_bytes_per_s=self._host.up_bytes_per_s(),
                down_bytes_per_s=self._host.down_bytes_per_s(),
                ready_ms=int(1000 * (self._offered_at - self.progress.began_at)),
            )
        )

    def over(self) -> None:
        """The round is over for us, one way or the other."""
        self._offering = False
        self.wake()

    def taken(self, seconds: float, fragments: float) -> float:
        """A round that moved so many was applied, in so many seconds. Returns in how many nothing was trained for each fragment of one of late, offers included."""
        self._taken_s.append((self._taking_s + seconds) / fragments)
        self._taking_s = 0.0
        return median(self._taken_s)

    def take_back(self) -> None:
        """What was offered is measured from parameters that there are not any more: the progress is offered anew."""
        if self._offering:
            self._offering, self._offered_steps = False, 0
            self._host.withdraw()
            self.wake()

    def settle(self, commit: Commit, version: int, contributed_samples: int) -> bool:
        """After a commit was applied: what is counted, what we hold now, and how long the lap is that begins.

        Returns whether the local progress may stay; when False, its samples were handed to others, and the caller drops it.
        """
        self.version, self.lap, self.counted_steps = version, commit.lap, commit.steps
        self.count(contributed_samples)
        ledger = commit.ledger
        suspended = next((s.intervals for s in ledger.suspended if s.peer == self.me), ())
        self.window = ledger.window(self.me) or suspended
        return is_prefix(self.progress.trained, self.window)

    def count(self, samples: int) -> None:
        """A round has counted our first `samples` samples."""
        if samples:
            rest = split(self.progress.trained, samples)[1]
            steps = self._steps_in(count(rest))
            self._offered_steps = max(0, self._offered_steps - (self.progress.steps - steps))
            self.progress = Progress(rest, steps, self._offered_at)

    def drop(self) -> None:
        """Give up local progress."""
        self.progress = Progress()
        self._offering, self._offered_steps = False, 0
        self._host.withdraw()
        self.wake()

    def _next_batch(self) -> Intervals | None:
        fresh = split(self.window, count(self.progress.trained))[1]
        batch = split(fresh, self.pace.samples_per_step)[0]
        return batch if count(batch) == self.pace.samples_per_step else None

    @property
    def out_of_samples(self) -> bool:
        """Whether the window is used up."""
        return count(self.window) - count(self.progress.trained) < self.pace.samples_per_step

    async def _change(self) -> None:
        """Until something changes, or a step that could not be made is to be tried again."""
        retry_at = self.hindrance.retry_at
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(retry_at if self.hindrance.forbids(self._now()) else None):
                await self._changed.wait()
        self._changed.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
