"""What the nodes' logs show of the invariants of the design (§5), whoever the nodes were: in the demo, on this machine, anywhere.

Each check compares what different nodes, or the same one at different times, wrote down, and says how much it had to compare: what left nothing to
compare is not checked, and no more is claimed than that. Samples have a module of their own (`audit_samples`).

    1  same version, same bits      the digests that peers name at each version
    2  no commit, no outer step     the version of each life of a node: it never goes back, and moves by a commit or a download
    3  the dead cost only their own parts left out of a round, though nobody was lost and all members held all of them
    4  divide by contributors       who is counted had begun to send a contribution, and weighs what its samples weigh
    5  one history                  what peers write of the commit of each height
    6  each sample once             `audit_samples`
    8  bad messages, never a crash  how processes ended that nobody killed
    9  a missed round has a reason  the reasons; and no contribution that was begun is never heard of again

Where a log lacks lines (`logs.gaps_of`) nothing is asked of its peer: what it did then may be right, or not.

What no log shows, and `judge` looks at in simulations: the mean itself (4), the votes (5), microbatches (7), limits (8).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from farflung.node.events import Event
from farflung.sims.debts import Debts
from farflung.sims.facts import KILLED, RunFacts
from farflung.sims.intervals import length
from farflung.sims.logs import Chain, Logs, Place, chain_of, samples_of

INVARIANTS = {
    1: "same version, same bits",
    2: "no commit, no outer step",
    3: "a dead member costs its own contribution only",
    4: "divide by contributors",
    5: "one history",
    6: "each sample once",
    7: "exactly-once accumulation",
    8: "a bad message is an error, never a crash",
    9: "a missed round has a reason",
}

HONEST_REFUSALS = ("Refused", "Replayed", "Stale")
"""Errors with which honest nodes may refuse each other: what came too late, twice, or before its time."""

LOSSES = ("peer.suspect", "peer.dead", "peer.left", "peer.unreachable")
"""Events that say `of` somebody that it may be gone."""

SAME_FOR_ALL = ("event", "contributors", "samples", "view", "parts_left_out", "lap", "fragments")
"""Of what peers write of a commit. The digest is invariant 1; whose state was downloaded may hold a later version than the commit's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was looked at for an invariant, and what was found."""

    which: int
    """Invariant of the design."""
    what: str
    """That was compared, with its number."""
    count: int
    """How many; 0: nothing is known."""
    broken: list[str] = field(default_factory=list)
    """A sentence each."""


def counted(number: int, what: str) -> str:
    """`1 peer`, `1,200 peers`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def check_digests(logs: Logs) -> Check:
    """1: one digest at each version that is named more than once, be it by one peer in two lives."""
    at: dict[Place, list[tuple[str, str]]] = defaultdict(list)  # by chain and version, (peer, digest)
    for (chain, _), told in logs.rounds.items():
        for event in told:
            at[chain, event["version"]].append((event["peer"], event["digest"]))
    compared = {place: said for place, said in at.items() if len(said) > 1}
    broken = []
    for (chain, version), said in compared.items():
        digests = [digest for _, digest in said]
        usual = max(digests, key=digests.count)
        odd = dict.fromkeys(logs.name(peer) for peer, digest in said if digest != usual)
        if odd:
            broken.append(
                f"{', '.join(odd)} held other bits at version {version}{_of(chain)} than were held before or elsewhere"
            )
    return Check(which=1, what=f"the bits of {counted(len(compared), 'version')}", count=len(compared), broken=broken)


def check_versions(logs: Logs) -> Check:
    """2: in one life of a node the version never goes back, and each that it comes to is made by a commit or downloaded."""
    moves, broken = 0, []
    for peer, events in logs.lives:
        for own in _by_life(events):
            for chain, before, after, why in _moves(own):
                moves += 1
                if after < before and not why:
                    broken.append(f"{logs.name(peer)} went back from version {before} to {after}{_of(chain)}")
                elif not why:
                    broken.append(
                        f"{logs.name(peer)} came from version {before} to {after}{_of(chain)} without a commit"
                    )
    return Check(which=2, what=f"{counted(moves, 'move')} from version to version", count=moves, broken=broken)


def _by_chain(events: list[Event]) -> dict[Chain, list[Event]]:
    """What a node says of its own chain."""
    found: dict[Chain, list[Event]] = defaultdict(list)
    for event in events:
        if not event["event"].startswith(("stage.", "shadow")):
            found[chain_of(event)].append(event)
    return found


def _by_life(events: list[Event]) -> list[list[Event]]:
    """The same, of all groups through which it has gone as one: a new group goes on from the state of the old one."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if not event["event"].startswith(("stage.", "shadow")):
            stage, life, _ = chain_of(event)
            found[stage, life].append(event)
    return list(found.values())


def _moves(events: list[Event]) -> Iterator[tuple[Chain, int, int, bool]]:
    """(chain, version before, after, whether that may be) of each change in a life but the first. Back it may go with a download only, into another group.

    A life begins with what the process said before, and comes from there to what is on its disk. A node writes `round.commit` some moments after its
    version has moved, so nothing is asked of the last one either: the life may have ended in between.
    """
    committed = {event["version"] for event in events if event["event"] == "round.commit"}
    version, last = events[0]["version"], events[-1]["version"]
    began, downloaded, group = False, False, chain_of(events[0])
    for event in events:
        downloaded |= event["event"] == "span" and event["what"] == "download"
        after, chain = event["version"], chain_of(event)
        if after == version:
            continue
        if began and after < version:
            yield chain, version, after, downloaded and chain != group
        elif began:
            yield chain, version, after, downloaded or after in committed or after == last
        version, began, downloaded, group = after, True, False, chain


def check_parts(logs: Logs) -> Check:
    """3: a round leaves parts out only where a member of its plan was lost, or had not got all of the means. While whoever runs it lets messages be lost or late
    nothing is asked: an owner whose word twice does not come costs its part, though nobody is gone."""
    if logs.run.lossy:
        return Check(which=3, what="what no round left out", count=0)
    disturbed = list(_disturbed(logs.run))
    losses = [(e["time"], e["of"]) for e in logs.all(*LOSSES)]
    losses += [(e["time"], e["peer"]) for e in logs.all("node.stop")]
    losses += [(i.time, i.peer) for i in logs.run.timeline if i.what in (*KILLED, "stop")]
    planned: dict[Place, set[str]] = defaultdict(set)
    held: dict[Place, set[str]] = defaultdict(set)
    for event in logs.all("round.plan", "round.held"):
        place = (chain_of(event), event["round"])
        if event["event"] == "round.plan":
            planned[place].update(event["members"])
        else:
            held[place].add(event["peer"])
    began = {chain: -math.inf for chain, _ in logs.rounds}
    broken = []
    for (chain, height), told in logs.rounds.items():
        since, until = began[chain], max(event["time"] for event in told)
        began[chain] = min(event["time"] for event in told)
        left_out = max(event["parts_left_out"] for event in told)
        members = planned[chain, height]
        lost = {of for at, of in losses if since <= at <= until}
        if any(begins <= until and since <= ends for begins, ends in disturbed):
            continue
        if any(logs.lacks(member, since, until) for member in members):
            continue  # it may have said there whom it had lost
        if left_out and members and members <= held[chain, height] and not members & lost:
            broken.append(
                f"round {height}{_of(chain)} left {counted(left_out, 'part')} out, though nobody was lost and all members held everything"
            )
    return Check(
        which=3,
        what=f"what {counted(len(logs.rounds), 'round')} left out",
        count=len(logs.rounds),
        broken=broken,
    )


def _disturbed(run: RunFacts) -> Iterator[tuple[float, float]]:
    """When messages between nodes were lost or late, from and to, for what was done to the network."""
    for one in run.timeline:
        if one.what in ("drop", "delay"):
            yield one.time, math.inf if one.until is None else one.until
        elif one.what in ("partition", "apart"):
            heals = (i.time for i in run.timeline if i.what == "heal" and i.number == one.number and i.time >= one.time)
            yield one.time, min(heals, default=math.inf)


def check_contributors(logs: Logs) -> Check:
    """4: whoever a round counts had begun to send a contribution, and weighs as many tokens as its samples have."""
    sent = {(*_round(event), event["peer"]) for event in logs.all("round.scatter")}
    looked, broken = 0, []
    sizes: dict[Chain, dict[float, str]] = defaultdict(dict)  # by chain, tokens of a sample and who had it so
    for (chain, height), told in logs.rounds.items():
        samples = next((found for event in told if (found := samples_of(event))), {})
        for peer, tokens in told[0]["contributors"].items():
            if peer not in logs.events:
                continue
            looked += 1
            who = f"{logs.name(peer)} in round {height}{_of(chain)}"
            if (chain, height, peer) not in sent and not logs.lacks(peer, *logs.windows[chain, height]):
                broken.append(f"{who} was counted, and had sent no contribution")
            if tokens <= 0:
                broken.append(f"{who} was counted with {tokens} tokens")
            elif peer in samples:
                sizes[chain].setdefault(tokens / max(1, length(samples[peer])), who)
    for by_size in sizes.values():
        if len(by_size) > 1:
            said = "; ".join(f"{size:g} tokens a sample for {who}" for size, who in list(by_size.items())[:2])
            broken.append(f"contributions weigh other than their samples: {said}")
    return Check(which=4, what=f"the weights of {counted(looked, 'contribution')}", count=looked, broken=broken)


def check_history(logs: Logs) -> Check:
    """5: all peers write the same of one height, and none comes back to a height."""
    compared, broken = 0, []
    for (chain, height), told in logs.commits.items():
        compared += len(told) > 1
        for key in SAME_FOR_ALL:
            known = [(event["peer"], event[key]) for event in told if key in event and event[key] != {}]
            other = next((peer for peer, said in known if said != known[0][1]), None)
            if other is not None:
                who = f"{logs.name(known[0][0])} and {logs.name(other)}"
                broken.append(f"{who} know different commits of height {height}{_of(chain)}: {key} differ")
    for peer, events in logs.lives:
        for chain, own in _by_chain(events).items():
            heights = [event["height"] for event in own if event["event"] in ("round.commit", "view.commit")]
            broken += [
                f"{logs.name(peer)} came to height {after} after {before}{_of(chain)}"
                for before, after in pairwise(heights)
                if after <= before
            ]
    return Check(which=5, what=f"what peers know of {counted(compared, 'commit')}", count=compared, broken=broken)


def check_ends(logs: Logs) -> Check:
    """8: of processes that were watched, had come up and were not killed."""
    ups = {event["peer"] for event in logs.all("node.start")}
    exits = {peer: status for peer, status in logs.run.exits.items() if peer in ups}
    broken = [f"{logs.name(peer)} ended with status {status}" for peer, status in exits.items() if status]
    return Check(which=8, what=f"how {counted(len(exits), 'node')} ended", count=len(exits), broken=broken)


def check_misses(logs: Logs) -> Check:
    """9: missed and abandoned rounds have reasons, and a contribution that was begun is counted, missed, or its node's last word."""
    told = logs.all("round.missed", "round.abort")
    broken = [
        f"{logs.name(e['peer'])} says no reason for round {e['round']}{_of(chain_of(e))}"
        for e in told
        if not e["reason"].strip()
    ]
    contributors = {place: said[0]["contributors"] for place, said in logs.rounds.items()}
    begins: dict[Chain, int] = {}
    for chain, height in logs.commits:
        begins[chain] = min(height, begins.get(chain, height))
    sent = 0
    for peer, events in logs.lives:
        for own in _by_life(events):
            sent += sum(event["event"] == "round.scatter" for event in own)
            for chain, begun, by in _unexcused(own, list(logs.rounds), begins):
                if peer not in contributors[by]:
                    broken.append(
                        f"{logs.name(peer)} sent a contribution to round {begun}{_of(chain)}, and nothing says what became of it"
                    )
    what = f"the reasons of {counted(len(told), 'round')} missed or given up, and the ends of {counted(sent, 'contribution')}"
    return Check(which=9, what=what, count=len(told) + sent, broken=broken)


def _unexcused(
    events: list[Event], places: list[Place], begins: Mapping[Chain, int]
) -> Iterator[tuple[Chain, int, Place]]:
    """Of a life, where there are these rounds, and chains begin at these heights: to which round it sent a contribution without giving a reason why none
    counts it, and which had to. What it owed when its group became two it owes in the new one."""
    debts = Debts()
    sent_in: dict[int, Chain] = {}
    been_in: set[Chain] = set()
    rounds: dict[int, Place] = {}  # by height, those of the groups that it has come through
    for event in events:
        chain = chain_of(event)
        if chain not in been_in:
            been_in.add(chain)
            rounds = {height: place for height, place in rounds.items() if height < begins.get(chain, math.inf)}
            rounds |= {height: (one, height) for one, height in places if one == chain}
        match event["event"]:
            case "round.scatter":
                debts.sent(event["round"])
                sent_in[event["round"]] = chain
            case "round.missed":
                debts.excused(rounds)
            case "round.commit":
                for begun, by in debts.committed(event["round"], rounds):
                    yield sent_in[begun], begun, rounds[by]


CHECKS: tuple[Callable[[Logs], Check], ...] = (
    check_digests,
    check_versions,
    check_parts,
    check_contributors,
    check_history,
    check_ends,
    check_misses,
)


def refusals(logs: Logs) -> list[dict[str, Any]]:
    """What peers refused of each other that is not only late or repeated: {peer, of, error, reason, times}, the latest reason of each."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for event in logs.all("refused"):
        if event["error"] in HONEST_REFUSALS:
            continue
        key = event["peer"], event["of"], event["error"]
        times = found[key]["times"] if key in found else 0
        found[key] = {
            "peer": logs.name(event["peer"]),
            "of": logs.name(event["of"]) if event["of"] else "somebody unknown",
            "error": event["error"],
            "reason": event["reason"],
            "times": times + 1,
        }
    return list(found.values())


def _round(event: Event) -> Place:
    return chain_of(event), event["round"]


def _of(chain: Chain) -> str:
    stage, life, group = chain
    if group:
        return f" of group {group[:12]}"
    return f" of stage {stage}, life {life}" if life else f" of stage {stage}" if stage else ""
