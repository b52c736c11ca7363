"""Who dies when in a step of stage servers, under virtual time: what counts is what a single process would compute, and nothing twice."""

import asyncio
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.node.stage_lab import LAYERS, StageLab, costs, expected, in_stages, names, step_of, two_columns, whole
from tests.thorough import further, mostly

from farflung.node.pipeline import TICK_S
from farflung.node.pipeline_driver import Outcome
from farflung.node.recipe import HEARTBEAT_S
from farflung.node.stage_job import leg_of, patience
from farflung.node.stage_server import LEASE_LOOK_S, STREAM_S
from farflung.node.stage_step import OpenStep, Service
from farflung.node.stage_work import LATE_S
from farflung.protocol.droppable import Droppable
from farflung.protocol.flight import Patience
from farflung.protocol.roll import SILENT_AFTER
from farflung.protocol.route import DROPPED, live_hops
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import Hop, Kind, Lane, Op, Plan, Policy
from farflung.training.pipeline_schedules import one_f_one_b
from farflung.training.pipeline_simulate import simulate
from farflung.training.pipeline_worker import HEAD, Accumulated, mean_gradients

MOMENTS = {
    "before its forward": (Op(Kind.F, 0, 1), "started"),
    "in its forward": (Op(Kind.F, 0, 2), "started"),
    "after its forward, before it is sent": (Op(Kind.F, 0, 2), "finished"),
    "in the forward after it": (Op(Kind.F, 0, 3), "started"),
    "between forward and backward": (Op(Kind.LOSS, 0, 0), "started"),
    "in the backward after it": (Op(Kind.B, 0, 3), "finished"),
    "in its backward": (Op(Kind.B, 0, 2), "started"),
    "after its backward, before it is sent": (Op(Kind.B, 0, 2), "finished"),
    "after its backward": (Op(Kind.B, 0, 1), "started"),
    "before the end": (Op(Kind.B, 0, 0), "started"),
}


def by_turns() -> Plan:
    """Two columns as above, each microbatch followed by another on its lane: a step of half a minute."""
    plan = two_columns()
    return replace(plan, lanes=tuple(replace(lane, microbatches=2) for lane in plan.lanes))


@functools.cache
def usual() -> Outcome:
    """The step in which nobody dies."""
    return in_stages(whole, by_turns())


def planned() -> Patience:
    """As whoever plans such a step would have it."""
    return patience(leg_of(simulate(by_turns(), costs(7)).longest_silence_s))


HEARTBEATS_S = SILENT_AFTER * HEARTBEAT_S + TICK_S
"""Until others have noticed by its heartbeats that a machine is silent."""


FEW = {"process": [0.0, 0.02], "machine": [0.0], "machine, unnoticed": [0.0, 0.02]}
"""By how a peer dies: the share of control messages that is lost, for each seed."""

MORE = range(2, 8)
"""Further seeds, for those who have the time; every third loses messages."""


@pytest.mark.parametrize("death", FEW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stage_peer_dies(moment: str, death: str) -> None:
    for seed, drop in enumerate(FEW[death]):
        stage_peer_dies(moment, death, seed, drop)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("death", FEW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stage_peer_dies_with_more_seeds(moment: str, death: str) -> None:
    for seed in MORE:
        stage_peer_dies(moment, death, seed, 0.0 if seed % 3 else 0.02)


def stage_peer_dies(moment: str, death: str, seed: int, drop: float) -> None:
    """At no moment does it cost more than half a step, and the wait for whom nobody answers: when its connections break, when its heartbeats end, or when nothing but its stage server stands still, and the
    deadlines of flights show it. A control message that is lost may cost another deadline."""
    when, what = MOMENTS[moment]
    normal = usual()

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (when, what):
            lab.kill(3, reset=death == "process")
            if death == "machine":
                asyncio.get_running_loop().call_later(HEARTBEATS_S, lab.drivers[0].lost, 3, "no heartbeat")

    outcome = in_stages(
        whole, by_turns(), seed=seed, happens=happens, patience=planned(), jitter_s=0.3, drop=drop, duplicate=0.02
    )
    assert sorted(outcome.losses) == list(range(8)) and not outcome.cut, seed
    assert outcome.lost == {3}, seed
    assert outcome.losses == pytest.approx(normal.losses, rel=1e-6)
    for microbatch in (1, 3, 5, 7):  # the other column
        assert outcome.routes[microbatch] == normal.routes[microbatch]
    if not drop:
        # who dials a machine without power waits for ten seconds, a quarter of a step
        assert outcome.seconds <= (1.5 if death == "process" else 1.75) * normal.seconds, seed


def test_two_neighbours_die_between_forward_and_backward() -> None:
    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.B, 0, 3), "finished"):
            lab.kill(3)
            lab.kill(5)

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert lab.dead == outcome.lost == {3, 5} and len(outcome.losses) == 4

    in_stages(main, two_columns(), happens=happens)
    in_stages(main, two_columns(loss_at_home=False), happens=happens)


def test_the_last_peer_of_a_stage_dies() -> None:
    plan = one_f_one_b(names(4), 3)
    home = Plan(peers=plan.peers, stages=plan.stages, lanes=plan.lanes, slots=(3,) * 4, policy=Policy.BACKWARD)

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.F, 0, 1), "started"):
            lab.kill(2)

    async def dropped(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 3
        assert all(route[2].peer == DROPPED for route in outcome.routes.values())

    in_stages(dropped, home, happens=happens, droppable=Droppable(fewest=3))

    async def cut(lab: StageLab) -> None:
        outcome = await lab.run()
        assert sorted(outcome.cut) == [0, 1, 2] and not outcome.losses

    in_stages(cut, home, happens=happens)


def test_a_skipping_route_loses_a_hop() -> None:
    """The only peer of stage 2 dies before its first forward: gradients are those of the routes without it, and each stage's mean is over its own visits."""
    ways = [(0, 1, 2), (0, 2, 3), (0, 1, 3)]
    plan = Plan(
        peers=tuple(names(4)),
        stages=((0,), (1,), (2,), (3,)),
        lanes=tuple(Lane(route=tuple(Hop(stage, stage) for stage in way), microbatches=2) for way in ways),
        slots=(8,) * 4,
    )

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.F, 0, 0), "started"):
            lab.kill(2)

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 6 and not outcome.cut and outcome.lost == {2} and not lab.errors
        assert sum(note.what == "dropped" for note in outcome.notes) == 4
        for microbatch, route in outcome.routes.items():
            planned = lab.step.routes[microbatch]
            assert [route[hop] for hop in live_hops(route)] == [leg for leg in planned if leg.stage != 2]
        found = await lab.contributions(outcome)
        assert sum((one.visits for one in found), Counter[int]()) == {0: 6, 1: 4, 3: 4, HEAD: 6}

    in_stages(main, plan, happens=happens, droppable=Droppable(fewest=2))


def test_the_data_node_dies() -> None:
    """Its microbatches are void: leases free what is kept for them, or whoever watches the peers says so. Nothing of the step counts."""

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.B, 0, 1), "finished"):
            lab.kill(0)

    async def main(lab: StageLab) -> None:
        await lab.run()  # what is left of it reaches nobody
        assert lab.dead == {0}
        desks = [server._open[b"w" * 32].desk for server in lab.servers[1:]]
        assert sum(desk.num_visits for desk in desks) > 0
        lab.servers[1].lost(lab.step.keys[0])
        assert desks[0].num_visits == 0
        assert desks[0].counted and await lab.servers[1].settled(b"w" * 32) == Accumulated()
        await asyncio.sleep(lab.step.lease_s + LEASE_LOOK_S)
        assert sum(desk.num_visits for desk in desks) == 0
        assert all(not server._open[b"w" * 32].inputs for server in lab.servers[1:])

    in_stages(main, two_columns(), happens=happens)


def test_a_microbatch_may_take_as_long_as_the_patience_of_its_data_node() -> None:
    """What it has passed keeps what belongs to it: half an hour here, for passes of minutes are nothing that anybody loses patience with."""

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert 1500.0 < outcome.seconds < lab.step.lease_s
        assert len(outcome.losses) == 4 and not outcome.lost and not outcome.notes and not lab.errors

    patience = Patience(leg_s=120.0, answer_s=3.0, hard_s=480.0)
    in_stages(main, two_columns(), patience=patience, slow=dict.fromkeys(range(7), 100.0))


def two_homes() -> Plan:
    """Peers 0 and 7 are data nodes. Each has a lane in both columns of peers: of home 0, microbatches 0, 4 and 8 go by 1, 3 and 5, and 1, 5 and 9 by 2, 4
    and 6."""
    routes = [(Hop(0, home), *(Hop(s, 2 * s - 1 + column) for s in (1, 2, 3))) for home in (0, 7) for column in (0, 1)]
    return Plan(
        peers=tuple(names(8)),
        stages=((0, 7), (1, 2), (3, 4), (5, 6)),
        lanes=tuple(Lane(route=route, microbatches=3) for route in routes),
        slots=(8,) * 8,
        policy=Policy.BACKWARD,
    )


OF_HOME = {0: {0, 1, 4, 5, 8, 9}, 7: {2, 3, 6, 7, 10, 11}}
"""Microbatches of each data node of `two_homes`."""


def computed(lab: StageLab) -> dict[tuple[int, int], list[int]]:
    """By (microbatch, hop): the peers that have summed it up, whether it counts or not."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, server in enumerate(lab.servers):
        for keys in server._open[b"w" * 32].desk.counted.values():
            for key in keys:
                found.setdefault(key, []).append(number)
    return found


async def only_what_was_told(lab: StageLab) -> None:
    """Check that what counts is what data nodes have told, each visit at one peer, by the gradients as well; and that all is there of the data nodes that
    live."""
    alive = [number for number in range(8) if number not in lab.dead]
    sums = [await lab.servers[number].settled(b"w" * 32) for number in alive]
    told = {*lab.told, *((home, home) for home in OF_HOME)}
    counting = [
        key
        for peer, home in sorted(told)
        if peer in alive
        for key in lab.servers[peer]._open[b"w" * 32].desk.counted.get(home, ())
    ]
    assert len(set(counting)) == len(counting), "counted twice"
    assert set(counting) >= {(m, hop) for home in alive if home in OF_HOME for m in OF_HOME[home] for hop in range(5)}
    parts = [(microbatch, HEAD if hop == 4 else hop) for microbatch, hop in counting]
    assert sum((one.visits for one in sums), Counter[int]()) == Counter(part for _, part in parts)
    wanted = expected(lab.model, LAYERS, lab.data, {m: range(4) for m, _ in counting}, parts)
    found = mean_gradients(sums)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)


def test_the_word_of_a_data_node_stands() -> None:
    """Whatever is believed of it before, and whatever becomes of it then; but not when the step has been over for us."""
    boundary = Boundary.parse("fp32", 16)
    service = Service(forward=boundary, backward=boundary, vocab_size=32, seq_len=8, device=torch.device("cpu"))
    step = step_of(two_homes(), Droppable())
    open_ = OpenStep.begin(step, 3, service, None)
    open_.desk.counted = {0: {(0, 2), (4, 2)}, 7: {(2, 2)}}
    assert open_.settle(0, counts=False) == 0
    assert open_.settle(0, counts=True) == 2  # it was not dead
    assert open_.settle(0, counts=False) == 2  # now it is
    assert not open_.settled.is_set()
    assert open_.settle(7, counts=False) == 0
    assert open_.settled.is_set() and open_.counting == [0]
    assert open_.settle(7, counts=True) == 0 and open_.counting == [0]


SUSPECTED = (Op(Kind.B, 0, 2), "started")
"""When home 0 gives up peer 3, which lives and sums up its visit of microbatch 0 all the same: peer 4 does it too."""

HOME_DIES = {"process": (True, HEARTBEATS_S), "machine": (False, HEARTBEATS_S), "process, started anew": (True, LATE_S)}
"""Whether its connections break, and after how long others know by what is heard of it."""


def home_dies(lab: StageLab, death: str) -> None:
    """Home 0 dies, and after a while everybody knows."""
    reset, known_after_s = HOME_DIES[death]
    lab.kill(0, reset=reset)
    for number, server in enumerate(lab.servers):
        if number:
            asyncio.get_running_loop().call_later(known_after_s, server.lost, lab.step.keys[0])
    asyncio.get_running_loop().call_later(known_after_s, lab.drivers[7].lost, 0, "no heartbeat")


@pytest.mark.parametrize("lost", [3, 4])
def test_who_takes_over_sums_up_for_no_more_data_nodes_than_it_has_memory_for(lost: int) -> None:
    """Of three data nodes the plan brings two to peer 3 and one to peer 4. That has a place left, which is of the first of them."""
    stages = ((0, 1, 2), (3, 4), (5, 6), (7, 8))
    ways = [(0, 3, 5, 7), (1, 3, 5, 8), (2, 4, 6, 8)]
    lanes = tuple(Lane(route=tuple(Hop(*hop) for hop in enumerate(way)), microbatches=2) for way in ways)
    plan = Plan(peers=tuple(names(9)), stages=stages, lanes=lanes, slots=(8,) * 9, policy=Policy.BACKWARD)

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.F, 0, 2), "started"):
            lab.kill(lost)

    async def story(lab: StageLab) -> None:
        outcome = await whole(lab)
        summed = [
            {home for home, keys in server._open[lab.step.window].desk.counted.items() if keys}
            for server in lab.servers
        ]
        assert max(map(len, summed)) <= 2 and not lab.errors
        homes = {lab.step.home(microbatch) for microbatch in outcome.cut}
        assert homes == ({1} if lost == 3 else {2}), "who has no place there is cut at once"
        assert set(outcome.cut.values()) == {"nobody is left for hop 1, stage 1"}
        assert outcome.seconds < 60.0

    in_stages(story, plan, happens=happens, most_homes=2)


def test_what_a_dead_peer_has_summed_up_leaves_the_mean_of_the_others() -> None:
    """It dies when its own work is done and others' is not: samples that it served are trained at the other stages and not at its own, where the mean is over
    the visits that are left, each with the same weight, and neither over all microbatches nor scaled by the share that came through."""
    found: list[tuple[Counter[int], dict[str, torch.Tensor], list[int]]] = []

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.B, 2, 0), "finished"):  # microbatches 0 and 2 went through peer 3, and are home
            lab.kill(3)

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        sums = await lab.contributions(outcome)
        counts = sum((one.visits for one in sums), Counter[int]())
        left = sorted(microbatch for (microbatch, hop), _ in lab.visits(outcome).items() if hop == 2)
        found.append((counts, mean_gradients(sums), left))
        ways = {m: range(4) for m in range(4)}
        for stage, those in ((2, left), (1, [0, 1, 2, 3])):
            mean = expected(lab.model, LAYERS, lab.data, ways, [(m, stage) for m in those])
            for name, gradient in mean.items():
                torch.testing.assert_close(found[0][1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)

    in_stages(main, two_columns(), happens=happens)
    counts, _, left = found[0]
    assert counts == {0: 4, 1: 4, 2: 2, 3: 4, HEAD: 4} and left == [1, 3]


@pytest.mark.parametrize("death", HOME_DIES)
@pytest.mark.parametrize(
    "moment",
    mostly(["in its forward", "between forward and backward", "after its backward, before it is sent"], MOMENTS),
)
def test_one_of_two_data_nodes_dies(moment: str, death: str) -> None:
    """Before it has told anybody that its step is over, having given up a peer that lives: none of its work counts, all of the other one's does, also at
    the peer that the dead one gave up."""
    op, what = MOMENTS[moment]
    last = op._replace(microbatch=9)
    for seed, drop in enumerate([0.0, 0.02]):

        def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
            if (op, now) == SUSPECTED:
                lab.drivers[0].lost(3, "somebody says so")
            if (op, now) == (last, what):
                home_dies(lab, death)

        async def main(lab: StageLab) -> None:
            await lab.run()
            assert lab.dead == {0} and not any(home == 0 for _, home in lab.told)
            assert computed(lab)[0, 2] == [3, 4], "nothing could count twice"
            await only_what_was_told(lab)

        in_stages(main, two_homes(), seed=seed, happens=happens, jitter_s=0.3, drop=drop, duplicate=0.02)


@pytest.mark.parametrize("death", HOME_DIES)
@pytest.mark.parametrize("heard", [1, 4, *further(2, 3, 5, 6)])
def test_a_data_node_dies_while_it_says_that_its_step_is_over(heard: int, death: str) -> None:
    """So many peers have heard it: what they did for it counts, what others did does not."""
    for seed in range(3):

        def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
            if (op, now) == SUSPECTED:
                lab.drivers[0].lost(3, "somebody says so")
            if now == "told" and [home for _, home in lab.told].count(0) == heard and 0 not in lab.dead:
                home_dies(lab, death)

        async def main(lab: StageLab) -> None:
            await lab.run()
            assert lab.dead == {0} and len({peer for peer, home in lab.told if home == 0}) >= heard
            assert (3, 0) not in lab.told and computed(lab)[0, 2] == [3, 4], "nothing could count twice"
            await only_what_was_told(lab)

        in_stages(main, two_homes(), seed=seed, happens=happens, jitter_s=0.3, duplicate=0.02)


@pytest.mark.parametrize("reset", [True, False])
def test_of_a_peer_that_has_gone_no_stream_is_counted_any_more(reset: bool) -> None:
    """There is no end to the peers that come and go."""

    async def main(lab: StageLab) -> None:
        await lab.open()
        await asyncio.sleep(1.0)
        peer = lab.step.keys[3]
        assert [of for of, _ in lab.servers[6]._streams].count(peer) == 1
        lab.kill(3, reset=reset)
        await asyncio.sleep(2 * STREAM_S)
        assert peer not in {of for of, _ in lab.servers[6]._streams}

    in_stages(main, two_columns())
