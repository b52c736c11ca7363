"""Means from those who hold them: for a round that lacks one, and for rounds that went by while a node was away.

What comes back is checked before it is kept: its digest, and that it decodes. Of each mean one transfer is under way at a time: two would share a slow link, and
neither would come in time.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from farflung.compression.codec import CodecError, Payload, VectorCodec
from farflung.compression.digest import digest_of
from farflung.compression.unreduced import MeanCodec, MeanPolicy
from farflung.node import framing
from farflung.node.door import Door
from farflung.node.means import MeanStore
from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.chain import PartResult, RoundResult
from farflung.protocol.errors import Malformed, NetworkError, Refused, RemoteError
from farflung.protocol.headers import MeanRequest
from farflung.protocol.messages import Part
from farflung.protocol.partition import slow
from farflung.protocol.settings import FAST_BYTES_PER_S

RETRY_S = 1.0
"""Between tries."""

FETCH_S = 30.0
"""Until somebody who is asked for a mean answers."""

SLOWEST_BYTES_PER_S = 25_000.0
"""A fifth of a megabit per second: slower than this counts as no answer."""

FETCHES = 8
"""Means that are asked for at a time: one after another, whoever is behind would get a round later than the next is made."""

TRANSFER_S = 3600.0
"""Longest life of one transfer; rounds have deadlines of their own, this only frees what a dead link holds."""

INLINE_ELEMENTS = 1 << 19
"""A payload of so many elements is checked on the loop: most codecs take less time for it than the way through a door."""

Bounds = Part | PartResult
"""Whatever says `start` and `stop` of a part."""


C = TypeVar("C", covariant=True)


class Sliced(Protocol[C]):
    """Of a flat vector, with a codec for each slice: a `FlatCodec`, or a `MeanPolicy`."""

    def part(self, start: int, stop: int) -> C: ...


class FetchNews(Protocol):
    """Whom the fetcher tells, and asks."""

    def uplink_of(self, peer: PeerId) -> float:
        """Bytes/s, by its own word; 0 when that is not known."""
        ...

    def hears(self, peer: PeerId) -> bool:
        """False for one that only others hear."""
        ...

    def mean_held(self, plan_id: bytes, part: int, digest: bytes) -> None: ...

    def unreachable(self, peer: PeerId, reason: str) -> None: ...

    def refused(self, error: RemoteError) -> None: ...


@dataclass(slots=True, eq=False)
class _Search:
    """For one mean."""

    asks: PeerId | None = None
    """Who may be sending it now."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended, or another has taken its place."""


class Fetcher:
    """Asks for means, and gives those that are here."""

    def __init__(
        self,
        network: Network,
        side: Door,
        means: MeanStore,
        *,
        fast_bytes_per_s: float,  # of links: what is too slow scales with it
        news: FetchNews,
        received: Callable[[bytes, int], None],
    ) -> None:
        self._network = network
        self._side = side
        self._means = means
        self._slowest_bytes_per_s = SLOWEST_BYTES_PER_S * fast_bytes_per_s / FAST_BYTES_PER_S
        self._news = news
        self._received = received
        """Told the plan and the bytes of what came from others."""
        self._searches: dict[tuple[bytes, int, bytes], _Search] = {}
        """Those under way, by plan, part and digest."""

    def serve(self) -> None:
        """Answer requests."""
        self._network.serve("fetch", framing.guarded(self._serve_fetch, self._news.refused, within_s=TRANSFER_S))

    async def fetch(
        self, plan_id: bytes, part: int, digest: bytes, holders: Sequence[PeerId], bounds: Bounds, codec: MeanPolicy
    ) -> Payload | None:
        """Get the encoded mean of a part from whoever of `holders` has it; None when nobody can give it."""
        payload, _ = await self._search(plan_id, part, digest, holders, bounds, codec)
        return payload

    def seeks(self, plan_id: bytes, part: int, digest: bytes, holders: Sequence[PeerId]) -> bool:
        """Whether a mean is being looked for, and of no one who is none of the `holders` any more: who has died takes long to fail."""
        search = self._searches.get((plan_id, part, digest))
        return search is not None and search.asks in (None, *holders)

    async def _search(
        self, plan_id: bytes, part: int, digest: bytes, holders: Sequence[PeerId], bounds: Bounds, codec: MeanPolicy
    ) -> tuple[Payload | None, bool]:
        """What `fetch` says, and whether a None is final: all `holders` have been heard and have no such mean."""
        key = plan_id, part, digest
        while self.seeks(plan_id, part, digest, holders):
            await self._searches[key].over.wait()
        if key in self._searches:  # the one that it asks may be dead
            self._searches[key].over.set()
        search = self._searches[key] = _Search()
        try:
            return await self._ask_around(search, MeanRequest(plan_id, part, digest), holders, bounds, codec)
        finally:
            search.over.set()
            if self._searches.get(key) is search:
                del self._searches[key]

    async def _ask_around(
        self, search: _Search, request: MeanRequest, holders: Sequence[PeerId], bounds: Bounds, codec: MeanPolicy
    ) -> tuple[Payload | None, bool]:
        plan_id, part, digest = request.plan, request.part, request.digest
        here = await self._means.get(plan_id, part, digest)
        if here is not None:
            self._news.mean_held(plan_id, part, digest)
            return here, False
        final = bool(holders)
        others = rotated(holders, self._network.peer_id)
        turns = slow_ones_last(others, [self._news.uplink_of(peer) for peer in others])
        for peer in sorted(turns, key=self._news.hears, reverse=True):  # whom we do not hear takes us many seconds
            if search.over.is_set():
                return None, False
            search.asks = peer
            try:
                payload = await self._fetch_from(peer, request, bounds, part_codec(codec, bounds))
            except NetworkError as error:
                self._news.unreachable(peer, str(error))
                final = False
                continue
            except RemoteError as error:
                self._news.refused(error)
                continue
            finally:
                search.asks = None
            if payload is None:
                continue
            await self._means.put(plan_id, part, payload, replace=True)
            self._received(plan_id, len(payload))
            self._news.mean_held(plan_id, part, digest)
            return payload, False
        return None, final

    async def collect(
        self, result: RoundResult, holders: Sequence[PeerId], codec: MeanPolicy, *, attempts: int = 1
    ) -> dict[int, Payload] | None:
        """Encoded means of all parts that a committed round kept; None when nobody has them any more.

        Whoever was away for long asks for means that are gone: it ends with the first part of which all holders say so.
        """
        wanted = [k for k, part in enumerate(result.parts) if part.digest]
        means: dict[int, Payload] = {}
        for attempt in range(attempts):
            if attempt > 0:
                await asyncio.sleep(RETRY_S)
            missing = [k for k in wanted if k not in means]
            for first in range(0, len(missing), FETCHES):
                batch = [(k, result.parts[k]) for k in missing[first : first + FETCHES]]
                async with asyncio.TaskGroup() as group:
                    searches = [
                        group.create_task(self._search(result.plan, k, part.digest, holders, part, codec))
                        for k, part in batch
                    ]
                for (k, _), search in zip(batch, searches, strict=True):
                    payload, final = search.result()
                    if payload is not None:
                        means[k] = payload
                    elif final:
                        return None
            if len(means) == len(wanted):
                return means
        return None

    async def _fetch_from(self, peer: PeerId, request: MeanRequest, bounds: Bounds, codec: MeanCodec) -> Payload | None:
        """One answer, checked: digest, and that it decodes. Raises NetworkError, RemoteError naming the peer."""
        numel = bounds.stop - bounds.start
        limit = codec.max_nbytes(numel)
        try:
            async with asyncio.timeout(FETCH_S + limit / self._slowest_bytes_per_s):
                stream = await self._network.open_stream(peer, "fetch")
                try:
                    await framing.write_header(stream, request)
                    payload = await framing.read_blob(stream, limit)
                finally:
                    await stream.close()
        except TimeoutError as error:
            raise NetworkError(f"no answer to a request for part {request.part}") from error
        if payload is None:
            return None
        if await self._side.run(digest_of, payload) != request.digest:
            raise Refused(f"a mean of part {request.part} with another digest than asked for", peer=peer)
        try:
            await check_payload(self._side, codec, payload, numel)
        except CodecError as error:
            raise Malformed(f"a mean of part {request.part}: {error}", peer=peer) from error
        return payload

    async def _serve_fetch(self, stream: Stream) -> None:
        request = await framing.read_header(stream, MeanRequest)
        payload = await self._means.get(request.plan, request.part, request.digest)
        await framing.write_blob(stream, payload)


def part_codec(codec: Sliced[C], bounds: Bounds) -> C:
    """What encodes contributions to a part, or what its means are in."""
    return codec.part(bounds.start, bounds.stop)


async def check_payload(side: Door, codec: VectorCodec | MeanCodec, payload: Payload, numel: int) -> None:
    """Raises CodecError when the payload does not decode to `numel` elements."""
    if numel <= INLINE_ELEMENTS:
        codec.check(payload, numel)
    else:
        await side.run(codec.check, payload, numel)


def rotated(peers: Sequence[PeerId], me: PeerId) -> list[PeerId]:
    """The others, beginning after ourselves, so that not everybody turns to the same peer first."""
    ring = sorted(peers)
    after = [p for p in ring if p > me]
    return after + [p for p in ring if p < me]


def slow_ones_last(peers: Sequence[PeerId], bytes_per_s: Sequence[float]) -> list[PeerId]:
    """The same in another order: whoever sends clearly more slowly than most comes last, as far as that is known (0: it is not)."""
    order = sorted(zip(slow(bytes_per_s), range(len(peers)), strict=True))
    return [peers[place] for _, place in order]
