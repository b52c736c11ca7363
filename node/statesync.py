"""Late join and repair: outer state from several donors at once, chunk by chunk, hashed, resumable, while the swarm goes on.

Donors serve the state they have at the moment. When a round commits in the middle of a download, some chunks are of the older version and some of
the newer; since the outer step is elementwise, each older chunk is rolled forward by the round's mean, which is at most a byte a
parameter. Chunks are believed when, rolled to one version, their digests stand in a list whose own digest a quorum of the view announces in
signed heartbeats; those that do not are fetched again, from somebody else if possible.

Newcomers give each other what they have (as BitTorrent's peers do, Cohen 2003): a chunk that has the digest it should at the version of a list is *good*, and may be passed on, rolled
forward or not. Who has which good chunks newcomers ask each other now and then. Of a full donor each asks first for what the fewest others have, in an order of its own, so that a donor's
uplink is not spent on the same chunk for everybody.
"""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from farflung.compression.digest import digest_of
from farflung.node import framing
from farflung.node.network import Network, PeerId
from farflung.protocol import wire
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ChunkList, ChunkListRequest, ChunkRequest, PiecesRequest
from farflung.protocol.limits import CHUNK_BYTES
from farflung.training.coupled import Update
from farflung.training.errors import BadChunk
from farflung.training.outer import BYTES_PER_ELEMENT, OuterState

STREAMS_PER_DONOR = 2
"""Requests in flight at one donor: one is on the wire while the next is being read."""

FIRST_STREAMS = 4
"""Streams until chunks have shown how quick the link is: with more, a slow one is shared by so many that none comes in time."""

QUICK_S = 10.0
"""A chunk that was here sooner has room for another one beside it; one that was not, before any other has come, is late."""

LATE = 2.0
"""Times as long as the slowest that has come: then a chunk is late, and is asked for elsewhere as well."""

LATE_S = 0.5
"""And no sooner: small states come faster than one donor differs from another."""

ATTEMPTS = 3
"""Times in a row that donors are asked in vain by somebody who cannot come back later."""

DIAL_S = 10.0
"""Until a donor answers at all."""

LOOK_AGAIN_S = 10.0
"""Between two looks at who gives chunks, and what newcomers have by now."""

FELLOW_STREAMS = 4
"""To newcomers at the same time, beside those to donors."""

CHUNK_S = 60.0
"""Until a chunk begins to come, for others may come before us, and then until it is here: a megabyte over a fifth of a megabit per second."""

LIST_BYTES_PER_CHUNK = 34
"""A digest of 32 bytes in MessagePack."""

LIST_BYTES = 32
"""The rest of a list."""

VERSION_BYTES = 8

_LISTS = msgspec.msgpack.Decoder(ChunkList)


@dataclass(slots=True)
class Download:
    """Progress of one state transfer; kept while donors come and go."""

    num_chunks: int
    have: dict[int, int] = field(default_factory=dict)
    """Chunk → version at which it is."""
    source: dict[int, PeerId] = field(default_factory=dict)
    """Chunk → who gave it."""
    distrusted: set[PeerId] = field(default_factory=set)
    """Donors whose chunks turned out wrong."""
    received_bytes: int = 0
    good: set[int] = field(default_factory=set)
    """Chunks that are here and had the digest that a quorum announced: they may be given to others."""
    rolling: bool = False
    """While chunks are being brought to another version, none can be given."""
    asking: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while chunks may be asked for; not while something else needs the link."""

    def __post_init__(self) -> None:
        self.asking.set()

    @property
    def complete(self) -> bool:
        return len(self.have) == self.num_chunks

    def drop(self, index: int) -> None:
        """What is here of a chunk is wrong."""
        del self.have[index]
        self.good.discard(index)

    def keep(self, version: int) -> None:
        """Only what is at that version. Who gave something of a later one is not asked again: that version has not come."""
        self.distrusted |= {
            self.source[index] for index, at in self.have.items() if at > version and index in self.source
        }
        self.have = dict.fromkeys(self.at(version), version)
        self.good &= self.have.keys()

    def good_version(self, index: int) -> int | None:
        """At which a chunk can be given to others; None: not now."""
        return self.have[index] if index in self.good and not self.rolling else None

    def good_bits(self) -> bytes:
        """A bit for each chunk: whether it is good. The first of a byte is its highest."""
        bits = np.zeros(self.num_chunks, dtype=np.bool_)
        bits[sorted(self.good)] = True
        return np.packbits(bits).tobytes()

    def at(self, version: int) -> list[int]:
        """The chunks that are here at that version."""
        return [index for index, at in self.have.items() if at == version]


Arrived = Callable[[int, int, bytes], Awaitable[None]]
"""Hears of each chunk: its index, version and bytes."""


class Sources(NamedTuple):
    """Whom to ask for chunks."""

    donors: Sequence[PeerId]
    """They have all."""
    fellows: Sequence[PeerId] = ()
    """Newcomers, who have some."""


class _Work:
    """Which chunks are still to be asked for, and what is done with them. When none is left, those that are late are asked for again elsewhere: not at once,
    for whoever is asked in vain spends its uplink all the same."""

    def __init__(self, download: Download, arrived: Arrived, me: PeerId, now: Callable[[], float]) -> None:
        self.download = download
        self.arrived = arrived
        self.room = asyncio.Semaphore(FIRST_STREAMS)
        """For streams to donors."""
        self.fellow_room = asyncio.Semaphore(FELLOW_STREAMS)
        self._now = now
        self._asked = {index: 0 for index in range(download.num_chunks) if index not in download.have}
        """By chunk that is missing, of how many it is asked for."""
        self._asked_at = dict[int, float]()
        """When last."""
        self._slowest_s = 0.0
        """That any took to come."""
        self._changed = asyncio.Event()
        """A chunk has come, or does not from whom it was asked."""
        self._order = list(range(download.num_chunks))
        random.Random(me).shuffle(self._order)
        self._held: dict[PeerId, frozenset[int]] = {}
        """What fellows have, as they last said."""
        self._spread: Counter[int] = Counter()
        """By chunk, how many of them have it."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._asked

    def heard(self, fellow: PeerId, held: frozenset[int]) -> None:
        """What a fellow has."""
        self._spread.subtract(self._held.get(fellow, ()))
        self._spread.update(held)
        self._held[fellow] = held

    def take(self, held: Collection[int] | None = None) -> int | None:
        """Of these chunks, or of all, the one that nobody was asked for and the fewest fellows have; where none is left of all, one that is late. None: not now."""
        missing = self._asked if held is None else [index for index in self._asked if index in held]
        choice = [index for index in missing if not self._asked[index]]
        now = self._now()
        if not choice and all(self._asked.values()):
            choice = [index for index in missing if self._late_at(index) <= now]
        best = min(choice, key=lambda i: (self._asked[i], self._spread[i], self._order[i]), default=None)
        if best is not None:
            self._asked[best] += 1
            self._asked_at[best] = now
        return best

    async def wait(self) -> None:
        """Until there is one to take, or one has come. Where some are missing."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(map(self._late_at, self._asked)) - self._now())):
                await self._changed.wait()

    def _late_at(self, index: int) -> float:
        if not self._asked[index]:
            return -math.inf  # it was given back
        patience_s = max(LATE * self._slowest_s, LATE_S) if self._slowest_s else QUICK_S
        return self._asked_at[index] + patience_s

    def done(self, index: int, seconds: float) -> None:
        """It has come, in so many."""
        self._slowest_s = max(self._slowest_s, seconds)
        self._asked.pop(index, None)
        self._changed.set()

    def give_back(self, index: int) -> None:
        """Somebody who was asked for it does not give it."""
        if index in self._asked:
            self._asked[index] -= 1
        self._changed.set()


def wrong_digest(index: int, donor: PeerId) -> Refused:
    """What to say to whoever gave a chunk that is not what a quorum announced."""
    return Refused(f"chunk {index} does not have the digest that a quorum announced", peer=donor)


class Holder(Protocol):
    """What an outer state is downloaded into."""

    @property
    def outer(self) -> OuterState: ...


class StateSync:
    """Downloads outer state into a learner."""

    def __init__(self, network: Network, learner: Holder, refused: Callable[[RemoteError], None]) -> None:
        self._network = network
        self._learner = learner
        self.refused = refused

    def received_bytes(self) -> int:
        """That have come from all peers, of whatever kind."""
        return self._network.received_bytes()

    async def list_chunks(self, donor: PeerId, digest: bytes) -> ChunkList:
        """A donor's chunk digests, checked against the `digest` that a quorum announced.

        Raises NetworkError (the donor is busy or gone, or has moved on) or RemoteError.
        """
        num_chunks = self._learner.outer.num_chunks
        limit = LIST_BYTES_PER_CHUNK * num_chunks + LIST_BYTES
        data = await self._ask(donor, "chunks", ChunkListRequest(), limit, within_s=CHUNK_S)
        if data is None:
            raise NetworkError("the donor is between two versions")
        listing = wire.decode(_LISTS, data, what="list of chunks", limit=limit, peer=donor)
        if digest_of(*listing.digests) != digest:
            raise NetworkError("the donor's state is not the one a quorum announced")
        if len(listing.digests) != num_chunks:
            raise Refused(f"a list of {len(listing.digests)} chunks", peer=donor)
        return listing

    async def _ask(
        self, peer: PeerId, kind: str, request: ChunkListRequest | PiecesRequest, limit: int, *, within_s: float
    ) -> bytes | None:
        """One question, and the answer. Raises NetworkError or RemoteError."""
        try:
            async with asyncio.timeout(within_s):
                stream = await self._network.open_stream(peer, kind)
                try:
                    await framing.write_header(stream, request)
                    return await framing.read_blob(stream, limit)
                finally:
                    await stream.close()
        except TimeoutError as error:
            raise NetworkError(f"no answer about {kind} within {within_s:.0f} s") from error

    async def fetch(
        self,
        download: Download,
        donors: Sequence[PeerId],
        arrived: Arrived,
    ) -> None:
        """Get the chunks that `download` lacks, each at whatever version its donor has.

        Returns when nothing is missing or no donor can give more; the caller looks at `download.have` and goes on.
        """
        await self.fetch_from(lambda: Sources(donors), download, arrived)

    async def fetch_from(self, look: Callable[[], Sources], download: Download, arrived: Arrived) -> None:
        """The same from whoever `look` tells of, now and then, as long as some donor gives: those that have failed are asked once more, and fellows for what they have by then."""
        work = _Work(download, arrived, self._network.peer_id, asyncio.get_running_loop().time)
        streams, passes = dict[PeerId, list[asyncio.Task[None]]](), dict[PeerId, asyncio.Task[None]]()
        running = list[asyncio.Task[None]]()

        def end_all(_: asyncio.Task[None]) -> None:
            """Once nothing is missing, also the streams that still wait for a slow donor. Not by an error: a group that
            ends by one swallows, before Python 3.13, that its own task is cancelled at that moment.
            """
            if work.complete:
                for task in running:
                    task.cancel()

        async with asyncio.TaskGroup() as group:

            def start(asking: Coroutine[None, None, None]) -> asyncio.Task[None]:
                task = group.create_task(asking)
                task.add_done_callback(end_all)
                return task

            looked = False
            while not work.complete:
                sources = look()
                giving = {donor for donor, tasks in streams.items() if not all(task.done() for task in tasks)}
                due = [d for d in sources.donors if d not in streams or (giving and d not in giving)]
                streams |= {donor: [] for donor in due}
                for _ in range(STREAMS_PER_DONOR):
                    for donor in due:
                        streams[donor].append(start(self._drain(donor, work)))
                if giving or due or not looked:
                    for fellow in sources.fellows:
                        if fellow not in passes or passes[fellow].done():
                            passes[fellow] = start(self._drain_fellow(fellow, work))
                tasks = [*(task for tasks in streams.values() for task in tasks), *passes.values()]
                running = [task for task in tasks if not task.done()]
                if not running:
                    break
                await asyncio.wait(running, timeout=LOOK_AGAIN_S)
                looked = True
            for task in running:
                task.cancel()

    async def fetch_all(self, download: Download, donors: Sequence[PeerId], arrived: Arrived) -> None:
        """The same for who does not come back later, while donors serve others first: until they have been asked in vain a few times."""
        in_vain = 0
        while not download.complete and in_vain < ATTEMPTS:
            before = len(download.have)
            await self.fetch(download, donors, arrived)
            in_vain = in_vain + 1 if len(download.have) == before else 0

    async def _drain(self, donor: PeerId, work: _Work) -> None:
        """One stream to one donor at a time, when there is room for it: take chunks off the common list until none is missing, or the donor fails."""
        async with work.room:
            while await self._use_stream(donor, work, work.take, work.room) and not work.complete:
                await work.wait()

    async def _drain_fellow(self, fellow: PeerId, work: _Work) -> None:
        """The same of what a newcomer has now."""
        async with work.fellow_room:
            try:
                held = frozenset[int]() if work.complete else await self._pieces(fellow)
            except NetworkError:
                return
            except RemoteError as error:
                work.download.distrusted.add(fellow)
                self.refused(error)
                return
            work.heard(fellow, held)
            await self._use_stream(fellow, work, partial(work.take, held), work.fellow_room)

    async def _pieces(self, fellow: PeerId) -> frozenset[int]:
        """The chunks that a newcomer can give. Raises NetworkError or RemoteError."""
        count = self._learner.outer.num_chunks
        size = (count + 7) // 8
        data = await self._ask(fellow, "pieces", PiecesRequest(), size, within_s=DIAL_S)
        if data is None:
            return frozenset()  # it downloads nothing any more
        if len(data) != size:
            raise Refused(f"{len(data)} bytes about {count} chunks", peer=fellow)
        bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))[:count]
        return frozenset(np.flatnonzero(bits).tolist())

    async def _use_stream(
        self, donor: PeerId, work: _Work, take: Callable[[], int | None], room: asyncio.Semaphore
    ) -> bool:
        """Take chunks as long as there are any; whether the donor gave them all."""
        loop, download = asyncio.get_running_loop(), work.download
        index = take()
        if index is None:
            return True
        try:
            async with asyncio.timeout(DIAL_S):
                stream = await self._network.open_stream(donor, "chunk")
        except (NetworkError, TimeoutError):
            work.give_back(index)
            return False
        try:
            while True:
                await download.asking.wait()
                asked_at = loop.time()
                async with asyncio.timeout(CHUNK_S):
                    await framing.write_header(stream, ChunkRequest(index))
                    version = int.from_bytes(await framing.read_exactly(stream, VERSION_BYTES), "big")
                async with asyncio.timeout(CHUNK_S):
                    data = await framing.read_blob(stream, CHUNK_BYTES)
                if data is None:
                    raise NetworkError("the chunk is not there any more")
                if len(data) != self._chunk_bytes(index):
                    raise Refused(f"not a chunk {index}", peer=donor)
                if loop.time() - asked_at < QUICK_S:
                    room.release()  # for one more
                if index not in download.have:  # two donors were asked for it where it was late
                    download.have[index], download.source[index] = version, donor  # before any await: ours counts
                    try:
                        await work.arrived(index, version, bytes(data))
                    except BadChunk as error:
                        download.drop(index)
                        raise Refused(str(error), peer=donor) from error
                    except (RemoteError, NetworkError):
                        download.drop(index)
                        raise
                    download.received_bytes += len(data)
                work.done(index, loop.time() - asked_at)
                if (more := take()) is None:
                    return True
                index = more
        except (NetworkError, TimeoutError):
            work.give_back(index)  # what this donor did not deliver, others do
        except RemoteError as error:
            work.give_back(index)
            download.distrusted.add(donor)
            self.refused(error)
        finally:
            await stream.close()
        return False

    def _chunk_bytes(self, index: int) -> int:
        start, stop = self._learner.outer.chunk_range(index)
        return BYTES_PER_ELEMENT * (stop - start)

    def verify(self, download: Download, mine: Sequence[bytes], listing: ChunkList) -> None:
        """Drop the chunks that do not have the digest they should, and say who gave them."""
        wrong = [i for i, (a, b) in enumerate(zip(mine, listing.digests, strict=True)) if a != b]
        for index in wrong:
            self.drop_wrong(download, index)

    def drop_wrong(self, download: Download, index: int) -> None:
        """A chunk does not have the digest that a quorum announced: it is fetched again, and who gave it is named."""
        download.drop(index)
        donor = download.source.pop(index, None)
        if donor is not None:
            download.distrusted.add(donor)
            self.refused(wrong_digest(index, donor))

    def roll(
        self,
        chunks: Sequence[int],
        updates: Sequence[Update],
        step: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Bring chunks from the version before a round to that after it. `step(start, stop, mean)` is one outer step of a slice. Blocks."""
        outer = self._learner.outer
        for index in sorted(chunks):
            low, high = outer.chunk_range(index)
            for start, stop, mean in updates:
                a, b = max(low, start), min(high, stop)
                if a < b:
                    step(a, b, mean[a - start : b - start])
