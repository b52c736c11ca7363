"""When a node says again in what state it is: when that has changed, and where it stands, when only the reason for it has, but not all the time.

Pure: times are arguments, in seconds of one monotonic clock.
"""

import math

SAY_AGAIN_S = 10.0
"""Between two reasons of one state."""


class Utterance:
    """See the module."""

    def __init__(self) -> None:
        self._reason = ""
        self._said_at = -math.inf
        self._stood = False
        """As it was last said."""

    def is_due(self, reason: str, *, changed: bool, stands: bool, now: float) -> bool:
        """Whether to say it now, which is taken for said then. `changed`: the state has. `stands`: the node does nothing until somebody else does something."""
        is_news = reason != self._reason and (stands or self._stood)  # the end of standing is said, too
        if not changed and not (is_news and now >= self._said_at + SAY_AGAIN_S):
            return False
        self._reason, self._said_at, self._stood = reason, now, stands
        return True
