"""What it costs that peers of a stage train apart between rounds, by how microbatches are routed and by how the rounds are taken (`farflung bench drift`).

Peer c of every stage is column c, and so is data node c. A route may stay in its column, or leave it at some of its hops: then it crosses peers whose
parameters have drifted apart since the last round. The digest (5.1) recommends a home column that may be left, and rounds that are taken often, or in
each of which a part of the stage has its turn. Here all of it is trained in one process with what peers of a swarm have: `StageReplica`s, each with its
own parameters and moments, its mean over its own visits and its own clipping, and `Fragment`s. Rounds are exact (fp32), so that nothing else is seen.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from farflung.sims.batches import batch_of
from farflung.sims.pipeline_model import inner_of, model_of
from farflung.training.flat import flatten
from farflung.training.fragments import Fragment, cut
from farflung.training.inner import InnerConfig
from farflung.training.left_out import heldout_loss
from farflung.training.model import ModelConfig
from farflung.training.order import SampleOrder
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_worker import Accumulated
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.sources import open_dataset
from farflung.training.stage_replica import StageReplica
from farflung.training.tokenizer import ByteTokenizer

MODEL = model_of(4)
LAST_STEPS = 30
"""Steps at the end over which the loss of what peers train is averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftTask:
    """The defaults are the bench; tests take less."""

    model: ModelConfig = MODEL
    """One layer in each stage."""
    columns: int = 3
    """Peers of each stage."""
    microbatches: int = 6
    """Of a step, the same number from each data node."""
    batch: int = 4
    """Sequences of a microbatch."""
    steps: int = 360
    windows: int = 96
    """Held out."""
    inner_steps: tuple[int, ...] = (5, 15, 30, 90)
    """H: steps between two rounds of the same parameters."""
    fragments: int = 5
    """Parts of a stage that have their turn in rotating rounds."""
    leave: float = 1 / 3
    """Share of the microbatches that are dealt out anew at each hop where a home column may be left."""

    def __post_init__(self) -> None:
        if self.microbatches % self.columns or any(self.steps % h or h % self.fragments for h in self.inner_steps):
            raise ValueError("microbatches must be dealt evenly, and a run end with a round, as must every turn")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1,) * self.model.num_layers

    @property
    def inner(self) -> InnerConfig:
        return inner_of(self.steps)

    @property
    def outer(self) -> Nesterov:
        return Nesterov(lr=0.7, momentum=0.5)

    def ways(self) -> list["Way"]:
        """All that are compared, after peers that average their gradients in each step."""
        routes = (("columns", 0.0), ("home", self.leave), ("mesh", 1.0))
        return [
            Way(routes=name, leave=leave, inner_steps=inner, fragments=fragments)
            for fragments in (1, self.fragments)
            for inner in self.inner_steps
            for name, leave in routes
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train."""

    routes: str
    """`columns`, `home` or `mesh`."""
    leave: float
    """Share of a step's microbatches that are dealt out anew at each hop."""
    inner_steps: int
    """H."""
    fragments: int
    """1: a round moves the whole stage. Else a part of it, so many times as often."""

    @property
    def rounds(self) -> str:
        return "whole" if self.fragments == 1 else "rotating"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What one run came to, in nats per byte."""

    heldout: float
    """Of the outer parameters after the last round."""
    local: float
    """In training, over the last steps: of microbatches as they were routed."""


def train(
    task: DriftTask,
    way: Way | None,  # None: one peer for each stage, which is what averaging gradients in each step comes to
    seed: int,  # of parameters, order of the samples and routes
    say: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Raises DataError."""
    data = open_dataset("python", ByteTokenizer(), task.model.seq_len)
    order, rng = SampleOrder(num_samples=data.num_samples, seed=seed), random.Random(seed)
    stages = range(task.model.num_layers)
    columns, leave, fragments = (1, 0.0, 1) if way is None else (task.columns, way.leave, way.fragments)
    peers = [
        [StageReplica(task.model, StageSlice(task.sizes, stage), task.inner, task.outer, seed=seed) for stage in stages]
        for _ in range(columns)
    ]
    parts = [cut(one.layout.slots, fragments) for one in peers[0]]
    size = task.microbatches * task.batch
    last: list[float] = []
    for step in range(task.steps):
        tokens = batch_of(data, order, step, size).view(task.microbatches, task.batch, -1)
        sums = [[Accumulated() for _ in stages] for _ in range(columns)]
        routes = dealt(task, columns, leave, rng)
        losses = [visit(peers, sums, route, one) for route, one in zip(routes, tokens, strict=True)]
        for column, row in enumerate(peers):
            for stage, peer in enumerate(row):
                seen = sums[column][stage]
                peer.step(seen, step, loss=float("nan"), tokens=seen.visits[stage] * task.batch * task.model.seq_len)
        if way is not None and (step + 1) % (every := way.inner_steps // fragments) == 0:
            turn = (step + 1) // every - 1
            for stage in stages:
                take_round([row[stage] for row in peers], parts[stage][turn % fragments])
        if step >= task.steps - LAST_STEPS:
            last += losses
        say(step + 1, fmean(losses))
    for stage in stages:
        for part in parts[stage][:-1]:  # what was learnt after their last turn; that of the last part has just been
            take_round([row[stage] for row in peers], part)
    held_out = torch.from_numpy(data.heldout(task.windows))
    flats = {stage: one.outer.params if way is not None else _local(one) for stage, one in enumerate(peers[0])}
    return Trained(heldout=heldout_loss(task.model, task.sizes, flats, held_out, (), Runtime()), local=fmean(last))


def dealt(task: DriftTask, columns: int, leave: float, rng: random.Random) -> list[list[int]]:
    """For each microbatch of a step the column of each hop. Every peer gets the same number of visits; stage 0 is at its data node."""
    home = [microbatch % columns for microbatch in range(task.microbatches)]
    hops = [home]
    for _ in range(task.model.num_layers - 1):
        hop, leaving = list(home), sorted(rng.sample(range(task.microbatches), round(leave * task.microbatches)))
        for microbatch, other in zip(leaving, rng.sample(leaving, len(leaving)), strict=True):
            hop[microbatch] = home[other]
        hops.append(hop)
    return [list(route) for route in zip(*hops, strict=True)]


def visit(
    peers: Sequence[Sequence[StageReplica]],  # by column and stage
    sums: Sequence[Sequence[Accumulated]],  # gradients are added here
    route: Sequence[int],  # column of each stage
    tokens: Tensor,  # int64 [B, T + 1]
) -> float:
    """One microbatch, there and back; returns its loss."""
    x, inputs = tokens[:, :-1], []
    for stage, column in enumerate(route):
        inputs.append(x)
        x = peers[column][stage].worker.forward(stage, x)
    loss, gradient = peers[route[0]][0].worker.loss(x, tokens[:, 1:], sums[route[0]][0])
    back: Tensor | None = gradient
    for stage, column in reversed(list(enumerate(route))):
        assert back is not None
        back = peers[column][stage].worker.backward(stage, inputs[stage], back, sums[column][stage])
    return loss


def take_round(peers: Sequence[StageReplica], part: Fragment) -> None:
    """The peers of a stage average what they have learnt in a part of it since its last round, and take the outer step."""
    for peer in peers:
        peer.offer()
    updates = [
        (start, stop, torch.stack([peer.offered_gradient(start, stop) for peer in peers]).mean(0))
        for start, stop in part.slices
    ]
    for peer in peers:
        peer.apply(updates, contributed=True)


def _local(peer: StageReplica) -> Tensor:
    return flatten(peer.layout, peer.parameters, torch.empty(peer.num_parameters))
