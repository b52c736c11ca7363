"""Whose turn it is to plan the steps of a pipeline: the first data node that lives, unless nothing comes of its turn.

The order is the same everywhere (`roll.in_order`). A data node may live and yet begin no step: its plans break a rule and are refused, or it
makes none. Nobody has to say whose fault that is, and nobody is believed about another: each data node looks at what counts, whether a step
begins. After `TURN_S` in which one could have begun, and none was under way, it is the next one's turn, and so on round. When a step begins in a
later one's turn, those before it come last for `PASSED_S`, so a broken planner costs a turn in each such time, and not in each step.

Each data node has its own clock and news, so for a while two may take it for their turn, or none. Nothing comes of that: a peer takes part in one
step at a time, so one of two plans is refused, and where there is none the clocks go on. Nor can a peer depose a planner by refusing what is
right: it is left out of the next plan (`coordination.ASIDE_S`), which comes long before the turn is over.
"""

from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId
from farflung.protocol.roll import Roll, in_order

TURN_S = 60.0
"""A turn, from when a step could begin: longer than waiting for stragglers, planning, and the answers to a plan that is refused once or twice."""

PASSED_S = 900.0
"""So long comes last whoever let a turn go by, when somebody else began a step in the next one."""

MOST_BETWEEN_S = 1.0
"""Of the time between two looks counts so much: whoever stood still meanwhile has seen nothing of it."""


@dataclass(slots=True)
class Turns:
    """See the module. Of a data node; all times are seconds of one monotonic clock."""

    roll: Roll
    _waited_s: float = 0.0
    """In which a step could have begun, since the last one."""
    _looked_at: float | None = None
    _step: int = 0
    """Newest that we have heard of."""
    _passed: dict[PeerId, float] = field(default_factory=dict)
    """Until when they come last."""

    def look(
        self,
        now: float,
        *,
        possible: bool,  # every stage that routes need has somebody who lives
        under_way: bool,  # some peers are in a step, or about to be; time that passes meanwhile is nobody's turn
    ) -> None:
        """Once in every tick."""
        newest = self.roll.newest_step(0)
        if not possible or newest > self._step:
            self._waited_s = 0.0
        elif not under_way and self._looked_at is not None:
            self._waited_s += min(now - self._looked_at, MOST_BETWEEN_S)
        self._step, self._looked_at = max(self._step, newest), now

    def over(self) -> None:
        """Our own part in a step is over."""
        self._waited_s = 0.0

    def holder(self, now: float) -> PeerId:
        """Who plans the next step."""
        return self._order(now)[self._turn(now)]

    def began(self, planner: PeerId, now: float) -> list[PeerId]:
        """A step begins by the word of `planner`. Returns those who come last from now on, since their turns went by."""
        order, turn = self._order(now), self._turn(now)
        self._waited_s = 0.0
        gone_by = order[:turn] if order[turn] == planner else []
        self._passed |= dict.fromkeys(gone_by, now + PASSED_S)
        return gone_by

    def _order(self, now: float) -> list[PeerId]:
        """Of the data nodes that live, ourselves among them."""
        order = in_order(self.roll.swarm, [self.roll.me, *self.roll.training(0, now)])
        return sorted(order, key=lambda peer: now < self._passed.get(peer, 0.0))

    def _turn(self, now: float) -> int:
        """Place in the order of whose turn it is."""
        return int(self._waited_s // TURN_S) % len(self._order(now))
