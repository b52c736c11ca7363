"""What goes wrong in a simulation, and when: scripted by hand, or drawn from a seed.

A `Schedule` is a list of faults in the order of time; peers are numbers from 0. `draw_schedule` draws plausible churn and ends in a
calm stretch, with the network healed and every killed peer started again, so that a test can ask whether the swarm recovers. Between,
the only mercy is that one process is always alive: any number may be killed or cut off at once, majorities included.
`play` carries a schedule out on a `MemoryHub` and returns what it did, so that a test can assert that the faults fired.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from farflung.node.network import PeerId
from farflung.sims.links import Disturbance
from farflung.sims.network import MemoryHub

MAX_PEERS = 24
"""Peers of a drawn schedule: enough for every mixture of faults, few enough for hundreds of seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A peer's process starts: it joins, or comes back with what it had on disk."""

    at: float
    """Seconds since the schedule began, as in all faults."""
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A peer says goodbye and ends by itself."""

    at: float
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A peer's process is killed (SIGKILL), or its machine loses power: then `reset` is False and no stream shows it."""

    at: float
    peer: int
    reset: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A peer's process is stopped (SIGSTOP, a closed laptop)."""

    at: float
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """A paused process goes on."""

    at: float
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Nothing passes between the groups any more; peers in none form one more group."""

    at: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heal:
    """The partition ends."""

    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Control messages are lost for a while."""

    at: float
    until: float
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """Control messages arrive twice for a while."""

    at: float
    until: float
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """Everything from and to one peer, or to all when `peer` is None, takes `extra_s` seconds more for a while."""

    at: float
    until: float
    extra_s: float
    peer: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slow:
    """Everything that a peer computes takes `factor` times as long for a while: its owner plays a game, its fan has failed."""

    at: float
    until: float
    peer: int
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """A peer's clock is set `ahead_s` seconds ahead of the truth, or behind it."""

    at: float
    peer: int
    ahead_s: float


Window = Drop | Duplicate | Delay | Slow
Fault = Start | Leave | Kill | Pause | Resume | Partition | Heal | Window | Skew


def describe(fault: Fault) -> str:
    """One readable line."""
    match fault:
        case Start(peer=peer):
            what = f"start peer {peer}"
        case Leave(peer=peer):
            what = f"peer {peer} leaves"
        case Kill(peer=peer, reset=reset):
            what = f"kill peer {peer}" if reset else f"peer {peer} loses power"
        case Pause(peer=peer):
            what = f"pause peer {peer}"
        case Resume(peer=peer):
            what = f"resume peer {peer}"
        case Partition(groups=groups):
            what = "partition " + " | ".join(" ".join(map(str, group)) for group in groups)
        case Heal():
            what = "heal the partition"
        case Drop(until=until, probability=probability):
            what = f"drop {probability:.0%} of messages until {until:.1f} s"
        case Duplicate(until=until, probability=probability):
            what = f"duplicate {probability:.0%} of messages until {until:.1f} s"
        case Delay(until=until, extra_s=extra_s, peer=peer):
            whose = "everything" if peer is None else f"peer {peer}"
            what = f"delay {whose} by {extra_s:.2f} s until {until:.1f} s"
        case Slow(until=until, peer=peer, factor=factor):
            what = f"peer {peer} takes {factor:g} times as long until {until:.1f} s"
        case Skew(peer=peer, ahead_s=ahead_s):
            what = f"set the clock of peer {peer} {ahead_s:+.2f} s off"
    return f"{fault.at:8.1f} s  {what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Faults in the order of time. Raises ValueError when they do not fit together, such as killing who is not running."""

    num_peers: int
    duration_s: float
    """When the run ends, in seconds; no fault is later, nor lasts longer."""
    faults: tuple[Fault, ...]

    @property
    def founder(self) -> int:
        """Who founds the swarm: the first peer to start. Peer 0 where none does."""
        return next((fault.peer for fault in self.faults if isinstance(fault, Start)), 0)

    def __post_init__(self) -> None:
        if self.num_peers < 1:
            raise ValueError("a schedule needs at least one peer")
        running: set[int] = set()
        paused: set[int] = set()
        last = 0.0
        for fault in self.faults:
            if not last <= fault.at <= _end_of(fault) <= self.duration_s:
                raise ValueError(f"out of order, or not between 0 and {self.duration_s} s: {describe(fault)}")
            last = fault.at
            if not all(0 <= peer < self.num_peers for peer in _peers_of(fault)):
                raise ValueError(f"no such peer: {describe(fault)}")
            match fault:
                case Start(peer=peer) if peer not in running:
                    running.add(peer)
                case Leave(peer=peer) if peer in running - paused:
                    running.remove(peer)
                case Kill(peer=peer) if peer in running:
                    running.remove(peer)
                    paused.discard(peer)
                case Pause(peer=peer) if peer in running - paused:
                    paused.add(peer)
                case Resume(peer=peer) if peer in paused:
                    paused.remove(peer)
                case Start() | Leave() | Kill() | Pause() | Resume():
                    raise ValueError(f"the peer is in no state for it: {describe(fault)}")
                case Partition() if len(peers := _peers_of(fault)) != len(set(peers)):
                    raise ValueError(f"a peer is in two groups: {describe(fault)}")
                case Drop(probability=p) | Duplicate(probability=p) if not 0.0 <= p <= 1.0:
                    raise ValueError(f"not a probability: {describe(fault)}")
                case Delay(extra_s=extra_s) if extra_s < 0.0:
                    raise ValueError(f"not a delay: {describe(fault)}")
                case Slow(factor=factor) if factor <= 0.0:
                    raise ValueError(f"not a factor: {describe(fault)}")
                case _:
                    pass

    @property
    def calm_from(self) -> float:
        """Seconds after which nothing more happens and no window is open."""
        return max((_end_of(fault) for fault in self.faults), default=0.0)

    def describe(self) -> str:
        """One readable line per fault."""
        return "\n".join(describe(fault) for fault in self.faults)


def _end_of(fault: Fault) -> float:
    return fault.until if isinstance(fault, Window) else fault.at


def _peers_of(fault: Fault) -> tuple[int, ...]:
    match fault:
        case Partition(groups=groups):
            return tuple(peer for group in groups for peer in group)
        case Delay(peer=None) | Heal() | Drop() | Duplicate():
            return ()
        case Delay(peer=int(peer)) | Start(peer=peer) | Leave(peer=peer) | Kill(peer=peer) | Skew(peer=peer):
            return (peer,)
        case Pause(peer=peer) | Resume(peer=peer) | Slow(peer=peer):
            return (peer,)
    raise AssertionError(fault)


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
    )
    """Relative frequency of each kind of fault; one that is impossible at the moment (nobody to kill) is passed over."""
    min_rejoin_s: float = 5.0
    """Nobody comes back sooner, in seconds: a process takes that long to end and to start."""

    def __post_init__(self) -> None:
        if not (self.calm_s >= 0 and self.mean_gap_s > 0 and self.mean_outage_s > 0 and self.min_rejoin_s > 0):
            raise ValueError("calm_s is at least 0 s, the other times are above 0 s")


DEFAULT_CHURN = ChurnModel()


def draw_schedule(rng: random.Random, num_peers: int, duration_s: float, churn: ChurnModel = DEFAULT_CHURN) -> Schedule:
    """Draw random churn among 3 to 24 peers over `duration_s` seconds.

    A third or more of the peers start at 0 s, the rest joins later. Every absence by a kill, pause, partition and window ends before the
    last `churn.calm_s` seconds; who left with a goodbye may stay away, but for the founder. Raises ValueError when the duration leaves no room for that.
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
        self._running: list[int] = []
        self._paused: list[int] = []
        self._fresh = list(range(num_peers))
        self._busy_until: dict[int, float] = {}
        self._partitioned = False
        self._founder = 0

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
        return Schedule(num_peers=self._num_peers, duration_s=duration_s, faults=tuple(self._faults))

    def _draw_one(self, kind: str, now: float) -> None:
        rng = self._rng
        awake = [peer for peer in self._running if peer not in self._paused]
        if kind == "join" and self._fresh:
            self._happen(Start(at=now, peer=rng.choice(self._fresh)))
        elif kind == "leave" and len(self._running) > 1 and awake:
            self._happen(Leave(at=now, peer=(peer := rng.choice(awake))))
            if rng.random() < 0.5 or peer == self._founder:  # it may still be the only one who knows the history
                self._plan(Start(at=self._later(now, self._churn.min_rejoin_s), peer=peer))
        elif kind == "kill" and len(self._running) > 1:
            self._happen(Kill(at=now, peer=(peer := rng.choice(self._running)), reset=rng.random() < 0.7))
            self._plan(Start(at=self._later(now, self._churn.min_rejoin_s), peer=peer))
        elif kind == "pause" and awake:
            self._happen(Pause(at=now, peer=(peer := rng.choice(awake))))
            self._plan(Resume(at=self._later(now), peer=peer))
        elif kind == "partition" and not self._partitioned:
            self._happen(Partition(at=now, groups=self._draw_groups()))
            self._plan(Heal(at=self._later(now)))
        elif kind == "drop":
            self._happen(Drop(at=now, until=self._later(now), probability=rng.uniform(0.05, 0.6)))
        elif kind == "duplicate":
            self._happen(Duplicate(at=now, until=self._later(now), probability=rng.uniform(0.05, 0.6)))
        elif kind == "delay":
            whom = rng.choice([None, *range(self._num_peers)])
            self._happen(Delay(at=now, until=self._later(now), extra_s=rng.uniform(0.1, 3.0), peer=whom))

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
            if isinstance(fault, Resume) and fault.peer not in self._paused:
                continue  # killed while it was paused
            self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        self._faults.append(fault)
        match fault:
            case Start(peer=peer):
                self._running.append(peer)
                if peer in self._fresh:
                    self._fresh.remove(peer)
            case Leave(peer=peer):
                self._running.remove(peer)
            case Kill(peer=peer):
                self._running.remove(peer)
                if peer in self._paused:
                    self._paused.remove(peer)
            case Pause(peer=peer):
                self._paused.append(peer)
            case Resume(peer=peer):
                self._paused.remove(peer)
            case Partition():
                self._partitioned = True
            case Heal():
                self._partitioned = False
            case _:
                pass


class Processes(Protocol):
    """The processes of a simulation, as a schedule drives them. None of these waits."""

    def start(self, peer: int) -> None:
        """Start a peer's process; its last one has been killed, or was told to leave."""

    def leave(self, peer: int) -> None:
        """Tell a peer to say goodbye and end."""

    def kill(self, peer: int) -> None:
        """Cancel all tasks of a peer whose network has just been killed."""

    def slow(self, peer: int, factor: float) -> None:
        """From now on everything that a peer computes takes `factor` times its usual time."""


async def play(
    schedule: Schedule,
    hub: MemoryHub,
    peers: Sequence[PeerId],
    processes: Processes,
    on_fault: Callable[[str], None] = lambda line: None,
) -> list[tuple[float, str]]:
    """Carry out a schedule that begins now, and return what was done: (virtual time, one line).

    `peers[n]` is the id of peer number n; `on_fault` is told each line just before it happens. Returns at `schedule.duration_s`.
    """
    began = hub.now()
    # Ends of windows are steps of their own; at the same instant they come in the order in which their windows began.
    steps: list[tuple[float, int, Fault, bool]] = []
    for number, fault in enumerate(schedule.faults):
        steps.append((fault.at, number, fault, False))
        if isinstance(fault, Window):
            steps.append((fault.until, number, fault, True))
    open_windows: dict[int, int] = {}
    done: list[tuple[float, str]] = []
    for at, number, fault, ends in sorted(steps, key=lambda step: (step[0], step[1], step[3])):
        await asyncio.sleep(began + at - hub.now())
        line = ("end of " if ends else "") + describe(fault).partition(" s  ")[2]
        on_fault(line)
        if isinstance(fault, Slow):
            processes.slow(fault.peer, 1.0 if ends else fault.factor)
        elif ends:
            hub.calm(open_windows.pop(number))
        elif isinstance(fault, Drop | Duplicate | Delay):
            open_windows[number] = hub.disturb(_disturbance(fault, peers))
        else:
            _carry_out(fault, hub, peers, processes)
        done.append((hub.now(), line))
    await asyncio.sleep(began + schedule.duration_s - hub.now())
    return done


def _disturbance(fault: Drop | Duplicate | Delay, peers: Sequence[PeerId]) -> Disturbance:
    match fault:
        case Drop(probability=probability):
            return Disturbance(drop=probability)
        case Duplicate(probability=probability):
            return Disturbance(duplicate=probability)
        case Delay(extra_s=extra_s, peer=peer):
            return Disturbance(delay_s=extra_s, peers=None if peer is None else (peers[peer],))


def _carry_out(fault: Fault, hub: MemoryHub, peers: Sequence[PeerId], processes: Processes) -> None:
    match fault:
        case Start(peer=peer):
            processes.start(peer)
        case Leave(peer=peer):
            processes.leave(peer)
        case Kill(peer=peer, reset=reset):
            # A process that has ended by itself, or has not come as far as a network, has none to kill.
            if peers[peer] in hub.running():
                hub.kill(peers[peer], reset=reset)
            processes.kill(peer)
        case Pause(peer=peer):
            if peers[peer] in hub.running():
                hub.pause(peers[peer])
        case Resume(peer=peer):
            hub.resume(peers[peer])
        case Partition(groups=groups):
            hub.partition([[peers[peer] for peer in group] for group in groups])
        case Heal():
            hub.heal()
        case Skew(peer=peer, ahead_s=ahead_s):
            hub.set_skew(peers[peer], ahead_s)
        case _:
            raise AssertionError(f"not a fault that happens at once: {fault}")
