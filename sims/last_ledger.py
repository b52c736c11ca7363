"""Who has which sample in hand at the end of a run: of real nodes from what they left on disk, of simulated ones from what their judge has seen."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from farflung.node.events import Event
from farflung.node.paths import SwarmPaths
from farflung.node.storage import FileStorage
from farflung.protocol.chain import Commit
from farflung.protocol.ledger import Ledger, ahead
from farflung.sims.facts import Interval, LedgerFacts
from farflung.sims.logs import all_of, chain_of

COMMITS = ("round.commit", "view.commit")
"""What a node says of a commit that it has applied."""


@dataclass(slots=True)
class Applied:
    """How far nodes have come: what is newer is in nobody's events."""

    heights: dict[tuple[int, str], int] = field(default_factory=dict)
    """The newest commit of stage 0 that anybody has applied, by life and group."""

    def note(self, event: Event) -> None:
        """Another event of COMMITS."""
        stage, life, group = chain_of(event)
        if stage == 0:
            self.heights[life, group] = max(self.heights.get((life, group), 0), event["height"])

    @property
    def newest_life(self) -> int:
        return max((life for life, _ in self.heights), default=0)


@dataclass(slots=True)
class _Life:
    """Of stage 0; or a group of a swarm of replicas."""

    commits: list[Commit] = field(default_factory=list)
    """That anybody knows."""

    def ledger_at(self, height: int) -> Ledger:
        """That of the newest commit up to a height."""
        known = [commit for commit in self.commits if commit.height <= height]
        return max(known, key=lambda commit: commit.height).ledger if known else Ledger()

    @property
    def begins_at(self) -> int:
        """The first sample that it may hand out, if it begins with no ledger of an earlier life."""
        return min((life.since.samples for one in self.commits for life in one.lives if life.stage == 0), default=0)


def last_ledger(swarms: Collection[SwarmPaths], events_by_peer: Mapping[str, Sequence[Event]]) -> LedgerFacts:
    """See `ledger_of`; from the folders of these nodes."""
    applied = Applied()
    for event in all_of(events_by_peer, *COMMITS):
        applied.note(event)
    return ledger_of(
        {
            number: [commit for swarm in swarms for commit in _history(swarm, number)]
            for number in range(applied.newest_life + 1)
        },
        applied,
    )


def ledger_of(histories: Mapping[int, Sequence[Commit]], applied: Applied) -> LedgerFacts:
    """The ledger of the last commit that any node has applied, of those in `histories` by the life of stage 0 (replicas have one, 0); of a pipeline that of
    stage 0 in its newest life. What the peers of its earlier lives had in hand is let go (`protocol/lives.py`), but what a later ledger still has. Of several
    groups, all their ledgers as one."""
    heights = applied.heights
    lives = [_Life(list(histories.get(number, ()))) for number in range(applied.newest_life + 1)]
    if any(group for _, group in heights):  # of replicas, which have one life
        return _together([_of_group(lives[0], group).ledger_at(height) for (_, group), height in heights.items()])
    ledgers = [life.ledger_at(heights.get((number, ""), 0)) for number, life in enumerate(lives)]
    newest = ledgers[-1]
    let_go: list[Interval] = []
    for number, ledger in enumerate(ledgers[:-1]):
        let_go += _in_hand(ledger)
        begins_at = next((life.begins_at for life in lives[number + 1 :] if life.commits), 0)
        if ledger.cursor < begins_at:
            let_go.append((ledger.cursor, begins_at))
    return LedgerFacts(
        cursor=newest.cursor,
        free=list(newest.free),
        held={h.peer.hex(): list(h.intervals) for h in newest.held},
        suspended={s.peer.hex(): list(s.intervals) for s in newest.suspended},
        let_go=let_go,
    )


def _of_group(life: _Life, group: str) -> _Life:
    return _Life([commit for commit in life.commits if commit.group.hex() == group])


def _together(ledgers: Sequence[Ledger]) -> LedgerFacts:
    """Of groups. What one has not handed out of its own share yet, of numbers that others are past, is free as well."""
    cursor = max(ledger.cursor for ledger in ledgers)
    held: dict[str, list[Interval]] = defaultdict(list)
    suspended: dict[str, list[Interval]] = defaultdict(list)
    for ledger in ledgers:
        for holding in ledger.held:
            held[holding.peer.hex()] += holding.intervals
        for kept in ledger.suspended:
            suspended[kept.peer.hex()] += kept.intervals
    return LedgerFacts(
        cursor=cursor,
        free=[interval for one in ledgers for interval in (*one.free, *ahead(one, cursor))],
        held=dict(held),
        suspended=dict(suspended),
    )


def _history(swarm: SwarmPaths, life: int) -> list[Commit]:
    folder = swarm.stage(0, life)
    return [link.certified.commit for link in FileStorage(folder).load_history()] if folder.exists() else []


def _in_hand(ledger: Ledger) -> list[Interval]:
    held = [interval for entry in ledger.held for interval in entry.intervals]
    return [*ledger.free, *held, *(interval for entry in ledger.suspended for interval in entry.intervals)]
