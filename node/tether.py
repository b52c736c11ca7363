"""A data node's stream to one peer of its step, held from the beginning until it says at the end whether the peer's work counts.

It breaks at once when the peer's process dies, long before a deadline passes; and whoever cannot be told at the end does not count anyway.
A machine that goes silent shows by deadlines only, or by the heartbeats of whoever watches the peers.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from farflung.node import framing
from farflung.node.courier import REACH_S
from farflung.node.network import Network, PeerId
from farflung.protocol.errors import NetworkError, RemoteError
from farflung.protocol.headers import Settled, SettleRequest

SETTLE = "settle"

CLOSE_S = 1.0
"""What was written has been answered, or never will be."""

TRIES = 2
"""Streams that may break before the peer is lost: a link may be cut for a moment."""


class Tether:
    """`run` holds it; `settle` ends it."""

    def __init__(self, network: Network, peer: PeerId, window: bytes, lost: Callable[[str], None]) -> None:
        self._network = network
        self._peer = peer
        self._window = window
        self._lost = lost
        self._verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.visits: int | None = None
        """How many visits of ours the peer has accumulated, as it said at the end; None when it could not be told."""

    def settle(self, *, counts: bool) -> None:
        """Say it; then `run` ends, in seconds."""
        if not self._verdict.done():
            self._verdict.set_result(counts)

    async def run(self) -> None:
        """Until the peer has answered, or is lost."""
        reason = ""
        for _ in range(TRIES):
            try:
                await self._hold()
                return
            except TimeoutError:
                reason = f"no answer from {self._peer.hex()[:12]}"
            except (NetworkError, RemoteError) as error:
                reason = str(error)
        self._lost(reason)

    async def _hold(self) -> None:
        async with asyncio.timeout(REACH_S):
            stream = await self._network.open_stream(self._peer, SETTLE)
        broken: NetworkError | RemoteError | None = None
        try:
            # No error ends the group: before Python 3.13 it would swallow that this task is cancelled at that moment.
            async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as group:

                async def tell() -> None:
                    counts = await asyncio.shield(self._verdict)
                    patience.reschedule(asyncio.get_running_loop().time() + REACH_S)
                    with suppress(NetworkError):  # whoever reads meets it too
                        await framing.write_header(stream, SettleRequest(self._window, counts))

                telling = group.create_task(tell(), name="the end of a step")
                try:
                    self.visits = (await framing.read_header(stream, Settled)).visits
                except (NetworkError, RemoteError) as error:
                    broken = error
                finally:
                    telling.cancel()
            if broken is not None:
                raise broken
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await stream.close()
