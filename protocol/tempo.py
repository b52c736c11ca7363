"""How fast members train and how long rounds take, by their own word and by the chain: the figures that `rhythm` reckons with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median

from farflung.protocol import rhythm
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Heartbeat
from farflung.protocol.rhythm import Runner
from farflung.protocol.settings import Settings


@dataclass(slots=True)
class Tempo:
    """As one member knows it: of itself it reads `vitals`, of others their heartbeats."""

    settings: Settings
    membership: Membership
    history: History
    vitals: Callable[[], Heartbeat]

    def rounds_s(self) -> list[float]:
        """How long the newest rounds took from plan to end, seconds, newest first."""
        return [r.seconds_ms / 1000.0 for r in self.history.recent_rounds()]

    def usual_round_s(self) -> float:
        """The median of those; 0 before there was a round."""
        recent = self.rounds_s()
        return median(recent) if recent else 0.0

    def tokens_per_s(self, peer: PeerId) -> float:
        """How fast a peer trains, by its own word; 0 when it has not said."""
        if peer == self.membership.me:
            return self.vitals().tokens_per_s
        beat = self.membership.heartbeat(peer)
        return 0.0 if beat is None else beat.tokens_per_s

    def runners(self, peers: Collection[PeerId], now: float) -> list[Runner]:
        """When those of `peers` that train from the newest state will be ready, by their own word. Raises IndexError before there is a history."""
        me = self.membership.me
        found = self.membership.runners([p for p in peers if p != me], self.history.head.commit.version)
        beat = self.vitals()
        if me in peers and beat.tokens_per_s > 0.0:
            found.append(Runner(now + beat.ready_in_s, beat.tokens_per_s))
        return found

    def is_due(self, step_s: float, now: float) -> bool:
        """Whether we, a member between two inner steps of `step_s` seconds, should offer what we have: the fastest is about to have its H steps.

        Raises IndexError before there is a history.
        """
        head = self.history.head.commit
        others = self.runners([p for p in head.view if p != self.membership.me], now)
        lap = self.settings.rhythm(head.lap)
        return rhythm.is_due(lap, others, step_s=step_s, round_s=self.usual_round_s(), now=now)
