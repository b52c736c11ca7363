"""Who holds which outer state, by what members say in their heartbeats: voters, newcomers that may join, holders to learn from, minorities to repair.

**A vote says: I hold what this builds on.** A member may be without the outer state of its own head: its disk or power was lost before a checkpoint,
and it is still downloading. If such members voted, enough of them could leave the last holder out of the view, and the state would be gone.
So a member *holds* version v when it has applied v, or an earlier version and was in the view of each round since: that view is whoever has the
round's means on disk (`planning.conclude`), so it needs nobody to get to v, and being a moment behind with applying stops no vote.
Only holders vote and propose, and they vote for no commit whose view keeps no holder, e.g. one that lets all holders go, nor for one that divides the group and
leaves a half without. Promises are free.

- *The state outlives every commit.* A certificate is a quorum of holders, so when anything is decided, the state is on the disks of a quorum of
  the view. By the check of the next view at least one member of that holds it too; by induction every view has a holder.
- *One history.* Only votes are withheld, none is taken back, and Paxos lets an acceptor stay silent. Quorums are of the whole view as before, so
  any two meet. A proposer records its proposal as its own vote before others hear of it, which is why it must be able to vote.
- *Nothing waits for ever.* While the live holders are no quorum, no round is planned, and who is ready trains on by itself. The others download
  from any holder (`agreed`), and then vote. With a quorum of holders the turn of a proposer that is not one of them is passed on.

What is not covered: a member that lost its history as well forgot its promises (`farflung id` moved without the swarm's folder). And if every
member of the view has lost the state, nobody votes until one of them has it back from a newcomer, who is believed then.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from farflung.protocol.chain import Certified
from farflung.protocol.effects import Effect, Repair
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Heartbeat
from farflung.protocol.quorum import is_quorum
from farflung.protocol.settings import REPAIR_S

NEAR = 8
"""Rounds by which a newcomer's state may lag, for it to be waited for: before that the means which it needs are gone. What it knows of the history says
nothing: of a commit it hears long before it has the means."""

Basis = tuple[int, Certified, int, bytes] | tuple[()]
"""What decides who holds which state: news of others, the head, and the version and digest of our own."""


@dataclass(slots=True)
class Standing:
    """Who holds what, as one member knows it: its own outer state, and what the heartbeats of others say of theirs.

    But for `donors` and `compare`, what is asked is asked about the head of the history, and raises IndexError before there is one.
    """

    membership: Membership
    history: History
    applied_height: int = -1
    """Height up to which the node's outer state really is; -1 while it has none."""
    applied_version: int = -1
    digest: bytes = b""
    """Digest of that state; empty while it is being computed or fetched."""
    admitted: set[PeerId] = field(default_factory=set)
    """Who has shown that it may be here: outsiders among them may become members."""
    _holders: tuple[Basis, tuple[PeerId, ...], bool] = ((), (), False)
    """Who held the outer state when things stood so, and whether they were a quorum."""
    _near_since: dict[PeerId, float] = field(default_factory=dict)
    """When outsiders that have not come to the head yet were first seen near it, seconds."""
    _agreed: Basis = ()
    """How things stood when nobody's digest said that ours is wrong."""
    _repair: tuple[int, float] = (-1, 0.0)
    """The version that was last repaired, and when, seconds."""

    def applied(self, height: int, version: int, digest: bytes) -> None:
        """The node's outer state now is that of `height`."""
        self.applied_height, self.applied_version, self.digest = height, version, digest

    def lost(self) -> None:
        """The node has no outer state, or none that it could go on from."""
        self.applied(-1, -1, b"")

    def holds(self, peer: PeerId) -> bool:
        """Whether a peer has the outer state of our head, or all it takes to get there by itself."""
        if peer == self.membership.me:
            return bool(self.digest) and self.history.reaches(peer, self.applied_version)
        beat = self.membership.heartbeat(peer)
        return beat is not None and bool(beat.digest) and self.history.reaches(peer, beat.version)

    def holders(self) -> tuple[PeerId, ...]:
        """Live members that hold the outer state."""
        return self._look()[1]

    @property
    def decides(self) -> bool:
        """Whether these are a quorum."""
        return self._look()[2]

    def _look(self) -> tuple[Basis, tuple[PeerId, ...], bool]:
        """Asked on every tick, and worked out when something has changed."""
        basis = self._basis()
        if self._holders[0] != basis:
            view = self.history.head.commit.view
            holders = tuple(p for p in self.membership.live(view) if self.holds(p))
            self._holders = (basis, holders, is_quorum(view, holders))
        return self._holders

    @property
    def is_calm(self) -> bool:
        """Whether we and all members hold the outer state, live, and stay."""
        view = self.history.head.commit.view if self.digest and self.history else ()
        stays = not any(self.membership.leaves(p) for p in view)
        return bool(view) and stays and len(self.holders()) == len(view)

    def donors(self) -> list[PeerId]:
        """Live peers that hold a state, whichever, and so a history."""
        return [p for p, beat in self._beats(self.membership.known()) if beat.digest]

    def joiners(self) -> tuple[PeerId, ...]:
        """Live outsiders that hold exactly the state that we hold at the head, and may become members."""
        head = self.history.head.commit
        if not self.digest or self.applied_height != head.height:
            return ()
        same = [p for p, beat in self._outsiders() if (beat.height, beat.digest) == (head.height, self.digest)]
        return tuple(p for p in same if not self.membership.leaves(p))

    def waits_until(self, now: float, patience_s: float) -> float:
        """Until when rounds wait for live outsiders whose state is only a few rounds old; -inf: there are none. Were laps shorter than one takes to follow, it would come
        to the head whenever that has just moved, for ever. For each it is so many seconds from when it was first seen so near: whoever needs more, or says
        so, holds up nobody again until it has been at the head.
        """
        oldest, joiners = self.history.head.commit.version - NEAR, self.joiners()
        behind = {p: beat for p, beat in self._outsiders() if p not in joiners and not self.membership.leaves(p)}
        near = [p for p, beat in behind.items() if beat.digest and beat.version >= oldest]
        since = self._near_since
        self._near_since = {p: since.get(p, now) for p in behind if p in since or p in near}
        return max((self._near_since[p] + patience_s for p in near), default=-math.inf)

    def newcomer_downloads(self) -> bool:
        """Whether a live peer, outsider or member, has no outer state yet and fetches it."""
        admitted = {*self.admitted, *self.history.head.commit.view}
        return any(not beat.digest and beat.state == "joining" for _, beat in self._beats(sorted(admitted)))

    def compare(self, now: float) -> list[Effect]:
        """Same version, same bits (invariant 1): what a quorum of the view holds is repaired to when it is not what we hold.

        Asked with every heartbeat, and worked out when something has changed; a version is repaired once in `REPAIR_S`.
        """
        version, repaired_at = self._repair
        if not self.digest or not self.history or (version == self.applied_version and now < repaired_at + REPAIR_S):
            return []
        basis = self._basis()
        if basis == self._agreed:
            return []
        repair = self._disagreement()
        if repair is None:
            self._agreed = basis
            return []
        self._repair = (self.applied_version, now)
        return [repair]

    def _disagreement(self) -> Repair | None:
        view, me = self.history.head.commit.view, self.membership.me
        said: dict[bytes, list[PeerId]] = {self.digest: [me]}
        for peer in view:
            beat = self.membership.heartbeat(peer)
            if peer != me and beat is not None and beat.version == self.applied_version and beat.digest:
                said.setdefault(beat.digest, []).append(peer)
        most, donors = max(said.items(), key=lambda item: (len(item[1]), item[0]))
        if most == self.digest or not is_quorum(view, donors):
            return None
        return Repair(self.applied_version, most, tuple(donors))

    def _basis(self) -> Basis:
        return self.membership.news, self.history.head, self.applied_version, self.digest

    def _outsiders(self) -> list[tuple[PeerId, Heartbeat]]:
        """Live, and admitted."""
        return self._beats(sorted(self.admitted - set(self.history.head.commit.view)))

    def _beats(self, peers: Iterable[PeerId]) -> list[tuple[PeerId, Heartbeat]]:
        """What those of `peers` that live have said last."""
        live = self.membership.live(peers)
        return [(p, beat) for p in live if (beat := self.membership.heartbeat(p)) is not None]


def agreed(
    membership: Membership, view: Collection[PeerId], me: PeerId, at_least: int
) -> tuple[int, bytes, tuple[PeerId, ...]] | None:
    """The (version, digest) to download, and who holds it; None while there is none of `at_least` that version.

    Those of the view who hold it are a quorum of it with us and with those who say that they hold nothing: they must not keep a swarm from going on in
    which a few are left who hold anything. What most hold counts, then what is newest. Where a quorum holds nothing and nobody else of the view is heard who
    does, newcomers count who had it from members before these lost it.
    """
    held, lacking = _held(membership, (p for p in view if p != me))
    lacking.add(me)
    if not held and is_quorum(view, lacking):
        held, _ = _held(membership, (p for p in membership.known() if p not in view and p != me))
    for (version, digest), donors in sorted(held.items(), key=lambda item: (len(item[1]), item[0]), reverse=True):
        if version >= at_least and is_quorum(view, {*donors, *lacking}):
            return version, digest, tuple(donors)
    return None


def _held(membership: Membership, peers: Iterable[PeerId]) -> tuple[dict[tuple[int, bytes], list[PeerId]], set[PeerId]]:
    """Who of some that live holds which version and digest, and who says that it holds nothing."""
    held: dict[tuple[int, bytes], list[PeerId]] = {}
    lacking: set[PeerId] = set()
    for peer in membership.live(peers):
        beat = membership.heartbeat(peer)
        if beat is not None and beat.digest:
            held.setdefault((beat.version, beat.digest), []).append(peer)
        elif beat is not None:
            lacking.add(peer)
    return held, lacking
