"""Whose turn it is to plan the steps of a pipeline: the first data node that lives, unless nothing comes of its turn.

The order is the same everywhere (`roll.in_order`). A data node may live and yet begin no step: its plans break a rule and are refused, or it
makes none. Nobody has to say whose fault that is, and nobody is believed about another: each data node looks at what counts, whether a step
begins. After `TURN_S` in which one could have begun, and none was under way, it is the next one's turn, and so on round. When a step begins in a
later one's turn, those before it come last for `PASSED_S`, so a broken planner costs a turn in each such time, and not in each step. It
knows of that by its own clock, and by the step that began without it.

Each data node has its own clock and news, so for a while two may take it for their turn, or none. Nothing is lost but time: a peer takes part in
one step at a time, so of two plans one is refused, often both, and where there is none the clocks go on. The next step that begins settles it for
all who are in it: whoever planned it can plan, and comes last no more; and those of them who are before it in the order it must have passed over, or
it would have left the step to them, so all pass them over, until `PASSED_S` after the last such step. Nor can a peer depose a planner by refusing
what is right: it is left out of the next plan (`coordination.ASIDE_S`), which comes long before the turn is over.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId
from farflung.protocol.progress import newest_step
from farflung.protocol.roll import Roll, in_order

TURN_S = 60.0
"""A turn, from when a step could begin: longer than waiting for stragglers, planning, and the answers to a plan that is refused once or twice."""

PASSED_S = 900.0
"""So long comes last whoever let a turn go by, when somebody else began a step in the next one, or has begun one with it since."""

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
        newest = newest_step(self.roll, now)
        if newest > self._step:
            gone_by = self._order(now)[: self._turn(now)]
            if self.roll.me in gone_by:  # of others we do not know: perhaps it was begun before their turns were over
                self._pass_over(gone_by, now)
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

    def began(self, planner: PeerId, peers: Collection[PeerId], now: float) -> list[PeerId]:
        """A step that we take part in, with `peers`, begins by the word of `planner`. Returns those who come last from now on, since their turns went by."""
        order, turn = self._order(now), self._turn(now)
        self._waited_s = 0.0
        gone_by = order[:turn] if order[turn] == planner else []
        living = self._living(now)
        before = living[: living.index(planner)] if planner in living else []
        left_to_it = [peer for peer in before if peer in peers and peer not in gone_by]
        fresh = [peer for peer in [*gone_by, *left_to_it] if not self._is_passed(peer, now)]
        self._pass_over([*gone_by, *left_to_it], now)
        self._passed.pop(planner, None)
        return fresh

    def _pass_over(self, peers: list[PeerId], now: float) -> None:
        self._passed |= dict.fromkeys(peers, now + PASSED_S)

    def _is_passed(self, peer: PeerId, now: float) -> bool:
        return now < self._passed.get(peer, 0.0)

    def _living(self, now: float) -> list[PeerId]:
        """Data nodes that live, ourselves among them, in the order that is the same everywhere."""
        return in_order(self.roll.swarm, [self.roll.me, *self.roll.training(0, now)])

    def _order(self, now: float) -> list[PeerId]:
        """Those who were passed over last."""
        return sorted(self._living(now), key=lambda peer: self._is_passed(peer, now))

    def _turn(self, now: float) -> int:
        """Place in the order of whose turn it is."""
        return int(self._waited_s // TURN_S) % len(self._order(now))
