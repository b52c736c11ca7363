"""What the demo knows that no node's events say: who is who, the solo run, the kills, the ledger at the end.

Written as `run.json` beside the nodes' event files, so that a report can be made again from a folder.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from farflung.node.events import Event, read_events
from farflung.protocol.errors import ConfigError

Interval = tuple[int, int]
"""Sample numbers [start, stop)."""


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of the run."""

    peer: str
    """Public key in hex."""
    name: str
    """For people: `node 1`."""
    role: str
    """For people: `founder`, `joined late`, `replacement`."""


class Incident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something done to a node from outside."""

    time: float
    """Unix seconds."""
    what: str
    """`start` (with the first ones), `join` (later), `kill` or `stop`."""
    peer: str
    """Public key in hex."""


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
    timeline: list[Incident]
    solo_loss: list[SoloPoint]
    """Of the best single worker trained alone, by step; empty when there was none."""
    ddp_bytes_per_peer: int
    """What data-parallel training would have sent for the same steps, per peer."""
    ledger: LedgerFacts
    description: str = ""
    """One line on model, data and machine, for people."""
    sample_text: str = ""
    """Some lines written by the trained model."""


def load_run(path: Path) -> RunFacts:
    """`run.json`. Raises ConfigError naming file and key."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def save_run(path: Path, run: RunFacts) -> None:
    """Write `run.json`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run)))


def load_events(files: Iterable[Path]) -> dict[str, list[Event]]:
    """Events of several nodes' files by public key in hex, each in the order of time.

    Raises ConfigError for a damaged file.
    """
    by_peer: dict[str, list[Event]] = {}
    for file in sorted(files):
        for event in read_events(file):
            by_peer.setdefault(event["peer"], []).append(event)
    for events in by_peer.values():
        events.sort(key=_time)
    return by_peer


def _time(event: dict[str, Any]) -> float:
    return float(event["time"])
