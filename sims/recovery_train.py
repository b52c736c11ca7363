"""One run of `farflung bench recovery`, the explicit loop: stages are lost, come back, and training goes on.

The order within a step is CheckFree's: failures come before the first microbatch, recovery uses what survives, and
the step is made with the current batch. The curve and the final loss are those of held-out windows, all stages in
their order.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from farflung.sims.batches import batch_of
from farflung.sims.recovery_clock import Curve
from farflung.sims.recovery_failures import pattern
from farflung.sims.recovery_keepers import Keeper, Neighbours, pipeline_nbytes
from farflung.sims.recovery_live import Live, Rounds
from farflung.sims.recovery_methods import Method
from farflung.sims.recovery_node import ROUND_STEPS
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_tiers import Tier
from farflung.training.data import Dataset
from farflung.training.errors import NonFinite, Unrecoverable
from farflung.training.order import SampleOrder
from farflung.training.recovery_checkfree import CheckFree
from farflung.training.schedule import Schedule
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

Progress = Callable[[int, float], None]
"""Told the step that is done and its loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run came to."""

    curve: Curve
    """From step 0; of a single loss its first point is right after the recovery."""
    diverged: bool
    """Or stood, as so many stages were lost together that nobody may begin them anew. The curve then ends early."""
    losses: int
    """Stages that were lost."""
    pipeline_bytes: int
    """Activations and gradients of all steps, as coded."""
    kept_bytes: int
    """To keep copies fresh."""
    recovered_bytes: int
    """From copies to new peers."""
    rungs: dict[str, int]
    """How often a stage came back by what."""


def outcome_of(entry: dict[str, Any]) -> Outcome:
    """From what JSON makes of one. Raises TypeError and ValueError."""
    outcome = Outcome(**entry)
    return replace(outcome, curve=tuple((int(step), float(loss)) for step, loss in outcome.curve))


@lru_cache(maxsize=1)
def corpus(tier: Tier) -> Dataset:
    """The tier's data set."""
    return open_dataset(tier.data, ByteTokenizer(), tier.model.seq_len)


@lru_cache(maxsize=1)
def _windows(tier: Tier) -> Tensor:
    return torch.from_numpy(corpus(tier).heldout(tier.windows))


class Feed:
    """The batches and learning rates of a seed."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self._tier, self._data = tier, corpus(tier)
        self._order = SampleOrder(num_samples=self._data.num_samples, seed=seed)
        self._schedule = Schedule(peak=tier.lr, warmup_steps=tier.rise_steps, kind="constant")

    def step(self, pipeline: Pipeline, step: int) -> float:
        """Step `step` of the run. Returns its loss. Raises NonFinite."""
        size = self._tier.microbatches * self._tier.sequences
        tokens = batch_of(self._data, self._order, step, size).view(self._tier.microbatches, self._tier.sequences, -1)
        return pipeline.step(tokens, step=step, lr=self._schedule.at(step))


def train(
    method: Method, tier: Tier, *, rate: float, seed: int, progress: Progress = lambda step, loss: None
) -> Outcome:
    """A whole run, disturbed by the failures of this rate and seed; `none` by none. Raises DataError."""
    failures = pattern(tier, rate, seed) if method.fails else [frozenset[int]()] * tier.steps
    pipeline, keeper = start(method, tier, seed=seed)
    with closing(keeper):
        curve = [(0, pipeline.evaluate(_windows(tier)))]
        return _run(pipeline, keeper, Feed(tier, seed), failures, curve, progress)


def lose_once(
    method: Method,
    tier: Tier,
    stages: Sequence[int],
    *,
    seed: int,
    progress: Progress = lambda step, loss: None,
) -> Outcome:
    """Lose these stages together (none: for comparison), recover, and train on. The curve begins right after the recovery."""
    lost = frozenset(stages)
    pipeline, keeper = start(method, tier, seed=seed)
    with closing(keeper):
        if lost:
            pipeline.lose(lost)
            keeper.recover(pipeline, lost, tier.warm_steps)
        curve = [(0, pipeline.evaluate(_windows(tier)))]
        failures = [frozenset[int]()] * tier.event_steps
        return replace(_run(pipeline, keeper, Feed(tier, seed), failures, curve, progress), losses=len(lost))


def start(method: Method, tier: Tier, *, seed: int) -> tuple[Pipeline, Keeper]:
    """What all runs of a seed begin with, and what recovers by this method."""
    undisturbed, rounds = _undisturbed(method.checkfree, tier, seed)
    pipeline = undisturbed.copy()
    if method.kind == "ours":
        return pipeline, Live(pipeline, seed=seed, before=rounds)
    return pipeline, Neighbours(method, pipeline, seed=seed)


def _run(
    pipeline: Pipeline,
    keeper: Keeper,
    feed: Feed,
    failures: Sequence[frozenset[int]],
    curve: list[tuple[int, float]],
    progress: Progress,
) -> Outcome:
    tier, diverged = pipeline.tier, False
    for step, lost in enumerate(failures):
        try:
            loss = advance(pipeline, keeper, feed, tier.warm_steps + step, lost)
        except (NonFinite, Unrecoverable):
            diverged = True
            break
        if (step + 1) % tier.eval_every == 0:
            curve.append((step + 1, pipeline.evaluate(_windows(tier))))
        progress(step + 1, loss)
    return Outcome(
        curve=tuple(curve),
        diverged=diverged,
        losses=sum(map(len, failures)),
        pipeline_bytes=len(failures) * pipeline_nbytes(tier),
        kept_bytes=keeper.sent.kept,
        recovered_bytes=keeper.sent.recovered,
        rungs={str(rung): count for rung, count in keeper.rungs.items()},
    )


def advance(pipeline: Pipeline, keeper: Keeper, feed: Feed, step: int, lost: frozenset[int]) -> float:
    """Lose, recover and make step `step` of the run, undisturbed ones counted. Returns its loss. Raises NonFinite."""
    if lost:
        pipeline.lose(lost)
        keeper.recover(pipeline, lost, step)
    loss = feed.step(pipeline, step)
    keeper.after_step(pipeline, step + 1)
    return loss


@lru_cache(maxsize=2)
def _undisturbed(checkfree: CheckFree, tier: Tier, seed: int) -> tuple[Pipeline, Rounds]:
    """A pipeline after the undisturbed steps, and the rounds that live nodes had."""
    pipeline, feed, rounds = Pipeline(tier, checkfree, seed=seed), Feed(tier, seed), []
    for step in range(tier.warm_steps):
        feed.step(pipeline, step)
        if (step + 1) % ROUND_STEPS == 0:
            rounds.append((step + 1, [pipeline.held_by(stage).clone() for stage in range(tier.stages)]))
    return pipeline, rounds
