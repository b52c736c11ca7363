"""What a route may have become on its way: the rules by which data nodes and stage peers take each other's word for it.

They are the same for both, so that nobody passes on what the other one has to refuse.
"""

from collections.abc import Sequence

from farflung.protocol.droppable import Droppable
from farflung.protocol.route import OPEN, Route


def broken_rule(
    route: Route,
    planned: Route,
    hop: int,  # that a message of the microbatch is about; n is the loss
    *,
    stages: Sequence[Sequence[int]],  # the peers that hold each
    droppable: Droppable,
    loss_at_home: bool,
) -> str:
    """What is wrong with the route of a microbatch, in words; empty when nothing is."""
    if [leg.stage for leg in route] != [leg.stage for leg in planned] or route[0] != planned[0]:
        return "its route is not that of the plan"
    if _leaves_open(route, planned, hop):
        return "its route leaves open a leg that must be bound"
    if any(leg.peer >= 0 and leg.peer not in stages[leg.stage] for leg in route):
        return "its route goes to a peer for a stage that it does not hold"
    if not droppable.allows(route, loss_at_home=loss_at_home):
        return "its route leaves out a hop that must not be left out"
    return ""


def _leaves_open(route: Route, planned: Route, hop: int) -> bool:
    """Whether a leg is open that cannot be: the one that is spoken of, one before it, or one that the plan binds."""
    return any(
        leg.peer == OPEN and (at <= hop or plan.peer != OPEN)
        for at, (leg, plan) in enumerate(zip(route, planned, strict=True))
    )
