"""Who holds which outer state, by what members say in their heartbeats: newcomers that may join, holders to learn from, minorities to repair."""

from collections.abc import Iterable

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
