"""Whether one peer of a pipeline should leave its stage for another, which one, and for where: by what the steps of late have cost.

SWARM (digest, 3.1) moves a peer from the stage with the shortest queue to the one with the longest, every 300 s. Queues of one moment are noise
where steps are planned; what makes them grow is how long the peers of a stage need, all together, for what a step asks of them:

    v = max(computing / visits * weight(there) / weight(here), sending / visits)      seconds of a peer for one visit, here or elsewhere
    T = sum of visits / sum of 1/v                                                    seconds of a stage for one step, over its peers

Computing and sending are measured by each peer and told in its `Present`; weights are the products of a stage's layers and head. A stage bounds a step by its T, so the longest T is the *poor* stage.

Two reasons to move:

* **The last replica.** A stage of one peer is lost with it. It is the poorest of all, whatever its load; a peer of the stage with the most peers
  goes there, though that stage may be left with two.
* **Load.** From the stage where it costs least to the poorest, when the longer of the two T's becomes shorter by `MARGIN`, and that pays for the
  time of the move, counted as if the whole swarm stood still for it. The stage that gives keeps three.

Nobody moves back and forth: a move by load makes the longer T of two stages shorter, so the list of all T's, longest first, falls in the order of
dictionaries and never comes back; and as measurements are noisy, whoever has moved rests, and everybody waits until all have been where they are
for some steps. There is one move at a time.

The decision depends on nothing but the scene, in any order of its entries. The coordinator of steps decides; whoever is asked looks in its own scene
whether the move is allowed (`wrong`), so that a broken coordinator cannot strip a stage.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from farflung.protocol.keys import PeerId
from farflung.protocol.pipeline_messages import Present

KEEP = 3
"""Replicas that a stage keeps when it gives one for the sake of speed: of three, two are a quorum of their chain."""

KEEP_FOR_THE_LAST = 2
"""The same, when the other stage has one only."""

MARGIN = 0.15
"""By how much the longer T of two stages must become shorter. Measured shares of steps vary by a few hundredths."""

SETTLED_STEPS = 10
"""So long everybody has been in its stage before loads mean something: the means of `Load` then hold 94 % of new steps."""

REST_STEPS = 20
"""So long nobody moves by load who has just come: until two changes of the others have settled."""

ARRIVAL_STEPS = 50
"""Who has been on its way into a stage for so many steps is not counted on any more."""

HORIZON_STEPS = 100
"""Gains are counted on for so long, for peers come and go."""

AWAY_S = 20.0
"""Of a peer that moves, beside its download: it is let go, builds a learner, and is taken in."""

RATE_BYTES_PER_S = 1.25e6
"""Of an uplink that nobody has measured: 10 Mbit/s."""

VISIT_FORWARDS = 3.5
"""A visit in forwards: one, and a backward of 2.5 that computes it anew (SWARM's figure)."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one peer knows when it asks whether somebody should move."""

    said: Mapping[PeerId, Present]
    """Of everybody who lives, ourselves included."""
    weights: tuple[float, ...]
    """Of each stage: what a visit computes, relative to the others."""
    state_bytes: tuple[int, ...]
    """Of each stage, what a newcomer downloads."""
    founder: PeerId
    """Of the swarm: its machine never leaves stage 0."""
    step: int
    """The next one of the pipeline."""
    steps_left: int
    alarm: frozenset[int] = frozenset()
    """Stages that have had fewer than two replicas for a while."""
    aside: frozenset[PeerId] = frozenset()
    """Peers that were asked lately and did not go."""

    @cached_property
    def staff(self) -> list[list[PeerId]]:
        """Replicas of each stage, sorted: who trains there and stays."""
        staff: list[list[PeerId]] = [[] for _ in self.weights]
        for peer in sorted(self.said):
            said = self.said[peer]
            if 0 <= said.stage < len(staff) and said.trains and said.wants < 0:
                staff[said.stage].append(peer)
        return staff

    @cached_property
    def moving(self) -> list[PeerId]:
        """Who is about to leave its stage for another, sorted."""
        return [peer for peer in sorted(self.said) if self.said[peer].stage >= 0 and self.said[peer].wants >= 0]

    @cached_property
    def arriving(self) -> set[int]:
        """Stages into which somebody is on the way."""
        found = set[int]()
        for said in self.said.values():
            if said.wants >= 0:
                found.add(said.wants)
            elif said.stage >= 0 and not said.trains and self.step - said.since <= ARRIVAL_STEPS:
                found.add(said.stage)
        return found


class Move(NamedTuple):
    """One peer leaves its stage for another."""

    peer: PeerId
    stage: int
    to: int
    urgent: bool
    """Because the other stage has one replica only."""
    reason: str
    """A sentence for people."""


def decide(scene: Scene) -> Move | None:
    """The one move that is worth it now, if there is one."""
    staff = scene.staff
    if not all(staff) or scene.moving or scene.steps_left < SETTLED_STEPS:
        return None  # without peers a stage is not poor but lost, which is another matter (`docs/architecture.md`)
    rates = _Rates(scene, staff)
    alone = [stage for stage in scene.alarm - scene.arriving if len(staff[stage]) == 1]
    for stage in sorted(alone, key=lambda one: (-rates.seconds(one), one)):
        move = _to_the_last(scene, staff, rates, stage)
        if move is not None:
            return move
    everybody = [peer for peers in staff for peer in peers]
    if scene.arriving or any(scene.step - scene.said[peer].since < SETTLED_STEPS for peer in everybody):
        return None
    return _by_load(scene, staff, rates)


def neediest(scene: Scene, counts: Sequence[int], fits: Collection[int], me: PeerId, wanted: int = -1) -> int:
    """The stage that a newcomer takes, of those that fit it: the one that takes longest for a step, as its peers tell what steps cost them.

    `scene` lacks the newcomer, and of it nothing counts but who serves what at which cost. `counts`: peers of each stage without the newcomer; those
    of them of whom the scene knows nothing are others that are about to come, and each shortens a step like one more of the usual rate. A stage of
    nobody comes first, then one of a single peer, which would be lost with it. While the costs of any stage that could be taken are unknown, the
    fewest peers decide. `wanted`, what it has said that it takes (-1: nothing yet), stays as long as nothing needs it more.

    Times that differ by less than `MARGIN` are equal, for measurements do; equal stages fall by a hash of the newcomer's key and their numbers, so that
    of those who come in the same moment not all take the same.
    """
    fewest = min(counts[stage] for stage in fits)
    rates, staff = _Rates(scene, scene.staff), scene.staff
    if fewest < KEEP_FOR_THE_LAST or any(rates.seconds(stage) <= 0.0 for stage in fits):
        equal = [stage for stage in fits if counts[stage] == fewest]
    else:
        needs = {stage: rates.seconds(stage) * min(1.0, len(staff[stage]) / counts[stage]) for stage in fits}
        equal = [stage for stage in fits if needs[stage] >= (1.0 - MARGIN) * max(needs.values())]
    if wanted in equal:
        return wanted
    return min(equal, key=lambda stage: (sha256(me + stage.to_bytes(2, "big")).digest(), stage))


def wrong(scene: Scene, peer: PeerId, to: int, *, urgent: bool) -> str:
    """What forbids a peer of the scene to move; empty when nothing does."""
    said, staff = scene.said[peer], scene.staff
    if not 0 <= to < len(staff) or to == said.stage:
        return f"there is no way from stage {said.stage} to stage {to}"
    if peer == scene.founder:
        return "the founder's machine serves stage 0, for it began it"
    if to not in said.fits:
        return f"this machine cannot serve stage {to}, or was told to serve stage {said.stage}"
    others = [one for one in staff[said.stage] if one != peer]
    keeps = KEEP_FOR_THE_LAST if urgent else KEEP
    if len(others) < keeps:
        return f"stage {said.stage} would be left with {len(others)} peers, and keeps {keeps}"
    if urgent and len(staff[to]) > 1:
        return f"stage {to} has {len(staff[to])} peers"
    if not urgent and scene.step - said.since < REST_STEPS:
        return f"it came at step {said.since}, and stays for {REST_STEPS} steps"
    first = min([peer, *scene.moving])
    return "" if first == peer else "another peer moves"


def _to_the_last(scene: Scene, staff: list[list[PeerId]], rates: "_Rates", to: int) -> Move | None:
    """A peer of the stage with the most of them joins a last replica."""
    able = [
        (-len(staff[scene.said[peer].stage]), rates.worse_after(peer, to), peer)
        for peer in _able(scene, staff, to, urgent=True)
    ]
    if not able:
        return None
    fewer, _, peer = min(able)
    stage = scene.said[peer].stage
    return Move(peer, stage, to, True, f"stage {to} has one peer only, stage {stage} has {-fewer}")


def _by_load(scene: Scene, staff: list[list[PeerId]], rates: "_Rates") -> Move | None:
    """To the stage that takes longest, if it is worth it."""
    to = max(range(len(staff)), key=lambda stage: (rates.seconds(stage), -stage))
    before = rates.seconds(to)
    able = [
        (rates.worse_after(peer, to), -len(staff[scene.said[peer].stage]), peer)
        for peer in _able(scene, staff, to, urgent=False)
    ]
    if not able:
        return None
    after, _, peer = min(able)
    gain_s = before - after
    donated = sum(scene.said[donor].up_bytes_per_s or RATE_BYTES_PER_S for donor in staff[to])
    away_s = AWAY_S + scene.state_bytes[to] / donated
    if gain_s < MARGIN * before or gain_s * min(scene.steps_left, HORIZON_STEPS) <= away_s:
        return None
    stage = scene.said[peer].stage
    reason = f"stage {to} needs {before:.3g} s for a step and stage {stage} {rates.seconds(stage):.3g} s; after it {after:.3g} s"
    return Move(peer, stage, to, False, reason)


def _able(scene: Scene, staff: list[list[PeerId]], to: int, *, urgent: bool) -> Collection[PeerId]:
    """Who may go there."""
    keeps = KEEP_FOR_THE_LAST if urgent else KEEP
    givers = [peer for peers in staff if len(peers) > keeps for peer in peers]
    return [peer for peer in givers if peer not in scene.aside and not wrong(scene, peer, to, urgent=urgent)]


class _Rates:
    """How long stages take, and would take."""

    def __init__(self, scene: Scene, staff: list[list[PeerId]]) -> None:
        self._scene, self._staff = scene, staff
        self._visits = [sum(scene.said[peer].load.visits for peer in peers) for peers in staff]
        self._own: dict[PeerId, float] = {}
        """Visits a second of each peer in its own stage; those that nobody knows are like the others' of the stage."""
        for peers in staff:
            known = {peer: rate for peer in peers if (rate := self._measured(peer, scene.said[peer].stage)) > 0.0}
            usual = sum(known.values()) / len(known) if known else 0.0
            self._own |= {peer: known.get(peer, usual) for peer in peers}
        self._together = [sum(self._own[peer] for peer in peers) for peers in staff]

    def seconds(self, stage: int) -> float:
        """T of a stage; 0 while nothing is known of it."""
        return _ratio(self._visits[stage], self._together[stage])

    def worse_after(self, peer: PeerId, to: int) -> float:
        """The longer T of two stages when a peer has moved from one to the other."""
        stage = self._scene.said[peer].stage
        there = self._measured(peer, to) or self._together[to] / len(self._staff[to])
        left = _ratio(self._visits[stage], self._together[stage] - self._own[peer])
        return max(left, _ratio(self._visits[to], self._together[to] + there))

    def _measured(self, peer: PeerId, at: int) -> float:
        """Visits a second at a stage; 0 when nothing is known."""
        said = self._scene.said[peer]
        load, more = said.load, self._scene.weights[at] / self._scene.weights[said.stage]
        if load.visits > 0.0:
            return _ratio(load.visits, max(load.computing_s * more, load.sending_s))
        return _ratio(1.0, VISIT_FORWARDS * said.forward_s * more)


def _ratio(of: float, to: float) -> float:
    return of / to if to > 0.0 else 0.0
