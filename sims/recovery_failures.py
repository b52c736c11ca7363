"""Which stages are lost before which step: independent, as in CheckFree's experiments; the same for all methods of a
seed.

Two neighbours in one step are left out of the patterns, as in the publication, for its rule has nothing to recover
them from: of such a pair the later one lives. End stages are lost like any other. What is left out here is measured by
itself: `events`.
"""

import random
from dataclasses import dataclass

from farflung.sims.recovery_methods import OURS
from farflung.sims.recovery_tiers import Tier
from farflung.training.recovery_costs import per_iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Stages that are lost together, once, in the middle of a run."""

    name: str
    about: str
    stages: tuple[tuple[int, ...], ...]
    """Which ones: one run for each."""
    rungs: tuple[str, ...]
    """Names of `recovery_methods.SINGLE` that can recover them."""


def pattern(tier: Tier, rate: float, seed: int) -> list[frozenset[int]]:
    """The stages lost before each step of a run, at so many failures per stage and hour."""
    chance = per_iteration(rate, tier.clock.iteration_s)
    rng = random.Random(f"recovery {rate} {seed}")
    steps = []
    for _ in range(tier.steps):
        lost: set[int] = set()
        for stage in range(tier.stages):
            if rng.random() < chance and stage - 1 not in lost:
                lost.add(stage)
        steps.append(frozenset(lost))
    return steps


def events(tier: Tier) -> tuple[Event, ...]:
    """The single losses of a tier."""
    last = tier.stages - 1
    middle = tier.stages // 2
    region = max(set(tier.regions), key=lambda one: (tier.regions.count(one), one))
    of_region = tuple(stage for stage, there in enumerate(tier.regions) if there == region)
    ours = OURS.name
    apart, ends = (ours, "neighbour mean", "copy", "random"), (ours, "swap twin", "copy", "random")
    return (
        Event(
            name="interior",
            about="one stage in the middle",
            stages=((middle - 1,), (middle,)),
            rungs=(ours, "fitted mean", *apart[1:]),
        ),
        Event(name="end", about="the first or the last stage", stages=((0,), (last,)), rungs=ends),
        Event(
            name="adjacent",
            about="two neighbours at once",
            stages=((middle - 1, middle),),
            rungs=(ours, "interpolation", "copy", "random"),
        ),
        Event(name="both ends", about="the first and the last stage at once", stages=((0, last),), rungs=ends),
        Event(
            name="region",
            about=f"{len(of_region)} of {tier.stages} peers at once, all of region {region}, with the shadows that they held",
            stages=(of_region,),
            rungs=apart,
        ),
    )
