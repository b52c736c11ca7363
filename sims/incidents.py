"""What was done to a run from outside, for people: what lasted from when to when, what happened at once, and words for it.

What was done at the same time to several nodes is one thing; what was done to the network is one each.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from farflung.sims.facts import KILLED, Incident, RunFacts
from farflung.sims.scene import Scene

LASTING = ("pause", "partition", "apart", "slow", "delay", "drop", "duplicate")
"""What goes on for a while; everything else happens at once."""

SHORT = {
    "join": "joined",
    "kill": "killed",
    "power": "lost power",
    "stop": "asked to leave",
    "pause": "stopped",
    "partition": "partition",
    "apart": "do not reach each other",
}

COUNTED = {
    "pause": ("pause", "pauses"),
    "partition": ("partition", "partitions"),
    "apart": ("cut between some", "cuts between some"),
    "slow": ("slow-down", "slow-downs"),
    "delay": ("delay", "delays"),
    "drop": ("loss of messages", "losses of messages"),
    "duplicate": ("doubling of messages", "doublings of messages"),
}
"""What is counted beside kills and joins: of one, of several."""

MOST_NAMES = 4
"""Of those to whom something was done; more are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """Something that was done."""

    start: float
    """Unix seconds, as `end`."""
    end: float
    """The same as `start` of what happened at once."""
    what: str
    """As of an `Incident`, but for `start`, `resume` and `heal`."""
    peers: tuple[str, ...]
    """To whom, by public keys in hex: of a partition, whoever is not on its largest side; none: to the network."""
    much: tuple[float, ...]
    """As of an `Incident`, for each peer, or for the network; empty where there is no such number."""
    sides: tuple[tuple[str, ...], ...] = ()
    """Of a partition, by public keys in hex, the largest last."""


def things_done(run: RunFacts) -> list[Thing]:
    """All but the first starts, in the order in which they began."""
    alike: dict[tuple[float, float, str, int | None], list[Incident]] = {}
    for place, incident in enumerate(run.timeline):
        if incident.what not in ("start", "resume", "heal"):
            end = _end(incident, islice(run.timeline, place + 1, None), run.ended)
            alone = None if incident.peer else place
            alike.setdefault((incident.time, end, incident.what, alone), []).append(incident)
    things = [_thing(start, end, same, run) for (start, end, _, _), same in alike.items()]
    return sorted(things, key=lambda thing: thing.start)


def _end(incident: Incident, later: Iterable[Incident], ended: float) -> float:
    match incident.what:
        case "pause":
            over = (i.time for i in later if i.peer == incident.peer and i.what in (*KILLED, "resume"))
            return next(over, ended)
        case "partition" | "apart":
            return next((i.time for i in later if i.what == "heal" and i.number == incident.number), ended)
        case _:
            return incident.time if incident.until is None else min(incident.until, ended)


def _thing(start: float, end: float, same: Sequence[Incident], run: RunFacts) -> Thing:
    sides = _sides(same[0].groups, run) if same[0].what == "partition" else []
    apart = [peer for group in same[0].groups for peer in group] if same[0].what == "apart" else []
    return Thing(
        start=start,
        end=end,
        what=same[0].what,
        peers=tuple([*(peer for side in sides[:-1] for peer in side), *apart, *(i.peer for i in same if i.peer)]),
        much=tuple(i.much for i in same if i.much is not None),
        sides=tuple(map(tuple, sides)),
    )


def _sides(groups: Sequence[Sequence[str]], run: RunFacts) -> list[Sequence[str]]:
    named = {peer for group in groups for peer in group}
    others = [facts.peer for facts in run.peers if facts.peer not in named]
    return sorted([*groups, *([others] if others else [])], key=len)


def count_things(run: RunFacts) -> str:
    """How often what was done, in words; empty where nothing was but kills and joins."""
    found = Counter(thing.what for thing in things_done(run))
    return ", ".join(f"{n:,} {names[n > 1]}" for what, names in COUNTED.items() if (n := found[what]))


def words(thing: Thing) -> str:
    """What was done, without to whom."""
    match thing.what, thing.much:
        case "slow", [*factors]:
            return f"computing takes {_range(factors)} times as long"
        case "delay", [*seconds]:
            return f"messages {_range(seconds)} s late, each way"
        case "drop", [probability]:
            return f"{probability:.0%} of control messages lost"
        case "duplicate", [probability]:
            return f"{probability:.0%} of control messages doubled"
        case "skew", [ahead_s]:
            return f"clock set {abs(ahead_s):.3g} s {'ahead' if ahead_s > 0 else 'back'}"
        case "skew", [*seconds]:
            return f"clocks set off by up to {max(map(abs, seconds)):.3g} s"
        case _:
            return SHORT[thing.what]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def whom(thing: Thing, scene: Scene) -> str:
    """To whom it was done."""
    if thing.what == "partition":
        smaller = " | ".join(_called(side, scene) for side in thing.sides[:-1])
        return f"{smaller} | the others" if smaller else "nobody"
    return _called(thing.peers, scene) if thing.peers else "everybody"


def _called(peers: Sequence[str], scene: Scene) -> str:
    """Whole classes by their names, a few others by their own."""
    classes: dict[str, set[str]] = {}
    for facts in scene.run.peers:
        classes.setdefault(facts.group, set()).add(facts.peer)
    whole = {name: members for name, members in classes.items() if name and len(members) > 1 and members <= set(peers)}
    rest = [peer for peer in peers if not any(peer in members for members in whole.values())]
    names = [f"all of {name}" for name in whole] + [scene.names.get(peer, peer[:12]) for peer in rest]
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(peers)} peers"
