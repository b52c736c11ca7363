"""What leaving stages out at inference costs, for models trained with whole routes and with routes that skip (`farflung bench pipeline --skip-stages`).

A model of eight stages is trained in one process (`pipeline_execute`): every step has random feasible routes of so many visits, as SkipPipe's rules allow
them without swaps, and every stage takes the mean over its visits. Then some stages but the first are left out, in all possible choices: dropping the
first one is fatal (digest, 1.2). All models see the same batches, so one that skips a quarter of the stages has done a quarter less work in them.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import torch
from torch import Tensor, nn

from farflung.sims.batches import batch_of
from farflung.sims.pipeline_model import inner_of, model_of
from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.order import SampleOrder
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_execute import execute
from farflung.training.pipeline_plan import Plan
from farflung.training.pipeline_routes import Routes, Task
from farflung.training.pipeline_rules import Rules
from farflung.training.pipeline_stages import split
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

MODEL = model_of(8)
SHARES = (25, 50)
"""Percent of the stages left out at inference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippingTask:
    """The defaults are the bench; tests take less."""

    model: ModelConfig = MODEL
    """One layer in each stage."""
    visits: tuple[int, ...] = (8, 6, 5)
    """Of a route in training, for each model: all stages, a quarter left out, three eighths."""
    microbatches: int = 4
    batch: int = 4
    """Sequences of a microbatch."""
    steps: int = 300
    windows: int = 96
    """Held out."""
    seed: int = 0

    @property
    def stages(self) -> int:
        return self.model.num_layers

    @property
    def inner(self) -> InnerConfig:
        return inner_of(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippingRow:
    """One model."""

    trained: str
    perplexity: float
    """Of the whole model, held out, per byte."""
    left_out: dict[int, tuple[float, float, float]]
    """By percent of the stages: mean, least and greatest perplexity over all choices."""

    def told(self, share: int) -> str:
        """For people, with the increase of the mean."""
        mean, least, most = self.left_out[share]
        return f"{mean:.2f} ({least:.2f} to {most:.2f}), {100 * (mean / self.perplexity - 1):+.1f} %"


def skipping_rows(say: Callable[[str], None], task: SkippingTask | None = None) -> list[SkippingRow]:
    """Train and evaluate one model for each number of visits. Raises DataError."""
    task = SkippingTask() if task is None else task
    data = open_dataset("python", ByteTokenizer(), task.model.seq_len)
    order = SampleOrder(num_samples=data.num_samples, seed=task.seed)
    held_out = torch.from_numpy(data.heldout(task.windows))
    size = task.microbatches * task.batch
    rows = []
    for visits in task.visits:
        skipped = 100 * (task.stages - visits) / task.stages
        trained = f"{skipped:.3g} % skipped" if skipped else "whole"
        model, rng = Decoder(task.model, seed=task.seed), random.Random(task.seed)
        optimizer = make_optimizer(model, task.inner)
        for step in range(task.steps):
            tokens = batch_of(data, order, step, size).view(task.microbatches, task.batch, -1)
            losses, means = execute(
                routes(task, visits, rng), model, (1,) * task.stages, [(one[:, :-1], one[:, 1:]) for one in tokens]
            )
            for name, parameter in model.named_parameters():
                parameter.grad = means[name]
            nn.utils.clip_grad_norm_(model.parameters(), task.inner.max_grad_norm)
            optimizer.step(task.inner.schedule.at(step))
            optimizer.zero_grad()
            if step % 10 == 0:
                say(f"trained {trained}: step {step} of {task.steps}, loss {fmean(losses):.3f}")
        rows.append(evaluate(model, held_out, trained))
    return rows


def routes(task: SkippingTask, visits: int, rng: random.Random) -> Plan:
    """One lane for each microbatch; random, but all stages are used about as often."""
    nothing = tuple((0.0,) * task.stages for _ in range(task.stages))
    others = -(-task.microbatches * (visits - 1) // (task.stages - 1))
    planned = Task(
        peers=tuple(map(str, range(task.stages))),
        costs=Costs(forward_s=nothing, latency_s=nothing, transmit_s=nothing),
        slots=(task.microbatches, *(others,) * (task.stages - 1)),
        rules=Rules(visits=visits),
        num_microbatches=task.microbatches,
    )
    return Routes(planned, [[stage] for stage in range(task.stages)], rng).plan()


def evaluate(model: Decoder, held_out: Tensor, trained: str) -> SkippingRow:
    """Perplexities of the whole model, and with stages left out."""
    stages = model.config.num_layers
    left_out = {}
    for share in SHARES:
        found = [
            _perplexity(model, held_out, choice) for choice in combinations(range(1, stages), stages * share // 100)
        ]
        left_out[share] = (fmean(found), min(found), max(found))
    return SkippingRow(trained=trained, perplexity=_perplexity(model, held_out, ()), left_out=left_out)


@torch.no_grad()
def _perplexity(model: Decoder, held_out: Tensor, left_out: Sequence[int]) -> float:
    stages, head = split(model, (1,) * model.config.num_layers)
    x = held_out[:, :-1]
    for number, stage in enumerate(stages):
        if number not in left_out:
            x = stage(x)
    return math.exp(float(next_token_loss(head(x), held_out[:, 1:])))
