"""From one plan to the next, in a fraction of a second (GWTF, 2509.21221; digest, 3.3).

A loss breaks the routes through that peer; a join gives its stage slots. Routes that are whole are kept, the others made
anew from what is free, and where the free slots do not fit together, a few whole ones as well. Then a short, cool search
improves all of them. It may change any route, which costs nothing, as hops keep no state between steps; but peers
keep their stages, as another stage means a download. With `proposals=0` whole routes stay as they are.

On the reference network, 20 000 proposals take 0.25 s of a core with the kernel and 2.5 s without: a lost data node costs 3 of 15
lanes and 14 % of the time of a step, a lost peer of another stage one lane and 4 %; a peer that returns restores both to 1 %.
"""

import random
from collections.abc import Sequence

from farflung.training.pipeline_plan import BadPlan, Plan
from farflung.training.pipeline_routes import Routes, Task, most_lanes
from farflung.training.pipeline_search import Search, improve

COOL = 0.008
"""First temperature of the search after a repair, over the makespan: it does not undo what is good."""
_ATTEMPTS = 20


def whole_paths(old: Plan, peers: Sequence[str], stages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Routes of a plan, by the places of `peers`, all of whose peers hold the same stage now."""
    place = {name: number for number, name in enumerate(peers)}
    held = {peer: number for number, stage in enumerate(stages) for peer in stage}
    paths = []
    for lane in old.lanes:
        path = [-1 if hop.peer is None else place.get(old.peers[hop.peer], -1) for hop in lane.route]
        if all(held.get(peer) == hop.stage for peer, hop in zip(path, lane.route, strict=True)):
            paths.append(path)
    return paths


def repair(
    task: Task,
    stages: Sequence[Sequence[int]],
    whole: Sequence[list[int]],  # paths that keep the task's rules
    *,
    proposals: int,
    seed: int,
) -> tuple[Routes, float]:
    """Routes near to these, and the seconds of a step. Raises BadPlan when nothing is feasible."""
    rng = random.Random(seed)
    kept = list(whole)[: most_lanes(task, stages)]  # in their order: the first lanes may have a microbatch more
    routes = _filled(task, stages, kept, rng)
    return routes, improve(routes, Search(proposals=proposals, seed=seed, roles=False, hot=COOL))


def _filled(task: Task, stages: Sequence[Sequence[int]], kept: list[list[int]], rng: random.Random) -> Routes:
    """As many of the kept routes as leave room for the others."""
    for attempt in range(_ATTEMPTS):
        try:
            return Routes(task, stages, rng, kept[: len(kept) * (_ATTEMPTS - attempt) // _ATTEMPTS])
        except BadPlan:
            rng.shuffle(kept)
    return Routes(task, stages, rng)
