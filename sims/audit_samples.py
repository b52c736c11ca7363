"""Samples by three accounts: what commits count, what steps trained, and what the ledger says is left (invariant 6).

A commit says which samples of each contributor it counts, worked out from the ledger before it: nobody's steps come into that. A step says what the
learner was given. The two are held against each other. A peer's local progress is a queue: what it trains comes last, and what a round counts is
taken from the front; all of it goes when the progress is dropped, and some when the node ends. So between two of those, in one *stretch*:

    trained    a a a a b b b b c c c c        (a, b, c: steps)
    counted    └── round 7 ──┘
               what lies before the last counted sample has been counted, and in that order: it went into the pseudo-gradient of a round

A sample there that no commit counts for this peer was trained in another's place or twice; one that a commit counts and no step has trained was not.

Where a log lacks lines a stretch ends, too. What was in the queue then may be counted by a commit that nobody knows, and until something that was trained
afterwards is counted, what commits count may have been trained meanwhile: of neither anything is asked.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farflung.node.events import Event
from farflung.protocol.limits import MAX_CLOCK_SKEW_S
from farflung.sims.audit import Check, counted
from farflung.sims.facts import Interval, LedgerFacts
from farflung.sims.intervals import clip, length, merge, repeats
from farflung.sims.logs import Chain, Logs, Place, begins_late, chain_of, gaps_of, samples_of

TAKES = ("step", "step.passed")
"""Where a peer takes samples: trains on them, or knows that no number comes out of them."""

BREAKS = ("node.start", "progress.dropped", "log.unwritten")
"""Where a stretch of a peer's training ends."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a commit counts of one peer."""

    time: float
    """When that peer sent the contribution, unix seconds: the samples were trained before. Where its log does not tell, when the first peer wrote of the commit."""
    intervals: Sequence[Interval]


@dataclass(slots=True)
class Comparison:
    """Of one peer's steps with what commits count of it; its samples with gaps and repetitions as they are."""

    counted: list[Interval] = field(default_factory=list)
    """Trained, and in the contribution of a round that was committed."""
    missing: list[Interval] = field(default_factory=list)
    """A commit counts them, and no step trained them."""
    foreign: list[Interval] = field(default_factory=list)
    """Among `counted`, and no commit counts them, or not so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What became of all samples of a run."""

    committed: int
    """That commits count."""
    twice: int
    """How often a sample was counted beyond its first time: by commits, or by the steps that were in them, whichever is more."""
    lost: int | None
    """Numbers below the ledger's cursor that are in no commit and in nobody's hands; None when nobody kept the ledger, or logs lack commits."""
    peers: dict[str, Comparison]
    """By public key: of those whose steps say what they trained."""

    @property
    def miscounted(self) -> int | None:
        """Samples that a commit counts and its peer did not train, or the other way round; None where steps do not tell."""
        if not self.peers:
            return None
        return sum(length(one.missing) + length(one.foreign) for one in self.peers.values())


def account(logs: Logs) -> Samples:
    """Follow the samples."""
    commits = committed_samples(logs)
    by_commits = [interval for claims in commits for intervals in claims.values() for interval in intervals]
    peers = _compare_all(logs)
    by_steps = [interval for one in peers.values() for interval in one.counted]
    ledger = logs.run.ledger
    return Samples(
        committed=length(merge(by_commits)),
        twice=max(repeats(by_commits), repeats(by_steps)),
        lost=None if ledger is None or _lacks_commits(logs) else _lost(ledger, by_commits),
        peers=peers,
    )


def check_samples(logs: Logs, samples: Samples) -> list[Check]:
    """6: by the commits alone, by the ledger, and by the steps."""
    committed = Check(
        which=6, what=f"{counted(samples.committed, 'sample')} that rounds count", count=samples.committed
    )
    if samples.twice:
        committed.broken.append(f"{counted(samples.twice, 'sample')} trained twice")
    if samples.lost:
        committed.broken.append(f"{counted(samples.lost, 'sample')} lost")
    trained = sum(length(one.counted) for one in samples.peers.values())
    steps = Check(which=6, what=f"{counted(trained, 'sample')} that steps trained for them", count=trained)
    for peer, one in samples.peers.items():
        if one.missing:
            said = (
                f"{counted(length(one.missing), 'sample')} that rounds count and it did not train: {_told(one.missing)}"
            )
            steps.broken.append(f"{logs.name(peer)} has {said}")
        if one.foreign:
            said = f"{counted(length(one.foreign), 'sample')} for a round that counts others: {_told(one.foreign)}"
            steps.broken.append(f"{logs.name(peer)} trained {said}")
    return [committed, steps]


def committed_samples(logs: Logs) -> list[dict[str, list[Interval]]]:
    """What each distinct commit of stage 0 counts, by contributor; the samples of other stages are tickets."""
    found: dict[tuple[Chain, int, str], dict[str, list[Interval]]] = {}
    for event in _told_samples(logs):
        found[chain_of(event), event["round"], repr(sorted(event["samples"].items()))] = samples_of(event)
    return list(found.values())


def _told_samples(logs: Logs) -> list[Event]:
    """Commits of stage 0 by peers that still had the commit before; the others cannot tell whose samples these are."""
    return [
        event for ((stage, _, _), _), told in logs.rounds.items() if stage == 0 for event in told if event["samples"]
    ]


def _lacks_commits(logs: Logs) -> bool:
    """Whether there may be commits of stage 0 that no log has, for logs lack lines. Each line says the height of the last that its peer knew."""
    if not logs.gaps:
        return False
    known: dict[Chain, int] = defaultdict(int)
    reached: dict[Chain, int] = defaultdict(int)
    for chain, _ in logs.commits:
        known[chain] += 1
    for events in logs.events.values():
        for event in events:
            chain = chain_of(event)
            reached[chain] = max(reached[chain], event["height"])
    before = {chain: min(height for one, height in logs.commits if one == chain) - 1 for chain in known if chain[2]}
    return any(reached[chain] - before.get(chain, 0) > known[chain] for chain in reached if chain[0] == 0)


def _lost(ledger: LedgerFacts, committed: Iterable[Interval]) -> int:
    kept = [
        *ledger.free,
        *ledger.let_go,
        *(interval for intervals in ledger.held.values() for interval in intervals),
        *(interval for intervals in ledger.suspended.values() for interval in intervals),
    ]
    return ledger.cursor - length(clip(merge([*committed, *kept]), ledger.cursor))


# ---- steps against commits -----------------------------------------------------------------------------------------


def _compare_all(logs: Logs) -> dict[str, Comparison]:
    """Of all peers with a log. Not of a pipeline, where what a step of it loses on the way is made good in the next."""
    if any("stage" in event for events in logs.events.values() for event in events):
        return {}
    sent: dict[tuple[str, Place], list[float]] = defaultdict(list)
    for event in logs.all("round.scatter"):
        sent[event["peer"], (chain_of(event), event["round"])].append(event["time"])
    claims: dict[str, dict[Place, Claim]] = defaultdict(dict)
    for event in _told_samples(logs):  # the first of each height is the earliest
        for peer, intervals in samples_of(event).items():
            place = (chain_of(event), event["round"])
            if place not in claims[peer]:
                claims[peer][place] = Claim(_sent_at(sent[peer, place], event["time"]), intervals)
    in_order = {peer: sorted(own.items(), key=lambda one: one[0][1]) for peer, own in claims.items()}
    return {
        peer: compare(events, [claim for _, claim in in_order.get(peer, [])]) for peer, events in logs.events.items()
    }


def _sent_at(sent: Sequence[float], told: float) -> float:
    """When a contribution was sent that a commit counts: a round may be tried more than once, and somebody who alone has committed it may end before a word, and
    train the same again. `sent`: each time that its peer began to; `told`: when somebody wrote of the commit first, by another clock perhaps."""
    return max((at for at in sent if at <= told), default=min(sent, default=told))


@dataclass(slots=True)
class _Trained:
    """What a peer trained, in its order: each a place in these lists."""

    stretches: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    """Of the numbers, between two neighbouring edges."""
    times: list[float] = field(default_factory=list)
    gaps_before: list[int] = field(default_factory=list)
    """How many gaps of the log come before it."""
    places: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By piece."""

    def before(self, piece: int, time: float) -> int:
        """The last place of a piece before it was sent; by other clocks it may seem to have been later."""
        places = self.places[piece]
        return next((place for place in reversed(places) if self.times[place] <= time), places[0])


def compare(events: Sequence[Event], claims: Sequence[Claim]) -> Comparison:
    """One peer's steps with what commits count of it, in the order of rounds."""
    steps = [event for event in events if event["event"] in (*TAKES, *BREAKS)]
    edges = _edges(steps, claims)
    trained = _follow(steps, edges, gaps_before=int(begins_late(events)))
    gaps = gaps_of(events)
    found = Comparison()
    claimed: set[int] = set()  # places
    last: dict[int, int] = {}
    """By stretch, the last claimed place before which no commit that nobody knows can count anything."""
    known = 0  # gaps of which all that was trained before they ended is counted, or given up
    for claim in claims:
        begun = sum(since - MAX_CLOCK_SKEW_S <= claim.time for since, _ in gaps)
        places: list[int] = []
        for start, stop in claim.intervals:
            for piece in range(bisect_left(edges, start), bisect_left(edges, stop)):
                if piece in trained.places:
                    places.append(trained.before(piece, claim.time))
                elif begun <= known:
                    found.missing.append((edges[piece], edges[piece + 1]))
        for place in places:
            known = max(known, trained.gaps_before[place])
            if trained.gaps_before[place] >= begun:
                of = trained.stretches[place]
                last[of] = max(last.get(of, -1), place)
        claimed.update(places)
    for place, (of, piece) in enumerate(zip(trained.stretches, trained.pieces, strict=True)):
        if place in claimed or place <= last.get(of, -1):
            found.counted.append((edges[piece], edges[piece + 1]))
        if place not in claimed and place <= last.get(of, -1):
            found.foreign.append((edges[piece], edges[piece + 1]))
    return found


def _follow(steps: Iterable[Event], edges: Sequence[int], gaps_before: int) -> _Trained:
    found = _Trained()
    stretch = 0
    for event in steps:
        if event["event"] in BREAKS:
            stretch += 1
            gaps_before += event["event"] == "log.unwritten"
            continue
        for start, stop in event["samples"]:
            for piece in range(bisect_left(edges, start), bisect_left(edges, stop)):
                found.places[piece].append(len(found.pieces))
                found.stretches.append(stretch)
                found.pieces.append(piece)
                found.times.append(event["time"])
                found.gaps_before.append(gaps_before)
    return found


def _edges(steps: Iterable[Event], claims: Iterable[Claim]) -> list[int]:
    """Where an interval of either begins or ends, ascending: between two neighbours all samples have the same history."""
    intervals = [interval for event in steps if event["event"] in TAKES for interval in event["samples"]]
    intervals += [interval for claim in claims for interval in claim.intervals]
    return sorted({edge for interval in intervals for edge in interval})


def _told(intervals: Iterable[Interval]) -> str:
    """The first of them, for people."""
    merged = merge(intervals)
    said = ", ".join(f"{start} to {stop - 1}" if stop - start > 1 else f"{start}" for start, stop in merged[:3])
    return f"{said}{', …' if len(merged) > 3 else ''}"
