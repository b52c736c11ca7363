"""The events of all nodes of a run, as checks and figures ask for them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

from farflung.node.events import Event
from farflung.protocol.limits import MAX_CLOCK_SKEW_S
from farflung.sims.facts import Interval, RunFacts

Events = Mapping[str, Sequence[Event]]
"""Events by public key in hex, each peer's in the order in which it wrote them: by times that may go back, where its clock was set."""

Chain = tuple[int, int, str]
"""A stage of the pipeline, 0 without one, the number of its life, and the group of the swarm (`protocol.chain.Half`), in hex, empty for the first one."""

Place = tuple[Chain, int]
"""A chain, and a height or version of it."""

BEGINNINGS = ("kernels", "node.start")
"""What a process says first, and when its node is up."""

UP = ("node.state", "step", "net")
"""What only a node says that is up."""


def all_of(events_by_peer: Events, *kinds: str) -> list[Event]:
    """Events of these kinds by all peers, in the order of time, but each peer's in its own."""
    found: list[tuple[float, Event]] = []
    for events in events_by_peer.values():
        latest = -math.inf
        for event in events:
            latest = max(latest, float(event["time"]))
            if event["event"] in kinds:
                found.append((latest, event))
    return [event for _, event in sorted(found, key=itemgetter(0))]


def lives_of(events: Sequence[Event]) -> list[list[Event]]:
    """Those of every life of one peer: from a start to the next, and what a process says before it starts, by itself."""
    starts = [n for n, event in enumerate(events) if event["event"] in BEGINNINGS]
    return [list(events[a:b]) for a, b in pairwise(sorted({0, *starts, len(events)}))]


def begins_late(events: Sequence[Event]) -> bool:
    """Whether the beginning of a peer's log is missing, as after it was full more than once (`node.events.MAX_LOG_BYTES`): the first that is there is of a
    node that is up, or takes up what it had; that of a pipeline may have made that just before."""
    first = next((event["event"] for event in events if event["event"] in (*BEGINNINGS, *UP)), "")
    start = next((event for event in events if event["event"] == "node.start"), None)
    return first in UP or (start is not None and start.get("resumed", False) and "stage" not in start)


def gaps_of(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From when to when a peer's log lacks lines, unix seconds: before its first one where it begins late, and what a full disk did not take."""
    found = [(-math.inf, float(events[0]["time"]))] if begins_late(events) else []
    told = [(float(e["since"]), float(e["time"])) for e in events if e["event"] == "log.unwritten"]
    return found + [(min(pair), max(pair)) for pair in told]  # the clock may have been set back meanwhile


def _unbroken(events: Sequence[Event]) -> list[list[Event]]:
    """Cut where lines are lacking before one."""
    cuts = [n for n, event in enumerate(events) if event["event"] == "log.unwritten"]
    return [list(events[a:b]) for a, b in pairwise(sorted({0, *cuts, len(events)}))]


def stage_of(event: Event) -> int:
    """That of the chain which the event is about; 0 without a pipeline."""
    return int(event.get("stage", 0))


def chain_of(event: Event) -> Chain:
    """The one which the event is about."""
    return stage_of(event), int(event.get("life", 0)), str(event.get("group", ""))


def samples_of(commit: Event) -> dict[str, list[Interval]]:
    """By contributor. Empty where the peer no longer had the commit before, and so cannot tell."""
    return {peer: [(start, stop) for start, stop in own] for peer, own in commit["samples"].items()}


@dataclass(frozen=True, kw_only=True)
class Logs:
    """See the module."""

    events: Events
    run: RunFacts

    @cached_property
    def names(self) -> dict[str, str]:
        """For people, of every peer."""
        given = {facts.peer: facts.name for facts in self.run.peers}
        return {peer: given.get(peer, peer[:12]) for peer in [*given, *self.events]}

    def name(self, peer: str) -> str:
        """For people, of anybody."""
        return self.names.get(peer, peer[:12])

    def all(self, *kinds: str) -> list[Event]:
        """See `all_of`."""
        return all_of(self.events, *kinds)

    @cached_property
    def lives(self) -> list[tuple[str, list[Event]]]:
        """(peer, events) of every life of every peer (`lives_of`), and where a log lacks lines of what comes before and after by itself: nobody knows what
        happened in between."""
        return [
            (peer, part)
            for peer, events in self.events.items()
            for life in lives_of(events)
            for part in _unbroken(life)
        ]

    @cached_property
    def gaps(self) -> dict[str, list[tuple[float, float]]]:
        """See `gaps_of`; of peers whose log lacks lines."""
        return {peer: gaps for peer, events in self.events.items() if (gaps := gaps_of(events))}

    def lacks(self, peer: str, since: float, until: float) -> bool:
        """Whether a peer's log lacks lines of that time, which may be by the clocks of others."""
        gaps = self.gaps.get(peer, ())
        return any(a - MAX_CLOCK_SKEW_S <= until and since <= b + MAX_CLOCK_SKEW_S for a, b in gaps)

    @cached_property
    def windows(self) -> dict[Place, tuple[float, float]]:
        """When what rounds count was sent, at the most: since the first word of the round two before, for one may send something before it writes of the
        last, until the last word of its own."""
        found: dict[Place, tuple[float, float]] = {}
        begins: dict[Chain, list[float]] = defaultdict(lambda: [-math.inf, -math.inf])
        for (chain, height), told in self.rounds.items():
            times = [float(event["time"]) for event in told]
            found[chain, height] = begins[chain][-2], max(times)
            begins[chain].append(min(times))
        return found

    @cached_property
    def commits(self) -> dict[Place, list[Event]]:
        """All that peers wrote of one commit, with a round or without, in the order of heights."""
        found: dict[Place, list[Event]] = defaultdict(list)
        for event in self.all("round.commit", "view.commit"):
            found[chain_of(event), event["round" if event["event"] == "round.commit" else "height"]].append(event)
        return dict(sorted(found.items()))

    @cached_property
    def rounds(self) -> dict[Place, list[Event]]:
        """Those of `commits` that moved the outer state."""
        only = {place: [e for e in told if e["event"] == "round.commit"] for place, told in self.commits.items()}
        return {place: told for place, told in only.items() if told}
