"""The figures of a run, worked out from its nodes' events alone, with nothing taken from a node's own opinion
of itself.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from farflung.node.events import Event
from farflung.sims.facts import Interval, LedgerFacts, RunFacts
from farflung.sims.pipeline_log import pipeline_figures
from farflung.sims.spans import USES, kill_time, seconds_by_use

Events = Mapping[str, Sequence[Event]]
"""Events by public key in hex, each peer's in the order of time."""


def summarise(events_by_peer: Events, run: RunFacts) -> dict[str, Any]:
    """The figures that `farflung demo --json` and `farflung sim report --json` print.

    * `outer_loss`: the last held-out loss of the outer parameters (None without one); `solo_loss`: that of
    the run alone. * `bytes_sent_per_peer`: {name: bytes} over all lives of a node; `ddp_bytes_per_peer`: what
    data-parallel would send. * `rounds_committed`: distinct heights; `rounds_missed`: [{peer, round,
    reason}]. * `digests_equal`: all commits of one version have one digest over all peers. *
    `samples_trained_twice`: how often a sample was committed beyond its first time, each commit counted once
    however many peers saw it; two different commits of one height count as two, so a fork shows here as well.
    * `samples_lost`: numbers below the ledger's cursor that are in no commit and in nobody's hands; None when
    nobody kept the ledger. * `invariants_broken`: [{peer, which, detail}]. * `tokens_committed`, and
    `tokens_per_s` of the whole run. * `median_round_s`, plan to commit, at the slowest peer of each round. *
    `peers`: how many there were. * `utilisation`: {group: {peers, hours, and the share of their presence that
    went into each of `spans.USES`}}. * `pipeline`: see `pipeline_log.pipeline_figures`; rounds, tokens and samples are
    those of stage 0, for those of the others count the same again. * `judged`: what a judge beside the nodes found broken, and `expected`:
    [{what, got, met}], both as the facts have them.
    """
    names = {facts.peer: facts.name for facts in run.peers}
    commits = committed_samples(events_by_peer)
    outer = outer_losses(events_by_peer)
    trained = [interval for intervals in commits for interval in intervals]
    by_round = commits_by_round(events_by_peer).values()
    tokens = sum(sum(event["contributors"].values()) for event in by_round)
    seconds = run.ended - run.started
    return {
        "outer_loss": outer[-1]["loss"] if outer else None,
        "solo_loss": run.solo_loss[-1].loss if run.solo_loss else None,
        "bytes_sent_per_peer": {
            names.get(peer, peer[:12]): total_bytes(events, "sent_bytes") for peer, events in events_by_peer.items()
        },
        "bits_per_parameter": {
            way: round(statistics.median(bits), 3)
            for way in ("up", "down")
            if (bits := [e[f"{way}_bits"] for e in _all(events_by_peer, "round.commit") if e[f"{way}_bits"]])
        },
        "left_out": round(statistics.median(owed), 3)
        if (owed := [e["owed"] for e in _all(events_by_peer, "round.commit") if e["owed"] is not None])
        else None,
        "ddp_bytes_per_peer": run.ddp_bytes_per_peer,
        "rounds_committed": len(by_round),
        "rounds_missed": [
            {"peer": names.get(e["peer"], e["peer"][:12]), "round": e["round"], "reason": e["reason"]}
            for e in _all(events_by_peer, "round.missed")
        ],
        "digests_equal": digests_equal(events_by_peer),
        "samples_trained_twice": length(trained) - length(merge(trained)),
        "samples_lost": None if run.ledger is None else _lost(run.ledger, trained),
        "peers_killed": sum(incident.what == "kill" for incident in run.timeline),
        "peers_joined": sum(incident.what == "join" for incident in run.timeline),
        "seconds": round(run.ended - run.started, 1),
        "invariants_broken": [
            {"peer": names.get(e["peer"], e["peer"][:12]), "which": e["which"], "detail": e["detail"]}
            for e in _all(events_by_peer, "invariant.broken")
        ],
        "tokens_committed": tokens,
        "tokens_per_s": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        "median_round_s": round(statistics.median(e["seconds"] for e in by_round), 3) if by_round else None,
        "peers": len({*names, *events_by_peer}),
        "utilisation": utilisation(events_by_peer, run),
        "pipeline": pipeline_figures(events_by_peer),
        "judged": run.violations,
        "expected": [structs.asdict(one) for one in run.expected],
    }


def utilisation(events_by_peer: Events, run: RunFacts) -> dict[str, dict[str, float]]:
    """Shares of the presence of each group's peers, all of them together, in the order in which groups come."""
    groups = groups_of(events_by_peer, run)
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(groups.values()):
        totals = dict.fromkeys(USES, 0.0)
        members = [peer for peer, group in groups.items() if group == name]
        for peer in members:
            for use, seconds in seconds_by_use(events_by_peer[peer], kill_time(run.timeline, peer)).items():
                totals[use] += seconds
        present = sum(totals.values())
        shares = {use: round(seconds / present, 4) if present else 0.0 for use, seconds in totals.items()}
        found[name] = {"peers": len(members), "hours": round(present / 3600, 3), **shares}
    return found


def groups_of(events_by_peer: Events, run: RunFacts) -> dict[str, str]:
    """The group of every peer with events: as the facts have it, or else the device that it named."""
    given = {facts.peer: facts.group for facts in run.peers if facts.group}
    found: dict[str, str] = {}
    listed = [facts.peer for facts in run.peers if facts.peer in events_by_peer]
    for peer in dict.fromkeys([*listed, *events_by_peer]):
        started = next((e for e in events_by_peer[peer] if e["event"] == "node.start"), None)
        found[peer] = given.get(peer) or ("unknown" if started is None else str(started["device"]))
    return found


def violations(figures: Mapping[str, Any]) -> list[str]:
    """What in the figures breaks an invariant of the design, one sentence each; empty for a sound run."""
    said = [f"{b['peer']} reports invariant {b['which']} broken: {b['detail']}" for b in figures["invariants_broken"]]
    said += figures["judged"]
    if not figures["digests_equal"]:
        said.append("peers held different bits at the same version")
    if figures["samples_trained_twice"]:
        said.append(f"{figures['samples_trained_twice']} samples were trained twice")
    if figures["samples_lost"]:  # None: nobody kept the ledger
        said.append(f"{figures['samples_lost']} samples were lost")
    return said


def outer_losses(events_by_peer: Events) -> list[Event]:
    """`outer.eval` events with a finite loss, one per version (the latest), in the order of versions."""
    by_version: dict[int, Event] = {}
    for event in _all(events_by_peer, "outer.eval"):
        if event["loss"] is not None:
            by_version[event["version"]] = event
    return [by_version[version] for version in sorted(by_version)]


def digests_equal(events_by_peer: Events) -> bool:
    """Whether all `round.commit` events of equal version, and of a pipeline of one stage, carry one digest."""
    digest_of: dict[tuple[int, int], str] = {}
    return all(
        digest_of.setdefault((event.get("stage", 0), event["version"]), event["digest"]) == event["digest"]
        for event in _all(events_by_peer, "round.commit")
    )


def committed_samples(events_by_peer: Events) -> list[list[Interval]]:
    """Sample intervals of each distinct commit, of all its contributors together."""
    commits: dict[tuple[int, tuple[Interval, ...]], list[Interval]] = {}
    for event in _all(events_by_peer, "round.commit"):
        if event.get("stage", 0) != 0:
            continue  # what other stages count are tickets
        intervals = sorted((start, stop) for own in event["samples"].values() for start, stop in own)
        commits[event["round"], tuple(intervals)] = intervals
    return list(commits.values())


def commits_by_round(events_by_peer: Events) -> dict[int, Event]:
    """One `round.commit` event per round height, the slowest peer's, in the order of heights; of a pipeline those of stage 0."""
    found: dict[int, Event] = {}
    for event in _all(events_by_peer, "round.commit"):
        if event.get("stage", 0) != 0:
            continue
        known = found.get(event["round"])
        if known is None or event["seconds"] > known["seconds"]:
            found[event["round"]] = event
    return dict(sorted(found.items()))


def total_bytes(events: Sequence[Event], key: str) -> int:
    """`sent_bytes` or `received_bytes` of a peer's last `net` in each of its lives, added up."""
    total = current = 0
    for event in events:
        if event["event"] == "node.start":
            total, current = total + current, 0
        elif event["event"] == "net":
            current = event[key]
    return total + current


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same numbers as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif start < stop:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Numbers in the intervals, counted as often as they occur."""
    return sum(stop - start for start, stop in intervals)


def _lost(ledger: LedgerFacts, trained: Iterable[Interval]) -> int:
    kept = [
        *ledger.free,
        *(interval for intervals in ledger.held.values() for interval in intervals),
        *(interval for intervals in ledger.suspended.values() for interval in intervals),
    ]
    return ledger.cursor - length(_clip(merge([*trained, *kept]), ledger.cursor))


def _clip(intervals: Iterable[Interval], below: int) -> Iterator[Interval]:
    return ((start, min(stop, below)) for start, stop in intervals if start < below)


def _all(events_by_peer: Events, kind: str) -> list[Event]:
    found = [event for events in events_by_peer.values() for event in events if event["event"] == kind]
    return sorted(found, key=lambda event: float(event["time"]))
