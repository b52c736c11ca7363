"""Greetings that say nothing new, reckoned instead of sent: a simulated peer costs a sixth to an eighth of what it does with them (docs/experiments.md).

Of a group of 16 everybody greets 15 others every two seconds, and all but a few of these 24,000 greetings an hour say what the last one said. So a greeting that
has come to a peer is *repeated* to it from the second one on, without a message, as long as

- both processes run, neither is stopped, nothing is wrong with the network, and there is a way between the two that loses next to nothing
- its sender says nothing else, but how far its training is
- for its receiver it would change nothing (`changes_nothing`).

When one of these ends, or the receiver wants it (a connection broke, say), the receiver is told when the last one came, and both go on by messages, beat by beat:
what is new, suspicions and verdicts come as they would have. Whoever does not run is greeted by nobody. The bytes are counted.

What is not as it would be: figures of a peer that change with its steps are looked at by it, and known to others, up to half a minute late; the repeated
greetings arrive at once, and none is lost.
"""

import math
from dataclasses import dataclass, field

from farflung.node.peer import Peer
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId
from farflung.protocol.member import Member
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Heartbeat, encode
from farflung.sims.hub import MemoryHub
from farflung.sims.network import MemoryNetwork

MOST_LOST = 0.02
"""Share of messages that a way loses, up to which a verdict, after three greetings that were lost and two of others, comes of nothing but silence."""

ROUNDING = 1e-6
"""Of the time between two greetings, that clocks are off."""

ENVELOPE_BYTES = 87 + SIGNATURE_BYTES
"""Around a greeting: its version, swarm, sender, kind, number and time."""


def alike(a: Heartbeat | None, b: Heartbeat) -> bool:
    """Whether two greetings say the same, but for how far training is, and how fast."""
    return a is not None and _essence(a) == _essence(b)


def _essence(beat: Heartbeat) -> tuple[object, ...]:
    where = (beat.height, beat.ballot, beat.version, beat.digest, beat.group, beat.state)
    return *where, beat.every_s, beat.deaf_to, beat.addresses, beat.device, beat.admission


def changes_nothing(member: Member, sender: PeerId, beat: Heartbeat) -> bool:
    """Whether it would change nothing to hear the same from a peer once more, but that it lives (`Member.receive`)."""
    if not member.started or not member.membership.direct(sender) or member.membership.leaves(sender):
        return False
    head, is_back = member.head.commit, beat.state == "joining" and sender in member.head.commit.view
    ahead = beat.height > head.height or (beat.height == head.height and beat.ballot > member.consensus.ballot)
    differs = beat.version == member.standing.applied_version and beat.digest != member.standing.digest
    return beat.group == member.group and not (is_back or ahead or differs)


class Echoes:
    """Of one simulated network."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self._by_peer: dict[PeerId, Echo] = {}
        hub.on_change = self._changed

    def join(self, peer: Peer, network: MemoryNetwork) -> None:
        """A node has begun, perhaps anew in the same process: its greetings may be repeated from now on, and those of others to it."""
        self._changed(network.peer_id)
        echo = self._by_peer[network.peer_id] = Echo(self, peer, network)
        peer.member.greeting.carrier = echo
        network.before_count = echo.count

    def of(self, peer: PeerId) -> "Echo | None":
        """Of a node that runs."""
        return self._by_peer.get(peer)

    def may(self, a: PeerId, b: PeerId) -> bool:
        """Whether what one says to the other comes there."""
        hub = self.hub
        if not hub.quiet or hub.is_paused(a) or hub.is_paused(b) or not hub.reach(a, b):
            return False
        return hub.path(a, b).drop <= MOST_LOST

    def _changed(self, peer: PeerId | None) -> None:
        if peer is None:
            for echo in self._by_peer.values():
                echo.recheck()
            return
        if (gone := self._by_peer.get(peer)) is not None:
            gone.end()
        if not self.hub.runs(peer):
            self._by_peer.pop(peer, None)
        for other in self._by_peer.values():
            other.forget(peer)


@dataclass(slots=True)
class Echo:
    """Repeats what one node says (`greeting.Carrier`)."""

    echoes: Echoes
    peer: Peer
    network: MemoryNetwork
    repeats: bool = False
    """Whether to everybody to whom it would be sent."""
    _beat: Heartbeat | None = None
    every_s: float = 1.0
    _since: float = 0.0
    """When it was sent."""
    _ended_at: float = -math.inf
    """When that was over; infinite until then."""
    _hearers: dict[PeerId, "_Heard"] = field(default_factory=dict)
    _absent: dict[PeerId, None] = field(default_factory=dict)
    """Whom it greets though they do not run."""

    # ---- the node's own greetings (`greeting.Carrier`) ---------------------------------------------------------

    def greet(self, beat: Heartbeat, to: list[PeerId], now: float) -> list[PeerId]:
        """See `greeting.Carrier`."""
        if self._ended_at < math.inf or not alike(self._beat, beat):
            self.end()
            self._since, self._ended_at = now, math.inf
        self._beat, self.every_s = beat, beat.every_s
        if self._since == now:
            return to
        me = self.network.peer_id
        for heard in self._hearers.values():
            heard.membership.renew(me, beat, now)
        rest = [p for p in to if p not in self._hearers and not self._is_absent(p) and not self._repeat_to(p)]
        self.repeats = not rest
        if len(self._hearers) + len(self._absent) > len(to) - len(rest):
            for gone in [p for p in (*self._hearers, *self._absent) if p not in to]:
                self._drop(gone)
        return rest

    def count(self) -> None:
        """The bytes of what was repeated, before the node asks how many it has sent."""
        newest = self.newest(self.echoes.hub.now())
        for heard in self._hearers.values():
            heard.count(newest)

    def newest(self, now: float) -> float:
        """See `greeting.Carrier`."""
        now = min(now, self._ended_at)  # a process that stands greets nobody
        return self._since + self.every_s * math.floor((now - self._since) / self.every_s + ROUNDING)

    def _is_absent(self, peer: PeerId) -> bool:
        if self.echoes.hub.runs(peer):
            return False
        self._absent[peer] = None
        return True

    def _repeat_to(self, peer: PeerId) -> bool:
        """From now on; False where it has to be sent."""
        other, beat, me = self.echoes.of(peer), self._beat, self.network.peer_id
        if other is None or beat is None or not self.echoes.may(me, peer):
            return False
        member = other.peer.member
        if not alike(member.membership.heartbeat(me), beat) or not changes_nothing(member, me, beat):
            return False
        last_at = self.echoes.hub.now() - self.every_s
        self._hearers[peer] = heard = _Heard(
            self, other, member.membership, last_at, ENVELOPE_BYTES + len(encode(beat))
        )
        heard.membership.rely(me, heard)
        return True

    # ---- when it is over ---------------------------------------------------------------------------------------

    def end(self) -> None:
        """It says something else, or nothing any more."""
        for peer in list(self._hearers):
            self._drop(peer)
        self._ended_at = min(self._ended_at, self.echoes.hub.now())
        self._absent.clear()
        self.repeats = False
        self._stir()

    def forget(self, peer: PeerId) -> None:
        """A process has begun or ended, or been stopped: it is greeted by messages again."""
        if peer in self._hearers or peer in self._absent:
            self._drop(peer)
            self.repeats = False
            self._stir()

    def recheck(self) -> None:
        """The network has changed: whom that does not concern hears it on."""
        for peer in list(self._hearers):
            if not self.echoes.may(self.network.peer_id, peer):
                self.forget(peer)

    def _stir(self) -> None:
        """With its next beat the node looks at what it says."""
        if not self.echoes.hub.is_paused(self.network.peer_id):
            self.peer.member.greeting.stir(self.echoes.hub.now())
            self.peer.rest.reconsider()

    def _drop(self, peer: PeerId) -> None:
        self._absent.pop(peer, None)
        if (heard := self._hearers.get(peer)) is not None:
            heard.count(heard.newest())
            heard.membership.unrely(self.network.peer_id)
            del self._hearers[peer]
            if not self.echoes.hub.is_paused(peer):
                heard.other.peer.rest.reconsider()


@dataclass(slots=True)
class _Heard:
    """That it is repeated to one other (`membership.Sign`)."""

    echo: Echo
    other: Echo
    membership: Membership
    """Of the other."""
    counted_at: float
    """Until when the bytes were."""
    num_bytes: int

    def newest(self) -> float:
        """See `membership.Sign`."""
        return self.echo.newest(self.echo.echoes.hub.now())

    def end(self) -> None:
        """See `membership.Sign`."""
        self.echo.forget(self.other.network.peer_id)

    def count(self, newest: float) -> None:
        """The bytes of what was repeated since they were counted last; the last of it came at `newest`."""
        num_repeated = round((newest - self.counted_at) / self.echo.every_s)
        self.counted_at = newest
        if num_repeated:
            self.echo.network.repeated(self.other.network, num_repeated * self.num_bytes)
