"""Who holds which outer state, by what members say in their heartbeats: voters, newcomers that may join, holders to learn from, minorities to repair.

**A vote says: I hold what this builds on.** A member may be without the outer state of its own head: its disk or power was lost before a checkpoint,
and it is still downloading. If such members voted, enough of them could leave the last holder out of the view, and the state would be gone.
So a member *holds* version v when it has applied v, or an earlier version and was in the view of each round since: that view is whoever has the
round's means on disk (`planning.conclude`), so it needs nobody to get to v, and being a moment behind with applying stops no vote.
Only holders vote and propose, and they vote for no commit whose view keeps no holder, e.g. one that lets all holders go. Promises are free.

- *The state outlives every commit.* A certificate is a quorum of holders, so when anything is decided, the state is on the disks of a quorum of
  the view. By the check of the next view at least one member of that holds it too; by induction every view has a holder.
- *One history.* Only votes are withheld, none is taken back, and Paxos lets an acceptor stay silent. Quorums are of the whole view as before, so
  any two meet. A proposer records its proposal as its own vote before others hear of it, which is why it must be able to vote.
- *Nothing waits for ever.* While the live holders are no quorum, no round is planned, and who is ready trains on by itself. The others download
  from any holder (`agreed`), and then vote. With a quorum of holders the turn of a proposer that is not one of them is passed on.

What is not covered: a member that lost its history as well forgot its promises (`farflung id` moved without the swarm's folder). And if every
member of the view has lost the state, nobody votes any more.
"""

from collections.abc import Collection, Iterable

from farflung.protocol.chain import Commit
from farflung.protocol.effects import Repair
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Membership
from farflung.protocol.quorum import is_quorum

NEAR = 3
"""Commits by which a newcomer may lag and still be waited for."""


def holders(membership: Membership) -> list[PeerId]:
    """Live peers that hold a state, and so a history."""
    live = membership.live(membership.known())
    return [p for p in live if (beat := membership.heartbeat(p)) is not None and beat.digest]


def agreed(
    membership: Membership, view: Collection[PeerId], me: PeerId, at_least: int
) -> tuple[int, bytes, tuple[PeerId, ...]] | None:
    """The (version, digest) to download, and who of the view holds it; None while there is none of `at_least` that version.

    Those who hold it are a quorum of the view with us and with those who say that they hold nothing: they must not keep a swarm from going on in
    which a few are left who hold anything. What most hold counts, then what is newest.
    """
    said: dict[tuple[int, bytes], list[PeerId]] = {}
    lacking = {me}
    for peer in membership.live(p for p in view if p != me):
        beat = membership.heartbeat(peer)
        if beat is not None and beat.digest:
            said.setdefault((beat.version, beat.digest), []).append(peer)
        elif beat is not None:
            lacking.add(peer)
    for (version, digest), donors in sorted(said.items(), key=lambda item: (len(item[1]), item[0]), reverse=True):
        if version >= at_least and is_quorum(view, {*donors, *lacking}):
            return version, digest, tuple(donors)
    return None


def joiners(membership: Membership, head: Commit, digest: bytes, admitted: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Live outsiders that hold the state with this digest at this height, and may become members."""
    outsiders = membership.live(sorted(set(admitted) - set(head.view)))
    return tuple(
        p
        for p in outsiders
        if not membership.leaves(p)
        and (beat := membership.heartbeat(p)) is not None
        and (beat.height, beat.digest) == (head.height, digest)
    )


def nearly_there(membership: Membership, head: Commit, admitted: Iterable[PeerId]) -> bool:
    """Whether a live outsider is only a commit or two behind: with rounds in quick succession it would never catch up."""
    beats = (membership.heartbeat(p) for p in membership.live(sorted(set(admitted) - set(head.view))))
    return any(b is not None and b.digest != b"" and head.height - NEAR <= b.height < head.height for b in beats)


def downloading(membership: Membership, admitted: Iterable[PeerId]) -> bool:
    """Whether a live peer, outsider or member, has no outer state yet and fetches it."""
    beats = (membership.heartbeat(p) for p in membership.live(sorted(set(admitted))))
    return any(b is not None and b.digest == b"" and b.state == "joining" for b in beats)


def disagreement(membership: Membership, head: Commit, me: PeerId, version: int, digest: bytes) -> Repair | None:
    """Same version, same bits (invariant 1): what a quorum of the view holds when it is not what we hold."""
    said: dict[bytes, list[PeerId]] = {digest: [me]}
    for peer in head.view:
        beat = membership.heartbeat(peer)
        if peer != me and beat is not None and beat.version == version and beat.digest:
            said.setdefault(beat.digest, []).append(peer)
    most, donors = max(said.items(), key=lambda item: (len(item[1]), item[0]))
    if most == digest or not is_quorum(head.view, donors):
        return None
    return Repair(version, most, tuple(donors))
