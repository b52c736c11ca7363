"""The way of one microbatch through a pipeline, as its peers speak of it: legs, positions, and who is responsible at each.

A route of n legs, (stage, peer), has hops 0 to n - 1, forwards and backwards, and between them hop n, the loss. So what is done to a
microbatch is numbered by *positions*, one after another:

    F(0) = 0   F(1) = 1   ...   F(n-1) = n-1   LOSS = n   B(n-1) = n+1   ...   B(0) = 2n

A leg may be left open, to be bound by whoever sends to it, or dropped when its peer died and nobody can replace it. It
stays in the route then, so that a hop's number never changes and (microbatch, hop) can be the key under which
gradients are counted once.
"""

from typing import Annotated, NamedTuple

from msgspec import Meta

from farflung.protocol.limits import MAX_HOPS

OPEN = -1
"""A leg whose peer is bound by the sender."""
DROPPED = -2
"""A leg that is left out."""


class Leg(NamedTuple):
    stage: Annotated[int, Meta(ge=0, lt=1 << 16)]
    peer: Annotated[int, Meta(ge=DROPPED, lt=1 << 16)]
    """Its place in the plan's list of peers; or OPEN, or DROPPED."""


Route = tuple[Leg, ...]
Legs = Annotated[tuple[Leg, ...], Meta(min_length=1, max_length=MAX_HOPS)]
"""A route on the wire."""


def live_hops(route: Route) -> list[int]:
    """Hops that are not dropped, in order; hop 0 is always one of them."""
    return [hop for hop, leg in enumerate(route) if leg.peer != DROPPED]


def following(route: Route, hop: int) -> int:
    """The hop to which the output of `hop` goes; n is the loss."""
    return next((later for later in range(hop + 1, len(route)) if route[later].peer != DROPPED), len(route))


def preceding(route: Route, hop: int) -> int:
    """The hop to which the gradient of the input of `hop` goes, 1 to n."""
    return next(earlier for earlier in reversed(range(hop)) if route[earlier].peer != DROPPED)


def peer_of(route: Route, hop: int, *, loss_at_home: bool) -> int:
    """Who does `hop`. The loss is computed by the data node, or by the last hop."""
    if hop < len(route):
        return route[hop].peer
    return route[0].peer if loss_at_home else route[live_hops(route)[-1]].peer


def same_input(route: Route, other: Route, hop: int) -> bool:
    """Whether the input of `hop` is the same by both routes: it depends on which hops are left out before, not on peers."""
    return len(route) == len(other) and all(
        (ours.peer == DROPPED) == (theirs.peer == DROPPED)
        for ours, theirs in zip(route[:hop], other[:hop], strict=True)
    )


def position(route: Route, hop: int, *, backward: bool) -> int:
    """The number of what is done at `hop`; the loss counts as a forward."""
    return 2 * len(route) - hop if backward else hop


def place(route: Route, at: int) -> tuple[int, bool]:
    """(hop, backward) of a position."""
    return (at, False) if at <= len(route) else (2 * len(route) - at, True)


def with_peer(route: Route, hop: int, peer: int) -> Route:
    """The same route with another peer at `hop`."""
    return (*route[:hop], Leg(route[hop].stage, peer), *route[hop + 1 :])
