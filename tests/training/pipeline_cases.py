"""Random pipelines for the tests of plans: small networks, unequal in everything."""

import random

from hypothesis import strategies as st

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_routes import Routes, Task
from farflung.training.pipeline_rules import Rules

SEEDS = st.integers(0, 2**32 - 1)


def random_task(seed: int, *, ties: bool = False) -> tuple[Task, list[list[int]]]:
    """A task and its stages; with `ties` all times are small integers, so that much happens at the same instant."""
    rng = random.Random(seed)
    num_stages = rng.randint(1, 6)
    sizes = [rng.randint(1, 3) for _ in range(num_stages)]
    count = sum(sizes)
    everybody = range(count)

    def table(rows: int, low: float, high: float) -> tuple[tuple[float, ...], ...]:
        draw = (lambda: float(rng.randint(1, 3))) if ties else (lambda: rng.uniform(low, high))
        return tuple(tuple(draw() for _ in everybody) for _ in range(rows))

    order = list(everybody)
    rng.shuffle(order)
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    stages = [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    costs = Costs(
        forward_s=table(num_stages, 0.5, 2.0),
        latency_s=table(count, 0.0, 1.0),
        transmit_s=table(count, 0.0, 3.0),
        backward=2.0 if ties else 1.5,
        loss=1.0 if ties else 0.25,
        pause_s=rng.choice((0.0, 1.0 if ties else 0.13)),
        shared_uplinks=rng.random() < 0.7,
    )
    task = Task(
        peers=tuple(f"peer {peer}" for peer in everybody),
        costs=costs,
        slots=tuple(rng.randint(1, 3) for _ in everybody),
        rules=Rules(visits=rng.randint(max(1, num_stages - 2), num_stages), max_swaps=rng.randint(0, 2)),
        num_microbatches=rng.randint(1, 12),
    )
    return task, stages


def random_routes(seed: int, *, ties: bool = False) -> Routes:
    task, stages = random_task(seed, ties=ties)
    return Routes(task, stages, random.Random(seed))
