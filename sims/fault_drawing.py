"""Schedules drawn from a seed: plausible churn, then a calm stretch, so that a test can ask whether the swarm recovers.

In the calm the network is healed and every killed peer started again. Before it the only mercy is that one process is always alive: any number
may be killed or cut off at once, majorities included.
"""

import heapq
import random
from dataclasses import dataclass
from itertools import count

from farflung.sims.faults import (
    Delay,
    Drop,
    Duplicate,
    Fault,
    Heal,
    Kill,
    Leave,
    Partition,
    Pause,
    Presence,
    Resume,
    Schedule,
    Skew,
    Start,
)

MAX_PEERS = 24
"""Peers of a drawn schedule: enough for every mixture of faults, few enough for hundreds of seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnModel:
    """How much goes wrong in a drawn schedule."""

    calm_s: float = 300.0
    """The calm stretch at the end, in seconds."""
    mean_gap_s: float = 20.0
    """Mean time between two faults, exponential, in seconds; follow-ups such as restarts come on top."""
    mean_outage_s: float = 40.0
    """Mean length of an absence, a pause, a partition or a window, exponential, in seconds."""
    max_skew_s: float = 2.0
    """Every clock is off by up to so many seconds, uniform: NTP keeps machines within one."""
    weights: tuple[tuple[str, float], ...] = (
        ("join", 3.0),
        ("leave", 1.5),
        ("kill", 3.0),
        ("pause", 1.0),
        ("partition", 1.0),
        ("drop", 1.0),
        ("duplicate", 1.0),
        ("delay", 1.0),
        ("apart", 1.0),
    )
    """Relative frequency of each kind of fault; one that is impossible at the moment (nobody to kill) is passed over."""
    min_rejoin_s: float = 5.0
    """Nobody comes back sooner, in seconds: a process takes that long to end and to start."""

    def __post_init__(self) -> None:
        if not (self.calm_s >= 0 and self.mean_gap_s > 0 and self.mean_outage_s > 0 and self.min_rejoin_s > 0):
            raise ValueError("calm_s is at least 0 s, the other times are above 0 s")


DEFAULT_CHURN = ChurnModel()

WHOLE, BRIDGED = 0, 1
"""Numbers of partitions: one of each kind is open at most."""

HANDOVER_S = 30.0
"""After a partition, one side has this long to tell the other what it decided alone; with messages that take 3 s it needs it."""


def draw_schedule(rng: random.Random, num_peers: int, duration_s: float, churn: ChurnModel = DEFAULT_CHURN) -> Schedule:
    """Draw random churn among 3 to 24 peers over `duration_s` seconds.

    A third or more of the peers start at 0 s, the rest joins later. Every absence by a kill, pause, partition and window ends before the
    last `churn.calm_s` seconds; who left with a goodbye may stay away, but for the founder, who was cut off just before, who was the only one awake, and whose goodbye was followed by the
    death or the goodbye of others at once: of two members nobody is left then to let it go. Raises ValueError when the duration leaves no room for that.
    """
    if not 3 <= num_peers <= MAX_PEERS:
        raise ValueError(f"num_peers is 3 to {MAX_PEERS}, not {num_peers}")
    end = duration_s - churn.calm_s
    if end <= 4 * churn.min_rejoin_s:
        raise ValueError(f"{duration_s} s leave no room for faults before {churn.calm_s} s of calm")
    return _Draw(rng, num_peers, end, churn).schedule(duration_s)


class _Draw:
    """The state of the swarm while a schedule is drawn: who may be hit by what, and what will happen to whom."""

    def __init__(self, rng: random.Random, num_peers: int, end: float, churn: ChurnModel) -> None:
        self._rng = rng
        self._num_peers = num_peers
        self._end = end
        self._churn = churn
        self._faults: list[Fault] = []
        self._planned: list[tuple[float, int, Fault]] = []
        self._numbers = count()
        self._presence = Presence()
        self._resumes: dict[int, Resume] = {}
        """What ends the last pause of each peer."""
        self._fresh = list(range(num_peers))
        self._founder = 0
        self._healed_at = -HANDOVER_S

    def schedule(self, duration_s: float) -> Schedule:
        rng, churn = self._rng, self._churn
        for peer in range(self._num_peers):
            if churn.max_skew_s > 0:
                self._faults.append(Skew(at=0.0, peer=peer, ahead_s=rng.uniform(-churn.max_skew_s, churn.max_skew_s)))
        first = rng.sample(self._fresh, rng.randint(max(1, self._num_peers // 3), self._num_peers))
        self._founder = first[0]
        for peer in first:
            self._happen(Start(at=0.0, peer=peer))
        # No fault of its own in the last moments: those are for what brings the swarm back.
        last = self._end - 2 * churn.min_rejoin_s
        now = rng.expovariate(1 / churn.mean_gap_s)
        while now < last:
            self._catch_up(now)
            kinds = [kind for kind, _ in churn.weights]
            self._draw_one(rng.choices(kinds, [weight for _, weight in churn.weights])[0], now)
            now += rng.expovariate(1 / churn.mean_gap_s)
        self._catch_up(self._end)
        for peer in self._unheard():
            self._happen(Start(at=self._end, peer=peer))
        return Schedule(num_peers=self._num_peers, duration_s=duration_s, faults=tuple(self._faults))

    def _unheard(self) -> list[int]:
        """Who is away for good, and may not have been let go: others went while it waited for that."""
        away = [
            peer for peer in range(self._num_peers) if peer not in self._presence.running and peer not in self._fresh
        ]
        gone = {peer: max(f.at for f in self._faults if isinstance(f, Leave) and f.peer == peer) for peer in away}
        return [peer for peer, at in gone.items() if self._somebody_went(at, at + HANDOVER_S)]

    def _somebody_went(self, after: float, until: float) -> bool:
        went = (f.at for f in self._faults if isinstance(f, Kill | Leave | Pause | Partition))
        return any(after < at <= until for at in went)

    def _draw_one(self, kind: str, now: float) -> None:
        rng, running, awake = self._rng, self._presence.running, self._presence.awake
        if kind == "join" and self._fresh:
            self._happen(Start(at=now, peer=rng.choice(self._fresh)))
        elif kind == "leave" and len(running) > 1 and awake:
            self._happen(Leave(at=now, peer=(peer := rng.choice(awake))))
            alone = peer == self._founder or now < self._healed_at + HANDOVER_S or awake == [peer]
            if rng.random() < 0.5 or alone:  # it may be the only one who knows the newest history
                self._plan(Start(at=self._later(now, self._churn.min_rejoin_s), peer=peer))
        elif kind == "kill" and len(running) > 1:
            self._happen(Kill(at=now, peer=(peer := rng.choice(running)), reset=rng.random() < 0.7))
            self._plan(Start(at=self._later(now, self._churn.min_rejoin_s), peer=peer))
        elif kind == "pause" and awake:
            self._happen(Pause(at=now, peer=(peer := rng.choice(awake))))
            self._resumes[peer] = Resume(at=self._later(now), peer=peer)
            self._plan(self._resumes[peer])
        elif kind == "partition" and WHOLE not in self._presence.partitions:
            self._cut(Partition(at=now, groups=self._draw_groups(), number=WHOLE))
        elif kind == "apart" and BRIDGED not in self._presence.partitions:
            some = rng.sample(range(self._num_peers), 3 if self._num_peers > 3 and rng.random() < 0.2 else 2)
            self._cut(Partition(at=now, groups=tuple((peer,) for peer in some), number=BRIDGED, bridged=True))
        elif kind == "drop":
            self._happen(Drop(at=now, until=self._later(now), probability=rng.uniform(0.05, 0.6)))
        elif kind == "duplicate":
            self._happen(Duplicate(at=now, until=self._later(now), probability=rng.uniform(0.05, 0.6)))
        elif kind == "delay":
            whom = rng.choice([None, *range(self._num_peers)])
            self._happen(Delay(at=now, until=self._later(now), extra_s=rng.uniform(0.1, 3.0), peer=whom))

    def _cut(self, partition: Partition) -> None:
        heal = Heal(at=self._later(partition.at), number=partition.number)
        self._happen(partition)
        self._plan(heal)
        self._healed_at = max(self._healed_at, heal.at)

    def _draw_groups(self) -> tuple[tuple[int, ...], ...]:
        peers = self._rng.sample(range(self._num_peers), self._num_peers)
        num_groups = 3 if self._rng.random() < 0.2 else 2
        cuts = sorted(self._rng.sample(range(1, self._num_peers), num_groups - 1))
        bounds = zip([0, *cuts], [*cuts, self._num_peers], strict=True)
        return tuple(tuple(sorted(peers[first:last])) for first, last in bounds)

    def _later(self, now: float, at_least: float = 1.0) -> float:
        outage_s = at_least + self._rng.expovariate(1 / self._churn.mean_outage_s)
        return min(now + outage_s, self._end)

    def _plan(self, fault: Fault) -> None:
        heapq.heappush(self._planned, (fault.at, next(self._numbers), fault))

    def _catch_up(self, now: float) -> None:
        while self._planned and self._planned[0][0] <= now:
            fault = heapq.heappop(self._planned)[2]
            if isinstance(fault, Resume) and fault is not self._resumes[fault.peer]:
                continue  # killed while it was paused, and paused again in its next life
            if self._presence.allows(fault):  # not so: killed while it was paused
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        self._presence.happen(fault)
        self._faults.append(fault)
        if isinstance(fault, Start) and fault.peer in self._fresh:
            self._fresh.remove(fault.peer)
