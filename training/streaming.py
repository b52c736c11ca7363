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

`choose` finds H, P and tau for a measured link. Seconds of one exchange of fragment p, both directions at once:

    e(P) = latency + n b / (P W),    n b bits in the busier direction, W bit/s

The link is busy P e(P) seconds in H s seconds of compute; H is the least that keeps that below BUSY, P the fewest
fragments for which e(P) fits into the least tau. tau beyond 5 costs quality (digest 1.5: less than 0.2 % up to 10),
and H costs about 1 % from 30 to 100, so both are as small as the link allows.
"""

import math
from dataclasses import dataclass

BUSY = 0.8
"""Share of the time that a link may be planned to carry exchanges: measured rates are peaks, and move."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a manifest allows `choose`. Raises ValueError."""

    min_interval: int = 10
    max_interval: int = 100
    max_fragments: int = 24
    max_delay: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.min_interval <= self.max_interval or self.max_fragments < 1 or self.max_delay < 1:
            raise ValueError("limits need 1 <= min_interval <= max_interval, and at least one fragment and one step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the peers of a swarm have measured, of the slowest that is to be kept up with. Raises ValueError."""

    step_s: float
    """Seconds of one inner step."""
    link_bits_per_s: float
    """Of the slower direction."""
    latency_s: float
    """Of one exchange, whatever its size: its messages' round trips."""
    bits: float
    """Of a whole model's exchange in the busier direction, as coded."""

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.link_bits_per_s > 0 and self.latency_s >= 0 and self.bits >= 0):
            raise ValueError("step time and link rate must be positive, latency and bits at least 0")

    def exchange_s(self, fragments: int) -> float:
        """Seconds from sending one of so many fragments to having its mean."""
        return self.latency_s + self.bits / (fragments * self.link_bits_per_s)


def choose(limits: Limits, measured: Measured) -> Timetable:
    """The timetable whose exchanges hide behind compute, or come nearest to it where the limits do not allow that."""
    best: tuple[int, int, Timetable] | None = None
    for fragments in range(1, min(limits.max_fragments, limits.max_interval) + 1):
        exchange_s = measured.exchange_s(fragments)
        needed = max(math.ceil(fragments * exchange_s / (BUSY * measured.step_s)), limits.min_interval, fragments)
        delay = max(1, math.ceil(exchange_s / measured.step_s))
        interval = min(needed, limits.max_interval)
        table = Timetable(interval=interval, fragments=fragments, delay=min(delay, limits.max_delay, interval))
        key = delay, needed
        if best is None or key < best[:2]:
            best = (*key, table)
    assert best is not None
    return best[2]


def exposed_share(table: Timetable, measured: Measured) -> float:
    """Share of the run's time in which a peer that keeps to the timetable waits: 0 when all is hidden.

    A round of H steps lasts at least as long as the link is busy in it, and each exchange is waited for when it
    takes longer than its tau steps (the closed form of digest 1.5).
    """
    compute_s = table.interval * measured.step_s
    exchange_s = measured.exchange_s(table.fragments)
    late_s = table.fragments * max(0.0, exchange_s - table.delay * measured.step_s)
    busy_s = max(0.0, table.fragments * exchange_s - compute_s)
    waiting_s = max(late_s, busy_s)
    return waiting_s / (compute_s + waiting_s)
