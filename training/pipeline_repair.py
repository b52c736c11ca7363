"""From one plan to the next when a peer joins or leaves, in a fraction of a second (GWTF, 2509.21221; digest, 3.3).

A loss breaks the routes through that peer; a join gives its stage slots. Routes that are whole are kept, the others made
anew from what is free, and where the free slots do not fit together, a few whole ones as well. Then a short, cool search
improves all of them. It may change any route, which costs nothing, as hops keep no state between steps; but peers
keep their stages, as another stage means a download. With `proposals=0` whole routes stay as they are, which is the repair
for microbatches that are under way. The caller decides which stage a peer that joins should hold, or asks `neediest_stage`.

On the reference network, 20 000 proposals take 0.25 s of a core with the kernel and 2.5 s without: a lost data node costs 3 of 15
lanes and 14 % of the time of a step, a lost peer of another stage one lane and 4 %; a peer that returns restores both to 1 %.
"""

import random
from collections.abc import Sequence
from math import inf

from farflung.training.pipeline_plan import BadPlan
from farflung.training.pipeline_routes import Routes, Task, most_lanes
from farflung.training.pipeline_search import Search, improve

_COOL = 0.008
"""First temperature of the search after a repair, over the makespan: it does not undo what is good."""
_ATTEMPTS = 20


def neediest_stage(task: Task, stages: Sequence[Sequence[int]], peer: int) -> int:
    """Where `peer`, which no stage has yet, allows the most lanes; if that is equal, where routes have the fewest slots.

    Raises BadPlan when the peer has memory for none of the stages, or when no lane can run even with it.
    """
    visits = task.rules.visits
    share = (visits - 1) / max(1, len(stages) - 1)
    ranked = []
    for number, stage in enumerate(stages):
        if not task.holds(number, peer):
            continue
        joined = [[*one, peer] if other == number else list(one) for other, one in enumerate(stages)]
        need = share if number else 1.0
        slots = sum(task.slots[one] for one in stage)
        ranked.append((-most_lanes(task, joined), slots / need if need else inf, number))
    if not ranked:
        raise BadPlan(f"peer {peer} cannot hold any stage; it needs more memory")
    return min(ranked)[-1]


def repair(old: Routes, task: Task, stages: Sequence[Sequence[int]], *, proposals: int, seed: int) -> Routes:
    """Routes for `task` and `stages`, near to `old`; peers have the same numbers in both, and new ones the last.

    A peer that left is in none of the stages, and one that joined is in one. Raises BadPlan when nothing is feasible.
    """
    rng = random.Random(seed)
    held = {peer: number for number, stage in enumerate(stages) for peer in stage}
    kept = [path for path in old.paths if all(held.get(peer) == old.stage_of[peer] for peer in path)]
    rng.shuffle(kept)
    del kept[most_lanes(task, stages) :]
    routes = _filled(task, stages, kept, rng)
    improve(routes, Search(proposals=proposals, seed=seed, roles=False, hot=_COOL))
    return routes


def _filled(task: Task, stages: Sequence[Sequence[int]], kept: list[list[int]], rng: random.Random) -> Routes:
    """As many of the kept routes as leave room for the others."""
    for attempt in range(_ATTEMPTS):
        try:
            return Routes(task, stages, rng, kept[: len(kept) * (_ATTEMPTS - attempt) // _ATTEMPTS])
        except BadPlan:
            rng.shuffle(kept)
    return Routes(task, stages, rng)
