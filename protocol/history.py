"""The part of the chain that a member keeps: what it builds on, what it serves, and what deadlines learn from."""

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from farflung.protocol import chain
from farflung.protocol import ledger as ledgers
from farflung.protocol.chain import Certified, Commit, RoundResult
from farflung.protocol.errors import Refused
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import Page
from farflung.protocol.limits import MAX_COMMITS_PER_REPLY, MAX_CONTROL_BYTES
from farflung.protocol.messages import Commits
from farflung.protocol.settings import HISTORY, RECENT_ROUNDS, Settings

MAX_REPLY_BYTES = MAX_CONTROL_BYTES // 2
"""Bytes of commits in one reply; a commit of 64 members is some 20 kB."""


class History:
    """Certified commits, one after another, and the parent of the first."""

    def __init__(self) -> None:
        self._links: deque[Certified] = deque(maxlen=HISTORY)
        self.newest: Certified | None = None
        """The head; None before there is one. Asked more often than anything else of a member."""
        self.anchor: Commit | None = None
        """Parent of the oldest commit kept; None when that is the genesis, or before there is any."""

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Certified]:
        return iter(self._links)

    def __reversed__(self) -> Iterator[Certified]:
        return reversed(self._links)

    @property
    def head(self) -> Certified:
        """The newest. Raises IndexError before there is one."""
        return self._links[-1]

    def replace(self, anchor: Commit | None, links: Iterable[Certified]) -> None:
        """Start anew from `links`, the first of which follows `anchor`."""
        self._links.clear()
        self._links.extend(links)
        self.newest = self._links[-1] if self._links else None
        self.anchor = anchor

    def append(self, certified: Certified) -> None:
        """The caller has checked that it follows."""
        if len(self._links) == self._links.maxlen:
            self.anchor = self._links[0].commit
        self._links.append(certified)
        self.newest = certified

    def parent_of(self, height: int) -> Commit | None:
        """The commit before `height`, when it is kept."""
        for certified in self._links:
            if certified.commit.height == height - 1:
                return certified.commit
        return self.anchor if self.anchor is not None and self.anchor.height == height - 1 else None

    @property
    def came_from(self) -> bytes | None:
        """The group out of which the head's has come lately; None when no commit that is kept says so."""
        for certified in reversed(self._links):
            half = certified.commit.half
            if half is not None and half.turned:
                return half.group
        return None

    def reaches(self, peer: PeerId, version: int) -> bool:
        """Whether a peer that has the outer state of `version` gets to the head's with what it holds itself.

        The view of a round is whoever holds all its means, on disk: so it was in the view of every round since.
        """
        for certified in reversed(self._links):
            commit = certified.commit
            if commit.version <= version:
                return True
            if commit.round is not None and peer not in commit.view:
                return False
        return self.anchor is not None and self.anchor.version <= version

    def recent_rounds(self, most: int = RECENT_ROUNDS) -> list[RoundResult]:
        """The newest rounds, newest first."""
        rounds: list[RoundResult] = []
        for certified in reversed(self._links):
            if certified.commit.round is not None:
                rounds.append(certified.commit.round)
                if len(rounds) == most:
                    break
        return rounds

    def pages(self) -> list[Page]:
        """What the commits that are kept say of samples, oldest first."""
        commits = [certified.commit for certified in self._links]
        if self.anchor is not None:
            commits.insert(0, self.anchor)
        return [
            Page(c.height, c.ledger, {one.peer: one.samples for one in c.round.contributors} if c.round else {})
            for c in commits
        ]

    def answer(self, after: int) -> Commits | None:
        """What a peer that knows the chain up to `after` lacks, in one message; the newest alone when that is too much
        history or it knows nothing (-1). None when it lacks nothing."""
        if not self._links:
            return None
        oldest = self._links[0].commit.height
        first = after + 1 - oldest if max(0, oldest - 1) <= after else len(self._links) - 1
        batch: list[Certified] = []
        size = 0
        for certified in list(self._links)[first : first + MAX_COMMITS_PER_REPLY]:
            size += len(msgspec.msgpack.encode(certified))
            if batch and size > MAX_REPLY_BYTES:
                break
            batch.append(certified)
        if not batch:
            return None
        return Commits(self.anchor if first == 0 else self._links[first - 1].commit, tuple(batch))


def check_chain(settings: Settings, message: Commits, peer: PeerId) -> None:
    """Check commits from their anchor on: links and certificates. Raises Refused or BadSignature naming `peer`.

    A newcomer trusts the anchor's view as far as it trusts the peer that the DHT and the invitation led it to; the founder's
    signature stands at genesis only. What it downloads afterwards must match what a quorum of that view says.
    """
    parent = message.anchor
    if parent is not None:
        left = settings.rules.total_steps - parent.steps
        if not settings.rules.laps.allows(parent.next_round, left):
            raise Refused(
                f"an anchor after which a round moves {parent.width} fragments in {parent.lap} steps, with {left} left",
                peer=peer,
            )
        if not ledgers.is_sound(parent.ledger):
            raise Refused("an anchor with a ledger that cannot be", peer=peer)
    for certified in message.chain:
        commit = certified.commit
        if parent is None:
            if not chain.is_genesis(commit, settings.founder, settings.rules):
                raise Refused("a first commit that is not the founder's", peer=peer)
            voters: tuple[PeerId, ...] = (settings.founder,)
        else:
            chain.check_successor(settings.swarm, parent, commit, settings.rules, peer=peer)
            voters = parent.view
        chain.check_certificate(settings.swarm, certified, voters, peer=peer)
        parent = commit
