"""What one peer is sent of one round: one transfer after another over one stream, contributions before means.

The stream stays open until the round is over: opening and ending another for the means took a tenth of a short round.

A round ends when its last transfer does. Two transfers to one peer would share the link and end together, and owners could begin to reduce only
then; one after the other, the first is there in half the time. Nor does the next wait until the last is acknowledged: while its last lost
packets are sent again, the link is busy with the next.

Means wait for contributions, since they hold up nobody: everybody waits for the last mean, and no mean can be made before its contributions.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from farflung.compression.codec import Payload
from farflung.node import framing
from farflung.node.network import Network, PeerId, Stream
from farflung.node.race import until_first
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ContributionHeader, MeanHeader

KIND = "round"
"""Of the streams."""

SEND_ATTEMPTS = 4
"""Streams in a row on which nothing is acknowledged, until what waits is given up; the plan's deadline ends them earlier."""

RETRY_S = 1.0
"""Between two of them."""

ACK = b"\1"


@dataclass(order=True, slots=True)
class _Transfer:
    rank: tuple[bool, int]
    """Means later, else in the order in which they came."""
    header: ContributionHeader | MeanHeader = field(compare=False)
    payload: Payload = field(compare=False)
    done: asyncio.Future[None] = field(compare=False)


class Delivery:
    """Transfers to one peer. `run` sends them, until it is cancelled."""

    def __init__(self, network: Network, peer: PeerId, unreachable: Callable[[PeerId, str], None]) -> None:
        self._network = network
        self._peer = peer
        self._unreachable = unreachable
        self._waiting: list[_Transfer] = []
        self._more = asyncio.Event()  # something waits
        self._sent = asyncio.Event()  # something is unanswered
        self._unanswered: deque[_Transfer] = deque()
        self._count = 0
        self._failures = 0
        """Streams in a row on which nothing was acknowledged, the present one included."""

    async def deliver(self, header: ContributionHeader | MeanHeader, payload: Payload) -> None:
        """Wait until the peer has taken it. A mean that is not early takes the place of an early one of its part that waits here.

        Raises NetworkError when it was given up; `unreachable` has been told why, each time.
        """
        if isinstance(header, MeanHeader) and not header.early:
            self._withdraw(header.part)
        rank = isinstance(header, MeanHeader), self._count
        self._count += 1
        transfer = _Transfer(rank, header, payload, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, transfer)
        self._more.set()
        await transfer.done

    async def run(self) -> None:
        """Send what is delivered, over one stream after another, until this is cancelled."""
        while True:
            await self._more.wait()
            self._failures += 1  # unless something is acknowledged
            try:
                await self._use_stream()
            except NetworkError as error:
                self._unreachable(self._peer, str(error))
                if self._failures:
                    await self._pause_or_give_up(error)

    async def _use_stream(self) -> NoReturn:
        """Send over one stream until it breaks. Raises NetworkError then."""
        stream = await self._network.open_stream(self._peer, KIND)
        broken: list[NetworkError] = []
        try:
            await until_first(self._write(stream, broken), self._read_answers(stream, broken))
        finally:
            await stream.close()
            self._take_back()
        raise broken[0]

    async def _write(self, stream: Stream, broken: list[NetworkError]) -> None:
        """Until the stream breaks."""
        while True:
            await self._more.wait()
            transfer = heapq.heappop(self._waiting)
            if not self._waiting:
                self._more.clear()
            self._unanswered.append(transfer)
            self._sent.set()
            follows = sum(len(later.payload) for later in self._waiting)
            try:
                await framing.write_with_header(stream, transfer.header, transfer.payload, follows=follows)
            except NetworkError as error:
                broken.append(error)
                return
            del transfer  # its memory is needed for the next: fresh pages made a round of 64 MB a fifth slower

    async def _read_answers(self, stream: Stream, broken: list[NetworkError]) -> None:
        """Until the stream breaks. Nothing is read while no answer is due: a read that is cancelled breaks the stream, and its connections."""
        while True:
            while not self._unanswered:
                self._sent.clear()
                await self._sent.wait()
            try:
                answer = await framing.read_exactly(stream, len(ACK))
            except NetworkError as error:
                broken.append(error)
                return
            if answer == ACK and self._unanswered:  # anything else changes nothing
                self._failures = 0
                done = self._unanswered.popleft().done
                if not done.done():
                    done.set_result(None)

    def _withdraw(self, part: int) -> None:
        """The cut left somebody out: early means are void, and would only take the link from those that count."""
        for transfer in list(self._waiting):
            header = transfer.header
            if isinstance(header, MeanHeader) and header.early and header.part == part:
                self._waiting.remove(transfer)
                if not transfer.done.done():
                    transfer.done.set_exception(NetworkError("a void mean is not sent"))
        heapq.heapify(self._waiting)

    def _take_back(self) -> None:
        """What was not acknowledged goes over the next stream: it may have been lost with this one."""
        for transfer in self._unanswered:
            heapq.heappush(self._waiting, transfer)
        self._unanswered.clear()
        if self._waiting:
            self._more.set()

    async def _pause_or_give_up(self, error: NetworkError) -> None:
        if self._failures < SEND_ATTEMPTS:
            await asyncio.sleep(RETRY_S)
            return
        for transfer in self._waiting:
            if not transfer.done.done():
                transfer.done.set_exception(error)
        self._waiting.clear()
        self._more.clear()
        self._failures = 0
