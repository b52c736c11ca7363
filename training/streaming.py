"""When which fragment is sent and applied: the timetable of Streaming DiLoCo (2501.18512; digest 1.5), a pure object.

With P fragments, an interval of H steps and a delay of tau, fragment p is sent after step t when

    (t - t_p) mod H = 0,  t > 0,    t_p = floor(p H / P)

and applied after step t + tau, so that the exchange hides behind tau steps of compute. Steps count from 1: "after
step t" is when t inner steps are done. Within one step all sends come before all applies, so that with tau = H, one
whole round late, what is sent was measured before the round before it moves anything (CO2, eager updates).

P = 1, tau = 0 is DiLoCo. At the last step nothing stays behind: what is in flight is applied, and every fragment with
progress since it was last sent is sent and applied once more, at once.

The k-th exchange of a fragment moves it from outer version k to k + 1: exchanges are named by (fragment, version), and
peers that hold the same versions hold the same bits, whenever they apply them. An exchange that arrives later than
tau is applied when it is there; nothing here waits.

How long H is to be for a link is chosen while a swarm trains, from how long its rounds take: `protocol.lap`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """One fragment's way from `version` to the next."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Actions:
    """What to do after one step, in this order."""

    sends: tuple[Exchange, ...] = ()
    """Measure and send; the results are applied later, unless they stand in `applies` too."""
    applies: tuple[Exchange, ...] = ()
    """Apply, oldest first."""
    flush: tuple[Exchange, ...] = ()
    """Measure, send and apply at once: only after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """The same for all peers of a swarm. Raises ValueError for numbers that make no timetable."""

    interval: int = 30
    """H: steps between two exchanges of a fragment."""
    fragments: int = 1
    """P, at most H."""
    delay: int = 0
    """tau: steps from sending to applying, at most H."""

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.interval:
            raise ValueError(f"{self.fragments} fragments in {self.interval} steps: choose 1 to {self.interval}")
        if not 0 <= self.delay <= self.interval:
            raise ValueError(f"a delay of {self.delay} steps: choose 0 to the interval, {self.interval}")

    def offset(self, fragment: int) -> int:
        """t_p."""
        return fragment * self.interval // self.fragments

    def after(
        self,
        step: int,  # steps done, from 1
        last: int | None = None,  # steps of the whole run; None when it does not end here
    ) -> Actions:
        """What is due after step `step`."""
        sends = self._sent_at(step)
        if step != last:
            return Actions(sends=sends, applies=sends if self.delay == 0 else self._sent_at(step - self.delay))
        in_flight = [
            exchange for sent in range(step - self.delay, step) for exchange in self._sent_at(sent) if sent > 0
        ]
        fresh = {exchange.fragment for exchange in sends}
        left = [p for p in range(self.fragments) if p not in fresh]
        flush = tuple(Exchange(p, self._versions(p, step)) for p in left)
        return Actions(sends=sends, applies=(*in_flight, *sends), flush=flush)

    def _sent_at(self, step: int) -> tuple[Exchange, ...]:
        if step <= 0:
            return ()
        due = [p for p in range(self.fragments) if (step - self.offset(p)) % self.interval == 0]
        return tuple(Exchange(p, self._versions(p, step) - 1) for p in due if step >= self.offset(p))

    def _versions(self, fragment: int, step: int) -> int:
        """How many times the fragment has been sent by the end of `step`."""
        since = step - self.offset(fragment)
        if since < 0:
            return 0
        return since // self.interval + (1 if self.offset(fragment) > 0 else 0)
