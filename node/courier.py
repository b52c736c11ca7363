"""Carries parcels between stages: one stream to each peer and direction, each parcel answered in its turn.

A parcel does not wait for the answer to the one before, which would cost the way there and back between any two: answers come in the order of
the parcels. Only one that asks first whether it is wanted keeps others waiting until it knows. Activations and gradients have
streams of their own, so that a gradient never waits behind activations.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from farflung.compression.codec import Payload
from farflung.node import framing
from farflung.node.network import Network, PeerId, Stream
from farflung.node.parcel_rate import ParcelRate
from farflung.node.race import until_first
from farflung.protocol.desk import Answer
from farflung.protocol.errors import Malformed, NetworkError, RemoteError
from farflung.protocol.headers import ParcelHeader

ACTIVATION = "activation"
GRADIENT = "gradient"

REACH_S = 15.0
"""Until a peer answers at all."""
SLOWEST_BYTES_PER_S = 25_000.0
"""A fifth of a megabit per second: slower than this counts as no answer."""
IDLE_S = 300.0
"""An unused stream is closed after this time."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A header, and the bytes that follow it."""

    header: ParcelHeader
    payload: Payload
    targets: bytes
    still_wanted: Callable[[], bool]
    done: Callable[[Answer | None], None]
    """Told the receiver's answer; None when it cannot be reached, and may or may not have it."""


@dataclass(slots=True)
class _UnderWay:
    parcel: Parcel
    began: float | None = None
    """When its payload was begun, by the loop's clock."""


class Courier:
    """All parcels in one direction to one peer."""

    def __init__(
        self,
        network: Network,
        peer: PeerId,
        kind: str,
        *,
        rate: ParcelRate,  # is told of the parcels of all couriers
        trip_s: Callable[[PeerId], float],  # to a peer and back
        refused: Callable[[RemoteError], None],
    ) -> None:
        self._network = network
        self._peer = peer
        self._kind = kind
        self._rate = rate
        self._trip_s = trip_s
        self._refused = refused
        self._waiting: deque[Parcel] = deque()  # bounded by the plan: one of each visit
        self._under_way: deque[_UnderWay] = deque()
        self._come = asyncio.Event()  # something waits
        self._patience: asyncio.Timeout | None = None  # of whoever reads answers; None: nobody does
        self._invited: asyncio.Future[bool]  # whether the payload of the parcel that asks is wanted

    def carry(self, parcel: Parcel) -> None:
        self._waiting.append(parcel)
        self._come.set()

    async def run(self) -> None:
        """Open a stream, also while nothing waits yet, and carry parcels until nobody has had any for IDLE_S."""
        while True:
            try:
                async with asyncio.timeout(REACH_S):
                    stream = await self._network.open_stream(self._peer, self._kind)
            except (NetworkError, TimeoutError):
                self._give_up_first()
            else:
                await self._use(stream)
            if not self._waiting:
                return

    async def _use(self, stream: Stream) -> None:
        """Until it breaks or nobody needs it. What is then without an answer may have arrived, and is sent again over another
        stream; but the first of them is given up where this stream has brought no answer at all.
        """
        heard: list[Answer] = []
        try:
            await until_first(self._hear(stream, heard), self._say(stream))  # in this order: who says expects an answer
        finally:
            await stream.close()
            for one in self._under_way:
                if one.began is not None:
                    self._rate.lost(one.began)
        if self._under_way:  # it broke
            self._waiting.extendleft(one.parcel for one in reversed(self._under_way))
            self._under_way.clear()
            if not heard:
                self._give_up_first()

    async def _say(self, stream: Stream) -> None:
        with suppress(NetworkError):
            await self._send_all(stream)

    async def _hear(self, stream: Stream, heard: list[Answer]) -> None:
        try:
            await self._read_all(stream, heard)
        except (NetworkError, TimeoutError):
            pass
        except RemoteError as error:
            self._refused(error)
        finally:
            self._patience = None

    async def _send_all(self, stream: Stream) -> None:
        while (parcel := await self._next()) is not None:
            if self._patience is None:  # the stream broke in the moment in which the parcel came: it gets another one
                self._waiting.appendleft(parcel)
                return
            loop = asyncio.get_running_loop()
            self._under_way.append(one := _UnderWay(parcel))
            if len(self._under_way) == 1:
                self._expect(self._patience)
            self._invited = loop.create_future()
            await framing.write_header(stream, parcel.header)
            if parcel.header.asks and not await self._invited:
                continue
            one.began = loop.time()
            self._rate.begin(one.began)
            await stream.write(parcel.payload)
            if parcel.targets:
                await stream.write(parcel.targets)

    async def _next(self) -> Parcel | None:
        """Waits for it; none when that takes too long."""
        while True:
            while self._waiting:
                parcel = self._waiting.popleft()
                if parcel.still_wanted():
                    return parcel
            self._come.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._come.wait()
            except TimeoutError:
                if not self._under_way:
                    return None

    async def _read_all(self, stream: Stream, heard: list[Answer]) -> None:
        """Reads also while nothing is under way, or nobody would notice that the stream broke before it is needed."""
        while True:
            async with asyncio.timeout(None) as self._patience:
                if self._under_way:
                    self._expect(self._patience)
                answer = await _read_answer(stream)
                if not self._under_way:
                    raise Malformed("an answer to no parcel", peer=stream.peer)
                one = self._under_way[0]
                parcel = one.parcel
                declined = parcel.header.asks and answer is not Answer.TAKEN
                if parcel.header.asks:
                    self._invited.set_result(not declined)
                    if not declined:
                        answer = await _read_answer(stream)
                if one.began is None and not declined:  # to count it would begin what nobody ends
                    raise Malformed("an answer to a parcel of which it has nothing yet", peer=stream.peer)
            heard.append(answer)
            self._under_way.popleft()
            if one.began is not None:
                now = asyncio.get_running_loop().time()
                self._rate.arrived(one.began, parcel.header.nbytes, self._trip_s(self._peer), now)
            parcel.done(answer)

    def _expect(self, patience: asyncio.Timeout) -> None:
        """The answer to the first parcel under way, in time."""
        within_s = REACH_S + self._under_way[0].parcel.header.nbytes / SLOWEST_BYTES_PER_S
        patience.reschedule(asyncio.get_running_loop().time() + within_s)

    def _give_up_first(self) -> None:
        if self._waiting:
            self._waiting.popleft().done(None)


async def _read_answer(stream: Stream) -> Answer:
    byte = (await framing.read_exactly(stream, 1))[0]
    try:
        return Answer(byte)
    except ValueError as error:
        raise Malformed(f"{byte} as the answer to a parcel", peer=stream.peer) from error
