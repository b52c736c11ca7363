"""A plan carried out on one machine: every peer a worker with its own copy of its stages, in one process, without a clock.

It is driven by the same state machine as the simulator and shows what a schedule computes. On the swarm the same workers
are driven by stage servers (farflung.node).
"""

from collections.abc import Sequence

from torch import Tensor

from farflung.training.model import Decoder
from farflung.training.pipeline_machine import Bind, Machine, drive
from farflung.training.pipeline_plan import BadPlan, Kind, Op, Plan
from farflung.training.pipeline_worker import Accumulated, Batch, Worker, mean_gradients


def execute(
    plan: Plan,
    model: Decoder,
    layers: Sequence[int],  # per stage
    batches: Sequence[Batch],  # one per microbatch, in the order of `plan.schedule()`
    bind: Bind | None = None,
) -> tuple[list[float], dict[str, Tensor]]:  # loss per microbatch; gradients by the model's parameter names
    """One step of a valid plan: means over the visits of each stage. The model itself is left as it is.

    Raises BadPlan when stages, layers and batches do not fit.
    """
    if len(layers) != len(plan.stages):
        raise BadPlan(
            f"{len(layers)} stages of layers for a plan of {len(plan.stages)} stages; give each stage its layers"
        )
    if len(batches) != len(plan.schedule()):
        raise BadPlan(f"{len(batches)} batches for a plan of {len(plan.schedule())} microbatches; give one for each")
    machine = Machine(plan, bind)
    workers = [
        Worker(model, layers, {stage for stage, peers in enumerate(plan.stages) if peer in peers}, head=True)
        for peer in range(len(plan.peers))
    ]
    sums = [Accumulated() for _ in workers]
    arrived: dict[Op, Tensor] = {}
    inputs: dict[tuple[int, int], Tensor] = {}
    losses: dict[int, float] = {}

    def perform(op: Op) -> None:
        worker, into, stage = workers[machine.peer(op)], sums[machine.peer(op)], machine.stage(op)
        microbatch, hop = op.microbatch, op.hop
        key = (microbatch, hop)
        tokens, targets = batches[microbatch]
        hops = len(plan.lanes[machine.lane(op)].route)
        back = Kind.I if plan.split_backward else Kind.B
        if op.kind is Kind.F:
            inputs[key] = arrived.pop(op) if hop else tokens
            last = Op(Kind.LOSS, microbatch, 0 if plan.loss_at_home else hop)
            following = last if hop == hops - 1 else Op(Kind.F, microbatch, hop + 1)
            arrived[following] = worker.forward(stage, inputs[key])
        elif op.kind is Kind.LOSS:
            losses[microbatch], gradient = worker.loss(arrived.pop(op), targets, into)
            arrived[Op(back, microbatch, hops - 1)] = gradient
        elif op.kind is Kind.W:
            worker.weight_gradient(key, stage, into)
        else:
            x, gradient = inputs.pop(key), arrived.pop(op)
            if op.kind is Kind.I:
                of_input = worker.input_gradient(key, stage, x, gradient)
            else:
                of_input = worker.backward(stage, x, gradient, into)
            if of_input is not None:
                arrived[Op(back, microbatch, hop - 1)] = of_input

    drive(machine, perform)
    assert len(losses) == len(batches), "validate the plan before it is executed"
    return [losses[microbatch] for microbatch in range(len(batches))], mean_gradients(sums)
