"""Which hops a route may lose on its way when their peers are lost: the one limit that its data node keeps, and that every peer checks.

A microbatch that would come late, or have to be given up, can go on without a hop, from the peer before it to the one after it. What is left is a
route that skips one stage more than was planned, so it keeps the planned one's rules (`training/pipeline_rules.py`) but for their number of visits:
it still begins at the data node, no hop is too far ahead, and a swap only gets smaller when a hop before it goes.
"""

from dataclasses import dataclass
from itertools import accumulate

from farflung.protocol.route import Route, live_hops


@dataclass(frozen=True, kw_only=True, slots=True)
class Droppable:
    """By default no hop may go."""

    fewest: int = 1 << 16
    """Hops that must remain, the data node's included."""
    max_jump: int = 4
    """Stages between a hop and the highest one before it."""

    @classmethod
    def of_routes(cls, visits: int, stages: int, max_jump: int) -> "Droppable":
        """Of planned routes of `visits` of the stages.

        Where no route skips, nothing may go: the manifest asks for gradients of the whole model, and no stage was ever trained on what comes to it then.
        Where routes skip, one hop: the stages are trained on what comes from others than the one before, and lose less by it (docs/pipeline.md: two of
        eight cost 9 % of perplexity then, and 13 % else), while all wait for a microbatch that is late, and one that is cut short brings no gradient to any
        of them. Not two, as each takes the route farther from what the manifest asks for; and never the last one beside the data node, without which only
        that would learn.
        """
        if visits == stages:
            return cls()
        return cls(fewest=max(2, visits - 1), max_jump=max_jump)

    def allows(self, route: Route, *, loss_at_home: bool) -> bool:
        """Whether a route may be without the hops that it leaves out, if any."""
        live = live_hops(route)
        if len(live) == len(route):
            return True
        if len(live) < self.fewest or live[0] != 0:
            return False
        if live[-1] != len(route) - 1 and not loss_at_home:
            return False  # its peer has the head, and others may not
        stages = [route[hop].stage for hop in live]
        highest = accumulate(stages, max)
        return all(then - before <= self.max_jump for before, then in zip(highest, stages[1:], strict=False))
