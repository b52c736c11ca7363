"""What others did wrong, told to the log, a line each, but not more than a log can bear.

Whoever reaches this machine can send it nonsense as fast as the link takes it, admitted or not, and each message of that is refused. If each had
its line, somebody else would decide how fast the disk fills.
"""

import asyncio
import math

from farflung.node.events import EventLog
from farflung.protocol.errors import RemoteError

MOST = 60
"""Lines in one stretch of time: far more than honest peers give cause for."""

STRETCH_S = 60.0


class Refusals:
    """Call it with each; nothing of ours has changed by it."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._until = -math.inf
        """End of the stretch in which `_told` were told."""
        self._told = 0
        self._untold = 0

    def __call__(self, error: RemoteError) -> None:
        """A peer broke a rule."""
        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._until, self._told = now + STRETCH_S, 0
        if self._told == MOST:
            self._untold += 1
            return
        self._told += 1
        more, self._untold = self._untold, 0
        of = error.peer.hex() if error.peer else ""
        self._log.emit("refused", error=type(error).__name__, of=of, reason=error.reason, more=more)
