"""What goes wrong in a swarm with a pipeline, and when, drawn from a seed: whole stages are lost, and whoever mends that is hit, too.

Who serves which stage shows only as it goes, so a `Blow` says whom it hits by what he does (`Whom`), and `stage_losing` finds him when it falls.
Machines may be gone for good, those of stage 0 too where the others can replace them. What comes back in the end is as much as stages need to decide anything
(`protocol/accord.py`): of two stages the machines of stage 0, else those of so many stages that there are enough. So do links, and as many new machines as the
stages need come at the latest then; where too many of these are gone, too, some of the others come back.
"""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from farflung.protocol.manifest_sections import CHECKFREE, CHECKFREE_PLUS, LADDER, MIN_TWIN_STAGES

LAST = -1
"""In the place of a stage: the last one."""


class Whom(StrEnum):
    """Who is hit."""

    STAGES = "everybody of these stages"
    FIRST = "the first member of these stages, without whom the other one of two is no quorum"
    REGION = "everybody of this region"
    LEADER = "the data node that plans the steps"
    PROPOSER = "the data node whose turn it is to propose"
    CALLED = "whoever is called to begin a stage anew"
    ANYBODY = "somebody"


class What(StrEnum):
    """What happens to them."""

    KILL = "killed"
    POWER = "lose power"
    PAUSE = "stopped for a while"
    LEAVE = "leave"
    CUT = "cut off from all others for a while"
    DELAY = "slow to reach for a while"
    SLOW = "slow for a while"
    DROP = "messages are lost for a while"
    DUPLICATE = "messages are doubled for a while"
    COME = "a new machine comes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """One thing that goes wrong."""

    at: float
    """Seconds since the pipeline was well."""
    what: What
    whom: Whom = Whom.ANYBODY
    which: tuple[int, ...] = ()
    """Stages, or the region; of somebody, any number."""
    for_s: float | None = None
    """Until they are back; None: they never are, unless the end of the scene needs them."""
    much: float = 0.0
    """Of a delay in seconds, how many times as slow, or which share of messages."""

    def describe(self) -> str:
        """One readable line."""
        whose = "" if self.what in (What.DROP, What.DUPLICATE, What.COME) else f", {self.whom}"
        which = f" ({', '.join('the last' if one == LAST else str(one) for one in self.which)})" if self.which else ""
        back = "" if self.for_s is None else f", for {self.for_s:.1f} s"
        return f"{self.at:8.1f} s  {self.what}{whose}{which}{back}{f', {self.much:.2f}' if self.much else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A swarm, and what happens to it. Peers are numbers, 0 the founder."""

    stages: int
    layers: int
    placed: tuple[int, ...]
    """The stages of those who are there from the beginning."""
    newcomers: int
    """Machines that may come later."""
    regions: tuple[int, ...]
    """Of all of them."""
    skips: bool
    """Whether routes leave a stage out."""
    shadows: float
    delay_steps: int
    tied: bool
    """Whether the first ones keep to their stage whatever is needed later."""
    drop: float
    """Of messages, always."""
    blows: tuple[Blow, ...]
    dynamic: bool = False
    """Whether whoever sends a microbatch on chooses its way."""
    swaps: int = 0
    """Stages that a route may visit in swapped order."""
    recovery: str = LADDER
    """How lost stages come back, as manifests say it."""
    checkpoint_s: float = 0.0
    """Between two checkpoints of a peer; 0: after every round, as with models so small, and more as larger ones have it."""

    @property
    def num_peers(self) -> int:
        return len(self.placed) + self.newcomers

    def describe(self) -> list[str]:
        """Readable lines."""
        peers = ", ".join(f"{number} in stage {stage}" for number, stage in enumerate(self.placed))
        said = (
            f"{self.stages} stages of {self.layers} layers; {peers}; {self.newcomers} may come; regions {self.regions}"
        )
        traits = (
            f"skips {self.skips}, shadows {self.shadows}, delay {self.delay_steps}, tied {self.tied}, drop {self.drop}, "
            f"dynamic {self.dynamic}, swaps {self.swaps}, recovery {self.recovery}, checkpoints {self.checkpoint_s:g} s"
        )
        return [said, traits, *(blow.describe() for blow in self.blows)]


MEAN_GAP_S = 45.0
"""Between two blows, exponential: about what it takes to find out that a stage is lost."""

MOST_BLOWS = 4
"""Of a scene, without those that fall on whoever mends them."""

BY_RULE = 0.15
"""Share of scenes in which lost stages come back by CheckFree's rules alone."""

KINDS = {
    "stage": 4.0,
    "adjacent": 2.0,
    "ends": 2.0,
    "region": 2.0,
    "first": 2.0,
    "two at random": 1.0,
    "machine": 1.0,
    "planner": 1.0,
    "weather": 2.0,
    "come": 1.0,
}
"""Relative frequency of each kind."""


def draw_scene(seed: int) -> Scene:
    """All that the seed decides about a swarm and its misfortune."""
    rng = random.Random(f"{seed}/scene")
    stages = rng.randint(2, 6)
    most = rng.choice([1, 2, 2])
    placed = [stage for stage in range(stages) for _ in range(rng.randint(1, most))]
    newcomers, regions = rng.randint(2, stages), rng.randint(2, 4)
    scene = Scene(
        stages=stages,
        layers=stages + (rng.random() < 0.3),
        placed=(0, *placed[1:]),
        newcomers=newcomers,
        regions=tuple(rng.randrange(regions) for _ in range(len(placed) + newcomers)),
        skips=stages > 2 and rng.random() < 0.5,
        shadows=rng.choice([0.0, 0.02, 0.3, 1.0]),
        delay_steps=rng.choice([0, 0, 2]),
        tied=rng.random() < 0.3,
        drop=rng.choice([0.0, 0.0, 0.02]),
        blows=(),
    )
    routing = random.Random(f"{seed}/routing")
    dynamic = routing.random() < 0.4
    most_swaps = 2 if not dynamic and stages - scene.skips >= 3 else 0
    scene = replace(scene, dynamic=dynamic, swaps=routing.randint(0, most_swaps))
    by_rule = random.Random(f"{seed}/recovery")
    if by_rule.random() < BY_RULE:
        scene = replace(scene, recovery=CHECKFREE, layers=stages, shadows=0.0)
        if stages >= MIN_TWIN_STAGES and by_rule.random() < 0.5:
            scene = replace(scene, recovery=CHECKFREE_PLUS, skips=False, dynamic=False, swaps=0)
    checkpoint_s = random.Random(f"{seed}/checkpoints").choice([0.0, 0.0, 60.0, 300.0])
    scene = replace(scene, checkpoint_s=checkpoint_s)
    blows: list[Blow] = []
    now = 0.0
    for _ in range(rng.randint(1, MOST_BLOWS)):
        now += rng.expovariate(1.0 / MEAN_GAP_S)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        blows += _draw(rng, kind, scene, now)
    return replace(scene, blows=tuple(sorted(blows, key=lambda blow: blow.at)))


def _draw(rng: random.Random, kind: str, scene: Scene, now: float) -> list[Blow]:
    inner = range(1, scene.stages)
    match kind:
        case "stage":
            return _loss(rng, now, Whom.STAGES, (rng.choice(inner),))
        case "adjacent":
            first = rng.choice(inner)
            return _loss(rng, now, Whom.STAGES, (first, first + 1) if first + 1 < scene.stages else (first,))
        case "ends":
            return _loss(rng, now, Whom.STAGES, rng.choice([(0,), (LAST,), (0, LAST)]))
        case "region":
            return _loss(rng, now, Whom.REGION, (rng.choice(sorted(set(scene.regions))),))
        case "first":
            return _loss(rng, now, Whom.FIRST, (rng.choice(inner),))
        case "two at random":
            return _loss(rng, now, Whom.STAGES, tuple(sorted(rng.sample(range(scene.stages), 2))))
        case "machine":
            return _loss(rng, now, Whom.ANYBODY, (rng.randrange(1000),), mending=False)
        case "planner":
            return _loss(rng, now, rng.choice([Whom.LEADER, Whom.PROPOSER]), (), mending=False)
        case "weather":
            return [_weather(rng, now)]
        case _:
            return [Blow(at=now + rng.uniform(0.0, 5.0), what=What.COME) for _ in range(rng.randint(1, 2))]


def _loss(rng: random.Random, now: float, whom: Whom, which: tuple[int, ...], *, mending: bool = True) -> list[Blow]:
    """Machines go, and often something more happens while that is mended."""
    what = rng.choices([What.KILL, What.POWER, What.PAUSE, What.LEAVE, What.CUT], [5.0, 2.0, 1.0, 0.5, 1.0])[0]
    back = what in (What.PAUSE, What.CUT) or rng.random() < 0.4
    blows = [Blow(at=now, what=what, whom=whom, which=which, for_s=_outage(rng) if back else None)]
    if not mending:
        return blows
    if rng.random() < 0.5:
        blows.append(Blow(at=now + rng.uniform(0.0, 60.0), what=What.COME))
    if rng.random() < 0.3:
        whose = rng.choice([Whom.LEADER, Whom.PROPOSER])
        at = now + rng.uniform(20.0, 50.0)
        blows.append(Blow(at=at, what=What.KILL, whom=whose, for_s=rng.uniform(5.0, 40.0)))
    if rng.random() < 0.3:
        what = rng.choice([What.KILL, What.POWER, What.PAUSE])
        for_s = _outage(rng) if what is What.PAUSE or rng.random() < 0.4 else None
        blows.append(Blow(at=now + rng.uniform(0.1, 10.0), what=what, whom=Whom.CALLED, for_s=for_s))
    if rng.random() < 0.3:
        blows.append(_weather(rng, now + rng.uniform(0.0, 50.0)))
    return blows


def _weather(rng: random.Random, at: float) -> Blow:
    """Links or machines are bad for a while."""
    for_s = _outage(rng)
    match rng.choice([What.CUT, What.CUT, What.DROP, What.DUPLICATE, What.DELAY, What.SLOW]):
        case What.CUT:
            if rng.random() < 0.5:
                return Blow(at=at, what=What.CUT, whom=Whom.REGION, which=(rng.randrange(2),), for_s=for_s)
            some = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 3)))
            return Blow(at=at, what=What.CUT, which=some, for_s=for_s)
        case What.DELAY:
            return Blow(at=at, what=What.DELAY, which=(rng.randrange(1000),), for_s=for_s, much=rng.uniform(0.1, 3.0))
        case What.SLOW:
            return Blow(at=at, what=What.SLOW, which=(rng.randrange(1000),), for_s=for_s, much=rng.uniform(2.0, 10.0))
        case what:
            return Blow(at=at, what=what, for_s=for_s, much=rng.uniform(0.05, 0.5))


def _outage(rng: random.Random) -> float:
    return min(150.0, 3.0 + rng.expovariate(1.0 / 40.0))
