"""Flights and desks on a network of events: no torch, no loop, everything that can go wrong drawn from a seed."""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from farflung.protocol.desk import Answer, Desk, Forget, Later, Ready, Report, Send
from farflung.protocol.desk import Effect as DeskEffect
from farflung.protocol.droppable import Droppable
from farflung.protocol.flight import Patience
from farflung.protocol.flights import Effect as FlightEffect
from farflung.protocol.flights import Flights, Note, Start, Tell
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Again, GiveUp, Landed, Passage, encode
from farflung.protocol.pipeline_messages import decode as decode_pipeline
from farflung.protocol.route import Route, live_hops
from farflung.protocol.route_rules import broken_rule
from farflung.protocol.visit import Work
from farflung.protocol.wiring import UNMEASURED

WINDOW = b"w" * 32
PATIENCE = Patience(leg_s=12.0, answer_s=4.0, hard_s=200.0)
NOTHING = Droppable()
Happens = Callable[["PipelineLab", int, Work, str], None]


class PipelineLab:
    """One data node, peer 0, and the peers of all stages; every peer computes one thing at a time, backwards first."""

    def __init__(
        self,
        seed: int,
        stages: Sequence[Sequence[int]],
        lanes: Sequence[Sequence[tuple[int, Route]]],
        *,
        loss_at_home: bool = True,
        droppable: Droppable = NOTHING,
        loss: float = 0.0,
        most_waiting: int = 64,
        visit_s: Mapping[int, float] = UNMEASURED,
        happens: Happens | None = None,
        lease_s: float = math.inf,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.loss = loss
        self.loss_at_home = loss_at_home
        self.lease_s = lease_s
        self.droppable = droppable
        self.dead: set[int] = set()
        self.notes: list[Note] = []
        self.happens = happens
        self.full = 0.0
        """Chance that a parcel that a planned hop brings finds no room."""
        self.fails = 0.0
        """Chance that what a peer computes overflows, or finds no room; but a backward of a loss that counts at that peer."""
        self._chance = random.Random(f"{seed}/room")
        self.slow: dict[int, float] = {}
        self.tensors: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
        """(peer, microbatch, hop, backward): the stages that made an input, or the loss whose gradient it is."""
        self.kept: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._stages = stages
        self._planned = {m: way for lane in lanes for m, way in lane}
        self._stage = {(m, h): leg.stage for lane in lanes for m, way in lane for h, leg in enumerate(way)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._queues: dict[int, list[Work]] = defaultdict(list)
        self._computing: set[int] = set()
        self.flights = Flights(
            window=WINDOW,
            home=0,
            stages=stages,
            lanes=lanes,
            loss_at_home=loss_at_home,
            patience=PATIENCE,
            droppable=droppable,
            visit_s=visit_s,
        )
        self.desks = {
            peer: Desk(
                window=WINDOW,
                me=peer,
                stages=stages,
                loss_at_home=loss_at_home,
                most_waiting=most_waiting,
                visit_s=visit_s,
                lease_s=lease_s,
            )
            for peer in sorted({peer for stage in stages for peer in stage})
        }

    def run(self, seconds: float = 20000.0) -> None:
        self._do(self.flights.begin(0.0))
        while not self.flights.done and self.now < seconds:
            for peer in self.desks.keys() - self.dead:
                self._at(peer, self.desks[peer].expire(self.now))
            due = self.flights.next_due()
            assert due is not None
            if self._events and self._events[0][0] <= due:
                self.now, _, event = heapq.heappop(self._events)
                event()
            else:
                self.now = due
                self._do(self.flights.tick(self.now))
        assert self.flights.done, f"{self.flights._flights} after {self.now} s; {self.notes}"
        while self._events:  # what was on its way when the last one landed
            self.now, _, event = heapq.heappop(self._events)
            event()

    def kill(self, peer: int) -> None:
        self.dead.add(peer)

    def counted(self) -> dict[tuple[int, int], list[int]]:
        """Peers whose gradients of each (microbatch, hop) count."""
        found = defaultdict(list)
        for peer, desk in self.desks.items():
            if peer not in self.dead and peer not in self.flights.lost:
                for key in desk.counted.get(0, ()):
                    found[key].append(peer)
        return found

    # ---- inside --------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _delay(self) -> float:
        return self.rng.uniform(0.01, 1.0)

    def _do(self, effects: Sequence[FlightEffect]) -> None:
        for effect in effects:
            match effect:
                case Note():
                    self.notes.append(effect)
                case Start(order):
                    self._start(order)
                case Tell(peer, message):
                    self._message(0, peer, partial(self._order, peer, message))

    def _start(self, order: Again) -> None:
        header = ParcelHeader(
            WINDOW, order.microbatch, 0, False, order.until, order.version, order.route, 1, 1, math.nan, False, 4
        )
        if (order.microbatch, 0) in self.desks[0]._visits:
            self._at(0, self.desks[0].on_again(order, self.now))
        else:
            self.tensors[0, order.microbatch, 0, False] = ()
            self._at(0, self.desks[0].take(header, self.now)[1])

    def _message(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        if sender == receiver:
            self._later(0.0, deliver)
            return
        copies = 0 if self.rng.random() < self.loss else 2 if self.rng.random() < self.loss else 1
        for _ in range(copies):
            self._later(self._delay(), deliver)

    def _order(self, peer: int, message: Again | GiveUp | Landed) -> None:
        if peer in self.dead:
            return
        assert decode_pipeline(encode(message), peer=None) == message
        if not isinstance(message, Landed):
            self._check(message)
        desk = self.desks[peer]
        match message:
            case Again():
                self._at(peer, desk.on_again(message, self.now))
            case GiveUp():
                self._at(peer, desk.on_give_up(message))
            case Landed():
                self._at(peer, desk.on_landed(message.microbatches))

    def _at(self, peer: int, effects: Sequence[DeskEffect], tensor: tuple[int, ...] | None = None) -> None:
        """`tensor`: what the sends among them carry, where they are not the first try: the input may be another one by now."""
        for effect in effects:
            match effect:
                case Ready(work):
                    self._queues[peer].append(work)
                    self._later(0.0, lambda: self._compute(peer))
                case Send():
                    self._send(peer, effect, self._tensor(peer, effect) if tensor is None else tensor)
                case Later(send):
                    assert tensor is not None
                    self._later(1.0, partial(self._send, peer, send, tensor))
                case Report(home, passage):
                    assert home == 0
                    self._message(peer, 0, partial(self._heard, peer, passage))
                case Forget(microbatch, hop):
                    for key in [key for key in self.kept if key[:2] == (peer, microbatch) and hop in (None, key[2])]:
                        del self.kept[key]
                    self._queues[peer] = [
                        work
                        for work in self._queues[peer]
                        if work.microbatch != microbatch or hop not in (None, work.hop)
                    ]

    def _check(self, one: Again | GiveUp | Passage | ParcelHeader) -> None:
        """Nobody who keeps to the rules is ever refused, and no version is above the data node's."""
        wrong = broken_rule(
            one.route,
            self._planned[one.microbatch],
            one.hop,
            stages=self._stages,
            droppable=self.droppable,
            loss_at_home=self.loss_at_home,
        )
        assert not wrong, (wrong, one)
        flight = self.flights._flights.get(one.microbatch)
        assert flight is None or one.version <= flight.version

    def _heard(self, peer: int, passage: Passage) -> None:
        self._check(passage)
        self._do(self.flights.heard(peer, passage, self.now))

    def _compute(self, peer: int) -> None:
        if peer in self._computing or peer in self.dead or not self._queues[peer]:
            return
        work = min(self._queues[peer], key=lambda one: not one.backward)
        self._queues[peer].remove(work)
        if not self.desks[peer].started(work):
            self._later(0.0, lambda: self._compute(peer))
            return
        self._computing.add(peer)
        if self.happens is not None:
            self.happens(self, peer, work, "started")
        self._later(self.slow.get(peer, self.rng.uniform(0.5, 2.0)), lambda: self._computed(peer, work))

    def _computed(self, peer: int, work: Work) -> None:
        self._computing.discard(peer)
        if peer in self.dead:
            return
        visit = self.desks[peer]._visits.get((work.microbatch, work.hop))
        is_alone = (
            work.backward and not self.loss_at_home and visit is not None and work.hop == live_hops(visit.route)[-1]
        )
        if not is_alone and self._chance.random() < self.fails:
            self._at(peer, self.desks[peer].failed(work))
            self._compute(peer)
            return
        effects = self.desks[peer].finished(work, 0, 1.0)
        if (*work[:2],) in self.desks[peer].counted.get(0, ()):
            came = self.tensors[peer, work.microbatch, work.hop, False]
            loss = self.tensors.get((peer, work.microbatch, work.hop, True), came)
            if work.backward:
                assert loss[: len(came) + 1] == (*came, self._stage[work[:2]]), "a gradient for another input"
            self.kept[peer, work.microbatch, work.hop] = loss
        if self.happens is not None:
            self.happens(self, peer, work, "finished")
        if peer in self.dead:
            return
        self._at(peer, effects)
        self._compute(peer)

    def _send(self, peer: int, send: Send, tensor: tuple[int, ...]) -> None:
        if peer in self.dead or not self.desks[peer].wants(send):
            return
        delay = 0.0 if send.peer == peer else self._delay()
        self._later(delay, lambda: self._arrive(peer, send, tensor))

    def _arrive(self, peer: int, send: Send, tensor: tuple[int, ...]) -> None:
        desk = self.desks[peer]
        broken = self.rng.random() < self.loss and send.peer != peer
        if peer not in self.dead and (send.peer in self.dead or (broken and self.rng.random() < 0.5)):
            self._at(peer, desk.unreachable(send))
            return
        if send.peer in self.dead:
            return  # whoever sent it died after it
        header = ParcelHeader(
            WINDOW,
            send.work.microbatch,
            send.hop,
            send.backward,
            send.until,
            send.version,
            send.route,
            1,
            1,
            send.loss,
            False,
            4,
        )
        answer = self._take(send, header, tensor)
        if self.rng.random() < self.loss:  # the sender tries once more, and that one is slow
            self._later(self.rng.uniform(0.0, 40.0), partial(self._take, send, header, tensor))
        if peer in self.dead:
            return
        if broken:
            self._at(peer, desk.unreachable(send))  # it came, and the answer was lost
        elif answer is Answer.TAKEN:
            self._at(peer, desk.passed(send))
        elif answer is Answer.BUSY:
            self._at(peer, desk.busy(send), tensor)
        else:
            self._at(peer, desk.unwanted(send))

    def _tensor(self, peer: int, send: Send) -> tuple[int, ...]:
        microbatch, hop = send.work.microbatch, send.work.hop
        if send.backward:
            return self.kept[peer, microbatch, hop]
        return (*self.tensors[peer, microbatch, hop, False], self._stage[microbatch, hop])

    def _take(self, send: Send, header: ParcelHeader, tensor: tuple[int, ...]) -> Answer:
        desk, microbatch = self.desks[send.peer], send.work.microbatch
        self._check(header)
        if send.peer in self.dead:
            return Answer.UNWANTED
        bound = send.tried is None and 0 < send.hop < len(send.route)
        if bound and self._chance.random() < self.full:
            answer, effects = desk.cannot(header, self.now)
            self._at(send.peer, effects)
            return answer
        answer, effects = desk.take(header, self.now)
        if answer is Answer.TAKEN and desk.keeps(microbatch, send.hop, backward=send.backward):
            self.tensors[send.peer, microbatch, send.hop, send.backward] = tensor
        self._at(send.peer, effects)
        return answer
