"""Doors out of the event loop: what computes or waits for a disk goes through one, one call at a time, in order.

A node has four. The *learner's* door is the one to the model: training steps, offers, outer steps, evaluation. The *side* door takes what
must not wait behind a training step of many seconds: pseudo-gradients, encoding and decoding, means and chunks on disk. The *journal*'s
writes votes and commits, before which no message may leave: a few milliseconds, never behind anything longer. The *digest* door hashes states: with gigabytes
that takes many seconds, and the next round's encoding must not wait for it.

Only the learner's thread has torch's worker threads. OpenMP gives every thread that computes in parallel a pool of its own, and
as soon as there are more of these threads than cores, GNU's stops spinning at barriers and sleeps instead: a training
step then took 20 % longer (2 cores, measured), although the other pool did nothing.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import torch

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
    digest: Door

    @classmethod
    def threads(cls) -> "Doors":
        """A thread for each."""
        return cls(
            learner=ThreadDoor("learner", torch.get_num_threads()),
            side=ThreadDoor("side", 1),
            journal=ThreadDoor("journal", 1),
            digest=ThreadDoor("digest", 1),
        )

    def close(self) -> None:
        self.learner.close()
        self.side.close()
        self.journal.close()
        self.digest.close()

    async def join(self) -> None:
        """`close`, while the loop lives on: a step may take minutes, and who presses Ctrl-C is to be heard."""
        await asyncio.to_thread(self.close)


class ThreadDoor:
    """A single worker thread, in which torch computes with `torch_threads` threads."""

    def __init__(self, name: str, torch_threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, name, initializer=_compute_with, initargs=(torch_threads,))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _compute_with(threads: int) -> None:
    """How many threads torch uses when called from this one."""
    torch.get_num_threads()  # or else the first computation here would take the number that any thread set last
    torch.set_num_threads(threads)
