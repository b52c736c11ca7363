"""Which peer of a stage gets the next microbatch, where no plan says so: SWARM's wiring (arXiv 2301.11913), by whoever sends it.

A sender keeps account of what it has given to each peer. One that was given n and takes s seconds for each would have been busy with one more for
(n + 1) s, and the next goes where that is least: an interleaved round-robin by speed. So a peer half as fast gets half as many. Accounts are of one step,
and speeds only have to be right against each other. A peer that nobody has measured is taken to be like the median of the others; where none is
known, numbers decide.
"""

from collections.abc import Collection, Mapping
from statistics import median
from types import MappingProxyType

UNMEASURED: Mapping[int, float] = MappingProxyType({})
"""Nobody's speed is known."""


def least_busy(
    peers: Collection[int],
    given: Mapping[int, int],  # microbatches; none where a peer is not named
    visit_s: Mapping[int, float],  # what one takes each, as far as it is known
    *,
    first: int = 0,
) -> int:
    """Of peers of one stage, at least one. Equal ones are taken in order, the sender's own number the `first`, so that not all senders begin with the same."""
    known = [visit_s[one] for one in peers if one in visit_s]
    usual_s = median(known) if known else 1.0
    order = sorted(peers)
    turn = first % len(order)
    return min(order[turn:] + order[:turn], key=lambda one: (given.get(one, 0) + 1) * visit_s.get(one, usual_s))
