"""Outer state from others: late join, coming back after a long absence, and repair of a minority.

A download ends only when every chunk, rolled forward to one version, has the digest that stands in a list whose own digest a quorum of the view
announces. What an earlier process had already fetched is taken up again. A repair touches nothing until all it needs is here and checked.
"""

import asyncio
import contextlib

from farflung.compression.digest import digest_of
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.exchange import Exchange
from farflung.node.learner import Learner
from farflung.node.means import KEPT_ROUNDS
from farflung.node.network import PeerId
from farflung.node.statesync import Download, StateSync
from farflung.node.storage import Storage
from farflung.node.terms import Terms
from farflung.protocol import standing
from farflung.protocol.effects import Repair
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ChunkList
from farflung.protocol.member import Member
from farflung.training.errors import BadChunk

RETRY_S = 1.0
"""Between attempts that depend on what others say in their heartbeats."""

REPORT_CHUNKS = 16
"""Chunks between two lines of progress."""

FOLLOWED_ROUNDS = KEPT_ROUNDS // 2
"""Versions after which chunks are brought up to the history while others are still on their way: the means must still be there, and take a while to come."""

VERSIONS_AHEAD = 2
"""Versions by which a donor may be ahead of the history we know: a commit or two that have not reached us yet."""


class Catchup:
    """Downloads into the learner's outer state. Whoever calls keeps training out of it meanwhile."""

    def __init__(
        self,
        *,
        sync: StateSync,
        member: Member,
        exchange: Exchange,
        learner: Learner,
        doors: Doors,
        storage: Storage,
        log: EventLog,
        terms: Terms,
    ) -> None:
        self._sync = sync
        self._member = member
        self._exchange = exchange
        self._learner = learner
        self._aside = doors.side.run
        self._learn = doors.learner.run
        self._storage = storage
        self._log = log
        self._terms = terms
        self._download: Download | None = None

    async def download(self, at_least: int) -> int:
        """Fetch, roll forward and verify until the whole outer state is that of one version; returns it.

        It is one of our history: rounds that we do not know yet may have counted what we had trained.
        """
        download = self._download = self._download or await self._begin()
        while True:
            await self._fetch(download)
            view = self._member.head.commit.view
            newest = max([at_least, *download.have.values()])
            agreed = standing.agreed(self._member.membership, view, self._member.me, newest)
            if agreed is not None and download.complete and agreed[0] <= self._member.head.commit.version:
                version, digest, holders = agreed
                await self._roll_forward(download, version)
                download.have = dict.fromkeys(download.at(version), version)
                if download.complete and await self._verified(download, digest, holders):
                    self._download = None
                    self._report(download)
                    return version
            await asyncio.sleep(RETRY_S)

    async def _fetch(self, download: Download) -> None:
        """Get what is missing, and meanwhile keep what is here within reach of the swarm, which may move on for longer than means are kept."""
        fetched = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(download, fetched))
            await self._sync.fetch(download, self._donors(download), self._arrived)
            fetched.set()

    async def _follow(self, download: Download, fetched: asyncio.Event) -> None:
        """Means come before chunks: on a link that is not much faster than the rounds these would leave them no room. Not cancelled at the end, for a
        chunk that has been stepped counts as what it is now.
        """
        followed = min(download.have.values(), default=self._member.head.commit.version)
        while not fetched.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await fetched.wait()
            version = self._member.head.commit.version
            # Not as often as it may: what cannot be had now is not waited for again at once.
            if version - followed >= FOLLOWED_ROUNDS:
                download.asking.clear()
                await self._roll_forward(download, version)
                download.asking.set()
                followed = version

    async def _verified(self, download: Download, digest: bytes, holders: tuple[PeerId, ...]) -> bool:
        """Whether the state is the one announced. If not, a list tells which chunks are wrong, while there is somebody at that version."""
        mine = await self._aside(self._learner.outer.chunk_digests)
        if digest_of(*mine) == digest:
            return True
        listing = await self._listing(holders, digest)
        if listing is None:
            download.have.clear()  # nobody can say which are wrong any more
        else:
            self._sync.verify(download, mine, listing)
        return False

    async def fetch_repair(self, work: Repair) -> dict[int, bytes] | None:
        """The chunks in which we differ from the majority, checked against its digests; None when they cannot be had any more."""
        listing = await self._listing(work.donors, work.digest)
        if listing is None:
            return None  # the swarm has moved on; if we still differ, the next comparison says so
        mine = await self._aside(self._learner.outer.chunk_digests)
        same = {i: work.version for i, (a, b) in enumerate(zip(mine, listing.digests, strict=True)) if a == b}
        chunks: dict[int, bytes] = {}

        async def check(index: int, version: int, data: bytes) -> None:
            if version == work.version and digest_of(data) == listing.digests[index]:
                chunks[index] = data

        await self._sync.fetch(Download(len(mine), have=dict(same)), list(work.donors), check)
        return chunks if len(chunks) + len(same) == len(mine) else None

    async def _begin(self) -> Download:
        """A new transfer, with the chunks that an earlier one had already brought."""
        download = Download(self._learner.outer.num_chunks)
        oldest = self._member.head.commit.version - KEPT_ROUNDS  # older ones cannot be rolled forward

        def take(index: int, version: int, data: bytes) -> None:
            if index < download.num_chunks and version >= max(oldest, download.have.get(index, 0)):
                try:
                    self._learner.outer.load_chunk(index, data)
                except BadChunk:
                    return  # damaged on our disk: it is fetched again, like any that is not there
                download.have[index] = version

        await self._aside(self._storage.load_chunks, take)
        return download

    async def _arrived(self, index: int, version: int, data: bytes) -> None:
        download = self._download
        assert download is not None
        if version > self._member.head.commit.version + VERSIONS_AHEAD:
            raise Refused(f"chunk {index} of version {version}, which there cannot be", peer=download.source[index])
        self._learner.outer.load_chunk(index, data)
        await self._aside(self._storage.save_chunk, index, version, data)
        if len(download.have) % REPORT_CHUNKS == 0:
            self._report(download)

    def _report(self, download: Download) -> None:
        self._log.emit(
            "state.sync",
            chunks_done=len(download.have),
            chunks=download.num_chunks,
            donors=[p.hex() for p in sorted(set(download.source.values()))],
            bytes=download.received_bytes,
        )

    async def _roll_forward(self, download: Download, version: int) -> None:
        """Bring older chunks to `version` by the means of the rounds between, as far as these can be had."""
        oldest = min(download.have.values(), default=version)
        rounds = {c.commit.version: c.commit for c in self._member.history if c.commit.round is not None}
        for target in range(max(oldest, version - KEPT_ROUNDS) + 1, version + 1):
            commit = rounds.get(target)
            if commit is None or commit.round is None:
                continue
            holders = self._member.membership.live(p for p in commit.view if p != self._member.me)
            last = self._terms.settings.rules.ended_by(commit)
            means = await self._exchange.collect(commit.round, holders, last=last)
            if means is not None:
                updates = await self._aside(self._exchange.decode, commit.round, means, last=last)
                self._learner.outer.rule = self._terms.rule(commit)
                chunks = download.at(target - 1)  # more may come meanwhile; but nobody else changes these
                await self._learn(self._sync.roll, chunks, updates, self._learner.outer.advance_)
                download.have |= dict.fromkeys(chunks, target)

    def _donors(self, download: Download) -> list[PeerId]:
        """Everybody alive who holds a state, beginning at a place of our own so that newcomers do not all ask the same."""
        members = self._member.membership
        holders = [
            p
            for p in members.live(members.known())
            if p not in download.distrusted and (beat := members.heartbeat(p)) is not None and beat.digest
        ]
        if not holders:
            download.distrusted.clear()  # better the doubtful than nobody; what they give is checked all the same
        me = self._member.me
        return [p for p in holders if p > me] + [p for p in holders if p < me]

    async def _listing(self, donors: tuple[PeerId, ...], digest: bytes) -> ChunkList | None:
        for donor in donors:
            try:
                return await self._sync.list_chunks(donor, digest)
            except NetworkError:
                continue
            except RemoteError as error:
                self._sync.refused(error)
        return None
