"""Outer state from others: late join, coming back after a long absence, and repair of a minority.

A download ends only when every chunk, rolled forward to one version, has the digest that stands in a list whose own digest a quorum of the view
announces. What an earlier process had already fetched is taken up again. A repair touches nothing until all it needs is here and checked.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence

from farflung.compression.digest import digest_of
from farflung.node.disk import KEPT_ROUNDS
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.exchange import Exchange
from farflung.node.learner import Learner
from farflung.node.network import PeerId
from farflung.node.pursuit import Pursuit
from farflung.node.statesync import Download, Sources, StateSync, wrong_digest
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

VOUCH_S = 5.0
"""Between two looks at which chunks are good."""

FOLLOWED_ROUNDS = KEPT_ROUNDS // 2
"""Versions after which chunks are brought up to the history while others are still on their way: the means must still be there, and take a while to come."""

AHEAD_LOOKS = 10
"""Looks, `RETRY_S` apart, in which a version that a donor gave may still come."""

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
        self._listing: ChunkList | None = None
        """The newest that a quorum has announced since the download began: by it chunks are known to be good."""
        self._listed: tuple[int, bytes] | None = None
        """Its version and digest."""
        self.pursuit = Pursuit(
            member,
            log,
            under_way=lambda: self._download,
            received_bytes=sync.received_bytes,
            chunks=learner.outer.num_chunks,
        )

    @property
    def under_way(self) -> Download | None:
        """The download, while there is one."""
        return self._download

    async def download(self, at_least: int) -> int:
        """Fetch, roll forward and verify until the whole outer state is that of one version; returns it.

        It is one of our history: rounds that we do not know yet may have counted what we had trained.
        """
        download = self._download = self._download or await self._begin()
        waited = 0
        while True:
            await self._fetch(download)
            head = self._member.head.commit
            # Those who gave such chunks may have heard of a commit before us; but it comes soon, or there is none.
            ahead = any(version > head.version for version in download.have.values())
            waited = waited + 1 if ahead else 0
            newest = max([at_least, *(version for version in download.have.values() if version <= head.version)])
            agreed = standing.agreed(self._member.membership, head.view, self._member.me, newest)
            in_time = not ahead or waited > AHEAD_LOOKS
            if agreed is not None and download.complete and in_time and agreed[0] <= head.version:
                version, digest, holders = agreed
                # Asked for before all is brought forward: by then nobody may be at that version any more, to say which chunks are wrong.
                async with asyncio.TaskGroup() as group:
                    listed = group.create_task(self._known(version, digest, holders))
                    await self._roll_forward(download, version)
                    download.keep(version)
                    whole = download.complete and await self._verified(download, digest, listed)
                    listed.cancel()  # nobody waits for it where all is right
                if whole:
                    self._download = self._listing = self._listed = None
                    self._report(download)
                    return version
            await asyncio.sleep(RETRY_S)

    async def _fetch(self, download: Download) -> None:
        """Get what is missing, and meanwhile keep what is here within reach of the swarm, which may move on for longer than means are kept."""
        fetched = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(download, fetched))
            vouching = group.create_task(self._vouch(download))
            await self._sync.fetch_from(lambda: self._sources(download), download, self._arrived)
            fetched.set()
            vouching.cancel()

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

    async def _vouch(self, download: Download) -> None:
        """Find out which chunks are good, so that others may have them, while there are any."""
        while True:
            await asyncio.sleep(VOUCH_S)
            if not self._fellows(download):
                continue
            head = self._member.head.commit
            oldest = head.version - KEPT_ROUNDS
            download.good -= {index for index in download.good if download.have[index] < oldest}  # of no use to others
            agreed = standing.agreed(self._member.membership, head.view, self._member.me, max(0, oldest))
            if agreed is not None and agreed[0] <= head.version + VERSIONS_AHEAD and agreed[:2] != self._listed:
                await self._list(agreed[0], agreed[1], self._from_us_on(agreed[2]))
            if self._listing is not None:
                for index in download.at(self._listing.version):
                    await self._look_at(download, index, self._listing)

    async def _list(self, version: int, digest: bytes, holders: Sequence[PeerId]) -> ChunkList | None:
        """The list that a quorum has announced; None, and the last one stays, when nobody at that version gives it."""
        listing = await self._listing_of(holders, digest)
        if listing is not None:
            self._listing, self._listed = listing, (version, digest)
        return listing

    async def _known(self, version: int, digest: bytes, holders: Sequence[PeerId]) -> ChunkList | None:
        """The same; not asked for where we have it."""
        if self._listed == (version, digest):
            return self._listing
        return await self._list(version, digest, holders)

    async def _look_at(self, download: Download, index: int, listing: ChunkList) -> None:
        """Whether a chunk that came before the list is good. It may be brought to another version, or be dropped, meanwhile: then a later list tells."""
        if index in download.good or download.rolling:
            return
        digest = await self._aside(digest_of, self._learner.outer.chunk_bytes(index))
        if download.have.get(index) != listing.version or download.rolling:
            return
        if digest == listing.digests[index]:
            download.good.add(index)
        else:
            self._sync.drop_wrong(download, index)

    async def _verified(self, download: Download, digest: bytes, listed: Awaitable[ChunkList | None]) -> bool:
        """Whether the state is the one announced. If not, its list tells which chunks are wrong, where somebody has given that."""
        mine = await self._aside(self._learner.outer.chunk_digests)
        if digest_of(*mine) == digest:
            return True
        listing = await listed
        if listing is None:
            download.have.clear()  # nobody can say which are wrong
            download.good.clear()
        else:
            self._sync.verify(download, mine, listing)
        return False

    async def fetch_repair(self, work: Repair) -> dict[int, bytes] | None:
        """The chunks in which we differ from the majority, checked against its digests; None when they cannot be had any more."""
        listing = await self._listing_of(work.donors, work.digest)
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
        if version < self._member.head.commit.version - KEPT_ROUNDS:
            raise NetworkError(f"chunk {index} of version {version}, which nothing brings forward any more")
        listing = self._listing
        if listing is not None and listing.version == version:
            if digest_of(data) != listing.digests[index]:
                raise wrong_digest(index, download.source[index])
            download.good.add(index)
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
                download.rolling = True  # for good, if this is cancelled: the thread rolls on
                await self._learn(self._sync.roll, chunks, updates, self._learner.outer.advance_)
                download.have |= dict.fromkeys(chunks, target)
                download.rolling = False
            await self._exchange.rolled(commit.round)

    def _donors(self, download: Download) -> list[PeerId]:
        """Everybody alive who holds a state that we can judge, beginning at a place of our own so that newcomers do not all ask the same."""
        members = self._member.membership
        # Who was away for long is told the history piece by piece: until it is here a chunk of its end would only be thrown away.
        newest = self._member.head.commit.version + VERSIONS_AHEAD
        holders = [
            p
            for p in members.live(members.known())
            if p not in download.distrusted
            and (beat := members.heartbeat(p)) is not None
            and beat.digest
            and beat.version <= newest
        ]
        if not holders:
            download.distrusted.clear()  # better the doubtful than nobody; what they give is checked all the same
        return self._from_us_on(holders)

    def _sources(self, download: Download) -> Sources:
        """Whom to ask now."""
        return Sources(self._donors(download), self._fellows(download))

    def _fellows(self, download: Download) -> list[PeerId]:
        """Some of those who begin with the same group as we and have no state yet."""
        members, group = self._member.membership, self._member.group
        return self._from_us_on(
            p
            for p in members.live(members.known())
            if p not in download.distrusted
            and (beat := members.heartbeat(p)) is not None
            and beat.state == "joining"
            and not beat.digest
            and beat.group == group
        )[: self._terms.fellows]

    def _from_us_on(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Sorted peers, beginning at a place of our own."""
        me, those = self._member.me, list(peers)
        return [p for p in those if p > me] + [p for p in those if p < me]

    async def _listing_of(self, donors: Sequence[PeerId], digest: bytes) -> ChunkList | None:
        for donor in donors:
            try:
                return await self._sync.list_chunks(donor, digest)
            except NetworkError:
                continue
            except RemoteError as error:
                self._sync.refused(error)
        return None
