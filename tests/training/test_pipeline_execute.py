"""What a schedule computes is what one process computes, whatever the order, the peers and the routes."""

import math

import pytest
import torch
from torch import Tensor

from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_execute import execute
from farflung.training.pipeline_plan import BadPlan, Hop, Lane, Plan
from farflung.training.pipeline_rules import Rules, validate
from farflung.training.pipeline_schedules import (
    checkfree_plus,
    dynamic,
    gpipe,
    interleaved,
    least_loaded,
    one_f_one_b,
    zero_bubble_h1,
)
from farflung.training.pipeline_worker import Batch

LAYERS = 6
NAMES = ("a", "b", "c")


def model(*, tied: bool = True) -> Decoder:
    config = ModelConfig(
        vocab_size=32,
        dim=16,
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=2,
        ffn_dim=24,
        seq_len=8,
        tie_embeddings=tied,
    )
    return Decoder(config, seed=3)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (count, 2, 9), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def single_process(decoder: Decoder, layer_orders: list[list[int]], data: list[Batch]) -> dict[str, Tensor]:
    """Mean gradients of a model in which each microbatch passes through these layers only, in this order."""
    decoder.zero_grad(set_to_none=True)
    for order, (tokens, targets) in zip(layer_orders, data, strict=True):
        trunk = decoder.model
        x = trunk.embed_tokens(tokens)
        for layer in order:
            x = trunk.layers[layer](x, trunk.rotary)
        table = trunk.embed_tokens if decoder.lm_head is None else decoder.lm_head
        next_token_loss(trunk.norm(x) @ table.weight.T, targets).backward()  # type: ignore[no-untyped-call]
    means = {}
    for name, parameter in decoder.named_parameters():
        if parameter.grad is not None:
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
            visits = sum(layer is None or layer in order for order in layer_orders)
            means[name] = parameter.grad / visits
    decoder.zero_grad(set_to_none=True)
    return means


def assert_same(plan: Plan, layers: list[int], decoder: Decoder, costs: Costs | None = None) -> None:
    count = sum(lane.microbatches for lane in plan.lanes)
    data = batches(count)
    starts = [sum(layers[:stage]) for stage in range(len(layers))]
    orders = [
        [
            layer
            for hop in plan.lanes[lane].route
            for layer in range(starts[hop.stage], starts[hop.stage] + layers[hop.stage])
        ]
        for lane, _ in plan.schedule()
    ]
    expected = single_process(decoder, orders, data)
    bind = least_loaded(plan, costs) if costs is not None else None
    losses, gradients = execute(plan, decoder, layers, data, bind)
    assert all(math.isfinite(loss) for loss in losses)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, zero_bubble_h1])
def test_straight_pipelines(schedule: type, tied: bool) -> None:
    plan = schedule(NAMES, 5)
    validate(plan)
    assert_same(plan, [1, 3, 2], model(tied=tied))


def test_interleaved_stages() -> None:
    plan = interleaved(NAMES, 6, chunks=2)
    validate(plan)
    assert_same(plan, [1] * 6, model())


def skipping_plan() -> Plan:
    """Four stages on six peers, one stage skipped by each lane, one pair swapped, two microbatches per lane."""
    routes = [
        (Hop(0, 0), Hop(1, 1), Hop(2, 3)),
        (Hop(0, 0), Hop(2, 3), Hop(1, 2)),
        (Hop(0, 0), Hop(1, 2), Hop(3, 4)),
        (Hop(0, 5), Hop(2, 3), Hop(3, 4)),
    ]
    return Plan(
        peers=tuple("abcdef"),
        stages=((0, 5), (1, 2), (3,), (4,)),
        lanes=tuple(Lane(route=route, microbatches=2) for route in routes),
        slots=(3,) * 6,
    )


def test_skips_and_swaps_equal_a_model_without_those_layers() -> None:
    plan = skipping_plan()
    validate(plan, Rules(visits=3))
    assert_same(plan, [2, 1, 1, 2], model())


def test_checkfree_order() -> None:
    stages = ((0,), (1,), (2,), (3,), (4,))
    lane = Lane(route=tuple(Hop(stage, stage) for stage in range(5)))
    plan = checkfree_plus(Plan(peers=tuple("abcde"), stages=stages, lanes=(lane,) * 4, slots=(4,) * 5))
    validate(plan)
    assert [hop.stage for hop in plan.lanes[1].route] == [0, 2, 1, 4, 3]
    assert_same(plan, [2, 1, 1, 1, 1], model())


def test_dynamic_routes() -> None:
    plan = dynamic("abcde", [[0], [1, 2], [3, 4]], [4, 1, 2, 1, 1], [(0, 3), (0, 2), (0, 1)])
    validate(plan)
    zero = ((0.0,) * 5,) * 5
    costs = Costs(forward_s=((1.0, 1.0, 0.4, 1.0, 1.0),) * 3, latency_s=zero, transmit_s=zero)
    assert_same(plan, [2, 2, 2], model(), costs)


def test_layers_must_be_the_models() -> None:
    with pytest.raises(BadPlan, match="do not make up"):
        execute(gpipe(NAMES, 1), model(), [1, 1, 1], batches(1))


@pytest.mark.parametrize(("layers", "count"), [((3, 3), 1), ((2, 2, 1, 1), 1), ((2, 2, 2), 2), ((2, 2, 2), 0)])
def test_layers_and_batches_must_be_the_plans(layers: tuple[int, ...], count: int) -> None:
    with pytest.raises(BadPlan, match="for a plan of"):
        execute(gpipe(NAMES[:3], 1), model(), layers, batches(count))
