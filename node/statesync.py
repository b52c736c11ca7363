"""Late join and repair: outer state from several donors at once, chunk by chunk, hashed, resumable, while the swarm goes on.

Donors serve the state they have at the moment. When a round commits in the middle of a download, some chunks are of the older version and some of
the newer; since the outer step is elementwise, each older chunk is rolled forward by the round's mean, which is at most a byte a
parameter. Chunks are believed when, rolled to one version, their digests stand in a list whose own digest a quorum of the view announces in
signed heartbeats; those that do not are fetched again, from somebody else if possible.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from farflung.compression.digest import digest_of
from farflung.node import framing
from farflung.node.learner import Learner
from farflung.node.network import Network, PeerId, Stream
from farflung.node.slots import Slots
from farflung.protocol import wire
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ChunkList, ChunkListRequest, ChunkRequest
from farflung.protocol.limits import CHUNK_BYTES
from farflung.training.coupled import Update
from farflung.training.errors import BadChunk
from farflung.training.outer import BYTES_PER_ELEMENT, OuterState

STREAMS_PER_DONOR = 2
"""Requests in flight at one donor: one is on the wire while the next is being read."""

FIRST_STREAMS = 4
"""Streams until chunks have shown how quick the link is: with more, a slow one is shared by so many that none comes in time."""

QUICK_S = 10.0
"""A chunk that was here sooner has room for another one beside it."""

SERVED_AT_ONCE = 4
"""Chunks a donor sends at the same time; more wait their turn, so that newcomers do not take the uplink from rounds."""

TURN_S = 30.0
"""So long, from its first chunk, whoever has been served most comes before the others. Of a hundred that came at once all would else be through at the end, and none
before could help the others (docs/experiments.md, 2026-11-26); and without an end the slow ones would keep a donor for themselves. Less than `CHUNK_S`, or those who wait would be gone
by then."""

ATTEMPTS = 3
"""Times in a row that donors are asked in vain by somebody who cannot come back later."""

DIAL_S = 10.0
"""Until a donor answers at all."""

CHUNK_S = 60.0
"""Until a chunk is here: a megabyte over a fifth of a megabit per second."""

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
    asking: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while chunks may be asked for; not while something else needs the link."""

    def __post_init__(self) -> None:
        self.asking.set()

    @property
    def complete(self) -> bool:
        return len(self.have) == self.num_chunks

    def at(self, version: int) -> list[int]:
        """The chunks that are here at that version."""
        return [index for index, at in self.have.items() if at == version]


Arrived = Callable[[int, int, bytes], Awaitable[None]]
"""Hears of each chunk: its index, version and bytes."""


class _Work:
    """Which chunks are still to be asked for, and what is done with them. When none is left, those that are slow to come are asked for again elsewhere."""

    def __init__(self, download: Download, arrived: Arrived) -> None:
        self.download = download
        self.arrived = arrived
        self.room = asyncio.Semaphore(FIRST_STREAMS)
        """For streams."""
        self._asked = {index: 0 for index in range(download.num_chunks) if index not in download.have}

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._asked

    def take(self) -> int:
        """The chunk that the fewest donors have been asked for; something has to be missing."""
        index = min(self._asked, key=lambda i: (self._asked[i], i))
        self._asked[index] += 1
        return index

    def done(self, index: int) -> None:
        self._asked.pop(index, None)

    def give_back(self, index: int) -> None:
        if index in self._asked:
            self._asked[index] -= 1


class Donor:
    """Serves this node's outer state to others."""

    def __init__(self, network: Network, learner: Learner, version: Callable[[], int], steady: asyncio.Event) -> None:
        self._network = network
        self._learner = learner
        self._version = version
        self._steady = steady
        self._slots = Slots(SERVED_AT_ONCE)
        self._digests: tuple[int, tuple[bytes, ...]] = (-1, ())

    def serve(
        self, refused: Callable[[RemoteError], None], admitted: Callable[[PeerId], bool], within_s: float
    ) -> None:
        """Accept downloads by admitted peers."""
        self._admitted = admitted
        self._network.serve("chunks", framing.guarded(self._serve_list, refused, within_s=within_s))
        self._network.serve("chunk", framing.guarded(self._serve_chunks, refused, within_s=within_s))

    def remember(self, version: int, digests: Sequence[bytes]) -> None:
        """The digests of the state at `version`, as computed after it was applied."""
        self._digests = (version, tuple(digests))

    async def _serve_list(self, stream: Stream) -> None:
        self._check(stream.peer)
        await framing.read_header(stream, ChunkListRequest)
        version, digests = self._digests
        ready = bool(digests) and version == self._version()
        answer = msgspec.msgpack.encode(ChunkList(version, digests)) if ready else None
        await framing.write_blob(stream, answer, about=True)

    async def _serve_chunks(self, stream: Stream) -> None:
        self._check(stream.peer)
        loop = asyncio.get_running_loop()
        turn, served = 0.0, 0
        while True:  # until the other side closes, which ends `read_header`
            request = await framing.read_header(stream, ChunkRequest)
            if request.index >= self._learner.outer.num_chunks:
                raise Refused(f"asked for chunk {request.index}", peer=stream.peer)
            if loop.time() >= turn:
                served = 0
            async with asyncio.timeout(CHUNK_S), self._slots.slot(served):
                await self._steady.wait()
                # No await from here to the bytes: state and version belong together. Copying a chunk takes
                # well under a millisecond, so the loop can do it; behind the door it would wait for a step.
                version, data = self._version(), self._learner.outer.chunk_bytes(request.index)
                await stream.write(version.to_bytes(VERSION_BYTES, "big"), overhead=VERSION_BYTES)
                await framing.write_blob(stream, data)
            turn = loop.time() + TURN_S if served == 0 else turn
            served += 1

    def _check(self, peer: PeerId) -> None:
        if not self._admitted(peer):
            raise Refused("a download before being admitted to the swarm", peer=peer)


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

    async def list_chunks(self, donor: PeerId, digest: bytes) -> ChunkList:
        """A donor's chunk digests, checked against the `digest` that a quorum announced.

        Raises NetworkError (the donor is busy or gone, or has moved on) or RemoteError.
        """
        num_chunks = self._learner.outer.num_chunks
        limit = LIST_BYTES_PER_CHUNK * num_chunks + LIST_BYTES
        try:
            async with asyncio.timeout(CHUNK_S):
                stream = await self._network.open_stream(donor, "chunks")
                try:
                    await framing.write_header(stream, ChunkListRequest())
                    data = await framing.read_blob(stream, limit)
                finally:
                    await stream.close()
        except TimeoutError as error:
            raise NetworkError("no answer to a request for the list of chunks") from error
        if data is None:
            raise NetworkError("the donor is between two versions")
        listing = wire.decode(_LISTS, data, what="list of chunks", limit=limit, peer=donor)
        if digest_of(*listing.digests) != digest:
            raise NetworkError("the donor's state is not the one a quorum announced")
        if len(listing.digests) != num_chunks:
            raise Refused(f"a list of {len(listing.digests)} chunks", peer=donor)
        return listing

    async def fetch(
        self,
        download: Download,
        donors: Sequence[PeerId],
        arrived: Arrived,
    ) -> None:
        """Get the chunks that `download` lacks, each at whatever version its donor has.

        Returns when nothing is missing or no donor can give more; the caller looks at `download.have` and goes on.
        """
        work = _Work(download, arrived)
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(self._drain(donor, work)) for _ in range(STREAMS_PER_DONOR) for donor in donors
            ]

            def end_all(_: asyncio.Task[None]) -> None:
                """Once nothing is missing, also the streams that still wait for a slow donor. Not by an error: a group that
                ends by one swallows, before Python 3.13, that its own task is cancelled at that moment.
                """
                if work.complete:
                    for stream in streams:
                        stream.cancel()

            for stream in streams:
                stream.add_done_callback(end_all)

    async def fetch_all(self, download: Download, donors: Sequence[PeerId], arrived: Arrived) -> None:
        """The same for who does not come back later, while donors serve others first: until they have been asked in vain a few times."""
        in_vain = 0
        while not download.complete and in_vain < ATTEMPTS:
            before = len(download.have)
            await self.fetch(download, donors, arrived)
            in_vain = in_vain + 1 if len(download.have) == before else 0

    async def _drain(self, donor: PeerId, work: _Work) -> None:
        """One stream to one donor, when there is room for it: take chunks off the common list until none is missing, or the donor fails."""
        async with work.room:
            if not work.complete:
                await self._use_stream(donor, work)

    async def _use_stream(self, donor: PeerId, work: _Work) -> None:
        loop, download = asyncio.get_running_loop(), work.download
        index = work.take()
        try:
            async with asyncio.timeout(DIAL_S):
                stream = await self._network.open_stream(donor, "chunk")
        except (NetworkError, TimeoutError):
            work.give_back(index)
            return
        try:
            while True:
                await download.asking.wait()
                asked_at = loop.time()
                async with asyncio.timeout(CHUNK_S):
                    await framing.write_header(stream, ChunkRequest(index))
                    version = int.from_bytes(await framing.read_exactly(stream, VERSION_BYTES), "big")
                    data = await framing.read_blob(stream, CHUNK_BYTES)
                if data is None or len(data) != self._chunk_bytes(index):
                    raise Refused(f"not a chunk {index}", peer=donor)
                if loop.time() - asked_at < QUICK_S:
                    work.room.release()  # for one more
                if index not in download.have:  # near the end, two donors may be asked for the same chunk
                    download.have[index], download.source[index] = version, donor  # before any await: ours counts
                    try:
                        await work.arrived(index, version, bytes(data))
                    except BadChunk as error:
                        del download.have[index]
                        raise Refused(str(error), peer=donor) from error
                    except RemoteError:
                        del download.have[index]
                        raise
                    download.received_bytes += len(data)
                work.done(index)
                if work.complete:
                    return
                index = work.take()
        except (NetworkError, TimeoutError):
            work.give_back(index)  # what this donor did not deliver, others do
        except RemoteError as error:
            work.give_back(index)
            download.distrusted.add(donor)
            self.refused(error)
        finally:
            await stream.close()

    def _chunk_bytes(self, index: int) -> int:
        start, stop = self._learner.outer.chunk_range(index)
        return BYTES_PER_ELEMENT * (stop - start)

    def verify(self, download: Download, mine: Sequence[bytes], listing: ChunkList) -> None:
        """Drop the chunks that do not have the digest they should, and say who gave them."""
        wrong = [i for i, (a, b) in enumerate(zip(mine, listing.digests, strict=True)) if a != b]
        for index in wrong:
            del download.have[index]
            donor = download.source.pop(index, None)
            if donor is not None:
                download.distrusted.add(donor)
                self.refused(Refused(f"chunk {index} does not have the digest that a quorum announced", peer=donor))

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
