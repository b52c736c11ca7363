"""Carries a schedule out on a `MemoryHub`, and tells what was done, so that a test can assert that the faults fired."""

import asyncio
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
