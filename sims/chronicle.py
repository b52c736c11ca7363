"""What the judge of a simulated swarm knows of one group's history. A group that has come out of another shares with it what was before."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from farflung.protocol.chain import Certified, Commit, Rules
from farflung.protocol.ledger import BLOCK, Ledger, join, split

Interval = tuple[int, int]

Outer = tuple[int, Tensor, Tensor]
"""A version of the outer state, its parameters and momentum."""

KEPT_STATES = 8
"""Outer states of each group that are remembered: who meets another group may hear of an older one than the newest, for its peers are not all equally far."""


@dataclass(slots=True)
class Chronicle:
    """Of one group, as its members know it."""

    before: "Chronicle | None" = None
    """Of the group out of which it has come."""
    since: Commit | None = None
    """With which it began, if it has come out of another."""
    history: dict[int, Commit] = field(default_factory=dict)
    """By height, its own."""
    certificates: dict[int, list[Certified]] = field(default_factory=dict)
    """By height, those whose votes have been counted."""
    digests: dict[int, str] = field(default_factory=dict)
    """By version."""
    done: list[Interval] = field(default_factory=list)
    """Samples that commits have counted, up to `followed`, those that went with others where the group became two, and below the `cursor` those that were never its own."""
    cursor: int = 0
    """Of the ledger of the commit that was followed last."""
    divided: dict[int, tuple[list[Interval], int]] = field(default_factory=dict)
    """By height where it became two: `done` and `cursor` until then."""
    followed: int = -1
    outer: Outer | None = None
    """The newest seen."""
    parted: dict[int, Outer] = field(default_factory=dict)
    """By version, those with which it became two."""
    recent: dict[int, Tensor] = field(default_factory=dict)
    """By version, in their order, the newest parameters seen."""
    state: tuple[int, bytes, bytes] | None = None
    """The newest whose digest was found right: its version, and the bits of its parameters and momentum."""
    planned_in_calm: set[int] = field(default_factory=set)
    """Heights of rounds."""
    moved: dict[int, int] = field(default_factory=dict)
    """By fragment, the version with which a round last moved it, or before the first that was followed."""

    def at(self, height: int) -> "Chronicle":
        """Whose a height is."""
        older = self.before is not None and self.since is not None and height < self.since.height
        return self.before.at(height) if older and self.before is not None else self

    def of(self, version: int) -> "Chronicle":
        """Whose a version of the outer state is."""
        older = self.before is not None and self.since is not None and version <= self.since.version
        return self.before.of(version) if older and self.before is not None else self

    def commit(self, height: int) -> Commit | None:
        """Of this group, or of those before it."""
        return self.at(height).history.get(height)

    def rounds(self) -> list[int]:
        """Heights of the rounds of its history, of those before it too."""
        own = [height for height, commit in self.history.items() if commit.round is not None]
        if self.before is None or self.since is None:
            return own
        return [*(height for height in self.before.rounds() if height < self.since.height), *own]

    def came_to(self, version: int, params: Tensor, momentum: Tensor) -> None:
        """Somebody has taken the step to a version."""
        was = self.outer
        if was is not None and any(one.half is not None and one.version == was[0] for one in self.history.values()):
            self.parted[was[0]] = was
        self.outer = version, params.clone(), momentum.clone()
        self.recent[version] = self.outer[1]
        if len(self.recent) > KEPT_STATES:
            del self.recent[min(self.recent)]

    def stood(self) -> Outer | None:
        """Where the next step begins: the newest that it has come to, or what the group had out of which it has come when that became two."""
        if self.outer is not None or self.before is None or self.since is None:
            return self.outer
        return self.before.stood_at(self.since.version)

    def stood_at(self, version: int) -> Outer | None:
        """At a division; None where nobody has come there so far."""
        if version in self.parted:
            return self.parted[version]
        now = self.stood()
        return now if now is not None and now[0] == version else None

    def recently(self) -> list[Tensor]:
        """Parameters of this group, and of those before it while it was one with them, the newest first."""
        own = list(reversed(self.recent.values()))
        if self.before is None or self.since is None or len(own) == KEPT_STATES:
            return own
        return [
            *own,
            *(self.before.recent[one] for one in sorted(self.before.recent, reverse=True) if one <= self.since.version),
        ]

    @property
    def follows(self) -> Commit | None:
        """The next commit to follow; None while it is not known, or the group out of which this one has come is not followed so far."""
        if self.before is not None and self.since is not None and self.since.height not in self.before.divided:
            return None
        return self.history.get(self.followed + 1)

    def taken(self, commit: Commit) -> list[Interval]:
        """Samples that a commit counts, of all its contributors."""
        parent = self.commit(commit.height - 1)
        if commit.round is None or parent is None:
            return []
        found: list[Interval] = []
        for one in commit.round.contributors:
            found += split(parent.ledger.window(one.peer), one.samples)[0]
        return found

    def follow(self, commit: Commit, rules: Rules) -> Iterator[tuple[int, str]]:
        """Follow the next commit; tells which invariants it breaks, and how."""
        self.followed = commit.height
        parent, entries = self.commit(commit.height - 1), commit.ledger
        yield from _miscounted(parent, commit, rules)
        yield from _kept_from_others(parent, commit, rules)
        yield from self._stands_still(commit, rules)
        if parent is not None and commit.steps != parent.steps + (parent.lap if commit.round is not None else 0):
            yield 2, f"commit {commit.height} counts {commit.steps} steps, after {parent.steps} and {parent.lap}"
        if parent is not None and commit.round is not None:
            who = [c.peer for c in commit.round.contributors]
            if len(set(who)) != len(who) or not set(who) <= set(parent.view):
                yield 7, f"commit {commit.height} counts a contributor twice, or an outsider"
        self.done += self.taken(commit)
        if commit.height == 0 and rules.inherits:
            self.done = _gaps(entries)  # of an earlier life, or let go with it
        if commit.half is not None:
            if self.since is commit and self.before is not None:
                done, self.cursor = self.before.divided[commit.height]
                self.done = list(done)
            else:
                self.divided[commit.height] = list(self.done), self.cursor
            self.done += waiting(commit.half.ledger)
        self.done += others_blocks(entries, self.cursor)
        self.cursor = entries.cursor
        position = 0
        for start, stop in sorted([*self.done, *waiting(entries)]):
            if start < position:
                yield 6, f"commit {commit.height} has sample {start} twice"
            elif start > position:
                yield 6, f"commit {commit.height} has lost {start - position} samples from {position} on"
            position = max(position, stop)
        if position != entries.cursor:
            yield 6, f"commit {commit.height} accounts for {position} of {entries.cursor} samples"
        self.done = list(join(sorted(self.done)))

    def _stands_still(self, commit: Commit, rules: Rules) -> Iterator[tuple[int, str]]:
        """A fragment whose turn does not come: what is trained of it comes into no round. Where rounds may be wide or narrow nobody can say when it must."""
        since = commit.version if commit.round is None else commit.version - 1
        for fragment, (start, stop) in enumerate(pairwise(rules.cuts)):
            last = self.moved.setdefault(fragment, since)
            if commit.round is not None and any(p.start < stop and start < p.stop for p in commit.round.parts):
                self.moved[fragment] = commit.version
            elif len(rules.laps.widths) == 1 and commit.version - last >= 2 * rules.num_fragments:
                yield 2, f"fragment {fragment} was in none of the {commit.version - last} rounds until {commit.version}"

    @property
    def newest(self) -> Commit | None:
        return self.history.get(max(self.history, default=0))


def _miscounted(parent: Commit | None, commit: Commit, rules: Rules) -> Iterator[tuple[int, str]]:
    """Tokens, by which contributions are weighed and the run is told: those of the samples."""
    contributors = () if commit.round is None else commit.round.contributors
    for one in contributors:
        if one.tokens != one.samples * rules.tokens_per_sample:
            yield 4, f"commit {commit.height} weighs {one.samples} samples as {one.tokens} tokens"
    tokens = sum(one.tokens for one in contributors)
    if parent is not None and commit.tokens != parent.tokens + tokens:
        yield 4, f"commit {commit.height} counts {commit.tokens} tokens, after {parent.tokens} and {tokens}"


def _kept_from_others(parent: Commit | None, commit: Commit, rules: Rules) -> Iterator[tuple[int, str]]:
    """What a vanished peer had not finished is handed out again: when its lease is over, and before any new samples."""
    entries = commit.ledger
    if gone := {one.peer for one in entries.held} - set(commit.view):
        yield 6, f"commit {commit.height} has samples in the hands of {len(gone)} who are no members"
    if parent is None:
        return
    since = {one.peer: one.version for one in parent.ledger.suspended}
    for one in entries.suspended:
        begun = since.get(one.peer, commit.version)
        if one.version != begun or (one.peer in since and begun + rules.lease <= commit.version):
            yield 6, f"commit {commit.height} keeps samples since version {begun} for one who is gone"
    if entries.free and entries.cursor > parent.ledger.cursor:
        yield 6, f"commit {commit.height} hands out new samples while {len(entries.free)} intervals are free"


def waiting(ledger: Ledger) -> list[Interval]:
    """Samples that were handed out and that no round has counted."""
    parts = [h.intervals for h in ledger.held] + [s.intervals for s in ledger.suspended] + [ledger.free]
    return [interval for part in parts for interval in part]


def _gaps(entries: Ledger) -> list[Interval]:
    """Samples below the cursor that nobody has in hand."""
    found, position = [], 0
    for start, stop in sorted(waiting(entries)):
        found.append((position, start))
        position = stop
    return [(start, stop) for start, stop in [*found, (position, entries.cursor)] if start < stop]


def others_blocks(ledger: Ledger, begin: int) -> list[Interval]:
    """Numbers from `begin` to the cursor that were never this group's to hand out, since it was one of several."""
    found: list[Interval] = []
    ends = [*(share.since for share in ledger.shares[1:]), ledger.cursor][: len(ledger.shares)]
    for share, end in zip(ledger.shares, ends, strict=True):
        at = max(share.since, begin)
        while at < end:
            stop = min(end, (at // BLOCK + 1) * BLOCK)
            if at // BLOCK % share.stride != share.place:
                found.append((at, stop))
            at = stop
    return found
