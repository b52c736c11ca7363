"""Pauses that end when the wall clock jumps: the machine has slept, or its clock was set.

What others keep for us expires by wall clocks, and the loop's clock, by which pauses end, stands still while a machine sleeps (on Linux and macOS):
a laptop that woke after hours went on with its pauses, and nobody had its records any more.
"""

import asyncio
from collections.abc import Callable, Iterator

import structlog

JUMP_S = 30.0
"""Longer than any correction of a clock that runs well, and nothing of ours expires so soon."""

AFTER_JUMP_S = (15.0, 30.0, 60.0)
"""The pauses after a jump: a machine that wakes may have no network yet, so what was done at once is done again."""

LOOK_S = 5.0
"""Between two looks at both clocks."""

_log = structlog.get_logger(__name__)


class Jumps:
    """Of one task that pauses again and again."""

    def __init__(self, unix_time: Callable[[], float]) -> None:
        self._unix_time = unix_time
        self._apart = self._measured()
        self._soon: Iterator[float] = iter(())
        self.jumped = False
        """Whether a jump has ended the last pause."""

    async def pause(self, seconds: float) -> bool:
        """Wait so long by the loop's clock, shortly after a jump as `AFTER_JUMP_S` says, or until the wall clock has jumped, also since the last pause. Whether
        what comes next is for the sake of a jump."""
        loop = asyncio.get_running_loop()
        soon = next(self._soon, None)
        until = loop.time() + (seconds if soon is None else soon)
        while not self._has_jumped():
            if (left := until - loop.time()) <= 0.0:
                self.jumped = False
                return soon is not None
            await asyncio.sleep(min(left, LOOK_S))
        self.jumped, self._soon = True, iter(AFTER_JUMP_S)
        return True

    def _measured(self) -> float:
        return self._unix_time() - asyncio.get_running_loop().time()

    def _has_jumped(self) -> bool:
        apart = self._measured()
        by_s = apart - self._apart
        if abs(by_s) <= JUMP_S:
            return False
        self._apart = apart
        _log.info("the clock was set, or the machine has slept", seconds=by_s)
        return True
