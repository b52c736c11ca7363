"""Who holds the shadows of a stage: a pure decision by failure domains.

What takes a stage away takes a region, a network or an owner with it: a spot market, a provider's outage, somebody
who switches all of his machines off. A copy is worth what survives then. So the holder of a stage's shadow is a peer
of another stage, and

    1. is of another region than the peers that hold the stage now, and shares as few failure domains as possible with
       them: what is unknown may be shared, and counts half,
    2. is not of a stage beside it if another is as good, the last stage counting as beside the first: when the holder
       goes too, the stages on both sides are what the stage is made of, and at an end there is only one,
    3. holds few bytes of other shadows yet, and has a fast uplink to send the shadow from.

Holders stay, as moving a shadow costs a whole copy, unless a candidate shares fewer domains. Pieces whose peers are not
in several regions choose first, and of these those with the fewest live peers; where somebody comes too late for a
holder in another region, it is all tried again with those first who came too late.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DOMAINS = ("region", "network", "owner")
"""The kinds of failure domains, in the order of `Peer.domains`."""

APART, UNKNOWN, SHARED = range(3)
"""Whether two peers may be lost together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A peer that may hold shadows."""

    name: str
    stage: int
    """The one that it trains."""
    domains: tuple[str, str, str]
    """Region, network (AS number) and owner; an empty text is unknown, and may be shared with anybody."""
    room_bytes: int
    """Memory that it gives to shadows."""
    uplink_bytes_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What has shadows: a stage."""

    name: str
    stage: int
    """Whose peers train it."""
    nbytes: int
    """Memory that a shadow takes."""


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
    live = Counter(peer.stage for peer in peers)
    spread = {stage for stage in live if len({peer.domains[0] for peer in peers if peer.stage == stage}) > 1}
    order = sorted(pieces, key=lambda one: (one.stage in spread, live[one.stage], one.stage, one.name))
    best = found = _placed(peers, order, num_stages, current or {})
    for _ in pieces:
        if not found.late:
            break
        order = [*found.late, *(piece for piece in order if piece not in found.late)]
        found = _placed(peers, order, num_stages, current or {})
        best = min(best, found, key=lambda one: len(one.late))
    return best.held, best.missing


@dataclass(frozen=True, slots=True)
class _Placed:
    """What comes of it when pieces choose one after another."""

    held: list[Holding]
    missing: list[str]
    late: list[Piece]
    """Those for which nobody outside of their regions had room left."""


def _placed(
    peers: Sequence[Peer], order: Sequence[Piece], num_stages: int, current: Mapping[str, Sequence[str]]
) -> _Placed:
    room = {peer.name: peer.room_bytes for peer in peers}
    held: list[Holding] = []
    missing: list[str] = []
    late: list[Piece] = []
    for piece in order:
        apart = [peer for peer in peers if peer.stage == piece.stage]
        now = frozenset(current.get(piece.name, ()))
        dangers = {peer.name: _danger(peer, apart) for peer in peers if peer.stage != piece.stage}
        candidates = [
            peer
            for peer in peers
            if peer.name in dangers and room[peer.name] >= piece.nbytes
            if apart or peer.name in now
        ]
        if not candidates:
            missing.append(_nobody(piece, apart, others=bool(dangers)))
            continue

        def rank(
            peer: Peer,
            piece: Piece = piece,
            dangers: Mapping[str, tuple[int, int]] = dangers,
            now: frozenset[str] = now,
        ) -> tuple[object, ...]:
            beside = (peer.stage - piece.stage) % num_stages in (1, num_stages - 1)
            load = peer.room_bytes - room[peer.name]
            return dangers[peer.name], peer.name not in now, beside, load, -peer.uplink_bytes_s, peer.name

        best = min(candidates, key=rank)
        if dangers[best.name][0] and not all(regions for regions, _ in dangers.values()):
            late.append(piece)
        held.append(Holding(piece=piece.name, holder=best.name, why=_why(best, apart, best.name in now)))
        room[best.name] -= piece.nbytes
    return _Placed(held, missing, late)


def fall_together(peers: Sequence[Peer], everybody: Sequence[Peer]) -> bool:
    """Whether one region, network or owner is known to have all of `peers`, and not everybody."""
    for number in range(len(DOMAINS)):
        theirs = {peer.domains[number] for peer in peers}
        if len(theirs) == 1 and "" not in theirs and {peer.domains[number] for peer in everybody} - theirs - {""}:
            return True
    return False


def _shared(peer: Peer, others: Sequence[Peer]) -> list[int]:
    """By kind of domain, whether it may fall together with one of the others."""
    found = []
    for number in range(len(DOMAINS)):
        mine, theirs = peer.domains[number], [other.domains[number] for other in others]
        if mine and mine in theirs:
            found.append(SHARED)
        else:
            found.append(UNKNOWN if theirs and (not mine or not all(theirs)) else APART)
    return found


def _danger(peer: Peer, others: Sequence[Peer]) -> tuple[int, int]:
    """Regions first: they take most peers at once."""
    shared = _shared(peer, others)
    return shared[0], sum(shared)


def _why(peer: Peer, others: Sequence[Peer], stays: bool) -> str:
    shared = _shared(peer, others)
    kinds = [
        f"{'perhaps ' if how == UNKNOWN else ''}the {kind}" for kind, how in zip(DOMAINS, shared, strict=True) if how
    ]
    if not others:
        said = "it has a copy, and nobody trains the piece"
    elif kinds:
        said = f"it shares {', '.join(kinds)} with those that have it, and nobody with room is further apart"
    else:
        said = "it shares no region, network or owner with those that have it"
    return f"{peer.name} of stage {peer.stage}{' stays' if stays else ''}: {said}"


def _nobody(piece: Piece, apart: Sequence[Peer], *, others: bool) -> str:
    """`apart`: who serves its stage; `others`: whether anybody serves another one."""
    if not others:
        why = "nobody of another stage is there to hold one"
    elif not apart:
        why = "nobody of it is there to give one"
    else:
        why = f"nobody of another stage has {piece.nbytes:,} bytes left for one; more peers would have"
    return f"stage {piece.stage} has no place for a shadow: {why}"
