"""Pipelines of real peers: a process each, the real engine on loopback, and one of them killed at every moment that matters."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from tests.node.stage_lab import expected

from farflung.protocol.route import live_hops
from farflung.sims.stage_group import Death, StageGroup, StepSeen, stage_group
from farflung.sims.stage_mates import load_sums
from farflung.sims.stage_peer import World, key_of
from farflung.training.model import ModelConfig
from farflung.training.pipeline_plan import Hop, Kind, Lane, Op, Plan, Policy
from farflung.training.pipeline_schedules import dynamic, gpipe, one_f_one_b
from farflung.training.pipeline_worker import HEAD, mean_gradients

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a group has 300 s to come up

WORLD = World(
    model=ModelConfig(
        vocab_size=64, dim=32, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=48, seq_len=16, tie_embeddings=False
    ),
    seed=3,
    layers=(2, 1, 1),
    stages=((0,), (1, 2), (3,)),
    batch=2,
    heads=(0, 2),
)
PEERS = tuple(key_of(rank) for rank in range(4))
COUNT = 4
BATCHES = torch.randint(0, 64, (COUNT, 2, 17), generator=torch.Generator().manual_seed(3))


def columns(routes: Sequence[Sequence[tuple[int, int]]]) -> Plan:
    lanes = tuple(Lane(route=tuple(Hop(stage, peer) for stage, peer in route)) for route in routes)
    return Plan(peers=PEERS, stages=WORLD.stages, lanes=lanes, slots=(8,) * 4, policy=Policy.BACKWARD)


STRAIGHT = (PEERS[0], PEERS[1], PEERS[3])
SKIPPING = [((0, 0), (1, 1), (2, 3)), ((0, 0), (2, 3)), ((0, 0), (1, 2)), ((0, 0), (2, 3), (1, 1))]
PLANS = {
    "gpipe": gpipe(STRAIGHT, 4),
    "1f1b": one_f_one_b(STRAIGHT, 4),
    "dynamic": dynamic(PEERS, WORLD.stages, [6, 2, 2, 4], [(0, 2), (0, 2)]),
    "skips and swaps": columns(SKIPPING),
}
TWO_COLUMNS = columns([tuple(enumerate((0, 1 + number % 2, 3))) for number in range(COUNT)])
DIES = 1
"""On the ways of microbatches 0 and 2; the way of 1 and 3 is by rank 2."""
DEATHS = {
    "before F": Death(rank=DIES, before=Op(Kind.F, 0, 1)),
    "between F and B": Death(rank=DIES, before=Op(Kind.B, 0, 1)),
    "after B": Death(rank=DIES, after=Op(Kind.B, 0, 1)),
}


def test_pipelines_of_processes(tmp_path: Path) -> None:
    with stage_group(4, tmp_path, within_s=300.0) as group:
        group.enter(WORLD)
        for plan in PLANS.values():
            seen = step(group, plan, tmp_path)
            assert not seen.lost and not seen.notes and not seen.cut, seen
        for number, (moment, death) in enumerate(DEATHS.items()):
            if number:
                group.revive(DIES)
            seen = step(group, TWO_COLUMNS, tmp_path, death)
            assert seen.lost == {DIES} and not seen.cut, (moment, seen)
            assert [seen.routes[kept][1].peer for kept in (1, 3)] == [2, 2], moment
            assert seen.routes[0][1].peer == (DIES if moment == "after B" else 2), moment


TWO_HOMES = msgspec.structs.replace(WORLD, stages=((0, 4), (1, 2), (3,)))
HOME_DEATHS = [Death(rank=0, before=Op(Kind.LOSS, 1, 0)), Death(rank=0, before=Op(Kind.B, 0, 0))]
"""With some of its visits summed up at all others."""


@pytest.mark.thorough
def test_one_of_two_data_nodes_is_killed(tmp_path: Path) -> None:
    """Before it has told anybody that its step is over: all of the other one's work counts, and nothing else."""
    peers = tuple(key_of(rank) for rank in range(5))
    lanes = tuple(Lane(route=(Hop(0, home), Hop(1, middle), Hop(2, 3))) for home in (0, 4) for middle in (1, 2))
    plan = Plan(peers=peers, stages=TWO_HOMES.stages, lanes=lanes, slots=(8,) * 5, policy=Policy.BACKWARD)
    data = [(one[:, :-1], one[:, 1:]) for one in BATCHES]
    ways = {2: range(3), 3: range(3)}
    counted = [(m, part) for m in ways for part in (*range(3), HEAD)]
    wanted = expected(WORLD.decoder(), WORLD.layers, data, ways, counted)
    with stage_group(5, tmp_path, within_s=300.0) as group:
        group.enter(TWO_HOMES)
        for number, death in enumerate(HOME_DEATHS):
            if number:
                group.revive(0)
            files = {rank: tmp_path / f"{number}-{rank}.npz" for rank in range(5)}
            seen = group.step(plan, BATCHES, death=death, sums=files)
            assert sorted(seen.losses) == [2, 3] and not seen.cut and seen.lost <= {0}, seen
            sums = [load_sums(files[rank]) for rank in range(1, 5)]
            assert sum((one.visits for one in sums), Counter[int]()) == {0: 2, 1: 2, 2: 2, HEAD: 2}, death
            found = mean_gradients(sums)
            assert found.keys() == wanted.keys()
            for key, gradient in found.items():
                torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-7, msg=key)


def step(group: StageGroup, plan: Plan, folder: Path, death: Death | None = None) -> StepSeen:
    """Checks that the gradients are those of one process, of all visits but those that died with their peer."""
    files = {rank: folder / f"{rank}.npz" for rank in range(4)}
    for file in files.values():
        file.unlink(missing_ok=True)
    seen = group.step(plan, BATCHES, death=death, sums=files)
    assert sorted(seen.losses) == list(range(COUNT)), seen
    ways = {m: [route[hop].stage for hop in live_hops(route)] for m, route in seen.routes.items()}
    visits = [(m, leg.stage) for m, route in seen.routes.items() for leg in route if leg.peer not in seen.lost]
    counted = [*visits, *((m, HEAD) for m in ways)]
    sums = [load_sums(file) for file in files.values() if file.exists()]
    for part in (*range(3), HEAD):
        assert sum(one.visits[part] for one in sums) == sum(its == part for _, its in counted), (part, seen)
    data = [(one[:, :-1], one[:, 1:]) for one in BATCHES]
    wanted = expected(WORLD.decoder(), WORLD.layers, data, ways, counted)
    found = mean_gradients(sums)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-7, msg=key)
    return seen
