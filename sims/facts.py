"""What whoever starts the nodes knows and no node's events say: who is who, the solo run, the kills, the ledger at the end.

Written as `run.json` into the run's folder, beside the nodes' folders with an `events.jsonl` each, so that a report can
be made at any time. A folder without it is told about as far as the events alone go (`infer_run`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from farflung.node.events import Event, kept_events, older_events
from farflung.protocol.errors import ConfigError

EVENTS, RUN = "events.jsonl", "run.json"

Interval = tuple[int, int]
"""Sample numbers [start, stop)."""

FIRST_S = 30.0
"""Whoever starts within so many seconds of the first node was there from the start."""

ENDS = ("node.stop", "node.failed")
"""What a process says last that was not killed."""

SILENT_S = 30.0
"""A node that said nothing for so long before the end, and no goodbye, has vanished: `net` comes every few seconds."""

What = Literal[
    "start",
    "join",
    "kill",
    "power",
    "stop",
    "pause",
    "resume",
    "slow",
    "skew",
    "partition",
    "apart",
    "heal",
    "drop",
    "duplicate",
    "delay",
]

KILLED = ("kill", "power")
"""Incidents that end a node's life without a word of it."""


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of the run."""

    peer: str
    """Public key in hex."""
    name: str
    """For people: `node 1`."""
    role: str = ""
    """For people: `founder`, `joined late`, `replacement`."""
    region: str = ""
    """Where it is, one of `regions.NAMES`; empty where only the node itself may tell (`told_regions`)."""
    group: str = ""
    """Its class of machines, in which utilisation is told; empty: by the device that the node names."""


class Incident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something done from outside, to a node or to the network between them."""

    time: float
    """Unix seconds."""
    what: What
    """Of a node: `start` (with the first ones), `join` (later), `kill`, `power` (its machine has none any more) or `stop`; `pause` (of its process) and `resume`;
    `slow` (what it computes) and `skew` (its clock is set). Of the network: `partition` and `apart`, which a `heal` ends, `drop` and `duplicate` (of control messages). Of either: `delay`."""
    peer: str = ""
    """Public key in hex; empty: of the network."""
    until: float | None = None
    """Unix seconds; of what ends by itself: `slow`, `delay`, `drop`, `duplicate`."""
    much: float | None = None
    """`slow`: how many times as long everything takes; `delay`: seconds more each way; `drop` and `duplicate`: their probability; `skew`: seconds ahead."""
    number: int = 0
    """Of a `partition` or `apart`, and of the `heal` that ends it: several can be open at the same time."""
    groups: list[list[str]] = []
    """Of a `partition`, its sides by public keys in hex; whoever is in none is on one side more. Of `apart`, those between which nothing passes; whoever is in
    none reaches all."""


class LedgerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who owns which sample at the end of the run; intervals are [start, stop)."""

    cursor: int
    """First number that nobody has been handed yet."""
    free: list[Interval] = []
    """Handed back, to be handed out again."""
    held: dict[str, list[Interval]] = {}
    """In the hands of members, by public key in hex."""
    suspended: dict[str, list[Interval]] = {}
    """Kept for vanished members during their lease, by public key in hex."""
    let_go: list[Interval] = []
    """In the hands of peers of an earlier life of stage 0, which nobody knows of any more: not to be trained in this epoch."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that the run's author expected of it."""

    what: str
    """`rounds >= 12`."""
    got: str
    met: bool


class SoloPoint(msgspec.Struct, frozen=True, array_like=True):
    """A held-out loss of one worker that trains alone."""

    step: int
    tokens: int
    seconds: float
    loss: float


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of `run.json`."""

    name: str
    """Of the swarm."""
    started: float
    """Unix seconds."""
    ended: float
    """Unix seconds."""
    peers: list[PeerFacts]
    timeline: list[Incident] = []
    lossy: bool = False
    """Whether control messages are lost all the time."""
    solo_loss: list[SoloPoint] = []
    """Of the best single worker trained alone, by step; empty when there was none."""
    ddp_bytes_per_peer: int = 0
    """What data-parallel training would have sent for the same steps, per peer; 0 when nobody worked it out."""
    ledger: LedgerFacts | None = None
    """None when nobody kept it: then lost samples cannot be counted."""
    exits: dict[str, int] = {}
    """Status with which processes ended that nobody killed, by public key in hex; empty where nobody watched them."""
    violations: list[str] = []
    """What a judge beside the nodes found broken, a sentence each."""
    expected: list[Expectation] = []
    """What the run was to come to; empty when nobody said."""
    seed: int | None = None
    """What was drawn for the scenario; None where nothing was."""
    method: str = ""
    """Of `farflung create --method`, as the scenario has it; empty where nobody told."""
    description: str = ""
    """One line on model, data and machine, for people."""
    samples: list[str] = []
    """Texts that the trained model wrote, prompt included; each may be short, as documents may."""


def load_run(path: Path) -> RunFacts:
    """`run.json`. Raises ConfigError naming file and key."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_folder(folder: Path) -> tuple[RunFacts, dict[str, list[Event]]]:
    """What a run's folder holds: its facts, and the events of all nodes (`event_files`).

    Raises ConfigError when there are no events, for those of several runs, or for damaged files.
    """
    events_by_peer = load_events(event_files(folder))
    if (folder / RUN).exists():
        return load_run(folder / RUN), events_by_peer
    if not events_by_peer:
        inside = ", ".join(str(file.parent) for file in sorted(folder.rglob(RUN)))
        raise ConfigError(
            f"{folder} holds no run: there is neither {RUN} nor a node's {EVENTS} in it"
            + (f", but runs of their own are in {inside}: give those" if inside else "")
        )
    return infer_run(events_by_peer), events_by_peer


def event_files(folder: Path) -> Iterator[Path]:
    """Where nodes of the run in `folder` have their events, and beside it the older ones, at any depth, but for what lies in the folder of another run."""
    for at, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not Path(at, name, RUN).exists()]
        file = Path(at, EVENTS)
        if file.name in names or older_events(file).name in names:
            yield file


def infer_run(events_by_peer: Mapping[str, Sequence[Event]]) -> RunFacts:
    """As much as events alone say: peers in the order in which they came, and those that vanished without a word, for a while or for good."""
    ordered = sorted(events_by_peer, key=lambda peer: (events_by_peer[peer][0]["time"], peer))
    started = min(event["time"] for events in events_by_peer.values() for event in events)
    ended = max(event["time"] for events in events_by_peer.values() for event in events)
    timeline = []
    for peer in ordered:
        events = events_by_peer[peer]
        came: What = "start" if events[0]["time"] <= started + FIRST_S else "join"
        timeline.append(Incident(time=events[0]["time"], what=came, peer=peer))
        for process, after in pairwise(_processes(events)):
            if not any(event["event"] in ENDS for event in process):
                timeline.append(Incident(time=process[-1]["time"], what="kill", peer=peer))
                timeline.append(Incident(time=after[0]["time"], what="join", peer=peer))
        if events[-1]["event"] not in ENDS and events[-1]["time"] < ended - SILENT_S:
            timeline.append(Incident(time=events[-1]["time"], what="kill", peer=peer))
    return RunFacts(
        name=str(events_by_peer[ordered[0]][0]["swarm"]),
        started=started,
        ended=ended,
        peers=[PeerFacts(peer=peer, name=f"peer {number}") for number, peer in enumerate(ordered, start=1)],
        timeline=sorted(timeline, key=lambda incident: incident.time),
        description="Told from the nodes' events alone.",
    )


def _processes(events: Iterable[Event]) -> list[list[Event]]:
    """What each process of a node said, with what comes before it is up."""
    found: list[list[Event]] = []
    coming = False
    for event in events:
        kind = event["event"]
        if not found or kind == "kernels" or (kind == "node.start" and not coming):
            found.append([])
        coming = kind == "kernels" or (coming and kind != "node.start")
        found[-1].append(event)
    return found


def told_regions(events_by_peer: Mapping[str, Sequence[Event]]) -> dict[str, str]:
    """What nodes said of where they stand when they last started (`join --region`), by public key in hex; without those that said nothing."""
    said = {
        peer: str(event.get("region", ""))
        for peer, events in events_by_peer.items()
        for event in events
        if event["event"] == "node.start"
    }
    return {peer: region for peer, region in said.items() if region}


def save_run(path: Path, run: RunFacts) -> None:
    """Write `run.json`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run)))


def load_events(files: Iterable[Path]) -> dict[str, list[Event]]:
    """Events of several nodes' files by public key in hex, each in the order of its file, for a clock may be set back; the older ones of each log, too
    (`node.events.kept_events`).

    Raises ConfigError for a damaged file, and for events of several runs: compared as if they were of one they would show what never was.
    """
    by_peer: dict[str, list[Event]] = {}
    whose: dict[str, Path] = {}
    swarms: dict[tuple[str, str], Path] = {}
    for file in sorted(files):
        for event in kept_events(file):
            swarms.setdefault((event["swarm"], _manifest_of(file)), file)
            if whose.setdefault(event["peer"], file) != file:
                raise ConfigError(
                    f"{whose[event['peer']]} and {file} both have events of peer {event['peer'][:12]}, so they are of several runs, or one is "
                    "a copy; give the folder of one run"
                )
            by_peer.setdefault(event["peer"], []).append(event)
    if len(swarms) > 1:
        (one, first), (other, second), *_ = swarms.items()
        raise ConfigError(
            f"{first} is of swarm {one[0]}, and {second} of {'another swarm' if one[0] == other[0] else 'swarm'} {other[0]}; give the folder of one run"
        )
    return by_peer


def _manifest_of(file: Path) -> str:
    """Hash of the manifest of the swarm that a node's log is of, as its folder is named (`node.paths`); empty elsewhere."""
    return file.parent.name if file.parent.parent.name == "swarms" else ""
