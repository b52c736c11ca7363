"""What a route may have become on its way: the rules by which data nodes and stage peers take each other's word for it.

They are the same for both, so that nobody passes on what the other one has to refuse.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from farflung.protocol.droppable import Droppable
from farflung.protocol.route import OPEN, Route


def takers(
    planned: Collection[Route],  # that leave no legs open where there are more data nodes than that
    stages: Sequence[Sequence[int]],  # the peers that hold each
    most_homes: int | None,  # whose microbatches may come to one peer, which sums up apart for each; None: any number
) -> dict[int, tuple[tuple[int, ...], ...]]:  # by data node, by stage
    """The peers that may do microbatches of each data node, by the plan or in the place of a lost peer.

    All of a stage, unless there are more data nodes than a peer may sum up for: then at each those that the plan brings to it, and more as far as it has places,
    first those that fewest peers may help. So nobody sums up for more than it has memory for, whoever is lost, and whoever believes so: all have the plan.
    """
    homes = sorted({route[0].peer for route in planned})
    if most_homes is None or len(homes) <= most_homes:
        return dict.fromkeys(homes, tuple(tuple(peers) for peers in stages))
    comes = {(stage, peer): set[int]() if stage else {*homes} for stage, its in enumerate(stages) for peer in its}
    for route in planned:
        for leg in route[1:]:
            comes[leg.stage, leg.peer].add(route[0].peer)
    helped = Counter((stage, home) for (stage, _), its in comes.items() for home in its)
    for (stage, _), its in comes.items():
        while len(its) < most_homes:
            _, home = min((helped[stage, home], home) for home in homes if home not in its)
            its.add(home)
            helped[stage, home] += 1
    return {
        home: tuple(tuple(peer for peer in its if home in comes[stage, peer]) for stage, its in enumerate(stages))
        for home in homes
    }


def broken_rule(
    route: Route,
    planned: Route,
    hop: int,  # that a message of the microbatch is about; n is the loss
    *,
    stages: Sequence[Sequence[int]],  # the peers of each that may do its data node's microbatches
    droppable: Droppable,
    loss_at_home: bool,
) -> str:
    """What is wrong with the route of a microbatch, in words; empty when nothing is."""
    if [leg.stage for leg in route] != [leg.stage for leg in planned] or route[0] != planned[0]:
        return "its route is not that of the plan"
    if _leaves_open(route, planned, hop):
        return "its route leaves open a leg that must be bound"
    if any(leg.peer >= 0 and leg.peer not in stages[leg.stage] for leg in route):
        return "its route goes to a peer for a stage that it does not hold, or has no room for a sum of its data node's"
    if not droppable.allows(route, loss_at_home=loss_at_home):
        return "its route leaves out a hop that must not be left out"
    return ""


def _leaves_open(route: Route, planned: Route, hop: int) -> bool:
    """Whether a leg is open that cannot be: the one that is spoken of, one before it, or one that the plan binds."""
    return any(
        leg.peer == OPEN and (at <= hop or plan.peer != OPEN)
        for at, (leg, plan) in enumerate(zip(route, planned, strict=True))
    )
