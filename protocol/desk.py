"""What one stage peer does with the microbatches of one step: the pure half of a stage server.

A *visit* is one (microbatch, hop) at this peer. Its rules make every request safe to repeat, so that the data node may ask again whenever
it has heard nothing (the digest's 5.3 and 5.4):

- an input that comes again makes the forward run again, and its output is sent along the newest route;
- an input that came only to be kept (`until` is this hop), and a gradient, wait for each other: then the backward runs, whoever
  ran the forward;
- a visit is counted once. After that its answer to everything is the gradient that it has kept, sent back the way that the
  forward came, which only the data node can change. While that is on its way, it only says so: a slow link has enough to do;
- a gradient is taken only for the input that it belongs to: where a hop was left out before, the input is another one;
- a later version that others have named gives way to what the data node itself says, whose versions they are;
- what was given up under a version of the route is refused until a later version brings it back; so is what there was no room for
  here, or what failed, which the data node hears at once.

Kept are the input until the backward, and the gradient of the input until the microbatch has landed, both under a lease that
every request renews, and that is longer than a microbatch may take by the patience of its data node; outputs are computed again from the input. Forwards are refused as busy when too many wait. A leg that the
route leaves open is bound when it leaves, to the peer of its stage that is least busy by what we have given it (`wiring.py`);
one that says it is busy counts as given more, and peers that are known to be away come last.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Again, GiveUp, Passage, Said
from farflung.protocol.route import OPEN, Route, following, live_hops, peer_of, preceding, same_input, with_peer
from farflung.protocol.visit import Phase, Visit, Work
from farflung.protocol.wiring import UNMEASURED, least_busy


class Answer(IntEnum):
    """To a parcel; the byte on the wire."""

    TAKEN = 1
    BUSY = 2
    UNWANTED = 3


@dataclass(frozen=True, slots=True)
class Ready:
    """All that `work` needs is here."""

    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send the outcome of `work` on to `hop`."""

    work: Work
    hop: int
    peer: int
    until: int
    version: int
    route: Route
    loss: float
    tried: frozenset[int] | None
    """Peers of the leg that were busy, when it was bound here; None for a leg that the route binds."""

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.hop < self.work.hop


@dataclass(frozen=True, slots=True)
class Later:
    """The peer is busy; do `send` after a while."""

    send: Send


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the data node."""

    home: int
    passage: Passage


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of this microbatch is needed any more, or nothing of one of its hops."""

    microbatch: int
    hop: int | None = None


Effect = Ready | Send | Later | Report | Forget


class Desk:
    """The visits of one step at one peer. Whoever drives it has checked that messages come from those who may send them."""

    def __init__(
        self,
        *,
        window: bytes,
        me: int,  # our place among the plan's peers
        stages: Sequence[Sequence[int]],  # the peers that hold each
        loss_at_home: bool,
        most_waiting: int,  # forwards that may wait here
        lease_s: float,
        visit_s: Mapping[int, float] = UNMEASURED,  # seconds that a microbatch takes peers, where we know
    ) -> None:
        self._window = window
        self._me = me
        self._stages = stages
        self._loss_at_home = loss_at_home
        self._most_waiting = most_waiting
        self._lease_s = lease_s
        self._visits: dict[tuple[int, int], Visit] = {}
        self._landed: set[int] = set()
        self._losses: dict[int, float] = {}
        """By microbatch, those computed here."""
        self._given_up: dict[tuple[int, int], int] = {}  # the version up to which parcels are refused
        self._visit_s = visit_s
        self._given = Counter[int]()
        """By peer, how often a leg that was open was bound to it."""
        self._unreachable: set[int] = set()
        self.counted: dict[int, set[tuple[int, int]]] = {}
        """By data node: (microbatch, hop) whose gradients were accumulated here; hop n is the loss."""

    @property
    def num_visits(self) -> int:
        """Visits that something is kept for."""
        return sum(not visit.lapsed for visit in self._visits.values())

    def answer(self, parcel: ParcelHeader) -> Answer:
        """What `take` would answer now."""
        key = (parcel.microbatch, parcel.hop)
        visit = self._visits.get(key)
        lapsed = visit is not None and visit.lapsed
        if lapsed or parcel.microbatch in self._landed or parcel.version <= self._given_up.get(key, -1):
            return Answer.UNWANTED
        if (
            visit is not None
            and not self._is_counted(key, visit)
            and not same_input(visit.route, parcel.route, parcel.hop)
        ):
            if parcel.backward or parcel.version < visit.version or self._is_counting(key, visit):
                return Answer.UNWANTED
        has_it = visit is not None and (visit.has_input or self._is_counted(key, visit))
        fresh = not parcel.backward and not has_it
        in_between = 0 < parcel.hop < min(len(parcel.route), parcel.until)
        return Answer.BUSY if fresh and in_between and self._waiting() >= self._most_waiting else Answer.TAKEN

    def take(self, parcel: ParcelHeader, now: float) -> tuple[Answer, list[Effect]]:
        """A parcel for us, of which the tensors are here."""
        answer = self.answer(parcel)
        if answer is not Answer.TAKEN:
            return answer, []
        key = (parcel.microbatch, parcel.hop)
        visit = self._visit(key, parcel.route, parcel.version, now)
        if self._is_counted(key, visit):
            return Answer.TAKEN, self._back_again(key, visit)
        if not same_input(visit.route, parcel.route, parcel.hop):
            visit = self._visits[key] = Visit(parcel.route, parcel.version, visit.lease_until)
        if not self._loss_at_home and not math.isnan(parcel.loss):
            visit.loss = parcel.loss
        if parcel.backward and not visit.has_gradient:
            # the way by which the loss was reached is the way back, even if a newer forward has come by since
            visit.route, visit.version = parcel.route, max(visit.version, parcel.version)
            visit.has_gradient = True
            return Answer.TAKEN, self._backward_if_whole(key, visit)
        if parcel.backward or not visit.has_gradient:
            visit.follow(parcel.route, parcel.version)
        if parcel.backward:
            return Answer.TAKEN, [self._say(key, visit, Said.HOLDING, backward=True)]
        visit.until = parcel.until
        if visit.has_input:
            return Answer.TAKEN, self._forward_again(key, visit)
        visit.has_input = True
        if parcel.until > parcel.hop:
            visit.forward = Phase.READY
            return Answer.TAKEN, [Ready(Work(*key, backward=False))]
        return Answer.TAKEN, self._backward_if_whole(key, visit)

    def keeps(self, microbatch: int, hop: int, *, backward: bool) -> bool:
        """Whether the gradient, or the input, of a visit is to be kept here."""
        visit = self._visits.get((microbatch, hop))
        return visit is not None and (visit.has_gradient if backward else visit.has_input)

    def started(self, work: Work) -> bool:
        """`work` is about to run; False when it is not wanted any more."""
        visit = self._visits.get((work.microbatch, work.hop))
        if visit is None:
            return False
        if work.backward and visit.backward is Phase.READY:
            visit.backward = Phase.RUNNING
        elif not work.backward and visit.forward is Phase.READY:
            visit.forward = Phase.RUNNING
        else:
            return False
        return True

    def finished(self, work: Work, home: int, loss: float = math.nan) -> list[Effect]:
        """`work` was computed; a backward, and the loss, have accumulated their gradients."""
        key = (work.microbatch, work.hop)
        visit = self._visits.get(key)
        is_loss = not work.backward and visit is not None and work.hop == len(visit.route)
        if work.backward or is_loss:
            self.counted.setdefault(home, set()).add(key)
        if visit is None:
            return []  # it landed meanwhile
        if work.backward:
            visit.backward = Phase.DONE
            visit.has_input = visit.has_gradient = False
            return self._send_back(key, visit)
        if visit.forward is not Phase.RUNNING:
            return []  # given up meanwhile
        visit.forward = Phase.DONE
        if is_loss:
            self._losses[work.microbatch] = loss
            visit.has_input = False
            return self._send_back(key, visit)
        onward: list[Effect] = [self._send_on(key, visit)] if visit.until > work.hop else []
        return onward + self._backward_if_whole(key, visit)

    def failed(self, work: Work) -> list[Effect]:
        """`work` overflowed, or found no room, and added nothing: somebody else does its visit, or its data node hears that nobody does."""
        key = (work.microbatch, work.hop)
        visit = self._visits.get(key)
        if visit is None or (visit.backward if work.backward else visit.forward) is not Phase.RUNNING:
            return []  # it landed or was given up meanwhile
        if work.backward:
            visit.backward = Phase.IDLE
        else:
            visit.forward = Phase.IDLE
        is_loss = work.hop == len(visit.route)
        if not work.backward and not is_loss and (visit.has_gradient or self._counting(key, visit.route) is not None):
            # it was to be sent once more, and has been used: what is still to come needs only the input
            return self._backward_if_whole(key, visit)
        elsewhere = (work.microbatch, live_hops(visit.route)[-1]) if is_loss and not self._loss_at_home else key
        if self._counting(elsewhere, visit.route) is None:
            return self._give_up(elsewhere, visit.version, visit.route, backward=work.backward)
        del self._visits[key]  # the loss counts here, and nobody else has it: its data node has to lose us
        self._given_up[key] = visit.version
        return [Forget(*key), self._say(key, visit, Said.MISSING, backward=work.backward)]

    def cannot(self, parcel: ParcelHeader, now: float) -> tuple[Answer, list[Effect]]:
        """A parcel for us, of which there is no room for the tensors: somebody else does its visit, unless what it brings is here already, or
        something of it counts, which has to wait for room."""
        answer = self.answer(parcel)
        if answer is not Answer.TAKEN:
            return answer, []
        key = (parcel.microbatch, parcel.hop)
        visit = self._visits.get(key)
        has_it = False
        if visit is not None:
            brought = visit.has_gradient if parcel.backward else visit.has_input
            has_it = self._is_counted(key, visit) or (brought and same_input(visit.route, parcel.route, parcel.hop))
        if has_it:  # and perhaps there is a newer route to follow
            return self.take(parcel, now)
        # its data node has gone on, and would not listen
        is_late = visit is not None and visit.version > parcel.version
        if is_late or self._counting(key, parcel.route) is not None:
            return Answer.BUSY, []
        return Answer.UNWANTED, self._give_up(key, parcel.version, parcel.route, backward=parcel.backward)

    def passed(self, send: Send) -> list[Effect]:
        """The next hop's peer has taken it."""
        self._unreachable.discard(send.peer)
        key = (send.work.microbatch, send.work.hop)
        visit = self._visits.get(key)
        if visit is None:
            return []
        if visit.version == send.version:
            if send.backward:
                visit.returning = False
            else:
                visit.sending, visit.passed = False, True
        return [self._say(key, visit, Said.PASSED, backward=send.work.backward)]

    def busy(self, send: Send) -> list[Effect]:
        """The next hop's peer takes nothing at the moment: another one of a leg that we bound, or the same later."""
        if send.tried is None or not self.wants(send):
            return [Later(send)]
        tried = send.tried | {send.peer}
        others = set(self._stages[send.route[send.hop].stage]) - tried - self._unreachable
        if not others:
            return [Later(replace(send, tried=frozenset()))]
        peer = self._least_busy(others)
        visit = self._visits[send.work.microbatch, send.work.hop]
        visit.route = with_peer(visit.route, send.hop, peer)
        return [replace(send, peer=peer, route=visit.route, tried=tried)]

    def unreachable(self, send: Send) -> list[Effect]:
        """The next hop's peer does not answer; whether it took the parcel is not known, so the data node decides."""
        self._unreachable.add(send.peer)
        return self._stuck(send)

    def unwanted(self, send: Send) -> list[Effect]:
        """The next hop's peer refuses it for good: it gave the hop up, of which the data node may not have heard, or for which it saw no need then."""
        return self._stuck(send)

    def avoid(self, peer: int) -> None:
        """It is silent, as others have seen: legs that are open go to others, as long as there are any."""
        self._unreachable.add(peer)

    def wants(self, send: Send) -> bool:
        """Whether `send` is still to be done: its microbatch has not landed, nor its lease run out, and its route is the newest."""
        visit = self._visits.get((send.work.microbatch, send.work.hop))
        return visit is not None and visit.version == send.version and not visit.lapsed

    def on_again(self, order: Again, now: float) -> list[Effect]:
        """The data node wants something sent once more."""
        key = (order.microbatch, order.hop)
        if order.microbatch in self._landed:
            return []
        if (gone := self._gone(key, order)) is not None:
            return gone
        visit = self._visit(key, order.route, order.version, now)
        if not visit.obey(order.route, order.version, order.hop):
            return [self._say(key, visit, Said.MISSING, backward=order.backward)]
        if self._is_counted(key, visit):
            return self._back_again(key, visit)
        forward = not order.backward and visit.has_input
        said = Said.HOLDING if forward or visit.computing else Said.MISSING
        alive: Effect = self._say(key, visit, said, backward=order.backward)
        if forward:
            visit.until = order.until
            return [alive, *self._forward_again(key, visit)]
        return [alive]

    def on_give_up(self, order: GiveUp) -> list[Effect]:
        """The data node wants this visit done by somebody else."""
        key = (order.microbatch, order.hop)
        visit = self._visits.get(key)
        if order.microbatch in self._landed:
            return []
        if (gone := self._gone(key, order)) is not None:
            return gone
        if visit is not None and self._is_counted(key, visit):
            return self._back_again(key, visit)
        if visit is not None and not order.backward and visit.has_input and (visit.sending or visit.passed):
            return [self._say(key, visit, Said.HOLDING if visit.sending else Said.PASSED, backward=False)]
        if (one := self._counting(key, order.route)) is not None:
            return [self._say(one, self._visits[one], Said.HOLDING, backward=one == key)]
        return self._give_up(key, order.version, order.route, backward=False)

    def _gone(self, key: tuple[int, int], order: Again | GiveUp) -> list[Effect] | None:
        """What the data node hears of a visit, or of the loss that is computed with it, that counts here and of which nothing is kept any more; None: there is none."""
        for one in self._together(key, order.route):
            if one in self._visits and self._visits[one].lapsed:
                self._visits[one].obey(order.route, order.version, one[1])
                self._visits[one].follow(order.route, order.version)  # or it would not listen to the word
                return [self._say(one, self._visits[one], Said.MISSING, backward=True)]
        return None

    def on_landed(self, microbatches: Iterable[int]) -> list[Effect]:
        """Over, or void: what is kept for them goes; what was counted stays counted."""
        over = set(microbatches)
        self._landed |= over
        kept = [key for key in self._visits if key[0] in over]
        for key in kept:
            del self._visits[key]
        return [Forget(microbatch) for microbatch in sorted(over)]

    def expire(self, now: float) -> list[Effect]:
        """Let go of what nobody has asked for during a lease: its data node is gone, or has lost sight of it.

        If it asks all the same, it is told what is missing. What counts is remembered, and nothing else is done for that microbatch under the version that
        it had, as if it had been given up.
        """
        held = {key[0] for key, one in self._visits.items() if one.is_held(now)}
        over = {key: visit for key, visit in self._visits.items() if key[0] not in held and not visit.lapsed}
        for key, visit in over.items():
            if self._is_counted(key, visit):
                visit.lapsed = True
            else:
                del self._visits[key]
                self._given_up[key] = max(visit.version, self._given_up.get(key, -1))
        return [Forget(microbatch) for microbatch in sorted({key[0] for key in over})]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _give_up(self, key: tuple[int, int], version: int, route: Route, *, backward: bool) -> list[Effect]:
        together = self._together(key, route)
        for one in together:
            self._visits.pop(one, None)
            self._given_up[one] = max(version, self._given_up.get(one, -1))
        passage = Passage(self._window, *key, backward, Said.GAVE_UP, version, route, math.nan)
        return [*(Forget(*one) for one in together), Report(route[0].peer, passage)]

    def _together(self, key: tuple[int, int], route: Route) -> list[tuple[int, int]]:
        """The visits that are done by the same peer in any case: the loss goes where the last hop goes."""
        is_last = not self._loss_at_home and key[1] == live_hops(route)[-1]
        return [key, (key[0], len(route))] if is_last else [key]

    def _counting(self, key: tuple[int, int], route: Route) -> tuple[int, int] | None:
        """The first of them that counts here, or is about to."""
        for one in self._together(key, route):
            done = self._visits.get(one)
            if done is not None and (self._is_counted(one, done) or self._is_counting(one, done)):
                return one
        return None

    def _stuck(self, send: Send) -> list[Effect]:
        key = (send.work.microbatch, send.work.hop)
        visit = self._visits.get(key)
        if visit is None or visit.version > send.version:
            return []
        if send.backward:
            visit.returning = False
        else:
            visit.sending = False
        return [self._say(key, visit, Said.STUCK, backward=send.work.backward)]

    def _waiting(self) -> int:
        return sum(visit.forward is Phase.READY for visit in self._visits.values())

    def _visit(self, key: tuple[int, int], route: Route, version: int, now: float) -> Visit:
        visit = self._visits.setdefault(key, Visit(route, version, now))
        visit.lease_until = now + self._lease_s
        return visit

    def _is_counted(self, key: tuple[int, int], visit: Visit) -> bool:
        done = visit.forward if key[1] == len(visit.route) else visit.backward
        return done is Phase.DONE

    def _is_counting(self, key: tuple[int, int], visit: Visit) -> bool:
        return Phase.RUNNING is (visit.forward if key[1] == len(visit.route) else visit.backward)

    def _forward_again(self, key: tuple[int, int], visit: Visit) -> list[Effect]:
        if visit.computing or visit.sending:
            return [self._say(key, visit, Said.HOLDING, backward=visit.backward is not Phase.IDLE)]
        if visit.until <= key[1]:
            return self._backward_if_whole(key, visit)
        visit.forward = Phase.READY
        return [Ready(Work(*key, backward=False))]

    def _backward_if_whole(self, key: tuple[int, int], visit: Visit) -> list[Effect]:
        if not (visit.has_input and visit.has_gradient) or visit.computing:
            return []
        visit.backward = Phase.READY
        return [Ready(Work(*key, backward=True))]

    def _send_on(self, key: tuple[int, int], visit: Visit) -> Send:
        hop = following(visit.route, key[1])
        peer, tried = peer_of(visit.route, hop, loss_at_home=self._loss_at_home), None
        if peer == OPEN:
            peers = self._stages[visit.route[hop].stage]
            peer = self._least_busy([one for one in peers if one not in self._unreachable] or peers)
            tried = frozenset[int]()
            visit.route = with_peer(visit.route, hop, peer)
        visit.sending = True
        return Send(
            work=Work(*key, backward=False),
            hop=hop,
            peer=peer,
            until=visit.until,
            version=visit.version,
            route=visit.route,
            loss=math.nan,
            tried=tried,
        )

    def _back_again(self, key: tuple[int, int], visit: Visit) -> list[Effect]:
        """What a visit that is counted answers to everything: the gradient of its input once more, unless that is on its way."""
        holding = self._say(key, visit, Said.HOLDING, backward=True)
        return [holding] if visit.returning else [holding, *self._send_back(key, visit)]

    def _send_back(self, key: tuple[int, int], visit: Visit) -> list[Effect]:
        """The gradient of the input; of hop 0, which has none, the word that all is done."""
        is_loss = key[1] == len(visit.route)
        if key[1] == 0:
            return [self._say(key, visit, Said.PASSED, backward=True)]
        hop = preceding(visit.route, key[1])
        visit.returning = True
        send = Send(
            work=Work(*key, backward=not is_loss),
            hop=hop,
            peer=visit.route[hop].peer,
            until=0,
            version=visit.version,
            route=visit.route,
            loss=self._loss(key, visit),
            tried=None,
        )
        return [send]

    def _least_busy(self, peers: Collection[int]) -> int:
        peer = least_busy(peers, self._given, self._visit_s, first=self._me)
        self._given[peer] += 1
        return peer

    def _say(self, key: tuple[int, int], visit: Visit, said: Said, *, backward: bool) -> Report:
        passage = Passage(self._window, *key, backward, said, visit.version, visit.route, self._loss(key, visit))
        return Report(visit.route[0].peer, passage)

    def _loss(self, key: tuple[int, int], visit: Visit) -> float:
        """What was computed here goes before what others say: where the loss is at home, its data node believes nobody about it."""
        return self._losses.get(key[0], visit.loss)
