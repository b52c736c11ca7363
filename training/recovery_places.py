"""Who holds the shadows of a stage: a pure decision by failure domains.

What takes a stage away takes a region, a network or an owner with it: a spot market, a provider's outage, somebody
who switches all of his machines off. A copy is worth what survives then. So the holder of a stage's shadow is a peer
of another stage, and

    1. shares as few failure domains as possible with the peers that hold the stage now,
    2. is not of a stage beside it if another is as good, the last stage counting as beside the first: when the holder
       goes too, the stages on both sides are what the stage is made of, and at an end there is only one,
    3. holds few bytes of other shadows yet, and has a fast uplink to send the shadow from.

Holders stay, as moving a shadow costs a whole copy, unless a candidate shares fewer domains. Pieces with the fewest
live peers choose first. A second holder keeps apart from the first one as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DOMAINS = ("region", "network", "owner")
"""The kinds of failure domains, in the order of `Peer.domains`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A peer that may hold shadows."""

    name: str
    stage: int
    """The one that it trains."""
    domains: tuple[str, str, str]
    """Region, network (AS number) and owner; an empty text is unknown, and counts as shared with everybody."""
    room_bytes: int
    """Memory that it gives to shadows."""
    uplink_bytes_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What has shadows: the layers of a stage, or the ends."""

    name: str
    stage: int
    """Whose peers train it."""
    nbytes: int
    """Memory that a shadow takes."""
    copies: int = 1
    """Shadows that there are to be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One shadow's place, and why there."""

    piece: str
    holder: str
    why: str


def places(
    peers: Sequence[Peer],
    pieces: Sequence[Piece],
    num_stages: int,
    *,
    current: Mapping[str, Sequence[str]] | None = None,  # names of holders now, by piece
) -> tuple[list[Holding], list[str]]:
    """Where the shadows are to lie, and a sentence for each that has no place.

    A piece that no live peer trains keeps the holders that it has. Deterministic: all who know the same peers decide
    the same.
    """
    room = {peer.name: peer.room_bytes for peer in peers}
    held: list[Holding] = []
    missing: list[str] = []
    live = Counter(peer.stage for peer in peers)
    for piece in sorted(pieces, key=lambda one: (live[one.stage], one.stage, one.name)):
        apart = [peer for peer in peers if peer.stage == piece.stage]
        now = frozenset((current or {}).get(piece.name, ()))
        for copy in range(piece.copies):
            candidates = [
                peer
                for peer in peers
                if peer.stage != piece.stage and peer not in apart and room[peer.name] >= piece.nbytes
                if apart or peer.name in now
            ]
            if not candidates:
                missing.append(_nobody(piece, copy))
                break

            def rank(
                peer: Peer, piece: Piece = piece, apart: Sequence[Peer] = apart, now: frozenset[str] = now
            ) -> tuple[object, ...]:
                beside = (peer.stage - piece.stage) % num_stages in (1, num_stages - 1)
                load = peer.room_bytes - room[peer.name]
                return len(_shared(peer, apart)), peer.name not in now, beside, load, -peer.uplink_bytes_s, peer.name

            best = min(candidates, key=rank)
            held.append(Holding(piece=piece.name, holder=best.name, why=_why(best, apart, best.name in now)))
            room[best.name] -= piece.nbytes
            apart = [*apart, best]
    return held, missing


def _shared(peer: Peer, others: Sequence[Peer]) -> list[str]:
    """Kinds of domains in which it may fall together with one of the others."""
    found = []
    for number, kind in enumerate(DOMAINS):
        mine, theirs = peer.domains[number], [other.domains[number] for other in others]
        if theirs and (not mine or not all(theirs) or mine in theirs):
            found.append(kind)
    return found


def _why(peer: Peer, others: Sequence[Peer], stays: bool) -> str:
    shared = _shared(peer, others)
    if not others:
        said = "it has a copy, and nobody trains the piece"
    elif shared:
        said = f"no peer with room shares less than {' and '.join(shared)} with those that have it"
    else:
        said = "it shares no region, network or owner with those that have it"
    return f"{peer.name} of stage {peer.stage}{' stays' if stays else ''}: {said}"


def _nobody(piece: Piece, copy: int) -> str:
    which = "shadow" if copy == 0 else f"shadow number {copy + 1}"
    return f"{piece.name} has no place for a {which}: no other peer gives {piece.nbytes:,} bytes; raise their room"
