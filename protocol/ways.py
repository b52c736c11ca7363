"""How far the peers of a pipeline are from each other, measured by the words that they say to everybody anyway.

Some of a peer's words have a number (`Present.beat`). Whoever hears one says in its own next word which was the last and how long ago it came
(`Way`), and from that the first knows how long both ways take together, whatever the two clocks show:

    A: word 7 ──▶ B ... held_ms ... B: word 3, "of A: 7" ──▶ A: trip = now - when 7 was said - held

Each says with the same words what it has measured, so whoever plans knows the ways between others. One word tells of at most `MAX_WAYS` peers, by
turns; so in large swarms a part of the ways is known at any time.

Measured is what a message takes now and then, queues included, so the shortest of late counts: a trip falls at once and rises slowly. What two peers say
of the way between them may differ: the longer counts, so that it takes two liars to seem near. What cannot be (an answer to a word that was never said,
or earlier than it) is left out without a complaint: clocks stand still while a machine sleeps, and a process that was started anew counts from 1.
"""

from collections import deque
from collections.abc import Sequence

from farflung.protocol.errors import Refused
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import LONGEST_TRIP_MS, MAX_WAYS, WAY_NAME_BYTES
from farflung.protocol.pipeline_messages import Way

REMEMBERED = 16
"""Of our own words: of each its number, and when it was said. A heartbeat apart, so answers to older ones tell of nothing but a sleep."""

RISES = 0.125
"""Share of a trip that was longer than the others."""


def check_ways(ways: Sequence[Way], *, peer: PeerId) -> None:
    """Raises Refused naming the peer who says of one peer two things."""
    if len({way.peer for way in ways}) < len(ways):
        raise Refused("two ways to the same peer", peer=peer)


class Ways:
    """What one peer knows. All times are seconds of one monotonic clock."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._words = 0
        self._said: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._heard: dict[PeerId, tuple[int, float]] = {}
        """By peer, its newest word with a number, and when it came."""
        self._trips: dict[PeerId, float] = {}
        """From us and back, measured by ourselves."""
        self._told: dict[PeerId, tuple[Way, ...]] = {}
        """By peer, what it said last."""
        self._turn = 0

    def say(self, now: float) -> int:
        """The number of a word that is said now."""
        self._words += 1
        self._said.append((self._words, now))
        return self._words

    def tell(self, peers: Sequence[PeerId], now: float) -> tuple[Way, ...]:
        """What that word says of these: of those whose turn it is, if they are many."""
        if len(peers) > MAX_WAYS:
            self._turn %= len(peers)
            peers = [*peers[self._turn :], *peers[: self._turn]][:MAX_WAYS]
            self._turn += MAX_WAYS
        ways = []
        for peer in peers:
            beat, at = self._heard.get(peer, (0, now))
            trip_ms = max(1, round(1000.0 * self._trips[peer])) if peer in self._trips else 0
            held_ms = int(1000.0 * (now - at))
            if held_ms > LONGEST_TRIP_MS:
                beat, held_ms = 0, 0
            ways.append(Way(peer[:WAY_NAME_BYTES], beat, held_ms, trip_ms))
        return tuple(ways)

    def heard(self, peer: PeerId, beat: int, ways: tuple[Way, ...], now: float) -> None:
        """A word of a peer, which `check_ways` has passed."""
        if beat:
            self._heard[peer] = (beat, now)
        if not ways:
            return
        self._told[peer] = ways
        ours = self._me[:WAY_NAME_BYTES]
        for way in ways:
            if way.peer == ours:
                self._measure(peer, way, now)

    def _measure(self, peer: PeerId, way: Way, now: float) -> None:
        said_at = dict(self._said).get(way.beat)
        if said_at is None:
            return
        trip_s = now - said_at - way.held_ms / 1000.0
        if 0.0 <= trip_s <= LONGEST_TRIP_MS / 1000.0:
            known_s = self._trips.get(peer, trip_s)
            self._trips[peer] = min(trip_s, known_s + RISES * (trip_s - known_s))

    def forget(self, peer: PeerId) -> None:
        """It is gone."""
        for known in (self._heard, self._trips, self._told):
            known.pop(peer, None)

    def words(self, peer: PeerId) -> int:
        """How many it has said since it was started, one a heartbeat, as far as we know."""
        return self._heard.get(peer, (0, 0.0))[0]

    def trip_s(self, peer: PeerId) -> float:
        """From us to a peer and back; 0 while that is not known."""
        return self._trips.get(peer, 0.0)

    def between(self, peers: Sequence[PeerId]) -> dict[tuple[int, int], float]:
        """Of those of these peers (places in the list, the lower first) of which it is known: from one to the other and back, seconds."""
        place = {peer[:WAY_NAME_BYTES]: number for number, peer in enumerate(peers)}
        trips: dict[tuple[int, int], float] = {}

        def count(one: int, other: int, trip_s: float) -> None:
            if one != other:
                pair = (min(one, other), max(one, other))
                trips[pair] = max(trip_s, trips.get(pair, 0.0))

        for number, peer in enumerate(peers):
            if peer == self._me:
                for other, trip_s in self._trips.items():
                    if (to := place.get(other[:WAY_NAME_BYTES])) is not None:
                        count(number, to, trip_s)
            for way in self._told.get(peer, ()):
                if way.trip_ms and (to := place.get(way.peer)) is not None:
                    count(number, to, way.trip_ms / 1000.0)
        return trips
