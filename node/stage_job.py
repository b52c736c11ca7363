"""A step that a peer was asked to take part in: the plan, checked against what the peer knows, and what became of it.

A plan is believed in nothing but what cannot be checked: which routes are quick. Whoever plans may be broken or lie, so each peer looks for itself
whether the plan is by a data node, whether everybody serves the stage that it is planned for, and whether routes keep the manifest's rules
(`training/pipeline_rules.py`), and name their peers, or leave them open, as the manifest says (`pipeline.routing`).
"""

import asyncio
import math
from dataclasses import dataclass, field
from functools import cached_property

from farflung.node.pipeline_step import Step
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.errors import Refused
from farflung.protocol.flight import Patience
from farflung.protocol.keys import PeerId, short
from farflung.protocol.pipeline_messages import PlannedLane, StepPlan
from farflung.protocol.progress import may_plan, newest_step
from farflung.protocol.roll import Roll
from farflung.protocol.route import DROPPED, Leg
from farflung.training.pipeline_plan import BadPlan, Hop, Lane, Plan, Policy
from farflung.training.pipeline_rules import validate
from farflung.training.pipeline_worker import Accumulated

MIN_LEG_S, MAX_LEG_S = 5.0, 120.0
"""Patience of flights that a plan may ask for."""

ANSWER_S = 3.0
"""Until a stage peer answers whether it gives a hop up."""

LATER_THAN_PLANNED = 1.5
"""Times the longest silence that is planned, after which a flight is asked about. It costs a message and its answer, and no more where all is well."""

HARD_LEGS = 4.0
"""A peer that says it holds a flight is believed for so many legs: it may be several times slower than it said."""


@dataclass(kw_only=True)
class Job:
    """See the module."""

    step: Step
    number: int
    """Of the step, among all of the run."""
    coordinator: PeerId
    me: PeerId
    samples_per_microbatch: int
    since: float
    """When we accepted it, seconds."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the coordinator's word, or when none can come."""
    goes: bool = False
    """What the word was: whether it begins."""
    began_at: float | None = None
    """When we began it, after the word, seconds; None before."""
    taken: bool = False
    """We are at it."""
    ready: bool = False
    """We have said that we are ready."""

    def tell(self, *, goes: bool) -> None:
        """The word; the first one counts."""
        if not self.told.is_set():
            self.goes = goes
            self.told.set()

    @property
    def window(self) -> bytes:
        return self.step.window

    @property
    def place(self) -> int:
        """Ours in the plan."""
        return self.step.place[self.me]

    @cached_property
    def own(self) -> tuple[int, ...]:
        """Microbatches of which we are the data node."""
        return tuple(number for number in range(len(self.step.routes)) if self.step.home(number) == self.place)

    @property
    def own_samples(self) -> int:
        """In all of them."""
        return len(self.own) * self.samples_per_microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a step has made of us."""

    accumulated: Accumulated
    samples: int
    """That our gradient came from."""
    loss: float
    """Mean of our own microbatches; NaN when we had none."""
    missed: tuple[int, ...] = ()
    """Samples of our own microbatches that did not come home."""


def leg_of(silence_s: float) -> float:
    """How long a flight may be silent, when the plan has none that is longer than so many seconds."""
    return min(MAX_LEG_S, max(MIN_LEG_S, LATER_THAN_PLANNED * silence_s))


def patience(leg_s: float) -> Patience:
    """With flights that may be silent for so long."""
    return Patience(leg_s=leg_s, answer_s=ANSWER_S, hard_s=HARD_LEGS * leg_s)


def as_message(plan: Plan, *, window: bytes, number: int, leg_s: float) -> StepPlan:
    """The plan of a step as it is sent."""
    lanes = []
    for lane in plan.lanes:
        route = tuple(Leg(hop.stage, -1 if hop.peer is None else hop.peer) for hop in lane.route)
        lanes.append(PlannedLane(route, lane.microbatches))
    keys = tuple(bytes.fromhex(name) for name in plan.peers)
    return StepPlan(window, number, keys, plan.stages, tuple(lanes), leg_s)


def accept(message: StepPlan, sender: PeerId, *, roll: Roll, recipe: StageRecipe, now: float) -> Job:
    """Our part in a plan that is right. Raises Refused naming the sender for any other."""
    wrong = _wrong_peers(message, sender, roll, recipe.stage, now)
    if wrong:
        raise Refused(f"a plan of step {message.step}: {wrong}", peer=sender)
    try:
        step = _step(message, recipe, _visit_s(message, roll))
    except BadPlan as error:
        raise Refused(f"a plan of step {message.step}: {error}", peer=sender) from error
    return Job(
        step=step,
        number=message.step,
        coordinator=sender,
        me=roll.me,
        samples_per_microbatch=recipe.samples_per_microbatch,
        since=now,
    )


def _wrong_peers(message: StepPlan, sender: PeerId, roll: Roll, stage: int, now: float) -> str:
    """What does not fit to what we know of the swarm; empty when all does."""
    if sender not in roll.training(0, now) and (sender != roll.me or stage != 0):
        return "it does not come from a data node that trains"
    if len(message.stages) != roll.stages:
        return f"it has {len(message.stages)} stages, the manifest {roll.stages}"
    if not MIN_LEG_S <= message.leg_s <= MAX_LEG_S or not math.isfinite(message.leg_s):
        return f"it asks for a patience of {message.leg_s:g} s, allowed are {MIN_LEG_S:g} to {MAX_LEG_S:g}"
    if not may_plan(message.step, sender, roll, now):
        return f"nobody else is so far, and the next one that we know of is {newest_step(roll, now)}"
    planned: dict[PeerId, int] = {}
    for number, places in enumerate(message.stages):
        for place in places:
            if place >= len(message.peers) or message.peers[place] in planned:
                return "it plans a peer for two stages, or one that it does not list"
            planned[message.peers[place]] = number
    if len(planned) != len(message.peers) or planned.get(roll.me) != stage:
        return f"it does not plan all its peers, or not us for stage {stage}"
    for peer, number in planned.items():
        said = roll.present(peer)
        if peer != roll.me and (said is None or (said.stage, said.life) != (number, roll.number(number))):
            return f"it plans {short(peer)} for stage {number}, of which we have not heard that"
    return ""


def _visit_s(message: StepPlan, roll: Roll) -> dict[int, float]:
    """By place in the plan: a forward, of which a backward is a multiple that is the same for all; as peers say, and of those who know."""
    said = {place: roll.present(peer) for place, peer in enumerate(message.peers)}
    return {place: one.forward_s for place, one in said.items() if one is not None and one.forward_s > 0.0}


def _step(message: StepPlan, recipe: StageRecipe, visit_s: dict[int, float]) -> Step:
    """Raises BadPlan when it breaks a rule."""
    pipeline = recipe.pipeline
    legs = [leg for lane in message.lanes for leg in lane.route[1:]]
    if any(leg.peer == DROPPED for leg in legs):
        raise BadPlan("a route leaves out a hop that it lists; plan it without")
    if pipeline.dynamic and any(leg.peer >= 0 for leg in legs):
        raise BadPlan("a route says who does a stage, where the manifest leaves that to whoever sends; leave it open")
    if not pipeline.dynamic and any(leg.peer < 0 for leg in legs):
        raise BadPlan("a route leaves open who does a stage; plan all of it")
    lanes = tuple(
        Lane(
            route=tuple(Hop(leg.stage, leg.peer if leg.peer >= 0 else None) for leg in lane.route),
            microbatches=lane.microbatches,
        )
        for lane in message.lanes
    )
    wanted = sum(lane.microbatches for lane in lanes)
    if wanted != pipeline.microbatches:
        raise BadPlan(f"{wanted} microbatches, where the manifest says {pipeline.microbatches}")
    plan = Plan(
        peers=tuple(key.hex() for key in message.peers),
        stages=message.stages,
        lanes=lanes,
        slots=(pipeline.slots,) * len(message.peers),
        policy=Policy(pipeline.policy),
    )
    rules = recipe.rules()
    validate(plan, rules)
    return Step(
        number=message.step,
        window=message.window,
        plan=plan,
        most_tokens=recipe.tokens_per_microbatch,
        patience=patience(message.leg_s),
        droppable=recipe.droppable(),
        visit_s=visit_s,
        most_homes=rules.most_homes,
    )
