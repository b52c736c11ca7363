"""An orderly end for whoever is told to end: SIGTERM, and SIGHUP of a terminal that is closed. By default a process is gone at once, and what it has started, and
its temporary folders, stay.
"""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from farflung.node.runner import run_loop
from farflung.node.signals import ENDING, heard

T = TypeVar("T")


@contextmanager
def orderly_end() -> Iterator[None]:
    """In the main thread, without a loop: such a signal is a SystemExit where we are, with the status that shells know."""

    def leave(number: int, frame: FrameType | None) -> None:
        # the first is enough: what ends because of it is not to be interrupted
        for kind in ENDING:
            signal.signal(kind, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {kind: signal.signal(kind, leave) for kind in ENDING if signal.getsignal(kind) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def run_until_told(main: Coroutine[Any, Any, T]) -> T:
    """`run_loop`, in the main thread: such a signal cancels `main`, and when that has come to its end it is a SystemExit as above."""
    told: list[int] = []
    made: list[T] = []

    async def cancelled_when_told() -> None:
        task = asyncio.current_task()
        assert task is not None

        def leave(kind: signal.Signals) -> None:
            if not told:
                told.append(kind)
                task.cancel()

        try:
            with heard(ENDING, leave):
                made.append(await main)
        except asyncio.CancelledError:
            if not told:
                raise

    run_loop(cancelled_when_told())
    if told:
        raise SystemExit(128 + told[0])
    return made[0]
