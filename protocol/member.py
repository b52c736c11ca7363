"""The brain of one node: what it hears and what time it is go in, effects and reasons come out.

`Member` holds the head of the history, what it has promised and voted for (`Acceptor`: Paxos with a rotating proposer), this
node's part in the current round, and, when it is its turn, a `Proposer`. It does no IO and has no clock: the same object runs in
the daemon and in simulations. Messages it sends to itself are handled before a method returns.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import msgspec

from farflung.protocol import chain, patience, rhythm, standing
from farflung.protocol.acceptor import Acceptor
from farflung.protocol.chain import Certified, Commit, RoundResult
from farflung.protocol.effects import Apply, Effect, Expect, Forget, Note, RoundOver, Send
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
from farflung.protocol.quorum import proposer
from farflung.protocol.rhythm import Runner
from farflung.protocol.settings import GIVE_UP_S, MAX_BALLOT_STEP, REPAIR_S, RESEND_S, Settings

Standing = tuple[int, Certified, int, bytes] | tuple[()]
"""What decides who holds which state: news of others, the head, and the version and digest of our own."""


@dataclass(slots=True)
class Member:
    """One node's view of the swarm, and what it does about it. All times are seconds of one monotonic clock."""

    settings: Settings
    signer: Signer
    membership: Membership
    vitals: Callable[[], Heartbeat]
    """The node's current facts; what the machine itself knows (height, ballot, version, digest, state) is filled in here."""
    state: str = "joining"
    begins: Callable[[float], Mapping[int, PeerId]] = lambda now: {}
    """Stages of a pipeline to begin anew now, and by whom (`lost`); for whoever proposes in the chain of stage 0."""
    me: PeerId = field(init=False)
    follower: Follower = field(init=False)
    history: History = field(init=False)
    """The commits known."""
    started: bool = False
    """Whether any are."""
    in_view: bool = False
    """Whether the newest has us as a member."""
    acceptor: Acceptor = field(default_factory=Acceptor)
    ready: Ready | None = None
    ready_at: float = 0.0
    applied_height: int = -1
    """Height up to which the node's outer state really is."""
    applied_version: int = -1
    digest: bytes = b""
    """Digest of that state; empty while it is being computed or fetched."""
    part: Participation | None = None
    proposer: Proposer | None = None
    round_at: float = 0.0
    slot_at: float = 0.0
    reason: str = "starting"
    _promised_at: float = -1e9
    _beat_at: float = -1e9
    _no_quorum_since: float | None = None
    _repair: tuple[int, float] = (-1, 0.0)
    _over: set[bytes] = field(default_factory=set)
    """Plans of this height of which nothing can come: a late copy must not bring one back."""
    _contributing: bool = False
    """Whether a plan of this height has had us contribute."""
    _admitted: set[PeerId] = field(default_factory=set)
    _holders: tuple[Standing, tuple[PeerId, ...]] = ((), ())
    """Who held the outer state when things stood so."""
    _agreed: Standing = ()
    """How things stood when nobody's digest said that ours is wrong."""

    def __post_init__(self) -> None:
        self.me = self.signer.peer_id
        self.follower = Follower(self.settings, self.me)
        self.history = self.follower.history

    # ---- what others may read ----------------------------------------------------------------------------------

    @property
    def head(self) -> Certified:
        """The newest commit known. Raises IndexError before there is one: see `started`."""
        return self.history.head

    @property
    def ballot(self) -> int:
        """At which we are."""
        return self.acceptor.ballot

    def recent_rounds(self) -> list[RoundResult]:
        return self.history.recent_rounds()

    def usual_round_s(self) -> float:
        """From the plan of a round to its end, as of late; 0 before there was one."""
        recent = [r.seconds_ms / 1000.0 for r in self.recent_rounds()]
        return median(recent) if recent else 0.0

    def tokens_per_s(self, peer: PeerId) -> float:
        """How fast a peer trains, by its own word; 0 when it has not said."""
        if peer == self.me:
            return self.vitals().tokens_per_s
        beat = self.membership.heartbeat(peer)
        return 0.0 if beat is None else beat.tokens_per_s

    def runners(self, peers: Collection[PeerId], now: float) -> list[Runner]:
        """When those of `peers` that train from the newest state will be ready, by their own word."""
        found = self.membership.runners([p for p in peers if p != self.me], self.head.commit.version)
        beat = self.vitals()
        if self.me in peers and beat.tokens_per_s > 0.0:
            found.append(Runner(now + beat.ready_in_s, beat.tokens_per_s))
        return found

    def is_due(self, step_s: float, now: float) -> bool:
        """Whether we, between two inner steps of `step_s` seconds, should offer what we have: the fastest is about to have its H steps."""
        if not self.in_view:
            return False
        others = self.runners([p for p in self.head.commit.view if p != self.me], now)
        lap = self.settings.rhythm(self.head.commit.lap)
        return rhythm.is_due(lap, others, step_s=step_s, round_s=self.usual_round_s(), now=now)

    def holds(self, peer: PeerId) -> bool:
        """Whether a peer has the outer state of our head, or all it takes to get there by itself (`standing`)."""
        if peer == self.me:
            return bool(self.digest) and self.history.reaches(peer, self.applied_version)
        beat = self.membership.heartbeat(peer)
        return beat is not None and bool(beat.digest) and self.history.reaches(peer, beat.version)

    def holders(self) -> tuple[PeerId, ...]:
        """Live members that hold the outer state. Asked on every tick, and worked out when something has changed."""
        stands = self._stands()
        if self._holders[0] != stands:
            self._holders = (stands, tuple(p for p in self.membership.live(self.head.commit.view) if self.holds(p)))
        return self._holders[1]

    def _stands(self) -> Standing:
        return self.membership.news, self.head, self.applied_version, self.digest

    def leaves(self, peer: PeerId) -> bool:
        """Whether a member has said goodbye."""
        return self.state == "leaving" if peer == self.me else self.membership.leaves(peer)

    def joiners(self) -> tuple[PeerId, ...]:
        """Outsiders that hold exactly the state that we hold, and may become members."""
        if not self.digest or self.applied_height != self.head.commit.height:
            return ()
        return standing.joiners(self.membership, self.head.commit, self.digest, self._admitted)

    def newcomer_near(self) -> bool:
        """Whether somebody is about to have caught up with us."""
        return standing.nearly_there(self.membership, self.head.commit, self._admitted)

    def newcomer_downloads(self) -> bool:
        """Whether somebody fetches the outer state."""
        return standing.downloading(self.membership, {*self._admitted, *self.head.commit.view})

    def proposer_now(self) -> PeerId:
        """Whose turn it is at our ballot."""
        return proposer(self.settings.swarm, self.head.commit.view, self.head.commit.height + 1, self.ballot)

    def admitted(self, peer: PeerId) -> bool:
        """Whether a peer has shown that it may be here, to us or to a quorum."""
        if peer in self._admitted or peer in (self.me, self.settings.founder):
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
        effects = self._drop_plan(final=False)
        if self.ready is not None:
            effects.append(RoundOver(None, False, "the history went on without us"))
            self.ready = None
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
        self.ready, self.ready_at, self._no_quorum_since = ready, now, None
        return self._settle(self._promise(now), now)

    def withdraw(self, now: float) -> list[Effect]:
        """There is nothing to contribute after all."""
        if self.ready is None:
            return []
        self.ready = None
        return self._settle(self._promise(now), now)

    def contribution_arrived(self, plan: bytes, part: int, peer: PeerId, now: float) -> list[Effect]:
        """As an owner: a contributor's encoded part is here, whole."""
        if self.part is None or self.part.plan_id != plan:
            return []
        self.part.arrived(part, peer)
        return self._settle(self.part.report(self.membership, self.proposer_now(), now), now)

    def mean_held(self, plan: bytes, part: int, digest: bytes, now: float) -> list[Effect]:
        """The encoded mean of a part is here: made by us, sent by its owner, or fetched."""
        if self.part is None or self.part.plan_id != plan:
            return []
        self.part.hold(part, digest)
        return self._settle(self.part.show(self.proposer_now(), now), now)

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
        self.applied_height, self.applied_version, self.digest = height, version, digest
        self._beat_at = now
        effects = [*self._heartbeats(), *self._compare_digests(now)]
        if self.proposer is None and self.in_view and self.proposer_now() == self.me:
            effects += self._open(now)  # it was our turn all the time, but we could not vote
        return self._settle(effects, now)

    def lost_state(self, now: float) -> list[Effect]:
        """The node's outer state cannot be brought to the head's by itself: it has to be downloaded."""
        if not self.digest:
            return []
        self.applied_height, self.applied_version, self.digest = -1, -1, b""
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
            case Cut() if self._from_plans_proposer(sender, message.plan):
                assert self.part is not None
                effects += self.part.on_cut(sender, message.contributors)
            case Fetch() if self._from_plans_proposer(sender, message.plan):
                assert self.part is not None
                effects += self.part.on_fetch(message)
            case Abort() if self._from_plans_proposer(sender, message.plan):
                effects += self._drop_plan(final=True)
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
        self._admitted.add(sender)
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
        return effects + self._compare_digests(now)

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
        if not self._is_about_next(message.height, message.parent):
            return self.follower.help_along(sender, message.height, now)
        self.acceptor.check_near(message.ballot, sender)
        check_promise(message, self.head.commit, self.settings, sender)
        effects: list[Effect] = []
        if message.ballot > self.ballot and self.part is None:
            turn = proposer(self.settings.swarm, self.head.commit.view, message.height, message.ballot)
            if turn == self.me:
                effects += self._move_to(message.ballot, f"{short(sender)} asks us to lead", now)
        if self.proposer is not None and message.ballot == self.ballot:
            self.proposer.on_promise(sender, message, now)
        return effects

    def _on_plan(self, sender: PeerId, plan: Plan, now: float) -> list[Effect]:
        if not self._is_about_next(plan.height, plan.parent):
            return self.follower.help_along(sender, plan.height, now)
        view = self.head.commit.view
        if sender != proposer(self.settings.swarm, view, plan.height, plan.ballot):
            raise Refused(f"a plan for ballot {plan.ballot}, which is not its turn", peer=sender)
        self.acceptor.check_near(plan.ballot, sender)
        name = plan_id(self.settings.swarm, plan)
        if plan.ballot < self.ballot or name in self._over or (self.part is not None and self.part.plan_id == name):
            return []  # too late, or repeated
        check_plan(plan, self.head.commit, self.settings, self.me, self.ready, sender)
        # A second plan at one ballot says that the proposer has given the first up.
        effects = self._drop_plan(final=self.part is not None and self.part.plan.ballot == plan.ballot)
        if plan.ballot > self.ballot:
            effects += self._move_to(plan.ballot, "a plan of a higher ballot", now)
        self.part = Participation(name, plan, now, contributing=self.ready is not None)
        begun = self.part.begin(self.me)
        self._contributing |= self.part.contributing
        fields = {
            "round": plan.height,
            "ballot": plan.ballot,
            "proposer": sender.hex(),
            "members": [p.hex() for p in plan.members],
            "contributors": [c.peer.hex() for c in plan.contributors],
            "parts": len(plan.parts),
            "reason": plan.reason,
        }
        return [*effects, Note("round.plan", fields), Expect(name, plan), *begun]

    def _on_propose(self, sender: PeerId, message: Propose, now: float) -> list[Effect]:
        commit = message.commit
        if not self._is_about_next(commit.height, commit.parent):
            return self.follower.help_along(sender, commit.height, now)
        parent, rules = self.head.commit, self.settings
        if sender != proposer(rules.swarm, parent.view, commit.height, message.ballot):
            raise Refused(f"a proposal at ballot {message.ballot}, which is not its turn", peer=sender)
        if message.ballot < self.ballot:
            return []
        self.acceptor.check_alone(message, sender)
        self.acceptor.check_near(message.ballot, sender)
        chain.check_successor(rules.swarm, parent, commit, rules.rules, peer=sender)
        if self.part is not None:
            self.part.check_result(commit, sender)
        if not self.in_view:
            return []
        effects: list[Effect] = []
        if message.ballot > self.ballot:
            effects += self._move_to(message.ballot, "a proposal of a higher ballot", now)
        if not self.holds(self.me) or not any(self.holds(p) for p in commit.view):
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
        if self.part is not None or not self.started:
            return True
        if self.acceptor.ballot > 0 or self.acceptor.accepted is not None:
            return True
        return self.proposer is not None and self.proposer.busy

    def look_at(self) -> float:
        """When `tick` has something to do at the latest, as long as nothing comes in and we are not `busy`."""
        at = min(self._beat_at + self.membership.heartbeat_s, self.membership.look_at)
        return at if self.ready is None else min(at, self._promised_at + RESEND_S)

    def tick(self, now: float) -> list[Effect]:
        """Called several times a second while we are `busy`, and by `look_at`: heartbeats, repetitions, deadlines."""
        view = self.head.commit.view if self.started else ()
        effects = self.membership.tick(now, keep=view)
        if now >= self._beat_at + self.membership.heartbeat_s:
            self._beat_at = now
            effects += self._heartbeats()
        if not self.started:
            self.reason = "looking for a peer that knows the swarm's history"
            return self._settle(effects + self.follower.ask(standing.holders(self.membership), now), now)
        if self.in_view:
            reason = patience.why_next_ballot(self, now)
            if reason is not None:
                effects += self._move_to(self.ballot + 1, reason, now)
            if now >= self._promised_at + RESEND_S and (self.ready is not None or self.ballot > 0):
                effects += self._promise(now)
            effects += self._watch_quorum(now)
        if self.part is not None:
            effects += self.part.tick(self.membership, self.proposer_now(), now)
        if self.proposer is not None:
            effects += self.proposer.step(self, now)
            self.reason = self.proposer.reason
        elif not self.in_view:
            self.reason = "not a member yet"
        elif not self.holds(self.me):
            self.reason = "downloading the outer state; votes once it is here"
        elif not patience.holders_decide(self):
            self.reason = patience.why_no_quorum(self)
        else:
            self.reason = f"following {short(self.proposer_now())}"
        return self._settle(effects, now)

    def _watch_quorum(self, now: float) -> list[Effect]:
        """A ready member without a quorum trains on by itself after a while: its progress stays its own."""
        if self.ready is None or patience.holders_decide(self):
            self._no_quorum_since = None
            return []
        if self._no_quorum_since is None:
            self._no_quorum_since = now
        if now < self._no_quorum_since + GIVE_UP_S:
            return []
        self.ready, self._no_quorum_since = None, None
        reason = patience.why_no_quorum(self)
        return [*self._drop_plan(final=False), *self._promise(now), RoundOver(None, False, reason)]

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
        if self.proposer_now() == self.me and self.holds(self.me):
            self.proposer = Proposer(self.ballot, now)
        return self._promise(now)

    def _move_to(self, ballot: int, reason: str, now: float) -> list[Effect]:
        promise = self.acceptor.promise(self.head.commit.height + 1, ballot, reason)
        return [*self._drop_plan(final=False), *promise, *self._open(now)]

    def _promise(self, now: float) -> list[Effect]:
        if not self.in_view:
            return []
        self._promised_at = now
        head = self.head.commit
        parent = chain.commit_hash(self.settings.swarm, head)
        promise = Promise(head.height + 1, self.ballot, parent, self.acceptor.accepted, self.ready)
        return [Send(self.proposer_now(), promise)]

    def _advance(self, certified: Certified, now: float) -> list[Effect]:
        """The history moved by one."""
        commit = certified.commit
        was_member = self.in_view
        effects: list[Effect] = []
        part = self.part
        if part is not None and (commit.round is None or commit.round.plan != part.plan_id):
            effects += self._drop_plan(final=True)
        self.part = None
        self._over.clear()
        self.history.append(certified)
        self.in_view = self.me in commit.view
        self.acceptor = Acceptor()
        effects.append(Apply(certified))
        for peer in commit.view:
            self.membership.discover(peer, now)
        if commit.round is not None:
            self.round_at = now
            if self.ready is not None or self._contributing:
                contributed = any(c.peer == self.me for c in commit.round.contributors)
                reason = "committed" if contributed else self._why_missed(commit, part)
                effects.append(RoundOver(commit.round.plan, contributed, reason))
                self.ready = None
        self._contributing = False
        if was_member and self.me not in commit.view:
            effects.append(Note("view.dropped", {"reason": f"not in the view of height {commit.height}"}))
        return effects + self._open(now)

    def _why_missed(self, commit: Commit, part: Participation | None) -> str:
        assert commit.round is not None
        if self.ready is None:
            return "what we had sent for it was given up by us before it was planned anew"
        if part is None or part.plan_id != commit.round.plan:
            return "the plan of the round did not reach us in time"
        if not part.contributing:
            return "we were ready only after the round had been planned"
        return "left out at the cut: not every owner had received our contribution in time"

    def _drop_plan(self, *, final: bool) -> list[Effect]:
        """End our part in the round. `final`: nothing can come of it any more, so what we hold of it is not needed either."""
        if self.part is None:
            return []
        plan, self.part = self.part.plan_id, None
        if final:
            self._over.add(plan)
        return [Forget(plan, final)]

    def _heartbeat(self, *, reply: bool = False) -> Heartbeat:
        return msgspec.structs.replace(
            self.vitals(),
            height=self.head.commit.height if self.started else 0,
            ballot=self.ballot,
            version=max(self.applied_version, 0),
            digest=self.digest,
            state=self.state,
            reply=reply,
        )

    def _heartbeats(self) -> list[Effect]:
        beat = self._heartbeat()
        return [Send(p, beat) for p in self.membership.known()]

    def _compare_digests(self, now: float) -> list[Effect]:
        version, asked_at = self._repair
        if not self.digest or not self.started or (version == self.applied_version and now < asked_at + REPAIR_S):
            return []
        stands = self._stands()
        if stands == self._agreed:
            return []
        repair = standing.disagreement(self.membership, self.head.commit, self.me, self.applied_version, self.digest)
        if repair is None:
            self._agreed = stands
            return []
        self._repair = (self.applied_version, now)
        return [repair]

    def _is_ahead(self, sender: PeerId, beat: Heartbeat) -> bool:
        """Whether a fellow member is at a later ballot of our height, and nothing keeps us at ours."""
        if not self.in_view or self.part is not None or sender not in self.head.commit.view:
            return False
        return beat.height == self.head.commit.height and beat.ballot > self.ballot

    def _is_about_next(self, height: int, parent: bytes) -> bool:
        head = self.head.commit
        return height == head.height + 1 and parent == chain.commit_hash(self.settings.swarm, head)

    def _from_plans_proposer(self, sender: PeerId, plan: bytes) -> bool:
        if self.part is None or self.part.plan_id != plan:
            return False
        return sender == proposer(
            self.settings.swarm, self.head.commit.view, self.part.plan.height, self.part.plan.ballot
        )


def _refusal(error: RemoteError) -> Note:
    of = error.peer.hex() if error.peer else ""
    return Note("refused", {"error": type(error).__name__, "of": of, "reason": error.reason})
