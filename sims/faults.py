"""What goes wrong in a simulation, and when.

A `Schedule` is a list of faults in the order of time, scripted by hand, made from a scenario (`churn`) or drawn from a seed (`fault_drawing`);
peers are numbers from 0. `Presence` says which faults can follow which. `fault_playing` carries a schedule out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


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
    bridged: bool = False
    """Peers in no group reach all of them instead: some do not reach each other."""
    number: int = 0
    """Tells it from others that are open at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heal:
    """A partition ends."""

    at: float
    number: int = 0
    """The partition's."""


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
        case Partition(groups=groups, number=number, bridged=bridged):
            word = "apart" if bridged else "partition"
            named = f"{word} {number}: " if number else f"{word} "
            what = named + " | ".join(" ".join(map(str, group)) for group in groups)
        case Heal(number=0):
            what = "heal the partition"
        case Heal(number=number):
            what = f"heal partition {number}"
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


@dataclass(kw_only=True, slots=True)
class Presence:
    """Who is there after some faults, and so which can come next. Lists are in the order in which it happened: drawings choose by position."""

    running: list[int] = field(default_factory=list)
    """Who has started and neither left nor been killed; the paused are among them."""
    paused: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    """Who has been killed and has not started again."""
    partitions: list[int] = field(default_factory=list)
    """Numbers of those that are open."""

    @property
    def awake(self) -> list[int]:
        """Who runs and is not paused."""
        return [peer for peer in self.running if peer not in self.paused]

    def allows(self, fault: Fault) -> bool:
        """Whether the peer or the partition that a fault is about, if any, is in a state for it."""
        match fault:
            case Start(peer=peer):
                return peer not in self.running
            case Kill(peer=peer):
                return peer in self.running
            case Leave(peer=peer) | Pause(peer=peer):
                return peer in self.running and peer not in self.paused
            case Resume(peer=peer):
                return peer in self.paused
            case Partition(number=number):
                return number not in self.partitions
            case _:
                return True

    def happen(self, fault: Fault) -> None:
        """Take a fault into account. Raises ValueError, with nothing changed, when it is not allowed."""
        if not self.allows(fault):
            raise ValueError(f"its peer or partition is in no state for it: {describe(fault)}")
        match fault:
            case Start(peer=peer):
                self.running.append(peer)
                if peer in self.killed:
                    self.killed.remove(peer)
            case Leave(peer=peer):
                self.running.remove(peer)
            case Kill(peer=peer):
                self.running.remove(peer)
                self.killed.append(peer)
                if peer in self.paused:
                    self.paused.remove(peer)
            case Pause(peer=peer):
                self.paused.append(peer)
            case Resume(peer=peer):
                self.paused.remove(peer)
            case Partition(number=number):
                self.partitions.append(number)
            case Heal(number=number) if number in self.partitions:  # one that was not is healed already
                self.partitions.remove(number)
            case _:
                pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Faults in the order of time. Raises ValueError when they do not fit together, such as killing who is not running."""

    num_peers: int
    duration_s: float
    """When the run ends, in seconds; no fault is later, nor lasts longer."""
    faults: tuple[Fault, ...]
    founded_by: int | None = None
    """Whoever founds the swarm, where that is not to depend on who is left in the schedule."""

    @property
    def founder(self) -> int:
        """Who founds the swarm: the first peer to start, if nothing else is said. Peer 0 where none does."""
        if self.founded_by is not None:
            return self.founded_by
        return next((fault.peer for fault in self.faults if isinstance(fault, Start)), 0)

    def __post_init__(self) -> None:
        if self.num_peers < 1:
            raise ValueError("a schedule needs at least one peer")
        if self.founded_by is not None and not 0 <= self.founded_by < self.num_peers:
            raise ValueError(f"no such peer: {self.founded_by}, who founds the swarm")
        presence = Presence()
        last = 0.0
        for fault in self.faults:
            if not last <= fault.at <= _end_of(fault) <= self.duration_s:
                raise ValueError(f"out of order, or not between 0 and {self.duration_s} s: {describe(fault)}")
            last = fault.at
            if not all(0 <= peer < self.num_peers for peer in _peers_of(fault)):
                raise ValueError(f"no such peer: {describe(fault)}")
            presence.happen(fault)
            match fault:
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


def put_right(faults: Sequence[Fault], at: float) -> list[Fault]:
    """What ends, at a moment after them, all that these have left wrong but windows: partitions, pauses, and the absence of whoever was there."""
    presence = Presence()
    for fault in faults:
        presence.happen(fault)
    were_there = sorted({fault.peer for fault in faults if isinstance(fault, Start)})
    return [
        *(Heal(at=at, number=number) for number in sorted(presence.partitions)),
        *(Resume(at=at, peer=peer) for peer in sorted(presence.paused)),
        *(Start(at=at, peer=peer) for peer in were_there if peer not in presence.running),
    ]


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
