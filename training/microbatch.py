"""How many sequences go through the model at a time, while others take memory of the device and give it back.

What is too many by now is lowered at once; what once fitted is tried again when nothing has lacked room for some minutes, one size after another.
Nothing is computed here: whoever does says what came of it.
"""

import math
import time
from collections.abc import Callable, Sequence

RAISE_AFTER_S = 300.0
"""Without a lack, before a larger size is tried again. A try that fails costs a part of a step, and what torch had kept of the device."""


class Microbatch:
    """See the module."""

    def __init__(
        self,
        asked: int | None,  # by the machine's person, and never changed then; None: what fits
        now: Callable[[], float] = time.monotonic,  # seconds
    ) -> None:
        self.size = asked
        """Sequences at a time; None while that has to be found by trials."""
        self._asked = asked
        self._now = now
        self._largest = asked or 0
        """That has been found to fit."""
        self._lack_at = -math.inf

    @property
    def is_lowered(self) -> bool:
        """Whether something has lacked room of late: what there was by trial need not be there any more."""
        return self._now() < self._lack_at + RAISE_AFTER_S or (self.size is not None and self.size < self._largest)

    def found(self, size: int) -> None:
        """Trials have found that so many fit."""
        self.size, self._largest = size, max(size, self._largest)

    def to_try(
        self,
        sizes: Sequence[int],  # that there are, descending
    ) -> int:
        """What the next step is made with."""
        assert self.size is not None, "it has not been found yet"
        larger = [size for size in sizes if self.size < size <= self._largest]
        if larger and self._now() >= self._lack_at + RAISE_AFTER_S:
            return larger[-1]
        return self.size

    def fits(self, size: int) -> None:
        """What was tried has had room."""
        self.size = size

    def lacked(self) -> None:
        """There was no room for something else of a step."""
        self._lack_at = self._now()

    def lacks(self, size: int, sizes: Sequence[int]) -> int | None:
        """What was tried had none: what to try at once; None when there is nothing smaller, and then it has to be found anew."""
        self.lacked()
        if self._asked is not None:
            return None
        smaller = [other for other in sizes if other < size]
        if self.size is None or not smaller:
            self.size = None
            return None
        self.size = self.size if size > self.size else smaller[0]
        return self.size
