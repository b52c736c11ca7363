"""Who serves which stage, as one peer knows it: what peers of all stages last said of themselves, and when.

Within a stage `membership` decides who is dead, with second opinions, because a chain depends on it. Between stages nothing does: a peer that is
wrongly left out of a step loses nothing but that step. So silence is enough here, and a broken stream counts until the next word.

Everything is derived from messages and time; nothing here is agreed on. That is why whoever coordinates a step asks all peers of its plan first,
and they check the plan against their own roll.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from farflung.protocol.appointment import Appointment, check_appointment
from farflung.protocol.errors import BadSignature
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_PIPELINE_PEERS
from farflung.protocol.pipeline_messages import Present

SILENT_AFTER = 5
"""Heartbeats without a word, after which a peer is no longer counted on."""

FORGET_S = 600.0
"""After so long a silent peer is not talked to any more."""


@dataclass(slots=True)
class Entry:
    """A peer that we know of."""

    since: float
    """When we first heard of it, or last heard it."""
    present: Present | None = None
    lost: bool = False
    """A stream to it broke after its last word."""


@dataclass(slots=True)
class Roll:
    """See the module. All times are seconds of one monotonic clock."""

    swarm: bytes
    founder: PeerId
    """Of the swarm, and of stage 0."""
    me: PeerId
    stages: int
    heartbeat_s: float
    entries: dict[PeerId, Entry] = field(default_factory=dict)
    appointments: dict[int, Appointment] = field(default_factory=dict)
    """By stage, those that were shown to us and are genuine."""

    # ---- what comes in -----------------------------------------------------------------------------------------

    def discover(self, peer: PeerId, now: float) -> bool:
        """Somebody mentioned a peer; True when it is new to us."""
        if peer == self.me or peer in self.entries or len(self.entries) >= MAX_PIPELINE_PEERS:
            return False
        self.entries[peer] = Entry(now)
        return True

    def heard(self, peer: PeerId, present: Present, now: float) -> bool:
        """What an admitted peer says of itself. True when it is news that deserves an answer. Raises BadSignature naming the peer
        for an appointment that is none, with nothing changed."""
        fresh = [one for one in present.appointments if self.appointments.get(one.stage) != one]
        for appointment in fresh:
            check_appointment(appointment, self.swarm, self.founder, peer=peer)
            if not 0 < appointment.stage < self.stages:
                raise BadSignature(f"an appointment for stage {appointment.stage}, which there is not", peer=peer)
        for appointment in fresh:
            self.appointments.setdefault(appointment.stage, appointment)
        before = self.entries.get(peer)
        if before is None and len(self.entries) >= MAX_PIPELINE_PEERS:
            return False
        self.entries[peer] = Entry(now, present)
        return before is None or before.present is None or present.stage < 0

    def lose(self, peer: PeerId) -> None:
        """A stream to a peer broke, or it does not answer: it does not count until it is heard again."""
        if peer in self.entries:
            self.entries[peer].lost = True

    def left(self, peer: PeerId) -> None:
        """It said goodbye."""
        self.entries.pop(peer, None)

    def tick(self, now: float) -> None:
        """Forget those that are gone for long."""
        for peer in [p for p, entry in self.entries.items() if now > entry.since + FORGET_S]:
            del self.entries[peer]

    # ---- what follows ------------------------------------------------------------------------------------------

    @property
    def known(self) -> list[PeerId]:
        """Everybody we might talk to, sorted."""
        return sorted(self.entries)

    def present(self, peer: PeerId) -> Present | None:
        """The last word of a peer."""
        entry = self.entries.get(peer)
        return None if entry is None else entry.present

    def alive(self, peer: PeerId, now: float) -> bool:
        """Whether to count on a peer."""
        entry = self.entries.get(peer)
        if entry is None or entry.present is None or entry.lost:
            return False
        return now <= entry.since + SILENT_AFTER * self.heartbeat_s

    def serving(self, stage: int, now: float) -> list[PeerId]:
        """Others that serve a stage, sorted."""
        return [p for p in self.known if self.alive(p, now) and (said := self.present(p)) and said.stage == stage]

    def training(self, stage: int, now: float) -> list[PeerId]:
        """Those of them that train."""
        return [p for p in self.serving(stage, now) if (said := self.present(p)) and said.trains]

    def holders(self, stage: int, now: float) -> tuple[int, bytes, list[PeerId]] | None:
        """Version and digest of a stage's outer state that most of its peers announce (the newer of two that as many do), and who they
        are; None when nobody does."""
        found: dict[tuple[int, bytes], list[PeerId]] = {}
        for peer in self.serving(stage, now):
            said = self.present(peer)
            if said is not None and said.digest:
                found.setdefault((said.version, said.digest), []).append(peer)
        if not found:
            return None
        version, digest = max(found, key=lambda held: (len(found[held]), held))
        return version, digest, found[version, digest]

    def counts(self, now: float, mine: int) -> tuple[int, ...]:
        """Peers of each stage: those who serve it and stay, those who are about to, and ourselves, who are of stage `mine`."""
        counts = [0] * self.stages
        counts[mine] += 1
        for peer in self.known:
            said = self.present(peer)
            if said is not None and self.alive(peer, now):
                stage = said.wants if said.wants >= 0 else said.stage
                if 0 <= stage < self.stages:
                    counts[stage] += 1
        return tuple(counts)

    def founder_of(self, stage: int) -> PeerId | None:
        """Who began the chain of a stage, if we know."""
        if stage == 0:
            return self.founder
        appointment = self.appointments.get(stage)
        return None if appointment is None else appointment.founder

    def newest_step(self, mine: int) -> int:
        """The next step of the pipeline: the highest that anybody knows of who trains."""
        said = [entry.present.step for entry in self.entries.values() if entry.present and entry.present.trains]
        return max([mine, *said])


def in_order(swarm: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """Data nodes in the order in which they coordinate: the first of the living does. The same everywhere, and nobody can choose its place
    in all swarms."""
    return sorted(peers, key=lambda peer: (sha256(swarm + peer).digest(), peer))
