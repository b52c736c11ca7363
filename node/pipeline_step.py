"""One step of a pipeline: the plan, who its peers are, what a parcel of it may be, all of which they know alike; and how fast they are, as far as we know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from farflung.node.network import PeerId
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import Refused
from farflung.protocol.flight import Patience
from farflung.protocol.headers import ImprintKey, ParcelHeader
from farflung.protocol.messages import Again, GiveUp
from farflung.protocol.route import OPEN, Leg, Route, following, peer_of, preceding
from farflung.protocol.route_rules import broken_rule, takers
from farflung.protocol.wiring import UNMEASURED
from farflung.training.pipeline_plan import BadPlan, Plan
from farflung.training.pipeline_rules import validate


@dataclass(frozen=True, kw_only=True)
class Step:
    """Raises BadPlan when it cannot be carried out by stage servers."""

    number: int
    """Of the pipeline's steps; more than one window may have it, where the first came to nothing."""
    window: bytes
    """Its id, 32 bytes; never used twice."""
    plan: Plan
    """Peers are named by their public keys in hex."""
    most_tokens: int
    """Of a microbatch, and of a sequence of it."""
    patience: Patience
    """Of its flights."""
    droppable: Droppable = field(default_factory=Droppable)
    """What its routes may lose on their way."""
    visit_s: Mapping[int, float] = field(default_factory=lambda: UNMEASURED)
    """By place in the plan, what a microbatch takes a peer, seconds: right against each other, and by what we have heard."""

    most_homes: int | None = None
    """Data nodes whose microbatches may come to one peer of another stage; None: any number."""

    def __post_init__(self) -> None:
        validate(self.plan)
        if self.plan.split_backward:
            raise BadPlan("stage servers compute a backward in one; plan it without split_backward")
        if any(hop.stage == 0 for lane in self.plan.lanes for hop in lane.route[1:]):
            raise BadPlan("a route comes to stage 0, which takes tokens, after its beginning")
        if any(lane.route[0].stage != 0 for lane in self.plan.lanes):
            raise BadPlan("a route begins at a stage that takes no tokens; begin at stage 0")

    @cached_property
    def keys(self) -> tuple[PeerId, ...]:
        """Of the plan's peers, by their place."""
        return tuple(bytes.fromhex(name) for name in self.plan.peers)

    @cached_property
    def place(self) -> dict[PeerId, int]:
        """Of the plan's peers, by key."""
        return {key: place for place, key in enumerate(self.keys)}

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The planned one of each microbatch."""
        turns = self.plan.schedule()
        ways = [
            tuple(Leg(hop.stage, OPEN if hop.peer is None else hop.peer) for hop in lane.route)
            for lane in self.plan.lanes
        ]
        return tuple(ways[lane] for lane, _ in turns)

    @cached_property
    def lease_s(self) -> float:
        """How long something of a microbatch is kept though nobody asks for it, seconds."""
        return self.patience.lease_s(max(len(route) for route in self.routes))

    @cached_property
    def ascends(self) -> bool:
        """Whether all routes meet stages in one order."""
        ways = [[hop.stage for hop in lane.route] for lane in self.plan.lanes]
        return all(stages == sorted(stages) for stages in ways)

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """The lane of each microbatch."""
        return tuple(lane for lane, _ in self.plan.schedule())

    @cached_property
    def takers(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """By data node, the peers of each stage that may do its microbatches, also where others are lost."""
        return takers(set(self.routes), self.plan.stages, self.most_homes)

    @cached_property
    def homes(self) -> frozenset[int]:
        """All data nodes."""
        return frozenset(route[0].peer for route in self.routes)

    def home(self, microbatch: int) -> int:
        """The data node of a microbatch; -2 when there is no such microbatch."""
        return self.routes[microbatch][0].peer if microbatch < len(self.routes) else -2

    def imprint_key(self, microbatch: int) -> ImprintKey:
        """By which peers find again what they remember of it (`imprints`)."""
        return ImprintKey(self.number, self.window, microbatch)

    def spares(self, me: int) -> frozenset[tuple[int, bool]]:
        """(peer, backward): whom we may have to send to when a peer is lost, beside those that the plan has us send to.

        A lost peer's hop is done by a mate of its stage, or by nobody. So whoever has the hop before or after it may send to each of its mates, or past
        it; and its mates to whoever comes before and after. The loss belongs to its data node, whose stage is nobody else's of this microbatch.
        """
        found: set[tuple[int, bool]] = set()
        planned: set[tuple[int, bool]] = set()
        for route in set(self.routes):
            stages = self.takers[route[0].peer]
            way = [(leg.peer, stages[leg.stage] if hop else (leg.peer,)) for hop, leg in enumerate(route)]
            if self.plan.loss_at_home:
                way.append(way[0])
            for backward in (False, True):
                if backward:
                    way.reverse()
                for number, (peer, mates) in enumerate(way[:-1]):
                    then, others = way[number + 1]
                    if me == peer:
                        planned.add((then, backward))
                        found |= {(other, backward) for other in others}
                        found |= {(past, backward) for past, _ in way[number + 2 : number + 3]}
                    elif me in mates:
                        found.add((then, backward))
        return frozenset((peer, backward) for peer, backward in found - planned if peer not in (OPEN, me))

    def peer_at(self, route: Route, hop: int) -> int:
        return peer_of(route, hop, loss_at_home=self.plan.loss_at_home)

    def placed(self, sender: PeerId) -> int:
        """Its place in the plan. Raises Refused, naming it, for a peer that has none: it has no part in the step, whatever it says of it."""
        place = self.place.get(sender)
        if place is None:
            raise Refused("word of a step from a peer that is not in its plan", peer=sender)
        return place

    def check(self, header: ParcelHeader, sender: PeerId, me: int, most_bytes: int) -> None:
        """Raises Refused, naming the sender, for a parcel that it cannot send to us."""
        place = self.placed(sender)
        wrong = self._wrong_route(header.microbatch, header.route, header.hop, me) or self._wrong_parcel(
            header, place, most_bytes
        )
        if wrong:
            raise Refused(f"a parcel of microbatch {header.microbatch}, hop {header.hop}: {wrong}", peer=sender)

    def check_order(self, order: Again | GiveUp, sender: PeerId, me: int) -> None:
        """Raises Refused, naming the sender, for an order that a data node cannot give us."""
        if self.home(order.microbatch) != self.placed(sender):
            raise Refused("an order about a microbatch of another data node", peer=sender)
        wrong = self._wrong_route(order.microbatch, order.route, order.hop, me)
        if wrong:
            raise Refused(f"an order for microbatch {order.microbatch}, hop {order.hop}: {wrong}", peer=sender)

    def _wrong_route(self, microbatch: int, route: Route, hop: int, me: int) -> str:
        if microbatch >= len(self.routes):
            return f"the plan has {len(self.routes)} microbatches"
        planned, plan = self.routes[microbatch], self.plan
        stages = self.takers[planned[0].peer]
        wrong = broken_rule(
            route, planned, hop, stages=stages, droppable=self.droppable, loss_at_home=plan.loss_at_home
        )
        if wrong:
            return wrong
        if hop > len(route) or self.peer_at(route, hop) != me:
            return "it does not go here"
        return ""

    def _wrong_parcel(self, header: ParcelHeader, sender: int, most_bytes: int) -> str:
        route, hop = header.route, header.hop
        if not (0 if header.backward else 1) <= hop <= len(route) - header.backward:
            return "it does not go here"
        source = following(route, hop) if header.backward else preceding(route, hop)
        if self.peer_at(route, source) != sender:
            return "it does not come from there"
        if not 1 <= header.length <= self.most_tokens or not 1 <= header.batch * header.length <= self.most_tokens:
            return f"{header.batch} sequences of {header.length} tokens, at most {self.most_tokens} tokens are agreed"
        if header.nbytes > most_bytes:
            return f"{header.nbytes} bytes, limit {most_bytes}"
        return ""
