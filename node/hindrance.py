"""What keeps a peer from its next step, such as a full device or data that cannot be read, and when that is tried again.

The others hear of it by the state `waiting`, so that no round waits for this peer; what it has trained before it brings into one, once this
lasts. Pure: times are arguments, in seconds of one monotonic clock.
"""

FIRST_S, LONGEST_S = 5.0, 60.0
"""Pauses between two tries: each is twice as long as the one before, up to the longest."""

LASTS_S = 30.0
"""After which it is not taken for a moment's any more."""


class Hindrance:
    """See the module."""

    def __init__(self, first_s: float = FIRST_S) -> None:
        self._first_s = first_s
        self.reason = ""
        """A sentence for people; empty while there is none."""
        self.tries = 0
        """That have failed, of this one."""
        self.retry_at = 0.0
        self._since = 0.0

    def met(self, reason: str, now: float) -> None:
        """A step could not be made, or something in it."""
        early = self.forbids(now)
        self._since = self._since if self.reason else now
        self.reason = reason
        if not early:  # else it is of the try before
            self.tries += 1
            self.put_off(now)

    def put_off(self, now: float) -> None:
        """What was met was in a step that is over only now."""
        self.retry_at = now + min(LONGEST_S, self._first_s * 2.0 ** min(self.tries - 1, 10))

    def over(self) -> None:
        """One could."""
        self.reason, self.tries, self.retry_at = "", 0, 0.0

    def forbids(self, now: float) -> bool:
        """Whether it is too early for the next try."""
        return bool(self.reason) and now < self.retry_at

    def lasts(self, now: float) -> bool:
        """Whether it goes on for long, so that what was trained before need not wait for more."""
        return bool(self.reason) and now >= self._since + LASTS_S
