"""Carries parcels between stages: one stream to each peer and direction, one parcel after another, each answered.

Activations and gradients have streams of their own, so that a gradient never waits behind activations.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from farflung.compression.codec import Payload
from farflung.node import framing
from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.desk import Answer
from farflung.protocol.errors import NetworkError, Refused
from farflung.protocol.messages import ParcelHeader

ACTIVATION = "activation"
GRADIENT = "gradient"

REACH_S = 15.0
"""Until a peer answers at all."""
SLOWEST_BYTES_PER_S = 25_000.0
"""A fifth of a megabit per second: slower than this counts as no answer."""
IDLE_S = 300.0
"""An unused stream is closed after this time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A header, and the bytes that follow it."""

    header: ParcelHeader
    payload: Payload
    targets: bytes
    still_wanted: Callable[[], bool]
    done: Callable[[Answer | None], None]
    """Told the receiver's answer; None when it cannot be reached, and may or may not have it."""


class Courier:
    """All parcels in one direction to one peer."""

    def __init__(self, network: Network, peer: PeerId, kind: str) -> None:
        self._network = network
        self._peer = peer
        self._kind = kind
        self._queue: asyncio.Queue[Parcel] = asyncio.Queue()  # bounded by the plan: one of each visit
        self._stream: Stream | None = None

    def carry(self, parcel: Parcel) -> None:
        self._queue.put_nowait(parcel)

    async def run(self) -> None:
        """Carry parcels until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S if self._stream is not None else None):
                        parcel = await self._queue.get()
                except TimeoutError:
                    await self._hang_up()
                    continue
                if parcel.still_wanted():
                    parcel.done(await self._deliver(parcel))
        finally:
            await self._hang_up()

    async def _deliver(self, parcel: Parcel) -> Answer | None:
        # a stream that was idle may have been closed by the other side: then a new one is tried at once
        for _ in range(1 if self._stream is None else 2):
            try:
                async with asyncio.timeout(REACH_S + parcel.header.nbytes / SLOWEST_BYTES_PER_S):
                    if self._stream is None:
                        self._stream = await self._network.open_stream(self._peer, self._kind)
                    return await self._hand_over(self._stream, parcel)
            except (NetworkError, TimeoutError, Refused):
                await self._hang_up()
        return None

    async def _hand_over(self, stream: Stream, parcel: Parcel) -> Answer:
        await framing.write_header(stream, parcel.header)
        if parcel.header.asks:
            answer = await _read_answer(stream)
            if answer is not Answer.TAKEN:
                return answer
        await stream.write(parcel.payload)
        if parcel.targets:
            await stream.write(parcel.targets)
        return await _read_answer(stream)

    async def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()


async def _read_answer(stream: Stream) -> Answer:
    byte = (await framing.read_exactly(stream, 1))[0]
    try:
        return Answer(byte)
    except ValueError as error:
        raise Refused(f"{byte} as the answer to a parcel", peer=stream.peer) from error
