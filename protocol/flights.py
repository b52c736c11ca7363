"""What a data node decides about its microbatches in flight: when each starts, where it is, and what is done when a peer fails it.

Stage peers hand microbatches on by themselves and say so (`desk.py`); the data node only listens, and acts when it hears nothing for too
long. A flight is at one position at a time (`route.py`), and the peer of its hop is responsible. What may happen to that peer, and
what follows (the digest's table, 5.4):

    silence, once or twice     what it needs is sent to it again, by those who hold it: all requests may be repeated
    longer, or out of reach    it is asked to give the hop up. Only when it has answered that it did, or is lost, does another peer
                               of the stage get it: the one that is least busy with our flights. So a slow peer and its
                               replacement never both count a microbatch
    no answer to that          the peer is lost, for the whole step: nothing that it has accumulated for us will count
    silence of a holder that   the peer after it is asked whether it is there: the holder may be sending to it, and learns only much later that
    says that all is well      nobody listens. No answer, and that one is lost

    lost before its forward    the last peer before it that lives computes its output again and sends it on. The hop is left out, if the route
                               may lose it (`droppable.py`): a microbatch that is late goes on without it sooner than through the
                               replacement, which has work of its own. Else it is sent to that. A microbatch that has not begun is not
                               late, and loses a hop only where nobody is left who could do it
    lost before its backward   the same, only to be kept, and the next peer after it sends its gradient again: the replacement
                               computes forward and backward. Hops in between that are lost too are done again in the same way
    lost after its backward    what it had accumulated is lost with it: fewer visits of that stage, which keeps their mean unbiased
    no room for what it is     it says so, and another peer gets the hop at once
    sent, or for doing it; or
    an overflow
    its sender is refused      it may have given the hop up unheard, or when that was behind the flight: it is asked whether it does
    nobody can do the hop      the flight is cut short: what was counted stays. So it is at once when that fails at its data node

Time and all news are arguments; effects say what to send to whom.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import Refused
from farflung.protocol.flight import Flight, Patience
from farflung.protocol.limits import MAX_LOSS
from farflung.protocol.messages import Again, GiveUp, Landed, Passage, Said
from farflung.protocol.route import DROPPED, OPEN, Route, following, live_hops, peer_of, with_peer
from farflung.protocol.route_rules import broken_rule
from farflung.protocol.wiring import UNMEASURED, least_busy

MOST_SILENCES = 2
"""Deadlines that pass before a peer is asked to give a hop up."""
MOST_QUESTIONS = 2
"""Times that it is asked."""
MOST_MISSING = 32
"""Times that a microbatch gets nowhere because somebody says that it lacks what it was sent. Where messages are lost it is a few."""

MOST_DOUBTS = MOST_SILENCES + MOST_QUESTIONS
"""Times that a peer is asked whether it is there."""
MOST_VERSIONS = 16
"""Of one route; a flight that fails more often is cut short."""


@dataclass(frozen=True, slots=True)
class Start:
    """Give the microbatch to our own stage, or let that compute it again and send it along the route."""

    order: Again


@dataclass(frozen=True, slots=True)
class Tell:
    peer: int
    message: Again | GiveUp | Landed


@dataclass(frozen=True, slots=True)
class Note:
    """For the log."""

    what: str
    """`lost`, `rebound`, `dropped`, `cut`."""
    peer: int
    microbatch: int
    reason: str


Effect = Start | Tell | Note


@dataclass(slots=True)
class _Doubt:
    """A question whether a peer is there, to which there is no answer yet. It is about the hop that comes next at it: an order that changes nothing."""

    order: Again
    questions: int
    due: float


class Flights:
    """All microbatches of one data node in one step."""

    def __init__(
        self,
        *,
        window: bytes,
        home: int,  # our place among the plan's peers
        stages: Sequence[Sequence[int]],  # the peers that hold each
        lanes: Sequence[Sequence[tuple[int, Route]]],  # (microbatch, route), one after another, of each lane of ours
        loss_at_home: bool,
        patience: Patience,
        droppable: Droppable,
        visit_s: Mapping[int, float] = UNMEASURED,  # seconds that a microbatch takes peers, where we know
    ) -> None:
        """Raises ValueError for routes with open legs whose last peer would compute the loss."""
        self._window = window
        if not loss_at_home and any(leg.peer == OPEN for lane in lanes for _, route in lane for leg in route):
            raise ValueError(
                "open legs need the loss at home: it is what a microbatch that took two ways has in common"
            )
        self._home = home
        self._stages = stages
        self._waiting = [list(lane) for lane in lanes]
        self._lane = {microbatch: number for number, lane in enumerate(lanes) for microbatch, _ in lane}
        self._planned = {microbatch: route for lane in lanes for microbatch, route in lane}
        self._loss_at_home = loss_at_home
        self._patience = patience
        self._droppable = droppable
        self._visit_s = visit_s
        self._flights: dict[int, Flight] = {}
        self._heard_at: dict[int, float] = {}
        self._doubts: dict[int, _Doubt] = {}
        """By peer."""
        self.lost: set[int] = set()
        """Peers whose gradients of our microbatches do not count."""
        self.losses: dict[int, float] = {}
        """Of the microbatches that have landed."""
        self.cut: dict[int, str] = {}
        """Microbatches that did not come home, and why."""
        self.routes: dict[int, Route] = {}
        """Of all that are over: the legs that they took in the end."""

    @property
    def done(self) -> bool:
        return not self._flights and not any(self._waiting)

    def begin(self, now: float) -> list[Effect]:
        """The first microbatch of every lane."""
        return [effect for lane in range(len(self._waiting)) for effect in self._next_of(lane, now)]

    def next_due(self) -> float | None:
        """When `tick` has something to do; None when nothing is in flight."""
        if not self._flights:
            return None
        return min([flight.due for flight in self._flights.values()] + [doubt.due for doubt in self._doubts.values()])

    def heard(self, peer: int, passage: Passage, now: float) -> list[Effect]:
        """A peer says where a microbatch is. Raises Refused, naming nobody, for what it cannot say."""
        if passage.microbatch not in self._lane:
            raise Refused(f"word of microbatch {passage.microbatch}, which is none of ours")
        flight = self._flights.get(passage.microbatch)
        if flight is None:
            self._is_there(peer, now)
            return (
                [Tell(peer, Landed(self._window, (passage.microbatch,)))] if passage.microbatch in self.routes else []
            )
        wrong = self._wrong_word(passage)
        if wrong:
            raise Refused(f"word of microbatch {passage.microbatch}, hop {passage.hop}: {wrong}")
        if peer in self.lost:
            return []
        self._is_there(peer, now)
        flight.heard(peer, now)
        if passage.said is Said.GAVE_UP:
            return self._gave_up(flight, peer, passage, now)
        loss_done = passage.hop == len(flight.route) or passage.backward
        if loss_done and passage.said in (Said.PASSED, Said.STUCK) and peer == flight.peer(passage.hop):
            flight.adopt(passage)
        else:
            flight.bind(passage.route)
        if flight.peer(passage.hop) != peer:
            return []  # it was rebound, and says what no longer matters
        if (peer == self._home or not self._loss_at_home) and 0.0 <= passage.loss <= MAX_LOSS:
            flight.loss = passage.loss  # others only pass it on
        at = flight.position(passage.hop, backward=passage.backward)
        match passage.said:
            case Said.PASSED:
                return self._passed(flight, at, now) if at >= flight.at else []
            case Said.HOLDING:
                if at > flight.at:
                    flight.advance(at, now)
                elif at == flight.at and now - flight.since < self._patience.hard_s:
                    flight.wait(now)
                return [Tell(peer, Landed(self._window, tuple(self.cut)))] if self.cut else []
            case Said.STUCK:
                return self._stuck(flight, at, passage.route, now) if at >= flight.at else []
            case _:
                return self._missing(flight, at, passage, now) if passage.version == flight.version else []

    def lose(self, peer: int, reason: str, now: float) -> list[Effect]:
        """A peer is gone, or as good as gone, for this step."""
        if peer in self.lost or peer == self._home:
            return []
        self.lost.add(peer)
        self._doubts.pop(peer, None)
        effects: list[Effect] = [Note("lost", peer, -1, reason)]
        for flight in list(self._flights.values()):
            if flight.microbatch not in self._flights:
                continue  # cut meanwhile
            then = flight.next_hop
            if peer == flight.holder:
                effects += self._restore(flight, now)
            elif then is not None and flight.peer(then) == peer and flight.holder >= 0:
                # told even where it was asked itself: a gradient that has counted goes only the way that its holder is told
                effects += self._nudge(flight, now)
            elif peer in flight.senders:
                effects += self._restore(flight, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        effects: list[Effect] = []
        for flight in list(self._flights.values()):
            if flight.due > now or flight.microbatch not in self._flights:
                continue
            effects += self._overdue(flight, now)
        for peer, doubt in list(self._doubts.items()):
            if doubt.due <= now and peer in self._doubts:
                effects += self._question(peer, doubt, now)
        return effects

    def _overdue(self, flight: Flight, now: float) -> list[Effect]:
        if flight.asked and flight.holder not in self.lost:
            if flight.questions < MOST_QUESTIONS:
                return self._ask(flight, now)
            return self.lose(flight.holder, f"no answer about microbatch {flight.microbatch}", now)
        flight.silences += 1
        if flight.silences > MOST_VERSIONS:
            return self._cut(flight, "nobody answers for it", now)
        holder, long_ago = flight.holder, now - MOST_DOUBTS * self._patience.answer_s
        if flight.silences == 1 and holder >= 0 and holder not in self.lost:
            return [*self._nudge(flight, now), *self._doubt(flight, now)]
        unanswered = [peer for peer in flight.senders if peer != self._home]
        if unanswered:
            silent = [peer for peer in unanswered if self._heard_at.get(peer, long_ago) <= long_ago]
            if silent and flight.silences > MOST_DOUBTS:
                return self.lose(silent[0], f"no answer about microbatch {flight.microbatch}", now)
        elif flight.silences > MOST_SILENCES and holder not in (self._home, *self.lost):
            return self._ask(flight, now)
        return self._restore(flight, now)

    def _wrong_word(self, passage: Passage) -> str:
        planned = self._planned[passage.microbatch]
        if passage.hop > len(planned):
            return "its route has no such hop"
        return broken_rule(
            passage.route,
            planned,
            passage.hop,
            stages=self._stages,
            droppable=self._droppable,
            loss_at_home=self._loss_at_home,
        )

    def _is_there(self, peer: int, now: float) -> None:
        self._heard_at[peer] = now
        self._doubts.pop(peer, None)

    def _doubt(self, flight: Flight, now: float) -> list[Effect]:
        """Ask the peer to which the holder may be sending whether it is there."""
        then = flight.next_hop if flight.microbatch in self._flights else None
        peer = OPEN if then is None else flight.peer(then)
        if then is None or peer < 0 or peer in (self._home, flight.holder, *self.lost, *self._doubts):
            return []
        until = len(flight.route) + 1
        order = Again(self._window, flight.microbatch, then, flight.backward, until, flight.version, flight.route)
        self._doubts[peer] = doubt = _Doubt(order, 0, now)
        return self._question(peer, doubt, now)

    def _question(self, peer: int, doubt: _Doubt, now: float) -> list[Effect]:
        if doubt.questions == MOST_DOUBTS:
            return self.lose(peer, f"no answer about microbatch {doubt.order.microbatch}", now)
        doubt.questions, doubt.due = doubt.questions + 1, now + self._patience.answer_s
        return [Tell(peer, doubt.order)]

    # ---- where a flight is -----------------------------------------------------------------------------------------

    def _passed(self, flight: Flight, at: int, now: float) -> list[Effect]:
        """Position `at` is behind it."""
        if at == 2 * len(flight.route):
            return self._land(flight, now)
        at = flight.after(at)
        flight.advance(at, now)
        return self._restore(flight, now) if flight.holder in self.lost else []

    def _next_of(self, lane: int, now: float) -> list[Effect]:
        if not self._waiting[lane]:
            return []
        microbatch, route = self._waiting[lane].pop(0)
        flight = Flight(
            microbatch, route, self._loss_at_home, self._patience, due=now + self._patience.leg_s, since=now
        )
        self._flights[microbatch] = flight
        effects = self._rebind(flight, live_hops(route), now, may_drop=True, late=False) if self.lost else []
        if microbatch in self._flights:
            effects.append(self._again(flight, 0, backward=False, until=len(route) + 1))
        return effects

    def _land(self, flight: Flight, now: float, cut: str = "") -> list[Effect]:
        microbatch = flight.microbatch
        del self._flights[microbatch]
        self.routes[microbatch] = flight.route
        if cut:
            self.cut[microbatch] = cut
        else:
            self.losses[microbatch] = flight.loss
        # whoever may keep something for it: of a route that has changed, anybody
        everybody = {peer for stage in self._stages for peer in stage}
        known = sorted(
            (everybody if cut or flight.version else {leg.peer for leg in flight.route} & everybody) - self.lost
        )
        effects: list[Effect] = [Tell(peer, Landed(self._window, (microbatch,))) for peer in known]
        return effects + self._next_of(self._lane[microbatch], now)

    # ---- what is done about it -------------------------------------------------------------------------------------

    def _stuck(self, flight: Flight, at: int, route: Route, now: float) -> list[Effect]:
        """`at` is done, and the peer of what comes next, by `route`, is out of reach of whoever did it."""
        if at == 2 * len(flight.route):
            return []
        at = flight.after(at)
        if at > flight.at:
            flight.advance(at, now)
        peer, hop = flight.holder, flight.hop
        if peer in self.lost or peer_of(route, hop, loss_at_home=self._loss_at_home) != peer:
            return self._restore(flight, now)
        if peer == self._home or flight.asked:
            return []  # we are here: it will try again when it is told to
        return self._ask(flight, now)

    def _ask(self, flight: Flight, now: float) -> list[Effect]:
        """Let the holder give it up; or, if it is not known who that is, let its sender find somebody."""
        peer, hop = flight.holder, flight.hop
        if peer < 0:
            return self._restore(flight, now)
        flight.asked, flight.due = True, now + self._patience.answer_s
        flight.questions += 1
        if hop == len(flight.route):  # the last hop's, which would take its loss with it: it may have counted that
            return []
        order = GiveUp(self._window, flight.microbatch, hop, flight.backward, flight.version, flight.route)
        return [Tell(peer, order)]

    def _gave_up(self, flight: Flight, peer: int, passage: Passage, now: float) -> list[Effect]:
        """As it was asked to; or because it has no room for what came to it, whose sender is done then, or failed with it."""
        if passage.version != flight.version:
            return []
        if peer == self._home:
            return self._cut(flight, f"its data node has no room for hop {passage.hop}, or that overflows", now)
        flight.bind(passage.route)  # it may say so before its sender says whom it chose
        if passage.hop == len(flight.route) or flight.peer(passage.hop) != peer:
            return []
        at = flight.position(passage.hop, backward=passage.backward)
        if at > flight.at:
            flight.advance(at, now)
        flight.given_up += at < flight.at
        if flight.given_up > MOST_VERSIONS:
            return []  # each time others do something again, for which it is waited: for as long as it likes
        flight.refused.add((passage.hop, peer))
        return self._restore(flight, now)

    def _missing(self, flight: Flight, at: int, passage: Passage, now: float) -> list[Effect]:
        """A peer should send again what it does not have: its lease ran out, or it has been started anew."""
        if at > flight.at:
            return []
        if passage.backward and at < flight.at:
            return self._cut(flight, f"the gradient kept at hop {passage.hop} is gone, and may have counted", now)
        flight.missing += 1
        if flight.missing > MOST_MISSING:  # it would hold up everybody for as long as it likes
            return self._cut(flight, f"hop {passage.hop} lacks whatever it is sent", now)
        if at < flight.at and passage.hop < len(flight.route):
            # Its word may be late, and it has long had that: only what it gives up may be done elsewhere.
            peer, hop = flight.peer(passage.hop), passage.hop
            flight.told((peer,), now)
            return [Tell(peer, GiveUp(self._window, flight.microbatch, hop, False, flight.version, flight.route))]
        return self._restore(flight, now)

    def _nudge(self, flight: Flight, now: float) -> list[Effect]:
        """Let the holder go on, or say what it lacks; and not to a peer that is lost."""
        hop, backward, then = flight.hop, flight.backward, flight.next_hop
        effects: list[Effect] = []
        if then is not None and flight.peer(then) in self.lost:
            effects = self._rebind(flight, [then], now, may_drop=not backward)
            if backward and flight.microbatch in self._flights:  # the new one needs the input, too
                below = max(one for one in live_hops(flight.route) if one < then and self._is_here(flight, one))
                effects += self._rebind(flight, range(below + 1, then), now, may_drop=False)
                effects.append(self._again(flight, below, backward=False, until=then))
        if flight.microbatch in self._flights:
            effects.append(self._again(flight, hop, backward=backward, until=len(flight.route) + 1))
            flight.told(_addressed(effects, self._home), now)
        return effects

    def _restore(self, flight: Flight, now: float) -> list[Effect]:
        """Let those who hold what the flight needs send it again, to peers that are here."""
        hop, backward = flight.hop, flight.backward
        end = len(flight.route)
        hops = [*live_hops(flight.route), end]
        here = [one for one in hops if self._is_here(flight, one)]
        below = max((one for one in here if one < hop), default=0)
        above = min((one for one in here if one > hop), default=None) if backward else None
        # what has to be done again, or for the first time: up to `top`, from the loss on if nobody has a gradient any more
        if not backward:
            top = hop
        else:
            top = end if above is None else max(one for one in hops if one < above)
        effects = self._rebind(flight, [one for one in hops if below < one <= top], now, may_drop=not backward)
        if flight.microbatch not in self._flights:
            return effects
        if above is None:
            at = 0 if hop == 0 and not backward else following(flight.route, below)
            effects.append(self._again(flight, below, backward=False, until=end + 1))
        else:
            at = flight.position(top, backward=True)
            if top > 0:
                effects.append(self._again(flight, below, backward=False, until=top))
            effects.append(self._again(flight, above, backward=True, until=0))
        if at != flight.at:
            flight.at, flight.since = at, now
        flight.told(_addressed(effects, self._home), now)
        return effects

    def _is_here(self, flight: Flight, hop: int) -> bool:
        peer = flight.peer(hop)
        return peer not in self.lost and (hop, peer) not in flight.refused

    def _rebind(
        self, flight: Flight, hops: Sequence[int], now: float, *, may_drop: bool, late: bool = True
    ) -> list[Effect]:
        """Routes around those of `hops` whose peer is not here: without them, or by other peers; or the flight ends."""
        effects: list[Effect] = []
        route = flight.route
        for hop in hops:
            if hop == len(route) or self._is_here(flight, hop):
                continue  # the loss is wherever the data node is, or the last hop
            old = route[hop].peer
            able = [peer for peer in self._stages[route[hop].stage] if peer not in self.lost]
            fresh = [peer for peer in able if (hop, peer) not in flight.refused]
            if self._may_drop(route, hop, may_drop) and (late or not fresh):
                route = with_peer(route, hop, DROPPED)
                why = "is late" if fresh else f"finds nobody else with stage {route[hop].stage}"
                effects.append(Note("dropped", old, flight.microbatch, f"{why}, and leaves out hop {hop}"))
            elif able:
                peer = least_busy(fresh or able, self._load(), self._visit_s)
                flight.refused.discard((hop, peer))
                route = with_peer(route, hop, peer)
                effects.append(Note("rebound", peer, flight.microbatch, f"hop {hop} was at peer {old}"))
            else:
                why = f"nobody is left for hop {hop}, stage {route[hop].stage}"
                return self._cut(flight, why, now)
        if effects:  # even if it is the same peer again: it refuses the version that it gave up
            flight.route, flight.version = route, flight.version + 1
            if flight.version > MOST_VERSIONS:
                return self._cut(flight, f"its route failed {MOST_VERSIONS} times", now)
        return effects

    def _cut(self, flight: Flight, why: str, now: float) -> list[Effect]:
        holder = flight.holder
        return [Note("cut", holder, flight.microbatch, why), *self._land(flight, now, cut=why)]

    def _may_drop(self, route: Route, hop: int, may_drop: bool) -> bool:
        return may_drop and self._droppable.allows(with_peer(route, hop, DROPPED), loss_at_home=self._loss_at_home)

    def _load(self) -> Mapping[int, int]:
        return Counter(leg.peer for flight in self._flights.values() for leg in flight.route)

    def _again(self, flight: Flight, hop: int, *, backward: bool, until: int) -> Effect:
        order = Again(self._window, flight.microbatch, hop, backward, until, flight.version, flight.route)
        peer = flight.peer(hop)
        return Start(order) if hop == 0 and not backward else Tell(peer, order)


def _addressed(effects: Sequence[Effect], home: int) -> tuple[int, ...]:
    return tuple({effect.peer for effect in effects if isinstance(effect, Tell)} - {home})
