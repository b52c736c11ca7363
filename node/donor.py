"""Who gives outer state to others: members what they hold, and newcomers what they have of it already, so that of a crowd that comes at once not all wait for one uplink."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from farflung.node import framing
from farflung.node.learner import Learner
from farflung.node.network import Network, PeerId, Stream
from farflung.node.slots import Slots
from farflung.node.statesync import CHUNK_S, QUICK_S, VERSION_BYTES, Download
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ChunkList, ChunkListRequest, ChunkRequest, PiecesRequest

SERVED_AT_ONCE = 4
"""Chunks a donor sends at the same time; more wait their turn, so that newcomers do not take the uplink from rounds. Fewer where the link is so slow that they do
not come in time: of four of which none does nobody has anything, for ever."""

TURN_S = 30.0
"""So long, from its first chunk, whoever has been served most comes before the others. Of a hundred that came at once all would else be through at the end, and none
before could help the others (docs/experiments.md, 2026-11-26); and without an end the slow ones would keep a donor for themselves. Less than `CHUNK_S`, or those who wait would be gone
by then."""


class Donor:
    """Serves this node's outer state to others; while it is being downloaded, the chunks that are here and known to be right."""

    def __init__(
        self,
        network: Network,
        learner: Learner,
        version: Callable[[], int],
        steady: asyncio.Event,
        under_way: Callable[[], Download | None] = lambda: None,
    ) -> None:
        self._network = network
        self._learner = learner
        self._version = version
        self._steady = steady
        self._under_way = under_way
        """Our own download, while there is one."""
        self._slots = Slots(SERVED_AT_ONCE)
        self._digests: tuple[int, tuple[bytes, ...]] = (-1, ())

    def serve(
        self, refused: Callable[[RemoteError], None], admitted: Callable[[PeerId], bool], within_s: float
    ) -> None:
        """Accept downloads by admitted peers."""
        self._admitted = admitted
        self._network.serve("chunks", framing.guarded(self._serve_list, refused, within_s=within_s))
        self._network.serve("pieces", framing.guarded(self._serve_pieces, refused, within_s=within_s))
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

    async def _serve_pieces(self, stream: Stream) -> None:
        self._check(stream.peer)
        await framing.read_header(stream, PiecesRequest)
        download = self._under_way()
        await framing.write_blob(stream, None if download is None else download.good_bits(), about=True)

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
            async with self._slots.slot(served, within_s=CHUNK_S):
                await self._send(stream, request.index)
            turn = loop.time() + TURN_S if served == 0 else turn
            served += 1

    async def _send(self, stream: Stream, index: int) -> None:
        """Raises NetworkError, or TimeoutError when it takes too long."""
        loop = asyncio.get_running_loop()
        began: float | None = None  # until then it is we who are not ready
        try:
            async with asyncio.timeout(CHUNK_S):
                version, data = await self._chunk(index)
                began = loop.time()
                await stream.write(version.to_bytes(VERSION_BYTES, "big"), overhead=VERSION_BYTES)
                await framing.write_blob(stream, data)
        except (NetworkError, TimeoutError):
            if began is not None and loop.time() - began >= QUICK_S:  # else whoever asked has gone
                self._slots.fewer()
            raise
        if data is not None and loop.time() - began < QUICK_S:
            self._slots.more()

    async def _chunk(self, index: int) -> tuple[int, bytes | None]:
        """Version and bytes; no bytes: not here."""
        download = self._under_way()
        if download is None:
            await self._steady.wait()
        # No await from here to the bytes: state and version belong together. Copying a chunk takes
        # well under a millisecond, so the loop can do it; behind the door it would wait for a step.
        version = self._version() if download is None else download.good_version(index)
        return (0, None) if version is None or version < 0 else (version, self._learner.outer.chunk_bytes(index))

    def _check(self, peer: PeerId) -> None:
        if not self._admitted(peer):
            raise Refused("a download before being admitted to the swarm", peer=peer)
