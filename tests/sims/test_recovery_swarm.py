"""Mixed stage losses without a model: shadows, their budget and the ladder over vectors that walk at random.

More seeds by `swarm(seed)`; what came of them is in docs/experiments.md.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import pytest
import torch

from farflung.sims.recovery_keepers import pipeline_nbytes
from farflung.sims.recovery_methods import METHODS
from farflung.sims.recovery_ours import Ladder
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_tiers import CI
from farflung.training.model import ModelConfig
from farflung.training.recovery_rules import drawn

TIER = replace(
    CI, model=ModelConfig(vocab_size=8, dim=4, num_layers=6, num_heads=2, num_kv_heads=2, ffn_dim=4, seq_len=64)
)
OURS = METHODS[-1]
STEPS = 60


class Part:
    """A vector, and what it was after each step."""

    def __init__(self, values: torch.Tensor) -> None:
        self.flat, self.norm = values, 1.0
        self.history: list[torch.Tensor] = []

    def walk(self, generator: torch.Generator) -> None:
        self.flat += 0.01 * torch.randn(len(self.flat), generator=generator)
        self.history.append(self.flat.clone())


class Walkers:
    """What `Ladder` needs of a pipeline."""

    def __init__(self) -> None:
        self.tier = TIER
        self.stages = [Part(drawn(TIER.model, 1, seed)) for seed in range(TIER.stages)]
        self.ends = Part(torch.ones(36))
        self.parts = [*self.stages, self.ends]
        self.anew = 0

    def lose(self, lost: Iterable[int]) -> None:
        for stage in lost:
            self.stages[stage].flat.fill_(float("nan"))
            if stage == 0:
                self.ends.flat.fill_(float("nan"))

    def survivors(self, lost: frozenset[int]) -> dict[int, torch.Tensor]:
        return {stage: part.flat for stage, part in enumerate(self.stages) if stage not in lost}

    def replace(self, stage: int, vector: torch.Tensor, *, bump: bool) -> None:
        self.stages[stage].flat.copy_(vector)

    def replace_ends(self, vector: torch.Tensor) -> None:
        self.ends.flat.copy_(vector)

    def draw_ends(self, seed: int) -> None:
        self.ends.flat.fill_(1.0)
        self.anew += 1

    def fit(self, stage: int, config: object) -> None:
        pass


def losses(rng: random.Random) -> frozenset[int]:
    """None mostly; a stage, neighbours, ends, a region or everybody."""
    regions = [frozenset(s for s, there in enumerate(TIER.regions) if there == region) for region in "abcd"]
    first = rng.randrange(TIER.stages - 1)
    kinds = [frozenset({first}), frozenset({first, first + 1}), frozenset({0, 5}), rng.choice(regions)]
    if rng.random() < 0.02:
        return frozenset(range(TIER.stages))
    return rng.choice(kinds) if rng.random() < 0.15 else frozenset()


def swarm(seed: int) -> tuple[int, int]:
    """A run with all invariants checked. Returns stages that were lost, and those that came back from a shadow."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    walkers = Walkers()
    pipeline = cast(Pipeline, walkers)
    keeper = Ladder(OURS, pipeline, rate=0.33, seed=seed)
    lost_stages, alarms = 0, 0
    whole = 64 + 4 * max(len(part.flat) for part in walkers.parts)
    for step in range(STEPS):
        lost = losses(rng)
        walkers.lose(lost)
        shadows = dict(keeper._shadows)
        if lost:
            keeper.recover(pipeline, lost, step)
            lost_stages += len(lost)
            alarms += len(lost) * len(walkers.parts)
        for number, part in enumerate(walkers.parts):
            assert bool(part.flat.isfinite().all()), "recovered from something that was lost"
            stage = number % TIER.stages
            alive = [one for (piece, holder), one in shadows.items() if piece == number and int(holder[-1]) not in lost]
            if stage in lost and alive:  # the freshest copy that survived is what came back
                freshest = max(one.step for one in alive)
                was = part.history[freshest - 1] if freshest else None
                error = 0.0 if was is None else float((part.flat - was).norm() / was.norm())
                assert error < 0.15, f"seed {seed}, step {step}: piece {number} is off by {error}"
        for (number, holder), shadow in keeper._shadows.items():
            assert int(holder[-1]) != number % TIER.stages and int(holder[-1]) not in lost
            assert shadow.step <= step
        for part in walkers.parts:
            part.walk(generator)
        keeper.after_step(pipeline, step + 1)
        present = {number for number, _ in keeper._shadows}
        assert present == set(range(len(walkers.parts))), "a piece has no copy after the alarm"
        allowed = OURS.budget.share * (step + 1) * pipeline_nbytes(TIER) + alarms * whole
        assert keeper.sent.kept <= allowed + whole  # a payload may come to a little more than was expected of it
    return lost_stages, keeper.rungs["shadow"]


@pytest.mark.parametrize("seed", range(5))
def test_mixed_losses(seed: int) -> None:
    lost, from_shadows = swarm(seed)
    assert lost > 0 and from_shadows > 0
