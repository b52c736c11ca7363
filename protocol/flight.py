"""One microbatch in flight, as its data node sees it: the route that it takes, where it is on it, and who was told what about it."""

import math
from dataclasses import dataclass, field

from farflung.protocol.messages import Passage
from farflung.protocol.route import (
    DROPPED,
    OPEN,
    Leg,
    Route,
    following,
    peer_of,
    place,
    position,
    preceding,
    same_input,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Seconds."""

    leg_s: float
    """Without a word about a flight, before its holder is told to go on, or to say what it lacks."""
    answer_s: float
    """Until a peer answers that it gives a hop up."""
    hard_s: float
    """A peer that says it holds a flight, and does not get on with it, is believed for so long."""

    def lease_s(self, hops: int) -> float:
        """How long peers keep what nobody asks them for: a flight of so many hops may be for `hard_s` at each position of its route, and only those who
        hold it there are asked."""
        return (2 * hops + 1) * self.hard_s


@dataclass(slots=True)
class Flight:
    """One microbatch of ours on its way."""

    microbatch: int
    route: Route
    loss_at_home: bool
    patience: Patience
    due: float
    since: float
    version: int = 0
    at: int = 0
    silences: int = 0
    senders: tuple[int, ...] = ()
    """Peers that were told last to send something again."""
    asked: bool = False
    """Whether the holder was asked to give it up."""
    questions: int = 0
    missing: int = 0
    """How often a peer has said, since it was last got on, that it lacks what it was just sent."""
    given_up: int = 0
    """How often somebody whom it has passed has given its hop up."""
    refused: set[tuple[int, int]] = field(default_factory=set)
    """(hop, peer) that are not tried again."""
    loss: float = math.nan

    @property
    def hop(self) -> int:
        """Where it is; n is the loss."""
        return place(self.route, self.at)[0]

    @property
    def backward(self) -> bool:
        return place(self.route, self.at)[1]

    @property
    def holder(self) -> int:
        """The peer that is responsible for it."""
        return self.peer(self.hop)

    @property
    def next_hop(self) -> int | None:
        """Where the holder will send it; None at the end, and before the loss."""
        if self.backward:
            return preceding(self.route, self.hop) if self.hop else None
        then = following(self.route, self.hop)
        return then if then < len(self.route) else None

    def peer(self, hop: int) -> int:
        """Who does a hop."""
        return peer_of(self.route, hop, loss_at_home=self.loss_at_home)

    def position(self, hop: int, *, backward: bool) -> int:
        return position(self.route, hop, backward=backward)

    def after(self, at: int) -> int:
        """The position after `at`: dropped hops have none."""
        at += 1
        while self.peer(place(self.route, at)[0]) == DROPPED:
            at += 1
        return at

    def advance(self, at: int, now: float) -> None:
        """It got on."""
        self.at, self.since = at, now
        self.wait(now)

    def wait(self, now: float) -> None:
        """All is well; it takes its time."""
        self.due = now + self.patience.leg_s
        self.silences, self.asked, self.questions, self.missing = 0, False, 0, 0
        self.senders = ()

    def heard(self, peer: int, now: float) -> None:
        """Somebody who was told to send something has answered."""
        if peer in self.senders:
            self.senders = tuple(one for one in self.senders if one != peer)
            if not self.senders:
                self.due = max(self.due, now + self.patience.leg_s)

    def told(self, peers: tuple[int, ...], now: float) -> None:
        """These were told something. They answer at once; what they do about it takes longer."""
        self.asked, self.questions = False, 0
        self.senders = peers
        self.due = now + (self.patience.answer_s if peers else self.patience.leg_s)

    def bind(self, route: Route) -> None:
        """Open legs that somebody has bound."""
        self.route = tuple(
            Leg(ours.stage, theirs.peer if ours.peer == OPEN and theirs.peer >= 0 else ours.peer)
            for ours, theirs in zip(self.route, route, strict=True)
        )

    def adopt(self, passage: Passage) -> None:
        """The way by which the loss was reached is the way back, even if an older version of the route got there first.

        Versions are ours alone: none that a peer can truly know is above ours, so what it says of one is not counted on.
        """
        if self.position(passage.hop, backward=passage.backward) < self.at or self.route == passage.route:
            return
        if passage.hop == len(self.route) or not same_input(self.route, passage.route, passage.hop):
            self.route, self.version = passage.route, self.version + 1
