"""One ballot of one height, from its proposer's side: gather, plan, cut, collect, propose, certify.

    GATHER ──plan──▶ SCATTER ──cut──▶ HELD ──propose──▶ VOTE ──quorum of votes──▶ certified
       │  ▲              │              │                 ▲
       │  └───abort──────┴──────────────┘                 │
       └──────────── change of view, or a value that a member already voted for ─────┘

Pure: `step` is called after every message and on every tick, looks at what has arrived and at the time, and returns messages.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import Protocol

from farflung.protocol import chain, deadline, partition, reach, sharing
from farflung.protocol.accord import Word
from farflung.protocol.chain import Certified, Commit, Contribution, PartResult, RoundResult, Vote
from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.keys import PeerId
from farflung.protocol.lap import Lap
from farflung.protocol.membership import TRAINING_STATES, Membership
from farflung.protocol.messages import (
    Abort,
    Collected,
    Committed,
    Contributor,
    Cut,
    Fetch,
    Held,
    Message,
    Part,
    Plan,
    Promise,
    Propose,
    Ready,
    Voted,
    encode,
)
from farflung.protocol.planning import (
    ChangeView,
    Divide,
    Situation,
    StartRound,
    agreed,
    choose_cut,
    conclude,
    decide,
    lets_go,
)
from farflung.protocol.quorum import is_quorum
from farflung.protocol.rhythm import Offer
from farflung.protocol.settings import HOLD_S, RESEND_S, SETTLE_S, SHORT_S, Settings
from farflung.protocol.sharing import Link
from farflung.protocol.standing import Standing
from farflung.protocol.tempo import Tempo
from farflung.protocol.types import as_text

PLAN_DOMAIN = b"farflung/plan/1\0"

MAX_DOUBLINGS = 16
"""Of a round's time, after one plan more that failed."""

MAX_PAUSE_S = 30.0
"""Longest pause between two plans of one proposer."""

GRACE_S = 2 * RESEND_S
"""After the deadline of a phase: a plan, a cut or the answer to it may be lost, or overtake what it is about, and is said again."""


def plan_id(swarm: bytes, plan: Plan) -> bytes:
    """sha256 that names a plan (32 bytes)."""
    return sha256(PLAN_DOMAIN + swarm + encode(plan)).digest()


class Phase(StrEnum):
    GATHER = "gather"
    SCATTER = "scatter"
    HELD = "held"
    VOTE = "vote"


class Surroundings(Protocol):
    """What a proposer reads of the member it belongs to."""

    settings: Settings
    membership: Membership
    standing: Standing
    tempo: Tempo
    round_at: float
    """When the last round was committed here, seconds."""

    @property
    def me(self) -> PeerId: ...

    @property
    def head(self) -> Certified: ...

    def begins(self, now: float) -> Mapping[int, PeerId]: ...

    def says(self, now: float) -> Word | None: ...


@dataclass(slots=True)
class Proposer:
    ballot: int
    opened_at: float
    phase: Phase = Phase.GATHER
    reason: str = "opened"
    """Why nothing happens, or what does: a sentence for people."""
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    ready_at: dict[PeerId, float] = field(default_factory=dict)
    """When we first heard that a member is ready."""
    attempt: int = 0
    retry_at: float = 0.0
    """No plan before: each one that fails after the second doubles the pause."""
    failed: str = ""
    """Why the last plan failed."""
    without: str = ""
    """Who is not waited for, and why: a link that is too slow for rounds."""
    plan: Plan | None = None
    plan_id: bytes = b""
    phase_at: float = 0.0
    plan_at: float = 0.0
    sending_s: float | None = 0.0
    """That the slowest link was expected to take for contributions, and again for means, where that is not too short to be of bytes; None: nobody can say."""
    sent_at: float = 0.0
    settle_at: float | None = None
    collected: dict[PeerId, frozenset[PeerId]] = field(default_factory=dict)
    contributors: tuple[PeerId, ...] = ()
    owners: frozenset[PeerId] = frozenset()
    held: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict)
    commit: Commit | None = None
    votes: dict[PeerId, bytes] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether a round or a change of view is under way, or waits for somebody."""
        return self.phase is not Phase.GATHER or self.settle_at is not None or len(self.ready_at) > 0

    # ---- what members say -------------------------------------------------------------------------------------

    def on_promise(self, sender: PeerId, promise: Promise, now: float) -> None:
        self.promises[sender] = promise
        if promise.ready is None:
            self.ready_at.pop(sender, None)
        else:
            self.ready_at.setdefault(sender, now)

    def on_collected(self, sender: PeerId, message: Collected) -> None:
        if self.plan is None or message.plan != self.plan_id or self.phase is not Phase.SCATTER:
            return
        if sender in {part.owner for part in self.plan.parts}:
            planned = {contributor.peer for contributor in self.plan.contributors}
            # What an owner holds grows; an earlier word of it may come later.
            self.collected[sender] = self.collected.get(sender, frozenset()) | (planned & {*message.peers})

    def on_held(self, sender: PeerId, message: Held) -> None:
        if self.plan is not None and message.plan == self.plan_id and len(message.digests) == len(self.plan.parts):
            self.held[sender] = message.digests

    def on_voted(self, sender: PeerId, message: Voted, swarm: bytes) -> None:
        """The caller has checked the signature."""
        if self.commit is not None and message.digest == chain.commit_hash(swarm, self.commit):
            self.votes[sender] = message.signature

    # ---- what follows -----------------------------------------------------------------------------------------

    def step(self, s: Surroundings, now: float) -> list[Effect]:
        """Everything that can be done now."""
        effects: list[Effect] = []
        while True:
            before = (self.phase, self.attempt)
            match self.phase:
                case Phase.GATHER:
                    effects += self._gather(s, now)
                case Phase.SCATTER:
                    effects += self._scatter(s, now)
                case Phase.HELD:
                    effects += self._held(s, now)
                case Phase.VOTE:
                    effects += self._vote(s, now)
            if (self.phase, self.attempt) == before:
                return effects

    def _gather(self, s: Surroundings, now: float) -> list[Effect]:
        view = s.head.commit.view
        if self.ballot > 0 and not is_quorum(view, self.promises):
            self.reason = f"asks for ballot {self.ballot}: {len(self.promises)} of {len(view)} promised"
            return []
        accepted = [p.accepted for p in self.promises.values() if p.accepted is not None]
        if accepted:  # somebody may have seen this value decided: nothing else may be proposed
            newest = max(accepted, key=lambda a: a.ballot)
            self.reason = f"finishes what ballot {newest.ballot} began"
            return self._propose(newest.commit, s, now)

        follow = partial(chain.successor, s.settings.swarm, s.head.commit, s.settings.rules, result=None)
        decides = s.standing.decides and not s.settings.rules.finished(s.head.commit)
        begins = s.begins(now) if decides else {}
        if begins:
            self.reason = f"begins anew: stages {', '.join(map(str, sorted(begins)))}"
            return self._propose(follow(view=view, left=(), begins=begins), s, now)
        word = s.says(now) if decides else None
        if word is not None:
            self.reason = "says what it knows of the lives of stages"
            return self._propose(follow(view=view, left=(), word=word), s, now)

        situation = self._situation(s, now)
        decision = decide(situation)
        self.reason = decision.reason
        if isinstance(decision, ChangeView):
            if self.settle_at is None:
                self.settle_at = now + SETTLE_S
            if now < self.settle_at:
                return []
            return self._propose(follow(view=decision.view, left=decision.left), s, now)
        if isinstance(decision, Divide):
            return self._propose(follow(view=decision.stays, left=(), goes=decision.goes), s, now)
        if isinstance(decision, StartRound):
            if now < self.retry_at:
                self.reason = f"plans round {s.head.commit.height + 1} again after a pause: {self.failed}"
                return []
            return self._start(decision, situation.readies, s, now)
        return []

    def _situation(self, s: Surroundings, now: float) -> Situation:
        view = s.head.commit.view
        left = frozenset(p for p in view if s.membership.leaves(p))
        dead = {p: s.membership.dead_for(p, now) for p in view if p not in left and p != s.me}
        live = frozenset(s.membership.live(view))
        readies = {p: m.ready for p, m in sorted(self.promises.items()) if p in live and m.ready is not None}
        awaited = frozenset(p for p in live - set(readies) if p != s.me and self._trains(s, p))
        if s.me in live and s.me not in readies and s.membership.state in TRAINING_STATES:
            awaited |= {s.me}
        # Of members none of which is ready nothing follows from who is too slow.
        too_slow, self.without = s.tempo.too_slow(now, _links(readies)) if readies else (frozenset(), "")
        # Those who train are hoped for, but not for ever: one that hangs says that it trains.
        hoped_for = awaited if now < s.round_at + s.settings.max_round_s else frozenset()
        if len({*readies, *hoped_for} - too_slow) < s.settings.min_contributors:
            too_slow, self.without = frozenset(), ""
        readies = {p: ready for p, ready in readies.items() if p not in too_slow}
        awaited -= too_slow
        return Situation(
            view=view,
            live=live,
            holders=frozenset(s.standing.holders()),
            left=left,
            sure=s.membership.sure(view) if left else frozenset(),
            dead=frozenset(p for p, dead_s in dead.items() if dead_s > 0.0),
            gone=frozenset(p for p, dead_s in dead.items() if dead_s > s.settings.removal_s),
            readies=readies,
            awaited=awaited,
            joiners=s.standing.joiners(),
            hold_s=self._holds_until(s, now) - now,
            min_contributors=s.settings.min_contributors,
            max_group=s.settings.rules.max_group,
            divides=s.settings.rules.may_divide(s.head.commit),
            patience_left_s=self._patience_until(s, readies, awaited, now) - now if readies else 0.0,
            finished=s.settings.rules.finished(s.head.commit),
        )

    def _holds_until(self, s: Surroundings, now: float) -> float:
        """Until when rounds wait for newcomers: no longer after a round than for one of them, however many come, one after another."""
        longest_s = min(HOLD_S, s.settings.max_round_s)
        return min(s.standing.waits_until(now, longest_s), s.round_at + longest_s)

    def _patience_until(
        self, s: Surroundings, readies: Mapping[PeerId, Ready], awaited: Collection[PeerId], now: float
    ) -> float:
        """As long as it costs those who are ready nothing, once the round is due; see `rhythm`."""
        offers = [Offer(self.ready_at[p], ready.tokens, s.tempo.tokens_per_s(p)) for p, ready in readies.items()]
        return s.tempo.patient_until(offers, awaited, now, least_until=s.round_at + s.settings.min_round_s)

    def _trains(self, s: Surroundings, peer: PeerId) -> bool:
        heartbeat = s.membership.heartbeat(peer)
        return heartbeat is not None and heartbeat.state in TRAINING_STATES

    def _start(
        self, decision: StartRound, readies: Mapping[PeerId, Ready], s: Surroundings, now: float
    ) -> list[Effect]:
        rules = s.settings
        first, last = rules.rules.span(s.head.commit)
        uplink, downlink = rules.codecs(s.head.commit)
        nbytes = rules.expected_bytes(s.head.commit) * (last - first)
        everybody = list(decision.contributors)
        contributors, owners = reach.roles(
            {p: readies[p].lacks for p in everybody}, {p: readies[p].tokens for p in everybody}
        )
        is_last = rules.rules.is_last(s.head.commit)  # what that round leaves out is lost
        if contributors != everybody and (is_last or len(contributors) < rules.min_contributors):
            contributors = owners = everybody
        apart = reach.told(everybody, contributors, owners)
        links = _links({p: readies[p] for p in contributors})
        num_members = len(decision.members)
        shares = sharing.shares_of({p: links[p] for p in owners}, num_members)
        estimate = sharing.seconds_of(links, shares, num_members, nbytes)
        slow_s = sharing.seconds_of(links, shares, num_members, nbytes, below_bytes_per_s=rules.fast_bytes_per_s)
        waves = 2 if slow_s >= rules.waves_from_s else 1
        ranges = partition.in_waves(first, last, list(shares.values()), rules.align, waves)
        parts = tuple(Part(owners[o], start, stop) for o, (start, stop) in ranges)
        took_s = s.tempo.rounds_as_wide_s(last - first, alone=len(contributors) == 1)
        usual = deadline.adaptive(took_s, low=rules.min_round_s, high=rules.max_round_s)
        budget = max(usual, 3.0 * estimate)
        # Links may have become slower than any round since then: each plan of this height that fails after the first doubles the time.
        budget = min(budget * 2.0 ** min(max(0, self.attempt + self.ballot - 1), MAX_DOUBLINGS), rules.max_round_s)
        self.attempt += 1
        bytes_s = slow_s if slow_s >= SHORT_S else 0.0
        self.sending_s = bytes_s if estimate > 0.0 else rules.unmeasured_s(nbytes * (1.0 - 1.0 / len(contributors)))
        self.plan = Plan(
            height=s.head.commit.height + 1,
            ballot=self.ballot,
            attempt=self.attempt,
            parent=chain.commit_hash(rules.swarm, s.head.commit),
            members=decision.members,
            contributors=tuple(Contributor(p, readies[p]) for p in contributors),
            parts=parts,
            uplink=uplink,
            downlink=downlink,
            scatter_s=budget,
            gather_s=budget,
            reason=as_text("; ".join(filter(None, (decision.reason, self.without, apart)))),
            made_ms=int(1000 * now),
        )
        self.plan_id = plan_id(rules.swarm, self.plan)
        self.phase, self.phase_at, self.plan_at, self.sent_at = Phase.SCATTER, now, now, now
        self.collected, self.held, self.contributors = {}, {}, ()
        return self._broadcast(self.plan)

    def _scatter(self, s: Surroundings, now: float) -> list[Effect]:
        assert self.plan is not None
        plan = self.plan
        owners = {part.owner for part in plan.parts}
        waiting = {o for o in owners if o not in self.collected and s.membership.alive(o)}
        # Owners report at the deadline; their word needs a moment to arrive.
        if waiting and now < self.phase_at + plan.scatter_s + GRACE_S:
            self.reason = f"{len(self.collected)} of {len(owners)} owners hold their contributions"
            return self._repeat(plan, now)
        sizes = Counter[PeerId]()
        for part in plan.parts:
            sizes[part.owner] += part.stop - part.start
        self.contributors, self.owners = choose_cut(
            {o: self.collected[o] for o in owners if o in self.collected},
            sizes,
            {c.peer: c.ready.tokens for c in plan.contributors},
        )
        if len(self.contributors) < min(s.settings.min_contributors, len(plan.contributors)):
            return self._abort(
                f"only {len(self.contributors)} contributions reached every owner in {now - self.phase_at:.1f} s",
                s,
                now,
            )
        self.phase, self.phase_at, self.sent_at = Phase.HELD, now, now
        return self._broadcast(Cut(self.plan_id, self.contributors))

    def _held(self, s: Surroundings, now: float) -> list[Effect]:
        assert self.plan is not None
        plan = self.plan
        live = [p for p in plan.members if s.membership.alive(p)]
        held = {p: self.held[p] for p in live if p in self.held}
        digests = [agreed(held, k) for k in range(len(plan.parts))]
        wanted = [
            k
            for k, part in enumerate(plan.parts)
            if digests[k] or (part.owner in self.owners and s.membership.alive(part.owner))
        ]
        complete = bool(wanted) and all(
            p in held and all(digests[k] and held[p][k] == digests[k] for k in wanted) for p in live
        )
        expired = now >= self.phase_at + plan.gather_s + GRACE_S
        if not complete and not expired and wanted:
            done = sum(all(held[p][k] for k in wanted) for p in live if p in held)
            self.reason = f"{done} of {len(live)} members hold every part"
            if now < self.sent_at + RESEND_S:
                return []
            # A member that has said nothing may not have heard of the plan either.
            spoke = {*self.held, *self.collected, *self.contributors, s.me}
            silent = [Send(p, plan) for p in plan.members if p not in spoke]
            effects = self._repeat(Cut(self.plan_id, self.contributors), now)
            return silent + effects + self._directions(s, held, digests, now)

        result = conclude(s.head.commit.view, held, len(plan.parts))
        if result is None:
            return self._abort("no part is held by a quorum", s, now)
        readies = {c.peer: c.ready for c in plan.contributors}
        outcome = RoundResult(
            plan=self.plan_id,
            contributors=tuple(
                Contribution(p, readies[p].tokens, readies[p].samples, readies[p].ready_ms) for p in self.contributors
            ),
            parts=tuple(
                PartResult(part.owner, part.start, part.stop, digest)
                for part, digest in zip(plan.parts, result.digests, strict=True)
            ),
            seconds_ms=int(1000 * (now - self.plan_at)),
        )
        left = tuple(p for p in s.head.commit.view if s.membership.leaves(p))
        staying = tuple(p for p in result.view if p not in left)
        # or the state would go with them, or nobody could decide what comes next
        let_go = any(s.standing.holds(p) for p in staying) and lets_go(staying, s.membership.sure(s.head.commit.view))
        lap, notes = self._next_lap(s, outcome)
        commit = chain.successor(
            s.settings.swarm,
            s.head.commit,
            s.settings.rules,
            view=staying if let_go else result.view,
            left=left if let_go else (),
            result=outcome,
            lap=lap,
        )
        self.reason = result.reason
        return notes + self._propose(commit, s, now)

    def _next_lap(self, s: Surroundings, outcome: RoundResult) -> tuple[Lap, list[Effect]]:
        """Steps until the round after this one and what it moves, and what to log when that is not as before."""
        head, rules = s.head.commit, s.settings.rules
        fastest = max(s.tempo.tokens_per_s(p) for p in s.membership.live(head.view))
        step_s = s.settings.step_tokens / fastest if fastest > 0.0 else 0.0
        before, rounds = head.next_round, s.tempo.rounds_like(outcome)
        lap, reason = rules.laps.choose(
            before,
            left=rules.total_steps - head.steps - head.lap,
            step_s=step_s,
            rounds=rounds,
            fragment_s=None if self.sending_s is None else 2.0 * self.sending_s / rounds[0].fragments,
            longest_s=s.settings.max_round_s,
            newcomer=s.standing.newcomer_downloads(),
            taken_s=s.tempo.taken_of(fastest),
        )
        if lap == before:
            return lap, []
        what = {"round": head.height + 1, "steps": lap.steps, "delay": rules.laps.delay_of(lap.steps)}
        return lap, [Note("lap", what | {"fragments": lap.width, "reason": reason})]

    def _directions(
        self, s: Surroundings, held: Mapping[PeerId, tuple[bytes, ...]], digests: list[bytes], now: float
    ) -> list[Effect]:
        """Where to fetch parts whose owner cannot serve them, or is slow to."""
        assert self.plan is not None
        effects: list[Effect] = []
        for k, part in enumerate(self.plan.parts):
            slow = now > self.phase_at + self.plan.gather_s / 4 or not s.membership.alive(part.owner)
            holders = tuple(p for p, mine in sorted(held.items()) if digests[k] and mine[k] == digests[k])
            if slow and holders:
                lacking = [p for p in s.membership.live(self.plan.members) if p not in holders]
                effects += [Send(p, Fetch(self.plan_id, k, digests[k], holders)) for p in lacking]
        return effects

    def _propose(self, commit: Commit, s: Surroundings, now: float) -> list[Effect]:
        self.commit, self.votes = commit, {}
        self.phase, self.phase_at, self.sent_at = Phase.VOTE, now, now
        # To ourselves first: our own vote is on disk before anybody hears of the proposal, so that a proposer that
        # is killed and started again finds it and cannot propose another value at the same ballot.
        others = sorted({*s.head.commit.view, *commit.view} - {s.me})
        proposal = Propose(self.ballot, commit)
        return [Send(p, proposal) for p in [s.me, *others]]

    def _vote(self, s: Surroundings, now: float) -> list[Effect]:
        assert self.commit is not None
        view = s.head.commit.view
        if is_quorum(view, self.votes):
            votes = tuple(Vote(p, sig) for p, sig in sorted(self.votes.items()) if p in view)
            committed = Committed(Certified(self.commit, self.ballot, votes))
            # To ourselves last: a certificate speaks for itself, and the others need not wait for our disk.
            others = sorted({*view, *s.membership.known()} - {s.me})
            return [Send(p, committed) for p in [*others, s.me]]
        self.reason = f"{len(self.votes)} of {len(view)} members voted"
        if now < self.sent_at + RESEND_S:
            return []
        self.sent_at = now
        proposal = Propose(self.ballot, self.commit)
        return [Send(p, proposal) for p in sorted({*view, *self.commit.view}) if p not in self.votes]

    def _abort(self, reason: str, s: Surroundings, now: float) -> list[Effect]:
        effects = self._broadcast(Abort(self.plan_id, as_text(reason)))
        effects.append(Note("round.abort", {"round": s.head.commit.height + 1, "reason": reason}))
        self.phase, self.plan, self.plan_id, self.reason = Phase.GATHER, None, b"", reason
        self.failed = reason
        if self.attempt > 1:
            self.retry_at = now + min(RESEND_S * 2.0 ** (self.attempt - 2), MAX_PAUSE_S)
        return effects

    def _broadcast(self, message: Message) -> list[Effect]:
        assert self.plan is not None
        return [Send(p, message) for p in self.plan.members]

    def _repeat(self, message: Message, now: float) -> list[Effect]:
        if now < self.sent_at + RESEND_S:
            return []
        self.sent_at = now
        return self._broadcast(message)


def _links(readies: Mapping[PeerId, Ready]) -> dict[PeerId, Link]:
    return {
        p: Link(up_bytes_per_s=ready.up_bytes_per_s, down_bytes_per_s=ready.down_bytes_per_s)
        for p, ready in readies.items()
    }
