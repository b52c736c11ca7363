"""When a node greets everybody, and what whoever carries its messages may do of that for it.

Nearly all that peers say to each other is that they still live. A network that stands for many at once (`sims.echoes`) need not carry each of those greetings: it
is told what a node says, repeats that to whom it has reached, and says who has to be greeted by a message. A real network has no `Carrier`.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from farflung.protocol.effects import Send
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Heartbeat
from farflung.protocol.settings import ASLEEP_S

Basis = tuple[object, ...]
"""What our greetings rest on: as long as it is the same, so are they."""


class Carrier(Protocol):
    """Repeats greetings that say nothing new."""

    @property
    def repeats(self) -> bool:
        """Whether it does so to everybody: until something changes nobody has to be greeted."""

    def greet(self, beat: Heartbeat, to: list[PeerId], now: float) -> list[PeerId]:
        """We greet `to`; returns those to whom that has to be sent. To the others it is repeated every `beat.every_s` seconds from now on."""

    def newest(self, now: float) -> float:
        """When it was repeated last."""


@dataclass(slots=True)
class Greeting:
    """The greetings of one node. All times are seconds of one monotonic clock."""

    membership: Membership
    every_s: float = field(init=False)
    """What we said with the last one of when the next comes; it holds, whoever has come since."""
    carrier: Carrier | None = None
    _at: float = -1e9
    """When we last greeted everybody."""
    _state: str = ""
    """As which."""
    rests: bool = False
    """Whether what we said is repeated, and stands."""
    _rests_since: float = 0.0
    _basis: Basis = ()
    """Of what we said."""

    def __post_init__(self) -> None:
        self.every_s = self.membership.beat_s

    @property
    def due_at(self) -> float:
        """As we have said; sooner when our state is another one, for rounds wait for who trains."""
        if self._state != self.membership.state:
            return self._at + self.membership.heartbeat_s
        if self.rests:
            return self._rests_since + self.every_s * max(1, math.ceil(ASLEEP_S / self.every_s) - 2)
        return self._at + self.every_s

    def look(self, now: float, basis: Basis) -> bool:
        """Whether it is due."""
        if now >= self.due_at:
            return True
        self.stir(now, basis)
        return False

    def stir(self, now: float, basis: Basis | None = None) -> None:
        """Something may have changed what we say, or `basis`, what follows it, has: though it is repeated, it is due with the next beat."""
        if self.rests and self.carrier is not None:
            self._at = self.carrier.newest(now)
            self.rests = self.carrier.repeats and basis == self._basis

    def begin(self, now: float) -> None:
        """Greet everybody: what follows says so."""
        self._at, self.every_s, self._state = now, self.membership.beat_s, self.membership.state

    def to(self, beat: Heartbeat, now: float, basis: Basis, *, settled: bool) -> list[Send]:
        """To everybody whom nobody greets for us. `basis`: of what it says; `settled`: whether we have nothing to ask or to learn."""
        known = self.membership.known()
        if self.carrier is not None:
            known = self.carrier.greet(beat, known, now)
            self.rests, self._rests_since, self._basis = settled and self.carrier.repeats, now, basis
        return [Send(p, beat) for p in known]
