"""Which sample belongs to whom: the data ledger that every commit carries (invariant 6).

Samples are numbered on without end: number s is sample perm(epoch)(s mod N) of epoch s div N, so "once per epoch" is
"each number once". A number below `cursor` is held by a member, free to be handed out again, suspended (its holder
vanished and keeps it during a lease), or done. Everything here is a pure function of the ledger before, so that every
voter computes the same ledger after.

A swarm of several groups (`chain.Half`) has a ledger for each. They share the numbers by blocks: of every `stride` blocks a ledger has the one at `place`, and hands out no
other. So none of them needs to hear what the others do, and no number is anybody's twice.

A ledger says where each sample is, not who trained it: that was whoever held it before, as the ledgers of earlier commits tell while they are kept (`trace`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_DIVISIONS, MAX_INTERVALS
from farflung.protocol.types import Count, Intervals, Key

PIECES = 16
"""Of a window: less is not handed out. A slow member trains few samples a round, and if it got as few each time, its window would become as many intervals as
it has samples, until no ledger could hold them (`limits.MAX_INTERVALS`)."""


BLOCK = 4096
"""Samples that groups share out together. A window of less is one interval, as a rule, and larger ones, as 64 members may have them, are few enough for a ledger
(`limits.MAX_INTERVALS`); and groups that are about equally far go through the data in about its order."""


class Holding(Struct, frozen=True, array_like=True):
    """The samples of one member, in the order in which it trains them."""

    peer: Key
    intervals: Intervals


class Suspended(Struct, frozen=True, array_like=True):
    """The samples of a member that vanished, kept for it until `version` + lease."""

    peer: Key
    version: Count
    intervals: Intervals


class Share(Struct, frozen=True, array_like=True):
    """From one number on, every so-manyth block."""

    since: Count
    stride: Annotated[int, Meta(ge=1, le=1 << MAX_DIVISIONS)]
    place: Annotated[int, Meta(ge=0, lt=1 << MAX_DIVISIONS)]
    """Block number modulo `stride`."""

    def next(self, number: int) -> int:
        """The first number of ours that is not below `number`."""
        block = number // BLOCK
        ahead = (self.place - block) % self.stride
        return (block + ahead) * BLOCK if ahead else number

    def below(self, number: int) -> int:
        """How many numbers of ours are below `number`, from 0 on."""
        block, within = divmod(number, BLOCK)
        whole, rest = divmod(block, self.stride)
        return (whole + (rest > self.place)) * BLOCK + (within if rest == self.place else 0)


ALL = Share(0, 1, 0)


class Ledger(Struct, frozen=True, array_like=True):
    """Who holds which samples; entries are sorted by peer."""

    cursor: Count = 0
    held: tuple[Holding, ...] = ()
    free: Intervals = ()
    suspended: tuple[Suspended, ...] = ()
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_DIVISIONS)] = ()
    """What is this ledger's to hand out, by how its group came to be; empty: all numbers."""

    @property
    def share(self) -> Share:
        """Of what is handed out next."""
        return self.shares[-1] if self.shares else ALL

    def window(self, peer: PeerId) -> Intervals:
        """The samples a member holds."""
        return next((h.intervals for h in self.held if h.peer == peer), ())


def count(intervals: Iterable[tuple[int, int]]) -> int:
    """Samples in the intervals."""
    return sum(stop - start for start, stop in intervals)


def split(intervals: Sequence[tuple[int, int]], num: int) -> tuple[Intervals, Intervals]:
    """The first `num` samples, in order, and the rest. Fewer than `num` when there are not enough."""
    taken: list[tuple[int, int]] = []
    for i, (start, stop) in enumerate(intervals):
        if num <= 0:
            return tuple(taken), tuple(intervals[i:])
        if stop - start > num:
            return (*taken, (start, start + num)), ((start + num, stop), *intervals[i + 1 :])
        taken.append((start, stop))
        num -= stop - start
    return tuple(taken), ()


def join(*parts: Sequence[tuple[int, int]]) -> Intervals:
    """Concatenate in order, merging neighbours that touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in (interval for part in parts for interval in part):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def is_prefix(short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]]) -> bool:
    """Whether `long` begins with exactly the samples of `short`, in the same order."""
    return join(split(long, count(short))[0]) == join(short)


def fresh(share: Share, cursor: int, num: int) -> tuple[Intervals, int]:
    """The next `num` numbers of a share, from `cursor` on, and where the cursor is then. Raises ValueError when they are more intervals than any ledger holds: a
    history that a stranger tells may ask for as many as there are."""
    if share.stride > 1 and num > MAX_INTERVALS * BLOCK:
        raise ValueError(f"{num} samples are more than a ledger can hold of one block in {share.stride}")
    found: list[tuple[int, int]] = []
    while num > 0:
        cursor = share.next(cursor)
        taken = num if share.stride == 1 else min(num, BLOCK - cursor % BLOCK)
        found.append((cursor, cursor + taken))
        cursor += taken
        num -= taken
    return tuple(found), cursor


def ahead(ledger: Ledger, stop: int) -> Intervals:
    """The numbers below `stop` that this ledger is going to hand out."""
    found: list[tuple[int, int]] = []
    cursor = ledger.share.next(ledger.cursor)
    while cursor < stop:
        end = stop if ledger.share.stride == 1 else min(stop, cursor - cursor % BLOCK + BLOCK)
        found.append((cursor, end))
        cursor = ledger.share.next(end)
    return tuple(found)


def shared(ledger: Ledger, goes: Collection[PeerId]) -> tuple[Ledger, Ledger]:
    """The ledgers of the two groups that one becomes (`chain.Half`): of those who stay, and of those who go. Each member keeps what it holds; what is free, or
    kept for the vanished, stays; and the two hand out every other one of the blocks in turn. Raises ValueError when they cannot be shared out any further."""
    if len(ledger.shares) == MAX_DIVISIONS:
        raise ValueError(f"its samples are shared by {ledger.share.stride} groups already")
    at, stride, place = ledger.cursor, ledger.share.stride, ledger.share.place
    held: tuple[list[Holding], list[Holding]] = ([], [])
    for holding in ledger.held:
        held[holding.peer in goes].append(holding)
    stays = structs.replace(ledger, held=tuple(held[0]), shares=(*ledger.shares, Share(at, 2 * stride, place)))
    return stays, Ledger(at, tuple(held[1]), shares=(*ledger.shares, Share(at, 2 * stride, place + stride)))


def advance(
    ledger: Ledger,
    *,
    trained: Mapping[PeerId, int],
    view: Sequence[PeerId],
    left: Sequence[PeerId],
    window: int,
    version: int,
    lease: int,
) -> Ledger:
    """The ledger after a commit.

    `trained`: samples, from the front of their windows, that each contributor's accepted contribution used.
    `view`: members from now on; `left`: those that said goodbye (their samples are free at once). Members that are
    neither keep theirs suspended until `lease` versions have passed. Every member's window is filled up to `window`, if it lacks a `PIECES`-th of that.
    Raises ValueError when a contributor claims more than it holds.
    """
    held = {h.peer: h.intervals for h in ledger.held}
    for peer, num in trained.items():
        if num > count(held.get(peer, ())):
            raise ValueError(f"{peer.hex()[:12]} claims {num} samples and holds {count(held.get(peer, ()))}")
        held[peer] = split(held[peer], num)[1]

    free = ledger.free
    suspended: list[Suspended] = []
    for entry in ledger.suspended:
        if entry.peer in view:  # back within its lease: its progress is a prefix of what it gets back
            held[entry.peer] = join(entry.intervals, held.get(entry.peer, ()))
        elif entry.version + lease <= version or entry.peer in left:
            free = join(free, entry.intervals)
        else:
            suspended.append(entry)
    for peer in sorted(held):
        if peer in view:
            continue
        gone = held.pop(peer)
        if peer in left:
            free = join(free, gone)
        elif gone:
            suspended.append(Suspended(peer, version, gone))

    cursor = ledger.cursor
    for peer in sorted(view):
        missing = window - count(held.get(peer, ()))
        if missing >= max(1, window // PIECES):
            again, free = split(free, missing)
            new, cursor = fresh(ledger.share, cursor, missing - count(again))
            held[peer] = join(held.get(peer, ()), again, new)
    holdings = tuple(Holding(peer, held[peer]) for peer in sorted(held))
    return structs.replace(
        ledger, cursor=cursor, held=holdings, free=free, suspended=tuple(sorted(suspended, key=lambda s: s.peer))
    )


def inherited(ledger: Ledger, trained: Sequence[tuple[int, int]]) -> Ledger:
    """What a chain that has ended leaves to the next one, whose only member has `trained` so much that no round has counted: all else that somebody had in
    hand is free again."""
    waiting = [
        *ledger.free,
        *(one for entry in ledger.suspended for one in entry.intervals),
        *(one for entry in ledger.held for one in entry.intervals),
    ]
    free: list[tuple[int, int]] = []
    for start, stop in sorted(waiting):
        for begin, end in sorted(trained):
            if begin < stop and start < end:
                free.append((start, max(start, begin)))
                start = min(stop, end)
        free.append((start, stop))
    return Ledger(cursor=ledger.cursor, free=join(free), shares=ledger.shares)


# ---- questions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sample is, by one ledger."""

    state: Literal["ahead", "held", "suspended", "free", "trained"]
    """`ahead`: not handed out yet; `trained`: a round has counted it."""
    peer: PeerId | None = None
    """Who holds it, for whom it is kept, or whose contribution counted it; None for nobody, and where no ledger tells."""


@dataclass(frozen=True, slots=True)
class Page:
    """The ledger after one commit, and what made it of the one before."""

    height: int
    ledger: Ledger
    trained: Mapping[PeerId, int]
    """Samples, from the front of their windows before, that the commit's contributors have trained."""


def is_sound(ledger: Ledger) -> bool:
    """Whether all its intervals have samples, of those that were handed out."""
    parts = (*(h.intervals for h in ledger.held), ledger.free, *(s.intervals for s in ledger.suspended))
    return all(start < stop <= ledger.cursor for part in parts for start, stop in part)


def num_handed_out(ledger: Ledger, start: int, stop: int) -> int:
    """Samples from `start` to `stop` that were ever this group's to hand out, and have been."""
    stop, num = min(stop, ledger.cursor), 0
    ends = [*(share.since for share in ledger.shares), stop]
    for share, end in zip((ALL, *ledger.shares), ends, strict=True):
        num += max(0, share.below(min(stop, end)) - share.below(max(start, share.since)))
    return num


def num_trained(ledger: Ledger, start: int, stop: int) -> int:
    """Samples from `start` to `stop` that rounds have counted: those handed out that nobody has in hand, but for those that went with the members of a group that
    has gone since, who may have them in hand."""
    stop = min(stop, ledger.cursor)
    parts = [*(h.intervals for h in ledger.held), ledger.free, *(s.intervals for s in ledger.suspended)]
    waiting = sum(max(0, min(stop, end) - max(start, begin)) for part in parts for begin, end in part)
    return num_handed_out(ledger, start, stop) - waiting


def trained_by(pages: Sequence[Page]) -> Counter[PeerId]:
    """Samples of each peer that the rounds of these commits have counted."""
    total: Counter[PeerId] = Counter()
    for page in pages:
        total.update(page.trained)
    return total


def place_of(ledger: Ledger, sample: int) -> Place:
    """Where a sample is. Who trained it, a ledger alone does not tell."""
    if sample >= ledger.cursor:
        return Place("ahead")
    for holding in ledger.held:
        if _holds(holding.intervals, sample):
            return Place("held", holding.peer)
    for entry in ledger.suspended:
        if _holds(entry.intervals, sample):
            return Place("suspended", entry.peer)
    return Place("free" if _holds(ledger.free, sample) else "trained")


def trace(pages: Sequence[Page], sample: int) -> tuple[tuple[int, Place], ...]:
    """Where a sample has been, oldest first, each with the height of the commit since which it was there; the first may be older.

    `pages` follow one another. A sample that was trained before the first of them was trained by nobody knows whom.
    """
    found: list[tuple[int, Place]] = []
    for page in pages:
        place = place_of(page.ledger, sample)
        if place.state == "trained":  # by whoever held it until then, and for good
            found.append((page.height, Place("trained", found[-1][1].peer if found else None)))
            break
        if not found or place != found[-1][1]:
            found.append((page.height, place))
    return tuple(found)


def _holds(intervals: Iterable[tuple[int, int]], sample: int) -> bool:
    return any(start <= sample < stop for start, stop in intervals)
