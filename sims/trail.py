"""The log of a simulation: a total order of all that happened, that of the virtual clock (`clock`).

It is the same to the byte for the same seed and schedule, on every machine whose torch rounds alike and under any PYTHONHASHSEED. One line of it is one
event of one node (docs/events.md), a fault, or a broken invariant:

     41.250  3 round.commit    {"contributed": true, …}

Lines are hashed as they come, and kept or written only for those who ask.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from farflung.node.events import Event
from farflung.sims.swarm import START_UNIX_S

HEADING = ("swarm", "event", "peer", "time")
"""Keys of an event that a line of the log begins with, or that say the same in all of them."""

_ENCODER = json.JSONEncoder(sort_keys=True, default=str)

Sink = Callable[[str, Event], None]
"""Takes each line of the log, and the event it stands for; `peer` is the peer's number, or missing."""


def is_nodes(event: Event) -> bool:
    """Whether a node says it; a fault, a crash and a judge's verdict are told of nodes."""
    return "peer" in event and event["event"] != "crash"


def log_line(at: float, peer: int | None, what: str, fields: Event) -> str:
    """A line of the log: seconds from the beginning, the peer's number, the event, and what it says."""
    return f"{at:9.3f} {'' if peer is None else peer:>2} {what:15} {_ENCODER.encode(fields)}"


@dataclass(slots=True)
class Trail:
    """See the module."""

    keep: bool = False
    """Whether `lines` has the log in the end."""
    sink: Sink | None = None
    lines: list[str] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    @property
    def sha256(self) -> str:
        """Of all lines, in hex."""
        return str(self._hash.hexdigest())

    @property
    def now(self) -> float:
        """Seconds from the beginning."""
        return asyncio.get_running_loop().time() - START_UNIX_S

    def event(self, index: int, event: Event) -> None:
        """What a node says."""
        self.log(index, str(event["event"]), {k: v for k, v in event.items() if k not in HEADING})

    def log(self, index: int | None, what: str, fields: Event) -> None:
        """`index`: of the peer; None for what nobody in particular does."""
        self.log_at(self.now, index, what, fields)

    def log_at(self, at: float, index: int | None, what: str, fields: Event) -> None:
        """The same of a moment, in seconds from the beginning; for what shows when the clock stands already."""
        line = log_line(at, index, what, fields)
        self._hash.update(line.encode() + b"\n")
        if self.keep:
            self.lines.append(line)
        if self.sink is not None:
            whose = {} if index is None else {"peer": index}
            self.sink(line, {"time": at, "event": what, **whose, **fields})
