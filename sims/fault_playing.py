"""Carries a schedule out on a `MemoryHub`, and tells what was done, so that a test can assert that the faults fired."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from farflung.node.network import PeerId
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
    Resume,
    Schedule,
    Skew,
    Slow,
    Start,
    Window,
    describe,
)
from farflung.sims.hub import MemoryHub
from farflung.sims.links import Disturbance

OnFault = Callable[[str, Fault | None], None]
"""Takes one line about each fault just before it happens, or does not, and before a window ends; and the fault, where something comes of it then."""


class Processes(Protocol):
    """The processes of a simulation, as a schedule drives them. None of these waits."""

    def start(self, peer: int) -> None:
        """Start a peer's process; its last one has been killed, or was told to leave."""

    def leave(self, peer: int) -> None:
        """Tell a peer to say goodbye and end."""

    def kill(self, peer: int, *, reset: bool = True) -> None:
        """Cancel all tasks of a peer whose network has just been killed. Without `reset` its machine has lost power, and its disk what was not written yet."""

    def slow(self, peer: int, factor: float) -> None:
        """From now on everything that a peer computes takes `factor` times its usual time."""


class Player:
    """Carries out one fault after another, each at the moment at which it is told to."""

    def __init__(
        self,
        hub: MemoryHub,
        peers: Sequence[PeerId],  # by number
        processes: Processes,
        on_fault: OnFault = lambda line, fault: None,
    ) -> None:
        self.done: list[tuple[float, str]] = []
        """Virtual time, and the line."""
        self._hub = hub
        self._peers = peers
        self._processes = processes
        self._on_fault = on_fault
        self._open: dict[int, int] = {}
        """The hub's numbers of open disturbances."""
        self._cuts: dict[int, int] = {}
        """And of open partitions."""
        self._slowed: dict[int, dict[int, float]] = {}
        """By peer, factors of the windows that are open."""

    def begin(self, number: int, fault: Fault) -> None:
        """Let it happen, or say why it cannot. `number` names it for `end`."""
        if hindered := self._hindered(fault):
            self._tell(f"{_line(fault)} ({hindered})", None)
            return
        self._tell(_line(fault), fault)
        match fault:
            case Slow(peer=peer, factor=factor):
                self._slowed.setdefault(peer, {})[number] = factor
                self._slow(peer)
            case Drop() | Duplicate() | Delay():
                self._open[number] = self._hub.disturb(_disturbance(fault, self._peers))
            case Partition(groups=groups, number=which, bridged=bridged):
                sides = [[self._peers[peer] for peer in group] for group in groups]
                self._cuts[which] = self._hub.partition(sides, bridged=bridged)
            case Heal(number=which):
                self._hub.heal(self._cuts.pop(which))
            case _:
                _carry_out(fault, self._hub, self._peers, self._processes)

    def end(self, number: int, window: Window) -> None:
        """It is over."""
        self._tell("end of " + _line(window), None)
        if isinstance(window, Slow):
            del self._slowed[window.peer][number]
            self._slow(window.peer)
        else:
            self._hub.calm(self._open.pop(number))

    def _hindered(self, fault: Fault) -> str:
        """Why nothing comes of it: what it is to be done to is not there."""
        match fault:
            case Pause(peer=peer) if self._peers[peer] not in self._hub.running():
                return "it is not up"
            case Resume(peer=peer) if not self._hub.is_paused(self._peers[peer]):
                return "it is not paused"
            case Heal(number=which) if which not in self._cuts:
                return "it is not open"
            case _:
                return ""

    def _slow(self, peer: int) -> None:
        self._processes.slow(peer, math.prod(self._slowed[peer].values(), start=1.0))

    def _tell(self, line: str, fault: Fault | None) -> None:
        self._on_fault(line, fault)
        self.done.append((self._hub.now(), line))


async def play(
    schedule: Schedule,
    hub: MemoryHub,
    peers: Sequence[PeerId],
    processes: Processes,
    on_fault: OnFault = lambda line, fault: None,
) -> list[tuple[float, str]]:
    """Carry out a schedule that begins now, and return what was done: (virtual time, one line).

    `peers[n]` is the id of peer number n. Returns at `schedule.duration_s`.
    """
    began = hub.now()
    # Ends of windows are steps of their own; at the same instant they come in the order in which their windows began.
    steps: list[tuple[float, int, Fault, bool]] = []
    for number, fault in enumerate(schedule.faults):
        steps.append((fault.at, number, fault, False))
        if isinstance(fault, Window):
            steps.append((fault.until, number, fault, True))
    player = Player(hub, peers, processes, on_fault)
    for at, number, fault, ends in sorted(steps, key=lambda step: (step[0], step[1], step[3])):
        await asyncio.sleep(began + at - hub.now())
        if ends and isinstance(fault, Window):
            player.end(number, fault)
        else:
            player.begin(number, fault)
    await asyncio.sleep(began + schedule.duration_s - hub.now())
    return player.done


def _line(fault: Fault) -> str:
    return describe(fault).partition(" s  ")[2]


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
            processes.kill(peer, reset=reset)
        case Pause(peer=peer):
            hub.pause(peers[peer])
        case Resume(peer=peer):
            hub.resume(peers[peer])
        case Skew(peer=peer, ahead_s=ahead_s):
            hub.set_skew(peers[peer], ahead_s)
        case _:
            raise AssertionError(f"not a fault that happens at once: {fault}")
