"""How the steps of a pipeline begin: one data node at a time plans them, asks everybody in the plan, and gives the word.

    who is free ──▶ plan ──▶ StepPlan to all ──▶ all ready: StepGo ──▶ ... the step ... ──▶ who is free
                                   └──▶ somebody refuses, or says nothing: StepGo(go=False), and another plan

The coordinator is the first data node that lives, in an order that is the same everywhere, and the next one where nothing comes of its turn
(`turns`). Peers may disagree for a while about who that is, and then two of them plan: a peer takes part in one step at a time, so one of the two
is refused. Nothing is lost by it, for a step that has not begun has changed nothing. When the coordinator dies before the word, its plan is
void; when it dies after it, the step goes on without the microbatches that were its own, and the next in the order plans the step after it.

Where it hears too few stages to decide anything it plans none (`Roll.in_touch`): perhaps the others are about to go on without stage 0, and what it trains
would not count.

Only one machine here, and it is pure: `Coordinator` says whom to plan with and what to send; the plan is made by whoever has a model of costs
(`training/pipeline_online.py`), and checked by every peer that it is sent to.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId, short
from farflung.protocol.pipeline_messages import StepAnswer, StepGo, StepPlan
from farflung.protocol.progress import newest_step, shared_step
from farflung.protocol.roll import Roll
from farflung.protocol.turns import Turns
from farflung.protocol.types import as_text

ANSWER_S = 8.0
"""Until a peer of the plan has answered: it may have to read samples first."""

RESEND_S = 1.5
"""Between repetitions: control messages may be lost."""

STRAGGLER_S = 20.0
"""A step waits so long for living peers that are busy, as long as every stage has somebody who is not; once, until they have been in a step again."""

ASIDE_S = 10.0
"""Whoever refused a plan is left out for so long, if its stage has others; after a first refusal only until it says again that it is free, for what it had said was
older than what it does: after each round of its stage a peer is busy for a moment."""

PAUSE_S = 1.0
"""After a plan that came to nothing."""

Post = tuple[PeerId, StepPlan | StepGo]
"""To whom, and what; to ourselves as to the others."""


@dataclass(slots=True)
class Attempt:
    """A plan that was sent."""

    plan: StepPlan
    since: float
    sent_at: float
    ready: set[PeerId] = field(default_factory=set)
    gone: bool = False
    """Whether the word was given."""


@dataclass(slots=True)
class Coordinator:
    """See the module. All times are seconds of one monotonic clock."""

    roll: Roll
    may_miss: int = 0
    """Stages that every route leaves out, by the manifest: so many may have nobody."""
    reason: str = "no step yet"
    """What it waits for: a sentence for people."""
    attempt: Attempt | None = None
    _stands_since: float | None = None
    """Since when every stage has somebody free, and not all are."""
    _in_vain: set[PeerId] = field(default_factory=set)
    """Peers that were busy when a step was planned without them in the end, and in no step since: a device may be full for hours. That they say they are
    free does not count: they are about to try, and say it after each pause."""
    _pause_until: float = 0.0
    _refused: dict[PeerId, tuple[float, int]] = field(default_factory=dict)
    """When a peer refused last, and how often since it was ready for a step."""
    _refused_step: int = -1
    """The highest number of our plans that were refused."""
    _turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self._turns = Turns(self.roll)

    def leads(self, now: float) -> bool:
        """Whether it is our turn, we being a data node that trains."""
        return self._turns.holder(now) == self.roll.me

    def participants(self, now: float, *, free: bool) -> list[list[PeerId]] | None:
        """With whom to plan a step, by stage, ourselves, a data node that trains (and is `free`), included; None while there is none to plan."""
        roll = self.roll
        living = [roll.training(stage, now) for stage in range(roll.stages)]
        missing = sum(not peers and stage > 0 for stage, peers in enumerate(living))
        self._turns.look(now, possible=missing <= self.may_miss, under_way=self._under_way(living))
        if self.attempt is not None or not self.leads(now):
            return None
        if now < self._pause_until:
            return None
        if not roll.in_touch(now):
            near = ", ".join(map(str, sorted(roll.near(now))))
            self.reason = (
                f"hears stage {near} only, which are too few: the others may go on without stage 0"
                if near
                else "waits for peers of other stages, and hears none"
            )
            self._stands_since = None
            return None
        stages, busy = list[list[PeerId]](), set[PeerId]()
        for peers in living:
            able = [p for p in peers if (said := roll.present(p)) and said.free]
            stages.append([p for p in able if not self._is_aside(p, now)] or able)
            busy.update(p for p in peers if p not in able)
        stages[0] = sorted([*stages[0], roll.me])
        empty = next((stage for stage, peers in enumerate(stages) if not peers), None)
        deserted = [stage for stage in range(roll.stages) if not stages[stage] and roll.deserted(stage, now)]
        around = len(deserted) <= self.may_miss and all(stages[s] or s in deserted for s in range(roll.stages))
        if not free or (empty is not None and not around):
            self._stands_since = None
            there = len(living[empty]) if empty is not None else 0
            self.reason = (
                "we are not free"
                if not free
                else f"stage {empty} has {there} peers, none of them free"
                if there
                else f"nobody serves stage {empty}"
            )
            return None
        if self._stands_since is None:
            self._stands_since = now
        self._in_vain.intersection_update(roll.known)
        awaited = busy - self._in_vain
        if awaited and now < self._stands_since + STRAGGLER_S:
            self.reason = f"waits for {len(awaited)} busy peers"
            return None
        self._in_vain |= busy
        return stages

    def number(self, now: float) -> int:
        """That the next plan is to have. Once it was refused, perhaps since nobody else knows of it, only what the others know: else they would
        refuse all that we plan until our turn is over. Not before, for they say it a moment after us."""
        newest = newest_step(self.roll, now)
        return newest if newest > self._refused_step else shared_step(self.roll, now)

    def propose(self, plan: StepPlan, now: float) -> list[Post]:
        """Ask everybody in the plan."""
        self.attempt = Attempt(plan, now, now)
        self._stands_since = None
        self.reason = f"step {plan.step}: asked {len(plan.peers)} peers"
        return [(peer, plan) for peer in plan.peers]

    def answered(self, sender: PeerId, answer: StepAnswer, now: float) -> list[Post]:
        """A peer says whether it is ready."""
        attempt = self.attempt
        if attempt is None or answer.window != attempt.plan.window or sender not in attempt.plan.peers:
            return []
        if not answer.accepts:
            if attempt.gone:
                return []  # it is too late; its absence will be noticed
            _, times = self._refused.get(sender, (now, 0))
            self._refused[sender] = now, times + 1
            self._refused_step = max(self._refused_step, attempt.plan.step)
            return self._void(f"{short(sender)} refuses: {answer.reason}", now)
        attempt.ready.add(sender)
        self._refused.pop(sender, None)
        if attempt.gone or len(attempt.ready) < len(attempt.plan.peers):
            return []
        attempt.gone, attempt.sent_at = True, now
        self.reason = f"step {attempt.plan.step} is under way"
        return self._tell(attempt, go=True, reason="all are ready")

    def tick(self, now: float) -> list[Post]:
        """Repetitions, and an end to waiting."""
        attempt = self.attempt
        if attempt is None:
            return []
        silent = [peer for peer in attempt.plan.peers if peer not in attempt.ready]
        if not attempt.gone and now >= attempt.since + ANSWER_S:
            for peer in silent:
                self.roll.lose(peer)
            return self._void(f"{len(silent)} of {len(attempt.plan.peers)} peers did not answer", now)
        if now < attempt.sent_at + RESEND_S:
            return []
        attempt.sent_at = now
        if attempt.gone:
            return self._tell(attempt, go=True, reason="all are ready")
        return [(peer, attempt.plan) for peer in silent]

    def begins(self, planner: PeerId, peers: Collection[PeerId], now: float) -> list[PeerId]:
        """We have heard the word for a step that we take part in, with these. Returns the data nodes that are passed over from now on (`turns`)."""
        self._in_vain.difference_update(peers)
        return self._turns.began(planner, peers, now)

    def over(self, window: bytes, *, began: bool = True) -> None:
        """Our own part in a step is over. Only one that began is a reason to leave the turn where it is: a planner that asks again and again for
        steps that it cannot begin is passed over as one that plans none. Our own plan of which nobody has the word yet stays, for we refuse it (`answered`).
        """
        if began:
            self._turns.over()
        attempt = self.attempt
        if attempt is not None and attempt.plan.window == window and (began or attempt.gone):
            self.attempt = None

    def _is_aside(self, peer: PeerId, now: float) -> bool:
        """Whether a peer has refused a plan and is left out of others."""
        at, times = self._refused.get(peer, (-math.inf, 0))
        return now < at + ASIDE_S and (times > 1 or self.roll.entries[peer].since <= at)

    def _under_way(self, living: list[list[PeerId]]) -> bool:
        """Whether two of the others name the same step: one alone may say what it wants."""
        said = [
            present.window for peers in living for peer in peers if (present := self.roll.present(peer)) is not None
        ]
        windows = Counter(window for window in said if window)
        return max(windows.values(), default=0) > 1

    def _void(self, reason: str, now: float) -> list[Post]:
        assert self.attempt is not None
        attempt, self.attempt = self.attempt, None
        self._pause_until = now + PAUSE_S
        self.reason = f"step {attempt.plan.step} did not begin: {reason}"
        return self._tell(attempt, go=False, reason=reason)

    def _tell(self, attempt: Attempt, *, go: bool, reason: str) -> list[Post]:
        return [(peer, StepGo(attempt.plan.window, go, as_text(reason))) for peer in attempt.plan.peers]
