"""The brain of one node: what it hears and what time it is go in, effects and reasons come out.

`Member` lets in who may speak, hands what is said to whoever keeps the books of it, and says what is to be said of itself. Its parts are
who is there (`Membership`), the chain as far as we know it (`Follower`), who holds the outer state (`Standing`), how fast everybody is (`Tempo`),
what we offer to rounds (`Attendance`), and deciding the next commit (`Consensus`). It does no IO and has no clock: the same object runs in the
daemon and in simulations. Messages it sends to itself are handled before a method returns.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from farflung.protocol import chain
from farflung.protocol.attendance import Attendance
from farflung.protocol.chain import Certified, Commit, Half
from farflung.protocol.consensus import Consensus
from farflung.protocol.effects import Apply, Effect, Note, Refusal, Send
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.follower import Follower
from farflung.protocol.greeting import Basis, Greeting
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId, Signer
from farflung.protocol.limits import MAX_PIPELINE_PEERS
from farflung.protocol.membership import Membership
from farflung.protocol.messages import (
    Commits,
    Committed,
    Forward,
    GetCommits,
    Goodbye,
    Heartbeat,
    Message,
    Opinion,
    Probe,
    Ready,
)
from farflung.protocol.neighbours import Found, Neighbours, smallest_group
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import RESEND_S, Settings
from farflung.protocol.standing import Standing
from farflung.protocol.tempo import Tempo
from farflung.protocol.types import as_text
from farflung.protocol.waiting import ASKED, Waiting


@dataclass(slots=True)
class Member:
    """One node's view of the swarm, and what it does about it. All times are seconds of one monotonic clock."""

    settings: Settings
    signer: Signer
    membership: Membership
    vitals: Callable[[], Heartbeat]
    """The node's current facts; what the machine itself knows (height, ballot, version, digest, state, pace) is filled in here."""
    me: PeerId = field(init=False)
    follower: Follower = field(init=False)
    standing: Standing = field(init=False)
    tempo: Tempo = field(init=False)
    attendance: Attendance = field(init=False)
    consensus: Consensus = field(init=False)
    neighbours: Neighbours = field(default_factory=Neighbours)
    waiting: Waiting = field(init=False)
    _has_looked: bool = False
    """For a group, when there were some to choose from: if it does not answer, any is good."""
    reason: str = "starting"
    """Why nothing happens, or what does: a sentence for people."""
    greeting: Greeting = field(init=False)

    def __post_init__(self) -> None:
        self.me = self.signer.peer_id
        self.greeting = Greeting(self.membership)
        self.follower = Follower(self.settings, self.me)
        self.waiting = Waiting(self.settings.vain_s)
        self.standing = Standing(self.membership, self.history)
        self.tempo = Tempo(self.settings, self.membership, self.history, self.vitals)
        self.attendance = Attendance(self.me)
        self.consensus = Consensus(
            self.settings,
            self.signer,
            self.membership,
            self.follower,
            self.standing,
            self.tempo,
            self.attendance,
        )

    # ---- what others may read ----------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """The commits known."""
        return self.follower.history

    @property
    def started(self) -> bool:
        """Whether any are."""
        return self.follower.history.newest is not None

    @property
    def head(self) -> Certified:
        """The newest of them. Raises IndexError before there is one."""
        return self.follower.history.head

    @property
    def in_view(self) -> bool:
        """Whether that has us as a member."""
        return self.follower.in_view

    @property
    def group(self) -> bytes:
        """Whose history we follow; empty of the first group, and before there is any."""
        return self.head.commit.group if self.started else b""

    def is_due(self, step_s: float, now: float) -> bool:
        """Whether we, between two inner steps of `step_s` seconds, should offer what we have (`rhythm`)."""
        return self.in_view and self.tempo.is_due(step_s, now)

    def waits_in_vain(self, now: float) -> bool:
        """Whether it is time to begin anew with another group (`waiting`)."""
        return self.started and self.waiting.in_vain(now)

    def any_behind(self, version: int) -> bool:
        """Whether a fellow member that lives is not at this version of the outer state yet, as far as we know."""
        beats = [self.membership.heartbeat(p) for p in self.membership.live(self._view) if p != self.me]
        return any(beat is None or beat.version < version for beat in beats)

    def admitted(self, peer: PeerId) -> bool:
        """Whether a peer has shown that it may be here, to us or to a quorum."""
        return peer in self.standing.admitted or peer in (self.me, self.settings.founder) or self._is_member(peer)

    def check_admitted(self, sender: PeerId, message: Message) -> None:
        """Raise Refused naming `sender` unless it may say that: it has shown that it may be here, or does so now."""
        if self.admitted(sender) or (sender in self.neighbours.shown and isinstance(message, (GetCommits, Probe))):
            return
        if not isinstance(message, Heartbeat):
            raise Refused(f"{type(message).__name__} before being admitted to the swarm", peer=sender)
        if not self.settings.admits(sender, message.admission):
            raise Refused("no invitation to this swarm", peer=sender)

    @property
    def _view(self) -> tuple[PeerId, ...]:
        return self.head.commit.view if self.started else ()

    def _is_member(self, peer: PeerId) -> bool:
        return peer in self._view

    def _is_stranger(self, peer: PeerId) -> bool:
        return not (peer in self.membership.peers or self._is_member(peer))

    def passes_on(self, message: Forward) -> bool:
        """Whether to, when a member asks. Nobody answers: what does not arrive is said again, by way of another."""
        return message.to != self.me and self.membership.heard_by(message.to)

    # ---- the node's own news -----------------------------------------------------------------------------------

    def recall(self, votes: Iterable[SavedVote]) -> None:
        """What was promised and voted for before a restart. It counts from the first message on, so that a restarted member never says two things at one ballot."""
        self.consensus.recall(votes)

    def begin(self, anchor: Commit | None, history: Iterable[Certified], now: float) -> list[Effect]:
        """Start from a history: the genesis, what was saved, or what a donor sent (checked before)."""
        effects = [*self.attendance.drop(final=False), *self.attendance.give_up("the history went on without us")]
        self.history.replace(anchor, history)
        self.waiting.begin(now, had_a_place=self.consensus.has_voted_after(self.group, self.head.commit.height))
        for peer in self.head.commit.view:
            self.membership.expect(peer, now)
        self.follower.elsewhere.clear()
        if self.head.commit.half is not None:
            self._part(self.head.commit, self.head.commit.half)
        for peer, beat in self.membership.said():
            if self._is_elsewhere(peer, beat) and not self._is_member(peer):
                self._goes_by(peer, beat.group)
        return self._settle(effects + self.consensus.begin(now), now)

    def set_ready(self, ready: Ready, now: float) -> list[Effect]:
        """Local progress may go into a round; training stands until RoundOver."""
        head = self.head.commit
        self.attendance.offer(ready, head, [p for p in head.view if self.membership.unheard(p)], now)
        return self._settle(self.consensus.promise(now), now)

    def withdraw(self, now: float) -> list[Effect]:
        """There is nothing to contribute after all."""
        if self.attendance.ready is None:
            return []
        self.attendance.ready = None
        return self._settle(self.consensus.promise(now), now)

    def contribution_arrived(self, plan: bytes, part: int, peer: PeerId, now: float) -> list[Effect]:
        """As an owner: a contributor's encoded part is here, whole."""
        attended = self.attendance.part_in(plan)
        if attended is None:
            return []
        effects = attended.arrived(part, peer)
        return self._settle(effects + attended.report(self.membership, self.consensus.proposer_now(), now), now)

    def mean_held(self, plan: bytes, part: int, digest: bytes, now: float, *, early: bool = False) -> list[Effect]:
        """The encoded mean of a part is here: made by us, sent by its owner, or fetched. `early`: see `participation`."""
        attended = self.attendance.part_in(plan)
        if attended is None:
            return []
        attended.hold(part, digest, early=early)
        return self._settle(attended.show(self.consensus.proposer_now(), now), now)

    def unreachable(self, peer: PeerId, reason: str, now: float) -> list[Effect]:
        """A connection to a peer broke or could not be made."""
        return self._settle(self.membership.unreachable(peer, now, reason), now)

    def discovered(self, peers: Iterable[PeerId], now: float) -> list[Effect]:
        """Records or caches mention peers: all whom we did not know are greeted."""
        if new := [peer for peer in peers if self.membership.discover(peer, now)]:
            beat = self._heartbeat()
            return self._settle([Send(peer, beat) for peer in new], now)
        return []

    def found(self, peers: Found, now: float) -> list[Effect]:
        """Records tell of peers. Who is of another group than we is somebody to meet; and who is of none yet begins with the smallest that there is, so that groups
        that have lost members win some."""
        smallest = None if self.started or self._has_looked else smallest_group(peers, self.waiting.avoids)
        self._has_looked = self._has_looked or any(group is not None for group in peers.values())
        ours = self.group if self.started else smallest
        fellows = [peer for peer, group in peers.items() if group is None and self._is_stranger(peer)]
        greeted = fellows[: self.membership.fellows_wanted(self._view)]
        for peer, group in peers.items():
            if self._is_member(peer) or (group is not None and ours in (None, group)):
                greeted.append(peer)
            elif group is not None and self.started:
                self.neighbours.note(peer, group)
        return self.discovered(greeted, now)

    def applied(self, height: int, version: int, digest: bytes, now: float) -> list[Effect]:
        """The node's outer state now is that of `height`; everybody is told its digest."""
        self.standing.applied(height, version, digest)
        effects = [*self._greet(now), *self.standing.compare(now), *self.consensus.state_came(now)]
        return self._settle(effects, now)

    def lost_state(self, now: float) -> list[Effect]:
        """The node's outer state cannot be brought to the head's by itself: it has to be downloaded."""
        if not self.standing.digest:
            return []
        self.standing.lost()
        self.consensus.state_went()
        return self._settle(self._greet(now), now)

    def leave(self, reason: str) -> list[Effect]:
        return [way for p in self.membership.known() for way in self._ways_of(Send(p, Goodbye(as_text(reason))))]

    # ---- what others say ---------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Message, now: float, *, via: PeerId | None = None) -> list[Effect]:
        """Handle a verified message of another. `via`: who has passed it on. Raises RemoteError, having changed nothing, when it breaks a rule."""
        if sender == self.me:
            raise Refused("a message in our own name", peer=via if via is not None else sender)
        self.check_admitted(sender, message)
        effects = self._settle(self._receive(sender, message, now, via), now)
        if self.greeting.rests:
            self.greeting.stir(now, self._basis if isinstance(message, Heartbeat) else None)
        return effects

    def _receive(self, sender: PeerId, message: Message, now: float, via: PeerId | None = None) -> list[Effect]:
        if isinstance(message, Heartbeat):
            return self._on_heartbeat(sender, message, now, via)
        effects: list[Effect] = []
        match message:
            case Forward() if via is not None:
                raise Refused("passes on what was for itself", peer=via)
            case Forward():
                pass  # whoever has the messages themselves does (`passes_on`)
            case Goodbye():
                effects += self.membership.goodbye(sender, now)
            case Probe():
                effects += self.membership.answer(sender, message.target, now)
            case Opinion():
                self.membership.opinion(sender, message.target, message.age_s, now)
            case GetCommits():
                effects += self.follower.answer(sender, message.after)
            case Commits():
                effects += self._on_commits(sender, message, now)
            case Committed():
                effects += self._on_committed(sender, message.certified, now)
            case _ if not self.started:
                pass  # rounds mean nothing to somebody who has no history yet
            case _:
                effects += self.consensus.receive(sender, message, now)
        # Only now: a message that is refused says nothing, not even that its sender lives. And who is of another group is not heard: it may have told us of the division.
        if sender != self.me and sender not in self.neighbours.groups and sender not in self.follower.elsewhere:
            effects = [*self._heard(sender, now, via), *effects]
        return effects + self.consensus.step(now)

    def _heard(self, sender: PeerId, now: float, via: PeerId | None, beat: Heartbeat | None = None) -> list[Effect]:
        hear = self.membership.heard if via is None else self.membership.told
        return hear(sender, now, beat)

    def _on_heartbeat(self, sender: PeerId, beat: Heartbeat, now: float, via: PeerId | None) -> list[Effect]:
        if via is not None and self.membership.direct(sender):
            return []  # no news: we hear it ourselves
        is_stranger = self._is_stranger(sender)
        if self.membership.is_full and is_stranger:
            raise Refused(f"more than {MAX_PIPELINE_PEERS} peers at once", peer=sender)
        self.standing.admitted.add(sender)
        if self._is_elsewhere(sender, beat):
            return self._of_another_group(sender, beat, now)
        self.neighbours.forget(sender)
        self.follower.elsewhere.discard(sender)
        if is_stranger and not beat.digest and not self.membership.fellows_wanted(self._view):
            return []
        known = self.membership.news
        effects = self._heard(sender, now, via, beat)
        is_news = any(isinstance(e, Note) for e in effects)
        is_rare = self.greeting.every_s > self.membership.heartbeat_s
        is_back = is_rare and beat.state == "joining" and self._is_member(sender)
        if not beat.reply and (is_news or is_back):
            effects.append(Send(sender, self._heartbeat(reply=True)))  # news to us, so perhaps we are news to it
        knows = beat.height > self.head.commit.height if self.started else not self.waiting.shuns(beat.group, now)
        if beat.digest and knows:
            effects += self.follower.ask([sender], now)
        effects += self.consensus.follow(sender, beat, now)
        if self.membership.news != known:
            effects += self.consensus.step(now)
        return effects + self.standing.compare(now)

    def _is_elsewhere(self, sender: PeerId, beat: Heartbeat) -> bool:
        """Whether a peer is of another group. One that has no state is of none yet; and a member that has not heard yet how our group came to be is of it all the same."""
        if not self.started or not beat.digest or beat.group == self.group:
            return False
        lags = beat.height < self.head.commit.height and beat.group == self.history.came_from
        return not (lags and self._is_member(sender))

    def _of_another_group(self, sender: PeerId, beat: Heartbeat, now: float) -> list[Effect]:
        """It is not to be greeted, nor counted on: a member that has gone to another group, for it had lost its place here, is silent to us. But perhaps it is we who
        have not heard how the group became two; or it that has not heard where we are."""
        self.waiting.heard(beat.group, beat.height, now)
        if not self._is_member(sender):
            self._goes_by(sender, beat.group)
            return [] if beat.reply else [Send(sender, self._heartbeat(reply=True))]
        if beat.height <= self.head.commit.height:
            return []
        self.follower.elsewhere.add(sender)
        return self.follower.ask([sender], now)

    def _goes_by(self, peer: PeerId, group: bytes, *, own_word: bool = True) -> None:
        """A peer that has shown that it may be here is of another group."""
        self.membership.forget(peer)
        self.neighbours.note(peer, group, shown=True, own_word=own_word)

    def _on_commits(self, sender: PeerId, message: Commits, now: float) -> list[Effect]:
        if not message.chain:
            return []
        if not self.started or message.chain[0].commit.height > self.follower.height + 1:
            jump = self.follower.jump(sender, message, self.membership, now)
            if jump is None:
                return []
            # Whoever tells it may be of the other half, where it ends with a division.
            links = (*message.chain[:-1], self._our_side(message.chain[-1]))
            begun = self.begin(message.anchor, links, now)
            return [jump, *begun, Apply(links[0], message.anchor), *(Apply(c) for c in links[1:])]
        effects: list[Effect] = []
        for certified in message.chain:
            try:
                if certified.commit.height == self.head.commit.height + 1:
                    effects += self._on_committed(sender, certified, now)
                    if self.head.commit.group != certified.commit.group:
                        break  # what follows is the other half's
            except RemoteError as error:  # what came before it in the same message stands
                return [*effects, Refusal(error)]
        return effects

    def _on_committed(self, sender: PeerId, certified: Certified, now: float) -> list[Effect]:
        if not self.started or certified.commit.height > self.head.commit.height + 1:
            return self.follower.ask([sender], now)
        if certified.commit.height <= self.head.commit.height:
            return []
        self.follower.check_next(sender, certified)
        return self._advance(certified, now)

    # ---- time --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is under way whose deadlines are short: a round, a ballot, a change of view, the search for a history."""
        return not self.started or self.consensus.busy

    def look_at(self) -> float:
        """When `tick` has something to do at the latest, as long as nothing comes in and we are not `busy`."""
        at = min(self.greeting.due_at, self.membership.look_at)
        promises = self.attendance.ready is not None and self.consensus.has_say
        return min(at, self.consensus.promised_at + RESEND_S) if promises else at

    def tick(self, now: float) -> list[Effect]:
        """Called several times a second while we are `busy`, and by `look_at`: heartbeats, repetitions, deadlines."""
        effects = self.membership.tick(now, keep=self._view)
        divided = self.started and bool(self.head.commit.ledger.shares)
        self.waiting.look(now, in_view=self.in_view, takes=not self.started or self.consensus.goes_on, divided=divided)
        if len(self.standing.admitted) > len(self.membership.peers):
            self.standing.admitted &= self.membership.peers.keys()  # who was forgotten shows again that it may be here
        if self.greeting.look(now, self._basis):
            effects += self._greet(now)
        if not self.started:
            self.reason = "looking for a peer that knows the swarm's history"
            said = {p: self.membership.heartbeat(p) for p in self.standing.donors()}
            donors = [p for p, beat in said.items() if beat is None or not self.waiting.shuns(beat.group, now)]
            return self._settle(effects + self.follower.ask(donors, now), now)
        ballot = self.consensus.ballot
        effects += self.consensus.tick(now)
        if self.consensus.ballot != ballot:
            effects += self._greet(now)  # it was our decision: the others would hear of it with the next heartbeat only
        self.reason = self.consensus.reason() + self.waiting.outlook(now)
        return self._settle(effects, now)

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
                    answer = [Refusal(error)]
                queue.extendleft(reversed(answer))
            elif isinstance(effect, Send) and effect.via is None:
                out += self._ways_of(effect)
            else:
                out.append(effect)
        return out

    def _ways_of(self, send: Send) -> list[Effect]:
        """As it is, or by way of another; a heartbeat both, to see whether there is a way now."""
        via = self.membership.way_to(send.to)
        if via is None:
            return [send]
        detour = msgspec.structs.replace(send, via=via)
        return [send, detour] if isinstance(send.message, Heartbeat) else [detour]

    def _advance(self, certified: Certified, now: float) -> list[Effect]:
        """The history moved by one."""
        certified = self._our_side(certified)
        commit = certified.commit
        was_member = self.in_view
        effects = self.attendance.drop_unless(commit)
        self.history.append(certified)
        effects.append(Apply(certified))
        for peer in commit.view:
            self.membership.expect(peer, now)
            self.neighbours.forget(peer)
        if commit.half is not None:
            other = self._part(commit, commit.half)
            view, others = [p.hex() for p in commit.view], [p.hex() for p in commit.half.view]
            names = {"group": commit.group.hex(), "other": other.hex()}
            effects.append(Note("group.divided", names | {"view": view, "others": others}))
        effects += self.attendance.conclude(commit)
        if was_member and not self.in_view:
            effects.append(Note("view.dropped", {"reason": f"not in the view of height {commit.height}"}))
        return effects + self.consensus.next_height(now)

    def _our_side(self, certified: Certified) -> Certified:
        """Where the group becomes two, the commit as our half sees it."""
        commit = chain.as_decided(certified.commit)
        ours = chain.turned(self.settings.swarm, commit) if chain.goes(commit, self.me) else commit
        return msgspec.structs.replace(certified, commit=ours)

    def _part(self, commit: Commit, half: Half) -> bytes:
        """Our group has become two: who is of the other is of it from now on. Returns its name."""
        theirs = half.group if half.turned else chain.turned(self.settings.swarm, commit).group
        for peer in half.view:
            self._goes_by(peer, theirs, own_word=False)
        return theirs

    def _heartbeat(self, *, reply: bool = False) -> Heartbeat:
        return msgspec.structs.replace(
            self.vitals(),
            height=self.head.commit.height if self.started else 0,
            ballot=self.consensus.ballot,
            version=max(self.standing.applied_version, 0),
            digest=self.standing.digest,
            state=self.membership.state,
            every_s=self.greeting.every_s,
            reply=reply,
            deaf_to=self.membership.deaf_to(),
            group=self.group,
        )

    @property
    def _basis(self) -> Basis:
        said = (self.consensus.ballot, self.standing.applied_version, self.standing.digest, self.membership.state)
        return *said, self.history.head if self.started else None, self.membership.news, len(self.membership.peers)

    def _greet(self, now: float) -> list[Effect]:
        """A heartbeat to everybody."""
        self.greeting.begin(now)
        beat = self._heartbeat()
        others = self.neighbours.some(ASKED) if self.waiting.asks else ()
        greeted = self.greeting.to(beat, now, self._basis, settled=self.standing.is_calm and not self.waiting.asks)
        return [*greeted, *(Send(p, beat) for p in others)]
