"""What a peer remembers to balance stages by: which of them have too few replicas, and since when; whom it has asked to move.

    alarm       a stage that has had fewer than two replicas for `ALARM_BEATS` heartbeats: every peer notices by its own roll. A peer that
                is started anew is back by then.
    an order    by the coordinator of steps, as `balance.decide` has it, repeated until the peer says that it goes; whoever does not is left alone
                for a while. Nobody else is asked before it has arrived, or cannot be expected any more.

Nothing is lost with this memory: another coordinator sees in `Present` who moves, and notices alarms itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from farflung.protocol.balance import Move, Scene, decide
from farflung.protocol.keys import PeerId

ALARM_BEATS = 10
"""Heartbeats; 20 s with those of the daemon."""

ALARM_BELOW = 2
"""Replicas."""

RESEND_S = 2.0
"""Between two orders to the same peer: messages may be lost."""

OBEY_S = 20.0
"""Until a peer that was asked says that it goes."""

ASIDE_S = 600.0
"""Whoever did not is not asked again for so long."""

UNHEARD_S = 90.0
"""A peer that builds a learner for its new stage is silent for a while."""

ARRIVE_S = 3600.0
"""Until a peer that goes has arrived: it waits for a round, and downloads."""


@dataclass(slots=True)
class Balancer:
    """See the module. All times are seconds of one monotonic clock."""

    heartbeat_s: float
    alarm: dict[int, int] = field(default_factory=dict)
    """By stage, the replicas of those that have too few."""
    _few_since: dict[int, float] = field(default_factory=dict)
    _asked: Move | None = None
    _asked_at: float = 0.0
    _told_at: float = 0.0
    _seen_at: float = 0.0
    _aside: dict[PeerId, float] = field(default_factory=dict)

    def watch(self, replicas: Sequence[int], now: float) -> bool:
        """Take notice of how many replicas each stage has; True when the alarm has changed."""
        before, few = self.alarm, {stage: count for stage, count in enumerate(replicas) if count < ALARM_BELOW}
        self._few_since = {stage: self._few_since.get(stage, now) for stage in few}
        stands = ALARM_BEATS * self.heartbeat_s
        self.alarm = {stage: count for stage, count in few.items() if now >= self._few_since[stage] + stands}
        return self.alarm != before

    def order(self, scene: Scene, now: float) -> Move | None:
        """As the coordinator: whom to tell now to move. Of the scene, `alarm` and `aside` are ours to say."""
        if self._asked is not None and self._under_way(self._asked, scene, now):
            repeat = now >= self._told_at + RESEND_S and not self._goes(self._asked, scene)
            self._told_at = now if repeat else self._told_at
            return self._asked if repeat else None
        self._aside = {peer: until for peer, until in self._aside.items() if now < until}
        self._asked = decide(replace(scene, alarm=frozenset(self.alarm), aside=frozenset(self._aside)))
        self._asked_at = self._told_at = self._seen_at = now
        return self._asked

    def _under_way(self, move: Move, scene: Scene, now: float) -> bool:
        """Whether a move that we asked for may still come to something."""
        said = scene.said.get(move.peer)
        if said is None:
            return now < self._seen_at + UNHEARD_S
        self._seen_at = now
        if said.stage == move.stage and not self._goes(move, scene):
            if now < self._asked_at + OBEY_S:
                return True
            self._aside[move.peer] = now + ASIDE_S
            return False
        arrived = said.stage == move.to and said.trains
        return not arrived and now < self._asked_at + ARRIVE_S

    @staticmethod
    def _goes(move: Move, scene: Scene) -> bool:
        """Whether it does as it was asked, or has done so."""
        said = scene.said.get(move.peer)
        return said is None or said.stage != move.stage or said.wants == move.to
