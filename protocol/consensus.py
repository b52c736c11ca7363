"""How one member helps to decide the next commit: Paxos with a rotating proposer, and the round that the commit may hold.

At each height members begin at ballot 0. The proposer of a ballot follows from the chain (`quorum.proposer`); members promise it not to vote below, tell
it what they have ready and what they have voted for (`Acceptor`), take part in what it plans (`Attendance`), and vote for what it proposes. Whose turn it
is runs a `Proposer`. When nothing comes of a ballot, and `patience` says when, members move to the next.

Only who holds the outer state leads or votes (`standing`). Messages are about the next height: whoever is behind is helped along by the `Follower`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from farflung.protocol import chain, patience
from farflung.protocol.acceptor import Acceptor
from farflung.protocol.accord import Word
from farflung.protocol.attendance import Attendance
from farflung.protocol.chain import Certified
from farflung.protocol.effects import Effect, Send
from farflung.protocol.errors import Refused
from farflung.protocol.follower import Follower
from farflung.protocol.keys import PeerId, Signer, short, verify
from farflung.protocol.membership import Membership
from farflung.protocol.messages import (
    Abort,
    Collected,
    Cut,
    Fetch,
    Heartbeat,
    Held,
    Message,
    Plan,
    Promise,
    Propose,
    Voted,
)
from farflung.protocol.participation import Participation, check_plan, check_promise
from farflung.protocol.proposer import Proposer, plan_id
from farflung.protocol.quorum import is_quorum
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import MAX_BALLOT_STEP, RESEND_S, Settings
from farflung.protocol.standing import Standing
from farflung.protocol.tempo import Tempo


@dataclass(slots=True)
class Consensus:
    """See the module. Before there is a history it does nothing, and nobody may ask it to `receive`. Times are seconds of one monotonic clock."""

    settings: Settings
    signer: Signer
    membership: Membership
    follower: Follower
    standing: Standing
    tempo: Tempo
    attendance: Attendance
    begins: Callable[[float], Mapping[int, PeerId]] = lambda now: {}
    """Stages of a pipeline to begin anew now, and by whom (`lost`); for whoever proposes in the chain of stage 0."""
    says: Callable[[float], Word | None] = lambda now: None
    """What our stage's chain is to say of lives from now on, where stages decide together; None: nothing new (`accord`)."""
    acceptor: Acceptor = field(default_factory=Acceptor)
    _saved: dict[bytes, SavedVote] = field(default_factory=dict)
    """The newest of each group."""
    proposer: Proposer | None = None
    """When it is our turn, and we hold the state."""
    round_at: float = 0.0
    """When the last round was committed here."""
    slot_at: float = 0.0
    """When the height or ballot was opened."""
    promised_at: float = -1e9
    """When we last told the proposer where we stand."""

    @property
    def me(self) -> PeerId:
        return self.follower.me

    @property
    def head(self) -> Certified:
        return self.follower.history.head

    @property
    def ballot(self) -> int:
        """At which we are."""
        return self.acceptor.ballot

    def turn(self, ballot: int) -> PeerId:
        """Whose it is at a ballot."""
        return self.follower.turn(ballot)

    def proposer_now(self) -> PeerId:
        """Whose turn it is at our ballot."""
        return self.turn(self.ballot)

    @property
    def busy(self) -> bool:
        """Whether anything is under way whose deadlines are short: a round, a ballot, a change of view."""
        if self.attendance.part is not None or self.acceptor.ballot > 0 or self.acceptor.accepted is not None:
            return True
        return self.proposer is not None and self.proposer.busy

    @property
    def has_quorum(self) -> bool:
        """Whether the live members that hold the outer state can decide anything."""
        return self.standing.decides

    @property
    def goes_on(self) -> bool:
        """Whether the group can decide: together with us, where we have a place, and to take us in, where we have none."""
        if self.follower.in_view:
            return self.has_quorum and not self.lags
        head = self.head.commit
        return is_quorum(head.view, self.membership.live(head.view)) and self.settings.rules.has_room(head)

    def reason(self) -> str:
        """Why nothing happens, or what does: a sentence for people."""
        in_view = self.follower.in_view
        if not self.has_quorum:
            return ("" if in_view else "not a member yet; ") + patience.why_no_quorum(self)
        if not in_view:
            most, members = self.settings.rules.max_group, len(self.head.commit.view)
            return (
                "not a member yet"
                if members < most
                else f"all {most} places of members are taken: this node takes the next free one"
            )
        if self.lags:
            return "waiting for the others' history: this node has voted for what follows after it"
        if not self.standing.holds(self.me):
            return "downloading the outer state; votes once it is here"
        if self.proposer is not None:
            return self.proposer.reason
        return f"following {short(self.proposer_now())}"

    # ---- heights and ballots -----------------------------------------------------------------------------------

    def recall(self, votes: Iterable[SavedVote]) -> None:
        """What was promised and voted for before a restart."""
        self._saved |= {vote.group: vote for vote in votes}

    def has_voted_after(self, group: bytes, height: int) -> bool:
        """Or promised anything, on what follows after this height of a group: so it has, or had, a place that a history up to there may not show."""
        vote = self._saved.get(group)
        return vote is not None and vote.height > height

    def begin(self, now: float) -> list[Effect]:
        """The history is another one."""
        self.round_at = now
        return self._next_acceptor(now)

    def next_height(self, now: float) -> list[Effect]:
        """The history has moved by one."""
        if self.head.commit.round is not None:
            self.round_at = now
        return self._next_acceptor(now)

    def _next_acceptor(self, now: float) -> list[Effect]:
        if self.acceptor.ballot > 0 or self.acceptor.accepted is not None:
            self._saved[self.acceptor.group] = self.acceptor.saved
        head = self.head.commit
        self.acceptor = Acceptor(head.height + 1, head.group)
        saved = self._saved.get(head.group)
        if saved is not None and saved.height == head.height + 1:
            self.acceptor = Acceptor(saved.height, saved.group, saved.ballot, saved.accepted)
        return self._open(now)

    @property
    def has_say(self) -> bool:
        """Whether to promise, propose and vote."""
        return self.follower.in_view and not self.lags

    @property
    def lags(self) -> bool:
        """Whether our disk says that we have voted at a later height: those before it are decided, by a history that we have lost, and not to be decided once more. Others
        bring it."""
        saved = self._saved.get(self.acceptor.group)
        return saved is not None and saved.height > self.acceptor.height

    def _open(self, now: float) -> list[Effect]:
        """A new height or ballot: lead it when it is our turn, and tell the proposer where we stand."""
        self.slot_at = now
        self.proposer = None
        if not self.has_say:
            return []
        if self.proposer_now() == self.me and self.standing.holds(self.me):
            self.proposer = Proposer(self.ballot, now)
        return self.promise(now)

    def _move_to(self, ballot: int, reason: str, now: float) -> list[Effect]:
        promise = self.acceptor.promise(ballot, reason)
        return [*self.attendance.drop(final=False), *promise, *self._open(now)]

    def promise(self, now: float) -> list[Effect]:
        """Tell the proposer at which ballot we are, what we have voted for, and what we offer."""
        if not self.has_say:
            return []
        self.promised_at = now
        height, parent = self.head.commit.height + 1, self.follower.head_hash()
        promise = Promise(height, self.ballot, parent, self.acceptor.accepted, self.attendance.ready)
        return [Send(self.proposer_now(), promise)]

    def state_came(self, now: float) -> list[Effect]:
        """We hold the outer state: perhaps it was our turn all the time, but we could not vote."""
        if self.proposer is None and self.has_say and self.proposer_now() == self.me:
            return self._open(now)
        return []

    def state_went(self) -> None:
        """We do not hold the outer state any more."""
        self.proposer = None

    # ---- what others say ---------------------------------------------------------------------------------------

    def follow(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Effect]:
        """Go to where a fellow member is, when it is at a later ballot of our height and nothing keeps us at ours."""
        if not self.has_say or self.attendance.part is not None or sender not in self.head.commit.view:
            return []
        if beat.height != self.head.commit.height or beat.ballot <= self.ballot:
            return []
        ballot = min(beat.ballot, self.ballot + MAX_BALLOT_STEP)
        return self._move_to(ballot, f"{short(sender)} is at ballot {beat.ballot}", now)

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Handle a message about deciding. Raises RemoteError, having changed nothing, when it breaks a rule."""
        match message:
            case Promise():
                return self._on_promise(sender, message, now)
            case Plan():
                return self._on_plan(sender, message, now)
            case Propose():
                return self._on_propose(sender, message, now)
            case Voted():
                self._on_voted(sender, message)
            case Collected() if self.proposer is not None:
                self.proposer.on_collected(sender, message)
            case Held() if self.proposer is not None:
                self.proposer.on_held(sender, message)
            case Cut() if (part := self._part_led_by(sender, message.plan)) is not None:
                effects = part.on_cut(sender, message.contributors)
                return effects + part.show(self.proposer_now(), now) if part.complete else effects
            case Fetch() if (part := self._part_led_by(sender, message.plan)) is not None:
                return part.on_fetch(message)
            case Abort() if self._part_led_by(sender, message.plan) is not None:
                return [*self.attendance.drop(final=True), *self.promise(now)]
            case _:
                pass  # Collected, Held, Cut, Fetch or Abort of a plan that is over
        return []

    def _on_promise(self, sender: PeerId, message: Promise, now: float) -> list[Effect]:
        if not self.follower.leads_to(message.height, message.parent):
            return self.follower.help_along(sender, message.height, now)
        self.acceptor.check_near(message.ballot, sender)
        check_promise(message, self.head.commit, self.settings, sender)
        effects: list[Effect] = []
        if message.ballot > self.ballot and self.attendance.part is None:
            if self.follower.turn(message.ballot) == self.me and self.has_say:
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
        if plan.ballot < self.ballot or self.attendance.has_seen(name) or self.lags:
            return []  # too late, or repeated, or not for us
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
        if not self.has_say:
            return []
        effects: list[Effect] = []
        if message.ballot > self.ballot:
            effects += self._move_to(message.ballot, "a proposal of a higher ballot", now)
        halves = (commit.view,) if commit.half is None else (commit.view, commit.half.view)
        if not self.standing.holds(self.me) or not all(any(map(self.standing.holds, half)) for half in halves):
            return effects
        return effects + self.acceptor.vote(message, sender, swarm=rules.swarm, signer=self.signer, now=now)

    def _on_voted(self, sender: PeerId, message: Voted) -> None:
        if self.proposer is None or message.height != self.head.commit.height + 1 or message.ballot != self.ballot:
            return
        signed = chain.vote_bytes(self.settings.swarm, message.height, message.ballot, message.digest)
        verify(sender, message.signature, signed)
        self.proposer.on_voted(sender, message, self.settings.swarm)

    def _part_led_by(self, sender: PeerId, plan: bytes) -> Participation | None:
        """Our part in a plan, when `sender` is who made it."""
        part = self.attendance.part_in(plan)
        return part if part is not None and sender == self.follower.turn(part.plan.ballot) else None

    # ---- time --------------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Effect]:
        """Something was heard: what the proposer, if we are, makes of it."""
        return [] if self.proposer is None else self.proposer.step(self, now)

    def tick(self, now: float) -> list[Effect]:
        """Deadlines and repetitions."""
        effects: list[Effect] = []
        if self.has_say:
            reason = patience.why_next_ballot(self, now)
            if reason is not None:
                effects += self._move_to(self.ballot + 1, reason, now)
            if now >= self.promised_at + RESEND_S and (self.attendance.ready is not None or self.ballot > 0):
                effects += self.promise(now)
        if self.follower.in_view:
            effects += self._watch_quorum(now)
        if self.attendance.part is not None:
            effects += self.attendance.part.tick(self.membership, self.proposer_now(), now)
        return effects + self.step(now)

    def _watch_quorum(self, now: float) -> list[Effect]:
        """A ready member without a quorum trains on by itself after a while: its progress stays its own."""
        if not self.attendance.waits_in_vain(quorum=self.has_quorum, now=now):
            return []
        over = self.attendance.give_up(patience.why_no_quorum(self))
        return [*self.attendance.drop(final=False), *self.promise(now), *over]
