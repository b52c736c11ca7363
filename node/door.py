"""Doors out of the event loop: what computes or waits for a disk goes through one, one call at a time, in order.

A node has four. The *learner's* door is the one to the model: training steps, offers, outer steps, evaluation. The *side* door takes what
must not wait behind a training step of many seconds: pseudo-gradients, encoding and decoding, hashing, means and chunks on disk. The *journal*'s
writes votes and commits, before which no message may leave: a few milliseconds, never behind anything longer. The *idle* door takes what nobody waits for,
as the digest of a state of gigabytes: its thread yields its processor to all others.

Only the learner's thread has torch's worker threads. OpenMP gives every thread that computes in parallel a pool of its own, and
as soon as there are more of these threads than cores, GNU's stops spinning at barriers and sleeps instead: a training
step then took 20 % longer (2 cores, measured), although the other pool did nothing.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import torch

IDLE_NICENESS = 10
"""By how much the idle door's thread stands back: where there is work for more threads than processors, it gets a tenth of what others get."""

P = ParamSpec("P")
T = TypeVar("T")


class Door(Protocol):
    """Runs one computation after another, away from the loop."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`; raises what it raises. A cancelled caller does not stop a call that has begun."""

    def close(self) -> None:
        """No calls after this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doors:
    """The doors of a node."""

    learner: Door
    side: Door
    journal: Door
    idle: Door

    @classmethod
    def threads(cls) -> "Doors":
        """A thread for each."""
        return cls(
            learner=ThreadDoor("learner", torch.get_num_threads()),
            side=ThreadDoor("side", 1),
            journal=ThreadDoor("journal", 1),
            idle=ThreadDoor("idle", 1, IDLE_NICENESS),
        )

    def close(self) -> None:
        self.learner.close()
        self.side.close()
        self.journal.close()
        self.idle.close()


class ThreadDoor:
    """A single worker thread, in which torch computes with `torch_threads` threads."""

    def __init__(self, name: str, torch_threads: int, niceness: int = 0) -> None:
        self._pool = ThreadPoolExecutor(1, name, initializer=_set_up, initargs=(torch_threads, niceness))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _set_up(torch_threads: int, niceness: int) -> None:
    """How many threads torch uses when called from this one, and how far this one stands back behind others."""
    torch.get_num_threads()  # or else the first computation here would take the number that any thread set last
    torch.set_num_threads(torch_threads)
    if sys.platform == "linux":  # elsewhere it is the whole process that has a policy and a niceness
        with contextlib.suppress(OSError):  # in a sandbox that refuses it all goes a little slower
            _stand_back(niceness)


def _stand_back(niceness: int) -> None:
    """Let this thread, when it is woken, not take the processor from who woke it: that is the loop, which has more to do, and holds what
    Python code here would wait for. And by `niceness` behind all others.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if niceness:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
