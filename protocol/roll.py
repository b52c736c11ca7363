"""Who serves which stage, as one peer knows it: what peers of all stages last said of themselves, and when.

Within a stage `membership` decides who is dead, with second opinions, because a chain depends on it. Between stages nothing does: a peer that is
wrongly left out of a step loses nothing but that step. So silence is enough here, and a broken stream counts until the next word.

Everything is derived from messages and time; nothing here is agreed on but what others report of their chains (`accord`). That is why whoever coordinates a step asks all peers of its plan first,
and they check the plan against their own roll.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from farflung.protocol import accord
from farflung.protocol.accord import Word, number_in, number_of, rank
from farflung.protocol.appointment import Appointment, check_appointment
from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.hearsay import Hearsay
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_GROUP_PEERS, MAX_LIVES_AHEAD, MAX_PIPELINE_PEERS
from farflung.protocol.lives import (
    GONE_AFTER,
    HOME_GONE_AFTER,
    HOME_LOST_AFTER,
    LOST_AFTER,
    QUIET_AFTER,
    SOONEST_LOST,
    STARTING_S,
    Life,
)
from farflung.protocol.losses import Losses
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.ways import Ways, check_ways

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
    ended_at: float | None = None
    """When its process was first found ended after its last word."""

    def ended(self, now: float) -> None:
        """Its process was found ended. Should it have spoken meanwhile, there is another entry, which this does not touch."""
        self.lost = True
        self.ended_at = now if self.ended_at is None else self.ended_at


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
    renewed: dict[int, Life] = field(default_factory=dict)
    """By stage, the newest life of those that were begun anew and count, as far as we know."""
    ways: Ways = field(init=False)
    """How far they are."""
    losses: Losses = field(init=False)
    """How often they are lost."""
    by_chain: bool = False
    """Which lives stage 0 names we know from its own chain, and nobody's word adds to them."""
    own_step: tuple[int, int] = (-1, 0)
    """Our stage, -1 while we are in none, and the next step by those that we were in and by our chain (`progress`)."""
    hearsay: Hearsay = field(default_factory=Hearsay)
    """What others have said of the run."""
    _listens_since: float | None = None
    _shown: dict[int, float] = field(default_factory=dict)
    """By stage, when we last heard of somebody who has the state of its newest life, and does not say that it is lost, or makes it; or heard of that life."""
    _own: tuple[int, Word] | None = None
    """Our stage, and what its chain says."""
    _near: dict[int, float] = field(default_factory=dict)
    """By stage, when we last heard of somebody of it who has a quorum."""
    _called: tuple[int, float] = (0, 0.0)
    """The highest number of stage 0's life that anybody calls for, and since when we know."""
    _inherits: tuple[Life, tuple[Life, ...]] | None = None
    """The life of stage 0 that we found elected last, and the list that it begins with: those who called him may have other words by now."""
    _told: dict[PeerId, float] = field(default_factory=dict)
    """Data nodes whose processes others have found ended, and since when we know (`_are_told`)."""
    _open_since: float | None = None
    """Since when somebody has been called whose life does not count; None: nobody is."""

    def __post_init__(self) -> None:
        self.ways = Ways(self.me)
        self.losses = Losses(SILENT_AFTER * self.heartbeat_s)

    # ---- what comes in -----------------------------------------------------------------------------------------

    def discover(self, peer: PeerId, now: float) -> bool:
        """Somebody mentioned a peer; True when it is new to us."""
        if peer == self.me or peer in self.entries or len(self.entries) >= MAX_PIPELINE_PEERS:
            return False
        self.entries[peer] = Entry(now)
        return True

    def heard(self, peer: PeerId, present: Present, now: float) -> bool:
        """What an admitted peer says of itself. True when it is news that deserves an answer. Raises BadSignature or Refused naming the
        peer for an appointment that is none, a life that cannot be or ways that contradict each other, with nothing changed."""
        check_ways(present.ways, peer=peer)
        fresh = [one for one in present.appointments if self.appointments.get(one.stage) != one]
        for appointment in fresh:
            check_appointment(appointment, self.swarm, self.founder, peer=peer)
            if not 0 < appointment.stage < self.stages:
                raise BadSignature(f"an appointment for stage {appointment.stage}, which there is not", peer=peer)
        first = 0 if self.decides_together else 1
        said = (*present.lives, *present.decided, *(() if present.call is None else (present.call,)))
        if any(not first <= life.stage < self.stages or life.number < 1 for life in said):
            raise Refused("a life of a stage that cannot have been begun anew", peer=peer)
        if present.call is not None and present.call.stage != 0:
            raise Refused(f"a call for a life of stage {present.call.stage}, which stage 0 names", peer=peer)
        if any(life.number > self.number(life.stage) + MAX_LIVES_AHEAD for life in said):
            raise Refused("a life of a stage of far too high a number", peer=peer)
        for lives in (present.lives, present.decided):
            if [life.stage for life in lives] != sorted({life.stage for life in lives}):
                raise Refused("lives that are not one of each stage, by stage", peer=peer)
        for appointment in fresh:
            self.appointments.setdefault(appointment.stage, appointment)
        before = self.entries.get(peer)
        if before is None and len(self.entries) >= MAX_PIPELINE_PEERS:
            return False
        self.entries[peer] = Entry(now, present)
        self.ways.heard(peer, present.beat, present.ways, now)
        self._note_call(present.call, now)
        if any(life.number > self.number(life.stage) for life in said):
            self._settle(now)
        if present.stage >= 0 and present.life == self.number(present.stage) and not present.apart:
            self._near[present.stage] = now
        for stage in {present.stage, present.wants}:
            life = self.life(stage)
            if life is not None and (_has(present, life) or _makes(peer, present, life)):
                self._shown[stage] = now
        return before is None or before.present is None or present.stage < 0

    def lose(self, peer: PeerId) -> None:
        """A stream to a peer broke, or it does not answer: it does not count until it is heard again."""
        if peer in self.entries:
            self.entries[peer].lost = True

    def forget(self, peer: PeerId) -> None:
        """It is gone."""
        self.entries.pop(peer, None)
        self.ways.forget(peer)

    def tick(self, now: float) -> None:
        """Count those that are lost, and forget those that are gone for long."""
        if self._listens_since is None:
            self._listens_since = now
        words = {
            peer: one.since for peer, one in self.entries.items() if one.present is not None and one.present.stage >= 0
        }
        self.losses.look(words, now)
        quiet = [peer for peer in self._homes() if now > self.entries[peer].since + QUIET_AFTER * self.heartbeat_s]
        self._told = {peer: self._told.get(peer, now) for peer in quiet if self._are_told(peer, now)}
        others = [peer for stage in range(1, self.stages) for peer in self.serving(stage, now)]
        self.hearsay.listen(self.counting(now), self.said_by(others))
        for peer in [p for p, entry in self.entries.items() if now > entry.since + FORGET_S]:
            self.forget(peer)

    def on_trial(self, now: float) -> frozenset[int]:
        """Stages that data nodes try by the loss."""
        said = self.said_by(self.training(0, now))
        return frozenset(stage for one in said for stage in one.tries if stage < self.stages)

    def _alive(self, now: float) -> list[PeerId]:
        return sorted(peer for peer, entry in self.entries.items() if self._is_alive(entry, now))

    def said_by(self, peers: Iterable[PeerId]) -> list[Present]:
        """The last words of these, where there are any."""
        return [said for peer in peers if (said := self.present(peer)) is not None]

    def speak(self, stage: int, word: Word, now: float) -> None:
        """What the newest commit of our own stage's chain says."""
        self._own = stage, word
        self._note_call(word.call, now)
        if any(life.number > self.number(life.stage) for life in (*word.lives, *([word.call] if word.call else []))):
            self._settle(now)

    def _note_call(self, call: Life | None, now: float) -> None:
        if number_of(call) > self._called[0]:
            self._called = number_of(call), now
        if self._called[0] <= self.number(0):
            self._open_since = None
        elif self._open_since is None:
            self._open_since = now

    def renew(self, lives: Iterable[Life], now: float) -> list[Life]:
        """Lives that count for certain. Those that are newer than what we knew."""
        newer = [life for life in lives if life.number > self.number(life.stage)]
        for life in newer:
            self.renewed[life.stage], self._shown[life.stage] = life, now
        return newer

    def _settle(self, now: float) -> None:
        """Take up lives that count by now: that stage 0 names, and those of stage 0, as far as it takes other stages to say so."""
        if self.decides_together:
            words = self.words(now)
            if (found := accord.elected(self.stages, words)) is not None and found[0].number > self.number(0):
                self._inherits = found
            self.renew(accord.homes(self.stages, words), now)
        decided = {life for entry in self.entries.values() if entry.present for life in entry.present.decided}
        while True:
            words, term = self.words(now) if self.decides_together else {}, self.number(0)
            named = [life for life in self._named(now) if life.number > self.number(life.stage) and life.stage > 0]
            counts = [
                life
                for life in named
                if not self.decides_together or life in decided or accord.acknowledged(self.stages, words, term, life)
            ]
            if not counts:
                break
            self.renew(counts, now)  # and with them others' words may count
        if self.decides_together and not self.training(
            0, now
        ):  # nobody names any, and those that are served count all the same
            words = self.words(now)
            listed = {(life.stage, life.number): life for word in words.values() for life in word.lives}
            served = [listed[stage, word.life] for stage, word in words.items() if (stage, word.life) in listed]
            self.renew(served, now)

    def _named(self, now: float) -> list[Life]:
        """By stage 0 in its newest life, in their order: by its chain where that is ours, else what half of the data nodes say."""
        if self.by_chain:
            own = self._own
            return list(own[1].lives) if own is not None and own[1].life == self.number(0) else []
        said = self.said_by(self.training(0, now))
        found = {
            life
            for present in said
            for life in present.lives
            if 2 * sum(number_in(one.lives, life.stage) >= life.number for one in said) >= len(said)
        }
        return sorted(found, key=lambda life: (life.stage, life.number, life.founder))

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
        return entry is not None and self._is_alive(entry, now)

    def _is_alive(self, entry: Entry, now: float) -> bool:
        return entry.present is not None and not entry.lost and now <= entry.since + SILENT_AFTER * self.heartbeat_s

    def _of_life(self, stage: int) -> Iterator[tuple[PeerId, Entry, Present]]:
        """Others that by their last word are of a stage, in its newest life, in no order."""
        number = self.number(stage)
        for peer, entry in self.entries.items():
            said = entry.present
            if said is not None and said.stage == stage and said.life == number:
                yield peer, entry, said

    def serving(self, stage: int, now: float) -> list[PeerId]:
        """Others that serve a stage, in its newest life, sorted."""
        return sorted(peer for peer, entry, _ in self._of_life(stage) if self._is_alive(entry, now))

    def training(self, stage: int, now: float) -> list[PeerId]:
        """Those of them that train."""
        return sorted(peer for peer, entry, said in self._of_life(stage) if said.trains and self._is_alive(entry, now))

    def counting(self, now: float) -> list[Present]:
        """What data nodes say that train, or have made the last round."""
        return [said for said in self.said_by(self.serving(0, now)) if said.trains or said.finished]

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
                if 0 <= stage < self.stages and (said.wants >= 0 or said.life == self.number(stage)):
                    counts[stage] += 1
        return tuple(counts)

    @property
    def decided(self) -> tuple[Life, ...]:
        """The newest life that counts of each stage that was begun anew, by stage."""
        return tuple(self.renewed[stage] for stage in sorted(self.renewed))

    def life(self, stage: int) -> Life | None:
        """The newest life of a stage, if we know any."""
        if stage == 0:
            return self.renewed.get(0, Life(0, 0, self.founder))
        appointment = self.appointments.get(stage)
        first = None if appointment is None else Life(stage, 0, appointment.founder)
        return self.renewed.get(stage, first)

    def number(self, stage: int) -> int:
        """Of that life; 0 when we know of none."""
        life = self.life(stage)
        return 0 if life is None else life.number

    def lost(self, now: float, *, held: int) -> tuple[int, ...]:
        """Stages that were begun, and of which we have heard nobody who has their state, in a chain with a quorum, for so long that they are lost, as
        far as we can tell. `held`: whose state we have ourselves, and say nothing of here; -1: none."""
        if self._listens_since is None:
            return ()
        soonest_s, usual_s = SOONEST_LOST * self.heartbeat_s, LOST_AFTER * self.heartbeat_s
        silent = [
            stage
            for stage in range(0 if self.decides_together else 1, self.stages)
            if stage not in self._shown or now > self._shown[stage] + soonest_s
        ]
        if not silent:
            return ()
        homes = self.said_by(self.training(0, now))
        others = [said for said in self.said_by(self._alive(now)) if said.stage > 0]
        found = []
        for stage in silent:
            patience_s = usual_s if stage else HOME_LOST_AFTER * self.heartbeat_s
            if stage in self._shown:
                at = min(self._shown[stage] + patience_s, self._end_counts_from(stage, homes))
            else:  # never heard: a data node may know better, or half of the others, or all may just be starting
                agree = sum(stage in said.lost for said in others)
                known = any(stage in said.lost for said in homes) or 0 < len(others) <= 2 * agree
                at = self._listens_since + (patience_s if known else STARTING_S)
            if stage != held and self.life(stage) is not None and now > at:
                found.append(stage)
        return tuple(found)

    def _end_counts_from(self, stage: int, homes: list[Present]) -> float:
        """From when on it is proof enough that the processes of all have ended that had a stage's state; infinity where not all have, as far as we can tell."""
        if stage == 0:
            ended = [self._ended_at(peer) for peer in self._homes()]
            return max([self._shown[0], *ended]) + HOME_GONE_AFTER * self.heartbeat_s if ended else math.inf
        if self.by_chain:
            held = self._held_by(stage)
            gone = bool(held) and all(self.entries[peer].ended_at is not None for peer in held)
        else:  # told by half of those who look
            gone = bool(homes) and 2 * sum(stage in said.lost for said in homes) >= len(homes)
        return self._shown[stage] + GONE_AFTER * self.heartbeat_s if gone else math.inf

    def _ended_at(self, peer: PeerId) -> float:
        """When we have learnt that the process of a data node has ended; infinity where we have not."""
        found = self.entries[peer].ended_at
        return min(math.inf if found is None else found, self._told.get(peer, math.inf))

    def _are_told(self, peer: PeerId, now: float) -> bool:
        """Whether half of the peers of some stage have found the process of a data node ended: only those that compute next to it have dialled it before."""
        heard = self.said_by(self._alive(now))
        size = Counter(said.stage for said in heard if said.stage > 0)
        agree = Counter(said.stage for said in heard if said.stage > 0 and peer in said.ended)
        return any(2 * agree[stage] >= size[stage] for stage in size)

    @property
    def ended(self) -> tuple[PeerId, ...]:
        """Of those that had the state of stage 0, whom we found ended ourselves; nobody if it is not on us to look."""
        return tuple(peer for peer in self._homes() if self.entries[peer].ended_at is not None)[:MAX_GROUP_PEERS]

    def quiet(self, now: float) -> list[PeerId]:
        """Peers that had the state of a stage of which we have heard nobody for a while, and of which we do not know that they have ended."""
        found = []
        for stage, shown in self._shown.items():
            until = shown + (LOST_AFTER if stage else HOME_LOST_AFTER) * self.heartbeat_s
            if self._looks_for(stage) and shown + QUIET_AFTER * self.heartbeat_s < now <= until:
                found += [peer for peer in self._held_by(stage) if self.entries[peer].ended_at is None]
        return found

    def _looks_for(self, stage: int) -> bool:
        """Whether it is on us to dial those who had the state of a stage: data nodes for the others, these for stage 0, where they may begin it anew."""
        return stage > 0 if self.by_chain else stage == 0 and self.decides_together

    def _homes(self) -> list[PeerId]:
        """Who had the state of stage 0, if it is on us to look whether they have ended."""
        return self._held_by(0) if self._looks_for(0) else []

    def _held_by(self, stage: int) -> list[PeerId]:
        """Who, by its last word, has the state of a stage's newest life."""
        return sorted(peer for peer, _, said in self._of_life(stage) if said.digest)

    def deserted(self, stage: int, now: float) -> bool:
        """Whether a stage that once had peers has none that we hear: routes need not wait for it."""
        if self.serving(stage, now) or stage not in self._shown:
            return False
        return self.number(stage) > 0 or now > self._shown[stage] + SILENT_AFTER * self.heartbeat_s

    # ---- where stages decide together (`accord`) ---------------------------------------------------------------

    @property
    def decides_together(self) -> bool:
        """Whether there are so many stages that they do."""
        return self.stages >= accord.FEWEST

    def words(self, now: float) -> dict[int, Word]:
        """What the chains of stages say, by the most advanced of their peers. Whoever serves a later life than we know proves that it counts."""
        heard = [] if self._own is None else [self._own]
        heard += [
            (said.stage, Word(said.life, said.lives, said.call))
            for peer in self.known
            if (said := self.present(peer)) is not None and said.stage >= 0 and self.alive(peer, now)
        ]
        found: dict[int, Word] = {}
        for stage, word in heard:
            if word.life >= self.number(stage):
                before = found.get(stage, word)
                found[stage] = max(before, word, key=lambda one: (one.life, number_of(one.call), rank(one.lives)))
        return found

    def named(self, now: float) -> tuple[Life, ...]:
        """The list that a stage is to acknowledge: the newest that half of the data nodes have, or have gone on from."""
        lists = [said.lives for said in self.said_by(self.training(0, now))]
        lists.sort(key=rank, reverse=True)
        newest = lists[(len(lists) - 1) // 2] if lists else ()
        return newest if number_in(newest, 0) == self.number(0) else ()

    def near(self, now: float) -> set[int]:
        """Stages, but our own, of which we have heard somebody lately whose chain has a quorum."""
        mine = -1 if self._own is None else self._own[0]
        since = now - LOST_AFTER * self.heartbeat_s
        return {stage for stage, at in self._near.items() if stage != mine and at >= since}

    def in_touch(self, now: float) -> bool:
        """Whether a data node hears enough stages: else the others may be going on without stage 0, and what was trained here would not count."""
        return not self.decides_together or accord.enough(self.stages, {0, *self.near(now)})

    def overdue(self, now: float) -> bool:
        """Whether whoever was called last to begin stage 0 anew has been called for long, and not by enough."""
        number, since = self._called
        return number > self.number(0) and now > since + LOST_AFTER * self.heartbeat_s

    def unsettled(self, now: float, times: float = 1.0) -> bool:
        """Whether there has been somebody like that for long, or so many times as long, be it one after another."""
        return self._open_since is not None and now > self._open_since + times * LOST_AFTER * self.heartbeat_s

    def inherits(self, life: Life, now: float) -> tuple[Life, ...] | None:
        """With which lives this one of stage 0 begins; None while we do not hear enough of those who have called it."""
        found = self._inherits if self._inherits is not None and self._inherits[0] == life else None
        found = found or accord.elected(self.stages, self.words(now))
        return None if found is None or found[0] != life else found[1]

    def swarm_s(self, now: float) -> float:
        """For how long the swarm has been running at least, as half of the data nodes that we hear show by the number of their heartbeats."""
        words = sorted(self.ways.words(peer) for peer in self.serving(0, now))
        return self.heartbeat_s * words[len(words) // 2] if words else 0.0


def in_order(swarm: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """Data nodes in the order in which they coordinate: the first of the living does. The same everywhere, and nobody can choose its place
    in all swarms."""
    return sorted(peers, key=lambda peer: (sha256(swarm + peer).digest(), peer))


def _has(present: Present, life: Life) -> bool:
    """Whether a peer says that it has the state of a life, and its chain a quorum."""
    held = (present.stage, present.life) == (life.stage, life.number) and present.digest
    return bool(held) and life.stage not in present.lost


def _makes(peer: PeerId, present: Present, life: Life) -> bool:
    """Whether it makes that, or leaves its own stage to do so. From outside it says which life it makes: a founder that has lost the state of one waits
    there for the next."""
    called = present.wants == life.stage and life.founder == peer
    return called and (present.stage >= 0 or present.life == life.number)
