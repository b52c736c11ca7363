"""The brain of one node: what it hears and what time it is go in, effects and reasons come out.

`Member` routes what is said to whoever keeps the books of it, and is what these have in common: the ballot of consensus and whose turn it is.
Its parts are the chain as far as we know it (`Follower`), what was promised and voted for (`Acceptor`: Paxos with a rotating proposer),
who holds the outer state (`Standing`), how fast everybody is (`Tempo`), what we offer to rounds (`Attendance`), and, when it is our turn,
a `Proposer`. It does no IO and has no clock: the same object runs in the daemon and in simulations. Messages it sends to itself are
handled before a method returns.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from farflung.protocol import chain, patience
from farflung.protocol.acceptor import Acceptor
from farflung.protocol.attendance import Attendance
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.effects import Apply, Effect, Note, Send
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.follower import Follower
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId, Signer, short, verify
from farflung.protocol.membership import Membership
from farflung.protocol.messages import (
    Abort,
    Accepted,
    Collected,
    Commits,
    Committed,
    Cut,
    Fetch,
    GetCommits,
    Goodbye,
    Heartbeat,
    Held,
    Message,
    Opinion,
    Plan,
    Probe,
    Promise,
    Propose,
    Ready,
    Voted,
)
from farflung.protocol.participation import Participation, check_plan, check_promise
from farflung.protocol.proposer import Proposer, plan_id
from farflung.protocol.settings import MAX_BALLOT_STEP, RESEND_S, Settings
from farflung.protocol.standing import Standing
from farflung.protocol.tempo import Tempo


@dataclass(slots=True)
class Member:
    """One node's view of the swarm, and what it does about it. All times are seconds of one monotonic clock."""

    settings: Settings
    signer: Signer
    membership: Membership
    vitals: Callable[[], Heartbeat]
    """The node's current facts; what the machine itself knows (height, ballot, version, digest, state) is filled in here."""
    state: str = "joining"
    """What this node says of itself in heartbeats."""
    me: PeerId = field(init=False)
    follower: Follower = field(init=False)
    standing: Standing = field(init=False)
    tempo: Tempo = field(init=False)
    attendance: Attendance = field(init=False)
    history: History = field(init=False)
    """The commits known."""
    started: bool = False
    """Whether any are."""
    in_view: bool = False
    """Whether the newest has us as a member."""
    acceptor: Acceptor = field(default_factory=Acceptor)
    proposer: Proposer | None = None
    round_at: float = 0.0
    slot_at: float = 0.0
    reason: str = "starting"
    _promised_at: float = -1e9
    _beat_at: float = -1e9

    def __post_init__(self) -> None:
        self.me = self.signer.peer_id
        self.follower = Follower(self.settings, self.me)
        self.history = self.follower.history
        self.standing = Standing(self.membership, self.history)
        self.tempo = Tempo(self.settings, self.membership, self.history, self.vitals)
        self.attendance = Attendance(self.me)

    # ---- what others may read ----------------------------------------------------------------------------------

    @property
    def head(self) -> Certified:
        """The newest commit known. Raises IndexError before there is one: see `started`."""
        return self.history.head

    @property
    def ballot(self) -> int:
        """At which we are."""
        return self.acceptor.ballot

    @property
    def ready(self) -> Ready | None:
        """What we offer to the next round."""
        return self.attendance.ready

    @property
    def part(self) -> Participation | None:
        """Our part in the plan under way."""
        return self.attendance.part

    @property
    def applied_height(self) -> int:
        """Height up to which the node's outer state really is; -1 while it has none."""
        return self.standing.applied_height

    @property
    def applied_version(self) -> int:
        return self.standing.applied_version

    @property
    def digest(self) -> bytes:
        """Digest of the node's outer state; empty while it is being computed or fetched."""
        return self.standing.digest

    def holds(self, peer: PeerId) -> bool:
        """Whether a peer has the outer state of our head, or all it takes to get there by itself (`standing`)."""
        return self.standing.holds(peer)

    def is_due(self, step_s: float, now: float) -> bool:
        """Whether we, between two inner steps of `step_s` seconds, should offer what we have (`rhythm`)."""
        return self.in_view and self.tempo.is_due(step_s, now)

    def leaves(self, peer: PeerId) -> bool:
        """Whether a member has said goodbye."""
        return self.state == "leaving" if peer == self.me else self.membership.leaves(peer)

    def proposer_now(self) -> PeerId:
        """Whose turn it is at our ballot."""
        return self.follower.turn(self.ballot)

    def admitted(self, peer: PeerId) -> bool:
        """Whether a peer has shown that it may be here, to us or to a quorum."""
        if peer in self.standing.admitted or peer in (self.me, self.settings.founder):
            return True
        return self.started and peer in self.head.commit.view

    # ---- the node's own news -----------------------------------------------------------------------------------

    def begin(
        self,
        anchor: Commit | None,
        history: Iterable[Certified],
        now: float,
        *,
        vote: tuple[int, int, Accepted | None] | None = None,
    ) -> list[Effect]:
        """Start from a history: the genesis, what was saved, or what a donor sent (checked before).

        `vote` is what was promised and voted for before a restart: (height, ballot, accepted). It counts from the first
        message on, so that a restarted member never says two things at one ballot.
        """
        effects = [*self.attendance.drop(final=False), *self.attendance.give_up("the history went on without us")]
        self.history.replace(anchor, history)
        self.started, self.in_view = True, self.me in self.head.commit.view
        self.round_at = self.slot_at = now
        self.acceptor, self.proposer = Acceptor(), None
        if vote is not None and vote[0] == self.head.commit.height + 1:
            self.acceptor = Acceptor(ballot=vote[1], accepted=vote[2])
        for peer in self.head.commit.view:
            self.membership.discover(peer, now)
        return self._settle(effects + self._open(now), now)

    def set_ready(self, ready: Ready, now: float) -> list[Effect]:
        """Local progress may go into a round; training stands until RoundOver."""
        self.attendance.offer(ready, now)
        return self._settle(self._promise(now), now)

    def withdraw(self, now: float) -> list[Effect]:
        """There is nothing to contribute after all."""
        if self.attendance.ready is None:
            return []
        self.attendance.ready = None
        return self._settle(self._promise(now), now)

    def contribution_arrived(self, plan: bytes, part: int, peer: PeerId, now: float) -> list[Effect]:
        """As an owner: a contributor's encoded part is here, whole."""
        attended = self.attendance.part_in(plan)
        if attended is None:
            return []
        attended.arrived(part, peer)
        return self._settle(attended.report(self.membership, self.proposer_now(), now), now)

    def mean_held(self, plan: bytes, part: int, digest: bytes, now: float) -> list[Effect]:
        """The encoded mean of a part is here: made by us, sent by its owner, or fetched."""
        attended = self.attendance.part_in(plan)
        if attended is None:
            return []
        attended.hold(part, digest)
        return self._settle(attended.show(self.proposer_now(), now), now)

    def unreachable(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """A connection to a peer broke or could not be made."""
        return self._settle(self.membership.unreachable(peer, now, reason), now)

    def discovered(self, peer: PeerId, now: float) -> list[Effect]:
        """A record or a cache mentions a peer."""
        if not self.membership.discover(peer, now):
            return []
        return self._settle([Send(peer, self._heartbeat())], now)

    def applied(self, height: int, version: int, digest: bytes, now: float) -> list[Effect]:
        """The node's outer state now is that of `height`; everybody is told its digest."""
        self.standing.applied(height, version, digest)
        self._beat_at = now
        effects = [*self._heartbeats(), *self.standing.compare(now)]
        if self.proposer is None and self.in_view and self.proposer_now() == self.me:
            effects += self._open(now)  # it was our turn all the time, but we could not vote
        return self._settle(effects, now)

    def lost_state(self, now: float) -> list[Effect]:
        """The node's outer state cannot be brought to the head's by itself: it has to be downloaded."""
        if not self.standing.digest:
            return []
        self.standing.lost()
        self.proposer = None
        self._beat_at = now
        return self._settle(self._heartbeats(), now)

    def leave(self, reason: str) -> list[Effect]:
        return [Send(p, Goodbye(reason)) for p in self.membership.known()]

    # ---- what others say ---------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Handle a verified message. Raises RemoteError, having changed nothing, when it breaks a rule."""
        return self._settle(self._receive(sender, message, now), now)

    def _receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Heartbeat):
            return self._on_heartbeat(sender, message, now)
        if not self.admitted(sender):
            raise Refused(f"{type(message).__name__} before being admitted to the swarm", peer=sender)
        effects: list[Effect] = []
        match message:
            case Goodbye():
                effects += self.membership.goodbye(sender, now)
            case Probe():
                effects += self.membership.answer(sender, message.target, now)
            case Opinion():
                self.membership.opinion(message.target, message.age_s, now)
            case GetCommits():
                effects += self.follower.answer(sender, message.after)
            case Commits():
                effects += self._on_commits(sender, message, now)
            case Committed():
                effects += self._on_committed(sender, message.certified, now)
            case _ if not self.started:
                pass  # rounds mean nothing to somebody who has no history yet
            case Promise():
                effects += self._on_promise(sender, message, now)
            case Plan():
                effects += self._on_plan(sender, message, now)
            case Propose():
                effects += self._on_propose(sender, message, now)
            case Voted():
                effects += self._on_voted(sender, message)
            case Collected() if self.proposer is not None:
                self.proposer.on_collected(sender, message)
            case Held() if self.proposer is not None:
                self.proposer.on_held(sender, message)
            case Cut() if (part := self._part_led_by(sender, message.plan)) is not None:
                effects += part.on_cut(sender, message.contributors)
            case Fetch() if (part := self._part_led_by(sender, message.plan)) is not None:
                effects += part.on_fetch(message)
            case Abort() if self._part_led_by(sender, message.plan) is not None:
                effects += self.attendance.drop(final=True)
                effects += self._promise(now)
            case _:
                pass  # Collected, Held, Cut, Fetch or Abort of a plan that is over
        if sender != self.me:  # only now: a message that is refused says nothing, not even that its sender lives
            effects = [*self.membership.heard(sender, now), *effects]
        if self.proposer is not None:
            effects += self.proposer.step(self, now)
        return effects

    def _on_heartbeat(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Effect]:
        if not self.admitted(sender) and not self.settings.admits(sender, beat.admission):
            raise Refused("no invitation to this swarm", peer=sender)
        self.standing.admitted.add(sender)
        known = self.membership.news
        effects = self.membership.heard(sender, now, beat)
        if effects and not beat.reply and any(isinstance(e, Note) for e in effects):
            effects.append(Send(sender, self._heartbeat(reply=True)))  # news to us, so perhaps we are news to it
        if beat.digest and (not self.started or beat.height > self.head.commit.height):
            effects += self.follower.ask([sender], now)
        elif self._is_ahead(sender, beat):
            ballot = min(beat.ballot, self.ballot + MAX_BALLOT_STEP)
            effects += self._move_to(ballot, f"{short(sender)} is at ballot {beat.ballot}", now)
        if self.proposer is not None and self.membership.news != known:
            effects += self.proposer.step(self, now)
        return effects + self.standing.compare(now)

    def _on_commits(self, sender: PeerId, message: Commits, now: float) -> list[Effect]:
        if not message.chain:
            return []
        if not self.started or message.chain[0].commit.height > self.follower.height + 1:
            jump = self.follower.jump(sender, message, self.membership)
            if jump is None:
                return []
            begun = self.begin(message.anchor, message.chain, now)
            return [jump, *begun, *(Apply(c) for c in message.chain)]
        effects: list[Effect] = []
        for certified in message.chain:
            try:
                if certified.commit.height == self.head.commit.height + 1:
                    effects += self._on_committed(sender, certified, now)
            except RemoteError as error:  # what came before it in the same message stands
                return [*effects, _refusal(error)]
        return effects

    def _on_committed(self, sender: PeerId, certified: Certified, now: float) -> list[Effect]:
        if not self.started or certified.commit.height > self.head.commit.height + 1:
            return self.follower.ask([sender], now)
        if certified.commit.height <= self.head.commit.height:
            return []
        self.follower.check_next(sender, certified)
        return self._advance(certified, now)

    def _on_promise(self, sender: PeerId, message: Promise, now: float) -> list[Effect]:
        if not self.follower.leads_to(message.height, message.parent):
            return self.follower.help_along(sender, message.height, now)
        self.acceptor.check_near(message.ballot, sender)
        check_promise(message, self.head.commit, self.settings, sender)
        effects: list[Effect] = []
        if message.ballot > self.ballot and self.attendance.part is None:
            if self.follower.turn(message.ballot) == self.me:
                effects += self._move_to(message.ballot, f"{short(sender)} asks us to lead", now)
        if self.proposer is not None and message.ballot == self.ballot:
            self.proposer.on_promise(sender, message, now)
        return effects

    def _on_plan(self, sender: PeerId, plan: Plan, now: float) -> list[Effect]:
        if not self.follower.leads_to(plan.height, plan.parent):
            return self.follower.help_along(sender, plan.height, now)
        if sender != self.follower.turn(plan.ballot):
            raise Refused(f"a plan for ballot {plan.ballot}, which is not its turn", peer=sender)
        self.acceptor.check_near(plan.ballot, sender)
        name = plan_id(self.settings.swarm, plan)
        if plan.ballot < self.ballot or self.attendance.has_seen(name):
            return []  # too late, or repeated
        check_plan(plan, self.head.commit, self.settings, self.me, self.attendance.ready, sender)
        # A second plan at one ballot says that the proposer has given the first up.
        before = self.attendance.part
        effects = self.attendance.drop(final=before is not None and before.plan.ballot == plan.ballot)
        if plan.ballot > self.ballot:
            effects += self._move_to(plan.ballot, "a plan of a higher ballot", now)
        return effects + self.attendance.join(name, plan, sender, now)

    def _on_propose(self, sender: PeerId, message: Propose, now: float) -> list[Effect]:
        commit = message.commit
        if not self.follower.leads_to(commit.height, commit.parent):
            return self.follower.help_along(sender, commit.height, now)
        parent, rules = self.head.commit, self.settings
        if sender != self.follower.turn(message.ballot):
            raise Refused(f"a proposal at ballot {message.ballot}, which is not its turn", peer=sender)
        if message.ballot < self.ballot:
            return []
        self.acceptor.check_alone(message, sender)
        self.acceptor.check_near(message.ballot, sender)
        chain.check_successor(rules.swarm, parent, commit, rules.rules, peer=sender)
        if self.attendance.part is not None:
            self.attendance.part.check_result(commit, sender)
        if not self.in_view:
            return []
        effects: list[Effect] = []
        if message.ballot > self.ballot:
            effects += self._move_to(message.ballot, "a proposal of a higher ballot", now)
        if not self.standing.holds(self.me) or not any(self.standing.holds(p) for p in commit.view):
            return effects
        return effects + self.acceptor.vote(message, sender, swarm=rules.swarm, signer=self.signer, now=now)

    def _on_voted(self, sender: PeerId, message: Voted) -> list[Effect]:
        if self.proposer is None or message.height != self.head.commit.height + 1 or message.ballot != self.ballot:
            return []
        signed = chain.vote_bytes(self.settings.swarm, message.height, message.ballot, message.digest)
        verify(sender, message.signature, signed)
        self.proposer.on_voted(sender, message, self.settings.swarm)
        return []

    # ---- time --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is under way whose deadlines are short: a round, a ballot, a change of view, the search for a history."""
        if self.attendance.part is not None or not self.started:
            return True
        if self.acceptor.ballot > 0 or self.acceptor.accepted is not None:
            return True
        return self.proposer is not None and self.proposer.busy

    def look_at(self) -> float:
        """When `tick` has something to do at the latest, as long as nothing comes in and we are not `busy`."""
        at = min(self._beat_at + self.membership.heartbeat_s, self.membership.look_at)
        return at if self.attendance.ready is None else min(at, self._promised_at + RESEND_S)

    def tick(self, now: float) -> list[Effect]:
        """Called several times a second while we are `busy`, and by `look_at`: heartbeats, repetitions, deadlines."""
        view = self.head.commit.view if self.started else ()
        effects = self.membership.tick(now, keep=view)
        if now >= self._beat_at + self.membership.heartbeat_s:
            self._beat_at = now
            effects += self._heartbeats()
        if not self.started:
            self.reason = "looking for a peer that knows the swarm's history"
            return self._settle(effects + self.follower.ask(self.standing.donors(), now), now)
        if self.in_view:
            reason = patience.why_next_ballot(self, now)
            if reason is not None:
                effects += self._move_to(self.ballot + 1, reason, now)
            if now >= self._promised_at + RESEND_S and (self.attendance.ready is not None or self.ballot > 0):
                effects += self._promise(now)
            effects += self._watch_quorum(now)
        if self.attendance.part is not None:
            effects += self.attendance.part.tick(self.membership, self.proposer_now(), now)
        if self.proposer is not None:
            effects += self.proposer.step(self, now)
            self.reason = self.proposer.reason
        elif not self.in_view:
            self.reason = "not a member yet"
        elif not self.standing.holds(self.me):
            self.reason = "downloading the outer state; votes once it is here"
        elif not patience.holders_decide(self):
            self.reason = patience.why_no_quorum(self)
        else:
            self.reason = f"following {short(self.proposer_now())}"
        return self._settle(effects, now)

    def _watch_quorum(self, now: float) -> list[Effect]:
        """A ready member without a quorum trains on by itself after a while: its progress stays its own."""
        if not self.attendance.waits_in_vain(quorum=patience.holders_decide(self), now=now):
            return []
        over = self.attendance.give_up(patience.why_no_quorum(self))
        return [*self.attendance.drop(final=False), *self._promise(now), *over]

    # ---- inner workings ----------------------------------------------------------------------------------------

    def _settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """Handle messages to ourselves until none is left."""
        if not effects:
            return effects
        out: list[Effect] = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Send) and effect.to == self.me:
                try:
                    answer = self._receive(self.me, effect.message, now)
                except RemoteError as error:  # what we ask of ourselves may be what a member's promise made us ask
                    answer = [_refusal(error)]
                queue.extendleft(reversed(answer))
            else:
                out.append(effect)
        return out

    def _open(self, now: float) -> list[Effect]:
        """A new height or ballot: lead it when it is our turn, and tell the proposer where we stand."""
        self.slot_at = now
        self.proposer = None
        if not self.in_view:
            return []
        if self.proposer_now() == self.me and self.standing.holds(self.me):
            self.proposer = Proposer(self.ballot, now)
        return self._promise(now)

    def _move_to(self, ballot: int, reason: str, now: float) -> list[Effect]:
        promise = self.acceptor.promise(self.head.commit.height + 1, ballot, reason)
        return [*self.attendance.drop(final=False), *promise, *self._open(now)]

    def _promise(self, now: float) -> list[Effect]:
        if not self.in_view:
            return []
        self._promised_at = now
        height, parent = self.head.commit.height + 1, self.follower.head_hash()
        promise = Promise(height, self.ballot, parent, self.acceptor.accepted, self.attendance.ready)
        return [Send(self.proposer_now(), promise)]

    def _advance(self, certified: Certified, now: float) -> list[Effect]:
        """The history moved by one."""
        commit = certified.commit
        was_member = self.in_view
        effects = self.attendance.drop_unless(commit)
        self.history.append(certified)
        self.in_view = self.me in commit.view
        self.acceptor = Acceptor()
        effects.append(Apply(certified))
        for peer in commit.view:
            self.membership.discover(peer, now)
        if commit.round is not None:
            self.round_at = now
        effects += self.attendance.conclude(commit)
        if was_member and self.me not in commit.view:
            effects.append(Note("view.dropped", {"reason": f"not in the view of height {commit.height}"}))
        return effects + self._open(now)

    def _heartbeat(self, *, reply: bool = False) -> Heartbeat:
        return msgspec.structs.replace(
            self.vitals(),
            height=self.head.commit.height if self.started else 0,
            ballot=self.ballot,
            version=max(self.standing.applied_version, 0),
            digest=self.standing.digest,
            state=self.state,
            reply=reply,
        )

    def _heartbeats(self) -> list[Effect]:
        beat = self._heartbeat()
        return [Send(p, beat) for p in self.membership.known()]

    def _is_ahead(self, sender: PeerId, beat: Heartbeat) -> bool:
        """Whether a fellow member is at a later ballot of our height, and nothing keeps us at ours."""
        if not self.in_view or self.attendance.part is not None or sender not in self.head.commit.view:
            return False
        return beat.height == self.head.commit.height and beat.ballot > self.ballot

    def _part_led_by(self, sender: PeerId, plan: bytes) -> Participation | None:
        """Our part in a plan, when `sender` is who made it."""
        part = self.attendance.part_in(plan)
        return part if part is not None and sender == self.follower.turn(part.plan.ballot) else None


def _refusal(error: RemoteError) -> Note:
    of = error.peer.hex() if error.peer else ""
    return Note("refused", {"error": type(error).__name__, "of": of, "reason": error.reason})
