"""Who is there: heartbeats, suspicion, and a second opinion before anybody is called dead.

A cut link shows only after 30 to 60 s in the engines, so liveness is ours. A peer that was silent for a few heartbeats, or
to which a connection just broke, is *suspect*. Half-way to the verdict, others are asked when they last heard from it; only if nobody
has heard from it since the suspicion began is it *dead* (as SWIM's indirect probe, Das et al. 2002). A peer that others hear is merely
unreachable from here. All of this is one node's opinion: what the swarm decides, it decides by votes.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Protocol

from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.keys import PeerId, short
from farflung.protocol.limits import MAX_GROUP_PEERS, MAX_PIPELINE_PEERS
from farflung.protocol.messages import Heartbeat, Opinion, Probe
from farflung.protocol.rhythm import Runner

SUSPECT_AFTER = 3.5
"""Heartbeats missed before suspicion."""

FULL_PACE = 16
"""Peers that live, up to which they greet each other at the usual pace; each greets all others, so of more everybody greets more slowly."""

SLOWEST_PACE = 8.0
"""Times as slow, at most."""

ASK_AFTER = 1.25
"""Heartbeats between suspicion and asking others: long enough that a living peer has sent one more to them."""

VERDICT_AFTER = 2.5
"""Heartbeats between suspicion and verdict."""

UNHEARD_AFTER = 2.0
"""Heartbeats of a peer by which others have heard it later than we."""

ENOUGH_NEWCOMERS = 16
"""That a newcomer listens to: twice as many as it asks for what it downloads."""

FORGET_AFTER_S = 600.0
"""Dead or departed peers are forgotten after this; the peer cache on disk remembers addresses for longer."""

TRAINING_STATES = frozenset({"training", "ready", "round"})
"""Heartbeat states of members that a round waits for."""

ON_ITS_WAY_S = 1.0
"""What a peer had sent before it died may come for so long afterwards."""

NUM_WITNESSES = 3
"""Peers asked for a second opinion, as in SWIM."""


class Sign(Protocol):
    """That a peer goes on to greet us, in the place of its greetings (`greeting.Carrier`)."""

    def newest(self) -> float:
        """When it did so last."""

    def end(self) -> None:
        """We have to hear it ourselves again."""


class Liveness(StrEnum):
    UNKNOWN = "unknown"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


LIVES = (Liveness.ALIVE, Liveness.SUSPECT)
"""As which a peer counts as alive."""


@dataclass(slots=True)
class Peer:
    """What we know of one peer."""

    liveness: Liveness = Liveness.UNKNOWN
    heard_at: float = -math.inf
    since: float = 0.0
    """When `liveness` last changed."""
    heartbeat: Heartbeat | None = None
    beat_at: float = 0.0
    """When that came."""
    leaves_since: float = math.inf
    """When it said goodbye; it votes until it is let go, or falls silent."""
    asked: tuple[PeerId, ...] | None = None
    """For a second opinion, since it was suspected last; None: not yet."""
    witnessed_at: float = -1.0
    """Latest moment at which, by anybody's word, it was heard."""
    sign: Sign | None = None
    """Tells that it lives, while nobody hands on that it says so."""

    def refresh(self) -> None:
        """By its sign it was heard until now."""
        if self.sign is not None:
            heard_at = self.sign.newest()
            self.heard_at, self.witnessed_at = max(self.heard_at, heard_at), max(self.witnessed_at, heard_at)

    def let_go(self) -> None:
        """Rely on it no longer, and have it told."""
        self.refresh()
        if self.sign is not None:
            sign, self.sign = self.sign, None
            sign.end()


@dataclass(slots=True)
class Membership:
    """This node's opinion of every peer it has heard of; pure, time is an argument (seconds, monotonic)."""

    me: PeerId
    heartbeat_s: float
    state: str = "joining"
    """What this node says of itself in heartbeats."""
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    news: int = 0
    """Grows whenever somebody comes, goes, or says that it holds another state: what follows from those stands until then."""
    _leaves_since: float = math.inf
    """When we began to leave."""
    _pace: tuple[int, float] = (-1, 1.0)
    """The pace when `news` was so much."""
    _due: float = -math.inf
    """No peer is due for a suspicion, a question, a verdict or oblivion before this."""
    _detours: int = 0
    """Messages that others were asked to pass on, another each time or so, for one of them may pass on nothing."""

    def known(self) -> list[PeerId]:
        """Everybody we might talk to, sorted; the dead too, for they may come back."""
        return sorted(p for p, peer in self.peers.items() if peer.liveness is not Liveness.LEFT)

    def alive(self, peer: PeerId) -> bool:
        """Whether to count on a peer. Suspects still count: suspicion is cheap, a wrong verdict is not."""
        if peer == self.me:
            return True
        entry = self.peers.get(peer)
        return entry is not None and entry.liveness in LIVES

    def live(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [p for p in peers if self.alive(p)]

    def others_train(self, view: Iterable[PeerId]) -> bool:
        """Whether anybody of a view but we ourselves says so."""
        beats = [self.heartbeat(peer) for peer in self.live(view) if peer != self.me]
        return any(beat is not None and beat.state in TRAINING_STATES for beat in beats)

    def gone(self, peer: PeerId) -> bool:
        """Whether a peer was called dead, or left. One that we have never heard is neither."""
        entry = self.peers.get(peer)
        return entry is not None and entry.liveness in (Liveness.DEAD, Liveness.LEFT)

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats of this node, by how many live: each then sends about as many a second, however many there are."""
        if self._pace[0] != self.news:
            num_live = 1 + len(self.live(self.peers))
            self._pace = (self.news, min(max(1.0, num_live / FULL_PACE), SLOWEST_PACE))
        return self.heartbeat_s * self._pace[1]

    @property
    def verdict_s(self) -> float:
        """From the last heartbeat of a peer to the verdict, seconds, when it greets at our pace."""
        return (SUSPECT_AFTER + VERDICT_AFTER) * self.beat_s

    def every_s(self, peer: PeerId) -> float:
        """Seconds between two heartbeats of a peer, as it has said; the usual ones before."""
        entry = self.peers.get(peer)
        return self.heartbeat_s if entry is None else self._every_s(entry)

    def _every_s(self, entry: Peer) -> float:
        if entry.heartbeat is None:
            return self.heartbeat_s
        return min(max(entry.heartbeat.every_s, self.heartbeat_s), SLOWEST_PACE * self.heartbeat_s)  # whatever it says

    def dead_for(self, peer: PeerId, now: float) -> float:
        """Seconds since a peer was called dead or left; 0 when it is neither. One never heard of gets the time of a verdict."""
        entry = self.peers.get(peer)
        if entry is None or entry.liveness in (Liveness.ALIVE, Liveness.SUSPECT):
            return 0.0
        grace = self.verdict_s if entry.liveness is Liveness.UNKNOWN else 0.0
        return max(0.0, now - entry.since - grace)

    def unheard(self, peer: PeerId) -> bool:
        """Whether others hear a peer, by their word, and we do not."""
        entry = self.peers.get(peer)
        return (
            entry is not None
            and self.alive(peer)
            and entry.witnessed_at > entry.heard_at + UNHEARD_AFTER * self._every_s(entry)
        )

    def apart(self, peer: PeerId) -> bool:
        """Whether neither we nor a peer hear each other, though others hear both."""
        return self.me in self._says_deaf_to(peer) and self.unheard(peer)

    def deaf_to(self) -> tuple[PeerId, ...]:
        """Whom others hear and we do not, sorted."""
        perhaps = [p for p, entry in self.peers.items() if entry.witnessed_at > entry.heard_at]  # few of many
        return tuple(p for p in sorted(perhaps) if self.unheard(p))[:MAX_GROUP_PEERS]

    def _says_deaf_to(self, peer: PeerId) -> tuple[PeerId, ...]:
        """By its own last word."""
        heartbeat = self.heartbeat(peer)
        return () if heartbeat is None else heartbeat.deaf_to

    def heard_by(self, peer: PeerId) -> bool:
        """Whether a peer lives, and has not said that only others hear us."""
        return self.alive(peer) and self.me not in self._says_deaf_to(peer)

    def direct(self, peer: PeerId) -> bool:
        """Whether a peer lives, and we hear it ourselves."""
        entry = self.peers.get(peer)
        return entry is not None and entry.liveness is Liveness.ALIVE and not self.unheard(peer)

    def way_to(self, peer: PeerId) -> PeerId | None:
        """Who is to pass on what is for a peer that lives, where we do not hear it or it does not hear us, another each time; None where there is no need, or nobody."""
        if not self.alive(peer) or peer == self.me:
            return None
        deaf_to = self._says_deaf_to(peer)
        if self.me not in deaf_to and not self.unheard(peer):
            return None
        both = (p for p in sorted(self.peers) if self.direct(p) and self.heard_by(p))
        between = [p for p in both if p != peer and p not in deaf_to]
        between = [p for p in between if not self.leaves(p)] or between
        if not between:
            return None
        self._detours += 1  # by lot: turns may keep step with what is sent to others
        return between[sha256(peer + self._detours.to_bytes(8, "big")).digest()[0] % len(between)]

    def leaves(self, peer: PeerId) -> bool:
        """Whether a peer has said goodbye, still here or not; or whether we do."""
        if peer == self.me:
            return self.state == "leaving"
        entry = self.peers.get(peer)
        return entry is not None and (entry.leaves_since < math.inf or entry.liveness is Liveness.LEFT)

    def leave(self, now: float) -> None:
        """We say goodbye from now on."""
        self.state, self._leaves_since = "leaving", now

    def sure(self, view: Collection[PeerId]) -> frozenset[PeerId]:
        """Those of `view` that live and were heard of a while after the last of them, or we, began to leave: whoever has just died is not among them."""
        since = max((self.peers[p].leaves_since for p in view if p in self.peers and self.leaves(p)), default=-math.inf)
        since = max(since, self._leaves_since if self.leaves(self.me) else -math.inf)
        for peer in view:
            self._refreshed(peer)
        return frozenset(
            p for p in self.live(view) if p == self.me or self.peers[p].witnessed_at > since + ON_ITS_WAY_S
        )

    def heartbeat(self, peer: PeerId) -> Heartbeat | None:
        entry = self.peers.get(peer)
        return entry.heartbeat if entry else None

    def _refreshed(self, peer: PeerId) -> Peer | None:
        entry = self.peers.get(peer)
        if entry is not None:
            entry.refresh()
        return entry

    def rely(self, peer: PeerId, sign: Sign) -> None:
        """From now on a sign tells that a peer lives which we hear, and its greetings are not handed on."""
        self.peers[peer].sign = sign

    def renew(self, peer: PeerId, beat: Heartbeat, now: float) -> None:
        """It says now how far it is by now."""
        entry = self.peers[peer]
        entry.heartbeat, entry.beat_at = beat, now

    def unrely(self, peer: PeerId) -> None:
        """No longer: it is due as if we had heard its last greeting ourselves."""
        entry = self._refreshed(peer)
        if entry is not None and entry.sign is not None:
            entry.sign = None
            self._due = min(self._due, self._silent_at(entry))

    def runners(self, peers: Iterable[PeerId], version: int) -> list[Runner]:
        """When the live ones of `peers` will be ready that are at this version of the outer state and have said how fast they are."""
        found = []
        for peer in self.live(peers):
            entry = self.peers[peer]
            beat = entry.heartbeat
            if beat is None or beat.state not in TRAINING_STATES or beat.version != version or beat.tokens_per_s <= 0.0:
                continue
            found.append(Runner(entry.beat_at + beat.ready_in_s, beat.tokens_per_s))
        return found

    def ready_at(self, peer: PeerId) -> float:
        """When a peer will have made its steps, by its last word, whatever outer state that was of; -inf when it has not said."""
        entry = self.peers.get(peer)
        if entry is None or entry.heartbeat is None or entry.heartbeat.tokens_per_s <= 0.0:
            return -math.inf
        return entry.beat_at + entry.heartbeat.ready_in_s

    def discover(self, peer: PeerId, now: float) -> bool:
        """Somebody mentioned a peer; True when it is new to us, and there is room for it."""
        if self.is_full:
            return False
        return self.expect(peer, now)

    def expect(self, peer: PeerId, now: float) -> bool:
        """A peer that belongs here, however many there are; True when it is new to us."""
        if peer == self.me or peer in self.peers:
            return False
        self.peers[peer] = Peer(since=now)
        self._due = -math.inf
        return True

    def forget(self, peer: PeerId) -> None:
        """It does not belong here any more. If it comes again, it is new."""
        entry = self.peers.pop(peer, None)
        if entry is not None:
            self.news += 1
            entry.let_go()

    def said(self) -> list[tuple[PeerId, Heartbeat]]:
        """Whose heartbeats were heard, and the last one of each."""
        return [(peer, entry.heartbeat) for peer, entry in self.peers.items() if entry.heartbeat is not None]

    def fellows_wanted(self, view: Collection[PeerId]) -> int:
        """How many more others we have time for that are not of the view and have no state, as far as we know. A newcomer needs some to share a download with; did all
        of a crowd greet all, they would do nothing else. A member may have to let any of them in."""
        if self.me in view:
            return MAX_PIPELINE_PEERS
        here = (
            entry
            for peer, entry in self.peers.items()
            if peer not in view and entry.liveness not in (Liveness.DEAD, Liveness.LEFT)
        )
        num_fellows = sum(entry.heartbeat is None or not entry.heartbeat.digest for entry in here)
        return max(0, ENOUGH_NEWCOMERS - num_fellows)

    @property
    def is_full(self) -> bool:
        """Whether nobody new is taken up but members: whoever can make keys could make us greet as many peers as it likes."""
        return len(self.peers) >= MAX_PIPELINE_PEERS

    def heard(self, peer: PeerId, now: float, heartbeat: Heartbeat | None = None) -> list[Effect]:
        """Any verified message from a peer."""
        entry = self._entry(peer, now)
        entry.heard_at = entry.witnessed_at = now
        return self._lives(peer, entry, now, heartbeat, "heard from it")

    def told(self, peer: PeerId, now: float, heartbeat: Heartbeat | None = None) -> list[Effect]:
        """Any verified message from a peer that another has passed on."""
        entry = self._entry(peer, now)
        entry.refresh()
        entry.witnessed_at = now
        return self._lives(peer, entry, now, heartbeat, "others hear it, we do not")

    def _entry(self, peer: PeerId, now: float) -> Peer:
        self.expect(peer, now)
        return self.peers[peer]

    def _lives(self, peer: PeerId, entry: Peer, now: float, heartbeat: Heartbeat | None, reason: str) -> list[Effect]:
        if heartbeat is not None:
            before = entry.heartbeat
            if before is None or (before.version, before.digest) != (heartbeat.version, heartbeat.digest):
                self.news += 1
            entry.heartbeat, entry.beat_at = heartbeat, now
            entry.leaves_since = min(entry.leaves_since, now) if heartbeat.state == "leaving" else math.inf
            self._due = min(self._due, self._silent_at(entry))  # it may greet more often than it did
        if entry.liveness is Liveness.LEFT and heartbeat is None:
            return []  # stragglers of a peer that said goodbye; only a heartbeat brings it back
        if entry.liveness is Liveness.ALIVE:
            return []
        return self._become(peer, entry, Liveness.ALIVE, now, reason)

    def goodbye(self, peer: PeerId, now: float) -> list[Effect]:
        """A peer says that it leaves. It stays alive, and a voter, until it falls silent."""
        entry = self._entry(peer, now)
        entry.leaves_since = min(entry.leaves_since, now)
        return []

    def unreachable(self, peer: PeerId, now: float, reason: str) -> list[Effect]:
        """A connection to the peer broke: suspect it at once."""
        entry = self.peers.get(peer)
        if entry is None or entry.liveness is not Liveness.ALIVE or self.unheard(peer):
            return []
        return self._suspect(peer, entry, now, reason)

    def opinion(self, sender: PeerId, target: PeerId, age_s: float, now: float) -> None:
        """An answer to our probe: of whom we have asked, since the last suspicion."""
        entry = self.peers.get(target)
        if entry is not None and entry.asked is not None and sender in entry.asked:
            entry.witnessed_at = max(entry.witnessed_at, now - age_s)
            self._due = -math.inf

    def answer(self, sender: PeerId, target: PeerId, now: float) -> list[Effect]:
        """Answer somebody's probe, when we have anything to say."""
        entry = self._refreshed(target)
        if entry is None or entry.heard_at == -math.inf:
            return []
        return [Send(sender, Opinion(target, max(0.0, now - entry.heard_at)))]

    def tick(self, now: float, *, keep: Collection[PeerId] = ()) -> list[Effect]:
        """Suspicions and verdicts. Whoever is gone for long is forgotten, but for those in `keep`: members may always come back."""
        if now <= self._due:
            return []
        effects: list[Effect] = []
        self._due = now + FORGET_AFTER_S  # whoever is kept now may not be then
        for peer in sorted(self.peers):
            entry = self.peers[peer]
            if entry.sign is not None:
                continue
            if entry.liveness is Liveness.ALIVE and now > self._silent_at(entry):
                silent_s = now - max(entry.heard_at, entry.witnessed_at)
                effects += self._suspect(peer, entry, now, f"silent for {silent_s:.1f} s")
            elif entry.liveness is Liveness.SUSPECT:
                effects += self._consider(peer, entry, now)
            elif entry.liveness is Liveness.UNKNOWN and peer in keep:
                effects += self._inquire(peer, entry, now)
            elif entry.liveness is not Liveness.ALIVE and peer not in keep and now > entry.since + FORGET_AFTER_S:
                del self.peers[peer]
                continue
            self._due = min(self._due, self._due_at(entry, kept=peer in keep))
        return effects

    @property
    def look_at(self) -> float:
        """When to `tick` next at the latest; sooner, when it is sooner after a message."""
        return self._due

    def _silent_at(self, entry: Peer) -> float:
        """Until when a peer that lives need not be heard."""
        return max(entry.heard_at, entry.witnessed_at) + SUSPECT_AFTER * self._every_s(entry)

    def _due_at(self, entry: Peer, *, kept: bool) -> float:
        """No later than when the peer will be due, unless it is heard from, or spoken of, or a connection to it breaks."""
        match entry.liveness:
            case Liveness.ALIVE:
                return self._silent_at(entry)
            case Liveness.SUSPECT:
                return entry.since + (ASK_AFTER if entry.asked is None else VERDICT_AFTER) * self._every_s(entry)
            case Liveness.UNKNOWN if kept and entry.asked is None:
                return entry.since + ASK_AFTER * self.heartbeat_s
        return math.inf if kept else entry.since + FORGET_AFTER_S

    def _suspect(self, peer: PeerId, entry: Peer, now: float, reason: str) -> list[Effect]:
        entry.asked = None
        entry.heard_at = min(entry.heard_at, now)
        return self._become(peer, entry, Liveness.SUSPECT, now, reason)

    def _consider(self, peer: PeerId, entry: Peer, now: float) -> list[Effect]:
        if entry.witnessed_at > entry.since:
            return self._become(peer, entry, Liveness.ALIVE, now, "others hear it, we do not")
        suspected_for = now - entry.since
        if entry.asked is None and suspected_for > ASK_AFTER * self._every_s(entry):
            return self._ask(peer, entry)
        if suspected_for > VERDICT_AFTER * self._every_s(entry):
            if entry.leaves_since < math.inf:
                return self._become(peer, entry, Liveness.LEFT, now, "said goodbye")
            witnesses = len(self._witnesses(peer))
            return self._become(
                peer,
                entry,
                Liveness.DEAD,
                now,
                f"nobody of {witnesses + 1} has heard it for {suspected_for:.1f} s",
            )
        return []

    def _inquire(self, peer: PeerId, entry: Peer, now: float) -> list[Effect]:
        """A member that we have never heard may be well all the same: a newcomer that does not reach it would have it removed."""
        if entry.witnessed_at > entry.since:
            return self._become(peer, entry, Liveness.ALIVE, now, "others hear it, we do not")
        return self._ask(peer, entry) if now > entry.since + ASK_AFTER * self.heartbeat_s else []

    def _ask(self, peer: PeerId, entry: Peer) -> list[Effect]:
        if entry.asked is not None:
            return []
        entry.asked = self._witnesses(peer)
        return [Send(w, Probe(peer)) for w in entry.asked]

    def _witnesses(self, target: PeerId) -> tuple[PeerId, ...]:
        others = [p for p, e in self.peers.items() if e.liveness is Liveness.ALIVE and p != target]
        return tuple(sorted(others, key=lambda p: sha256(target + p).digest())[:NUM_WITNESSES])

    def _become(self, peer: PeerId, entry: Peer, liveness: Liveness, now: float, reason: str) -> list[Effect]:
        before, entry.liveness = entry.liveness, liveness
        if before is liveness:
            return []
        entry.let_go()
        entry.since = now
        self.news += 1
        self._due = -math.inf
        if liveness is Liveness.ALIVE and before is Liveness.SUSPECT and reason == "heard from it":
            return []  # a false alarm is not worth a line in the log
        return [Note(f"peer.{liveness}", {"of": peer.hex(), "name": short(peer), "reason": reason})]
