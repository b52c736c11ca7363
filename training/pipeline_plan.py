"""One representation for every pipeline schedule: lanes with routes, and operations that depend on routes only.

A *lane* is a place for one microbatch on its way: its microbatches go one after another, each when the one before has
returned. Its *route* lists hops, (stage, peer), the first of them its data node; it may leave stages out, swap
neighbours, or name one peer for several stages. From the route alone follows what an operation waits for (m is a
microbatch, h a hop, 0 the data node):

    F(m, h)     after F(m, h-1)                                     forward of one stage
    LOSS(m)     after F(m, last), at the data node or at the last hop
    B(m, h)     after B(m, h+1), the last after LOSS(m)             backward; or, with `split_backward`:
    I(m, h)     after I(m, h+1), the last after LOSS(m)             gradient of the input
    W(m, h)     after I(m, h)                                       gradient of the weights

Nothing is said about stages s and s+1, so GPipe, 1F1B, interleaved stages, zero-bubble, SkipPipe, CheckFree+ and
SWARM are plans of this one kind (pipeline_schedules.py builds them); messages are never written by hand: one goes
wherever two such operations are on different peers. What a peer does next is chosen among what is ready, by a policy or
by the order of a fixed program. The digest's section 4.2 has the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from farflung.training.errors import TrainingError


class BadPlan(TrainingError, ValueError):
    """A plan, or what a plan is to be made from, breaks a rule; the message says which one and what to change."""


class Kind(StrEnum):
    F = "F"
    LOSS = "LOSS"
    B = "B"
    I = "I"  # noqa: E741  # the name that the literature has for it
    W = "W"


class Policy(StrEnum):
    """Which of its ready operations a peer takes; ties go to the one that became ready first."""

    ARRIVAL = "arrival"
    """First come, first served."""
    BACKWARD = "backward"
    """Backward before forward before weight gradients: 1F1B with slots of S - s."""
    PROGRAM = "program"
    """The next of the peer's program, waiting for it if need be."""


class Hop(NamedTuple):
    """It names no version of weights: a backward computes its forward anew, so one hop uses the same weights for both, and peers of a stage differ anyway."""

    stage: int
    peer: int | None
    """Index into `Plan.peers`; None is bound while the plan runs, as SWARM does it."""


Route = tuple[Hop, ...]


class Op(NamedTuple):
    kind: Kind
    microbatch: int
    hop: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.hop}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    route: Route
    microbatches: int = 1
    """How many take this route, one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All routes of one step. `pipeline_rules.validate` says whether it can be carried out."""

    peers: tuple[str, ...]
    """Names; everything else counts peers by their place here."""
    stages: tuple[tuple[int, ...], ...]
    """The peers that hold each stage; with virtual stages a peer occurs in several."""
    lanes: tuple[Lane, ...]
    slots: tuple[int, ...]
    """Per peer: activations it can keep, each from a forward to the backward (or W) that uses it up."""
    policy: Policy = Policy.ARRIVAL
    program: Mapping[int, tuple[Op, ...]] | None = None
    """Per peer, all its operations in order: with Policy.PROGRAM, and only then."""
    loss_at_home: bool = True
    """The last hop sends its output to the data node, which has the head; if not, the last hop has it."""
    split_backward: bool = False
    """I and W instead of B."""

    def schedule(self) -> list[tuple[int, int]]:
        """(lane, turn) of every microbatch; its place in the list is its number. All first turns come first."""
        turns = [(lane, turn) for lane, one in enumerate(self.lanes) for turn in range(one.microbatches)]
        return sorted(turns, key=lambda both: (both[1], both[0]))


def operations(plan: Plan, hops: int, microbatch: int) -> list[Op]:
    """All operations of a microbatch with so many hops, in the order in which they depend on each other."""
    forward = [Op(Kind.F, microbatch, hop) for hop in range(hops)]
    loss = Op(Kind.LOSS, microbatch, 0 if plan.loss_at_home else hops - 1)
    kinds = (Kind.I, Kind.W) if plan.split_backward else (Kind.B,)
    return [*forward, loss, *(Op(kind, microbatch, hop) for hop in reversed(range(hops)) for kind in kinds)]


def after(plan: Plan, hops: int, op: Op) -> list[Op]:
    """What waits for `op` within its microbatch: the dependencies of the module's table, read forwards."""
    kind, microbatch, hop = op
    back = Kind.I if plan.split_backward else Kind.B
    if kind is Kind.F:
        last = hop == hops - 1
        return [Op(Kind.LOSS, microbatch, 0 if plan.loss_at_home else hop) if last else Op(Kind.F, microbatch, hop + 1)]
    if kind is Kind.LOSS:
        return [Op(back, microbatch, hops - 1)]
    if kind is Kind.W:
        return []
    weights = [Op(Kind.W, microbatch, hop)] if kind is Kind.I else []
    return [*weights, Op(back, microbatch, hop - 1)] if hop else weights
