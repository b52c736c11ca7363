"""A plan carried out on one machine: every peer a worker with its own copy of its stages, in one process, without a clock.

It is driven by the same state machine as the simulator and shows what a schedule computes. A worker keeps the input of
each forward until its backward, which computes the forward again; what the swarm's stages will do, so that any peer of a stage
can serve a backward.

Gradients: a stage's parameters get the mean over the microbatches that visited it, the embedding, norm and head the mean
over all. With skips that is the unbiased mean (digest, 4.2), equal to a single process whose microbatches leave out the same
layers.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.training.model import Decoder, next_token_loss
from farflung.training.pipeline_machine import Bind, Machine, drive
from farflung.training.pipeline_plan import Kind, Op, Plan
from farflung.training.pipeline_stages import Head, Stage, split

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both [B, T] int64."""


class _Worker:
    """One peer: copies of its stages, and what it keeps between forward and backward."""

    def __init__(self, model: Decoder, layers: Sequence[int]) -> None:
        self.model = copy.deepcopy(model)
        self.model.zero_grad(set_to_none=True)
        self.stages: list[Stage]
        self.head: Head
        self.stages, self.head = split(self.model, layers)
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.weight_gradients: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, key: tuple[int, int], stage: int, x: Tensor) -> Tensor:
        self.inputs[key] = x
        with torch.no_grad():
            return self.stages[stage](x)  # type: ignore[no-any-return]  # nn.Module.__call__

    def loss(self, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the gradient of the last hop's output; the head's own is accumulated."""
        x_BTD = x_BTD.detach().requires_grad_()
        loss = next_token_loss(self.head(x_BTD), targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        assert x_BTD.grad is not None
        return loss.detach(), x_BTD.grad

    def backward(self, key: tuple[int, int], stage: int, gradient: Tensor, *, weights: bool) -> Tensor:
        """The gradient of the stage's input (of tokens: nothing); its parameters' too, or later by `weight_gradient`."""
        x = self.inputs.pop(key)
        if not weights:
            self.weight_gradients[key] = (x, gradient)
        if not x.is_floating_point():
            if weights:
                self.stages[stage](x).backward(gradient)
            return torch.empty(0)
        x = x.detach().requires_grad_()
        output = self.stages[stage](x)
        if weights:
            output.backward(gradient)
            assert x.grad is not None
            return x.grad
        return torch.autograd.grad(output, x, gradient)[0]

    def weight_gradient(self, key: tuple[int, int], stage: int) -> None:
        x, gradient = self.weight_gradients.pop(key)
        self.stages[stage](x).backward(gradient)


def execute(
    plan: Plan,
    model: Decoder,
    layers: Sequence[int],  # per stage
    batches: Sequence[Batch],  # one per microbatch, in the order of `plan.schedule()`
    bind: Bind | None = None,
) -> tuple[list[Tensor], dict[str, Tensor]]:  # loss per microbatch; gradients by the model's parameter names
    """One step of a valid plan. The model itself is left as it is. Raises BadPlan when stages and layers do not fit."""
    machine = Machine(plan, bind)
    workers = [_Worker(model, layers) for _ in plan.peers]
    arrived: dict[Op, Tensor] = {}
    losses: dict[int, Tensor] = {}
    visits = Counter[int]()

    def perform(op: Op) -> None:
        worker, stage = workers[machine.peer(op)], machine.stage(op)
        microbatch, hop = op.microbatch, op.hop
        key = (microbatch, hop)
        tokens, targets = batches[microbatch]
        hops = len(plan.lanes[machine.lane(op)].route)
        back = Kind.I if plan.split_backward else Kind.B
        if op.kind is Kind.F:
            visits[stage] += 1
            output = worker.forward(key, stage, arrived.pop(op) if hop else tokens)
            last = Op(Kind.LOSS, microbatch, 0 if plan.loss_at_home else hop)
            arrived[last if hop == hops - 1 else Op(Kind.F, microbatch, hop + 1)] = output
        elif op.kind is Kind.LOSS:
            losses[microbatch], gradient = worker.loss(arrived.pop(op), targets)
            arrived[Op(back, microbatch, hops - 1)] = gradient
        elif op.kind is Kind.W:
            worker.weight_gradient(key, stage)
        else:
            gradient = worker.backward(key, stage, arrived.pop(op), weights=op.kind is Kind.B)
            if hop:
                arrived[Op(back, microbatch, hop - 1)] = gradient

    drive(machine, perform)
    assert len(losses) == len(batches), "validate the plan before it is executed"
    return [losses[microbatch] for microbatch in range(len(batches))], _mean(workers, layers, visits, len(batches))


def _mean(workers: Sequence[_Worker], layers: Sequence[int], visits: Counter[int], everyone: int) -> dict[str, Tensor]:
    stage_of = [stage for stage, size in enumerate(layers) for _ in range(size)]
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    for worker in workers:
        for name, parameter in worker.model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad
    means = {}
    for name, total in sums.items():
        in_layer = name.startswith("model.layers.")
        means[name] = total / (visits[stage_of[int(name.split(".")[2])]] if in_layer else everyone)
    return means
