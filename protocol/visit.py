"""The state of one visit: what a peer holds of a (microbatch, hop), and how far it is with it."""

import math
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

from farflung.protocol.route import OPEN, Leg, Route, same_input


class Work(NamedTuple):
    """Something to compute: a forward, the loss (a forward at hop n), or a backward."""

    microbatch: int
    hop: int
    backward: bool


class Phase(IntEnum):
    IDLE = auto()
    READY = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(slots=True)
class Visit:
    route: Route
    version: int
    lease_until: float
    until: int = 0
    has_input: bool = False
    has_gradient: bool = False
    forward: Phase = Phase.IDLE
    backward: Phase = Phase.IDLE
    sending: bool = False
    """Its output is on the way, under `version`."""
    passed: bool = False
    """Its output was taken by the next hop."""
    returning: bool = False
    """The gradient of its input is on the way back, under `version`."""
    lapsed: bool = False
    """It has counted, and nothing is kept of it any more: its lease ran out."""
    named: int = -1
    """The latest version that the data node itself has named here."""
    loss: float = math.nan
    """As a gradient has brought it."""

    @property
    def computing(self) -> bool:
        return any(phase in (Phase.READY, Phase.RUNNING) for phase in (self.forward, self.backward))

    def is_held(self, now: float) -> bool:
        """Whether its lease has not run out, or it is in use."""
        return self.lease_until > now or Phase.RUNNING in (self.forward, self.backward)

    def obey(self, route: Route, version: int, hop: int) -> bool:
        """Take what the data node itself says of visit `hop`. Versions are its own: a later one that only others have named may be made up, and gives way, or
        nobody would listen to its data node any more. False when by this route the input is another one than ours."""
        same = same_input(self.route, route, hop)
        if self.named <= version < self.version:
            self.version, self.sending, self.returning = version, False, False
            self.route = route if same else self.route
        self.named = max(self.named, version)
        if same:
            self.follow(route, version)
        return same

    def follow(self, route: Route, version: int) -> None:
        """Take what is newer in a route of the same visit."""
        if version > self.version:
            self.route, self.version = route, version
            self.sending = self.returning = False
        elif version == self.version:
            self.route = tuple(
                Leg(ours.stage, theirs.peer if ours.peer == OPEN else ours.peer)
                for ours, theirs in zip(self.route, route, strict=True)
            )
