"""A data node looks whether a stage that has fallen silent is gone, and all others whether stage 0 is: it dials those that had the stage's state.

A machine whose process has ended says so at once, and then nobody needs to wait until silence alone is proof enough (`protocol/lives.py`). Whoever takes the
connection is only slow; where no word comes back it may be the link. Both are no sign of anything, and they are dialled again a heartbeat later.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from farflung.node.network import Network, PeerId
from farflung.protocol.roll import Entry, Roll


class Knocking:
    """See the module."""

    def __init__(
        self,
        *,
        network: Network,
        roll: Roll,
        begin_task: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        """`begin_task` does something beside everything else."""
        self._network = network
        self._roll = roll
        self._begin_task = begin_task
        self._knocked_at: dict[PeerId, float] = {}

    def look(self, now: float) -> None:
        """Dial whom it is time to; several times a second."""
        quiet = self._roll.quiet(now)
        before = self._knocked_at
        self._knocked_at = {peer: before[peer] for peer in quiet if peer in before}
        for peer in quiet:
            if now >= self._knocked_at.get(peer, now - self._roll.heartbeat_s) + self._roll.heartbeat_s:
                self._knocked_at[peer] = now
                self._begin_task(self._knock(peer, self._roll.entries[peer]), "knock")

    async def _knock(self, peer: PeerId, entry: Entry) -> None:
        """`entry`: what we know of it now."""
        if await self._network.is_gone(peer):
            entry.ended(asyncio.get_running_loop().time())
