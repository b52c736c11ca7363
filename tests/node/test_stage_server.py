"""Stage servers under virtual time: gradients of a single process, whatever is skipped, and whoever dies when."""

import asyncio
import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from tests.node.stage_lab import LAYERS, StageLab, costs, expected, in_stages, names, step_of

from farflung.node import framing
from farflung.node.pipeline import TICK_S
from farflung.node.pipeline_driver import Outcome
from farflung.node.pipeline_step import Step
from farflung.node.recipe import HEARTBEAT_S
from farflung.node.stage_job import leg_of, patience
from farflung.node.stage_step import OpenStep, Service
from farflung.node.stage_work import LATE_S
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import NetworkError, Refused
from farflung.protocol.flight import Patience
from farflung.protocol.messages import Again, ParcelHeader, Passage, Said
from farflung.protocol.roll import SILENT_AFTER
from farflung.protocol.route import DROPPED, Leg, live_hops, with_peer
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import BadPlan, Hop, Kind, Lane, Op, Plan, Policy
from farflung.training.pipeline_schedules import dynamic, gpipe, interleaved, one_f_one_b, zero_bubble_h1
from farflung.training.pipeline_simulate import simulate
from farflung.training.pipeline_worker import HEAD, Accumulated, mean_gradients


def two_columns(microbatches: int = 4, *, loss_at_home: bool = True) -> Plan:
    """Peer 0 is the data node; stages 1 to 3 have two peers each, and the microbatches take them by turns."""
    stages = ((0,), (1, 2), (3, 4), (5, 6))
    routes = [tuple(Hop(stage, peers[lane % len(peers)]) for stage, peers in enumerate(stages)) for lane in (0, 1)]
    return Plan(
        peers=tuple(names(7)),
        stages=stages,
        lanes=tuple(Lane(route=routes[lane % 2]) for lane in range(microbatches)),
        slots=(8,) * 7,
        policy=Policy.BACKWARD,
        loss_at_home=loss_at_home,
    )


async def whole(lab: StageLab) -> Outcome:
    """Run the step, and check its gradients and that nothing counts twice."""
    outcome = await lab.run()
    visits = lab.visits(outcome)
    assert all(len(peers) == 1 for peers in visits.values()), "counted twice"
    parts = [(m, HEAD if hop == len(outcome.routes[m]) else outcome.routes[m][hop].stage) for m, hop in visits]
    ways = {m: [route[hop].stage for hop in live_hops(route)] for m, route in outcome.routes.items()}
    wanted = expected(lab.model, LAYERS, lab.data, ways, parts, lab.boundary)
    found = mean_gradients(await lab.contributions(outcome))
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    return outcome


@pytest.mark.parametrize(
    "plan",
    [
        gpipe(names(4), 5),
        one_f_one_b(names(4), 5),
        interleaved(names(2), 4, chunks=2),
        two_columns(),
        two_columns(loss_at_home=False),
        dynamic(names(7), [[0], [1, 2], [3, 4], [5, 6]], [4, 2, 2, 2, 2, 2, 2], [(0, 2), (0, 2), (0, 1)]),
    ],
    ids=["gpipe", "1f1b", "interleaved", "columns", "columns, loss at the end", "dynamic"],
)
def test_gradients_are_those_of_one_process(plan: Plan) -> None:
    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        count = len(lab.step.routes)
        assert sorted(outcome.losses) == list(range(count)) and not outcome.notes and not lab.errors
        assert sum(outcome.visits.values()) == count * (len(plan.stages) + 1)
        ways = {m: range(4) for m in range(count)}
        everything = [(m, part) for m in ways for part in (*range(4), HEAD)]
        wanted = expected(lab.model, LAYERS, lab.data, ways, everything)
        found = mean_gradients(await lab.contributions(outcome))
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)

    in_stages(main, plan)


def test_skips_and_swaps() -> None:
    routes = [
        (Hop(0, 0), Hop(1, 1), Hop(2, 3)),
        (Hop(0, 0), Hop(2, 3), Hop(1, 2)),
        (Hop(0, 0), Hop(1, 2), Hop(3, 4)),
        (Hop(0, 0), Hop(2, 3), Hop(3, 4)),
    ]
    plan = Plan(
        peers=tuple(names(5)),
        stages=((0,), (1, 2), (3,), (4,)),
        lanes=tuple(Lane(route=route, microbatches=2) for route in routes),
        slots=(8,) * 5,
    )

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 8 and not outcome.notes

    in_stages(main, plan)


def two_data_nodes() -> Plan:
    """Peers 0 and 5 are data nodes; their microbatches skip and meet at stages 1 to 3, of which 1 has two peers."""
    routes = [
        (Hop(0, 0), Hop(1, 1), Hop(2, 3)),
        (Hop(0, 0), Hop(2, 3), Hop(1, 2)),
        (Hop(0, 5), Hop(1, 2), Hop(3, 4)),
        (Hop(0, 5), Hop(1, 1), Hop(3, 4)),
    ]
    return Plan(
        peers=tuple(names(6)),
        stages=((0, 5), (1, 2), (3,), (4,)),
        lanes=tuple(Lane(route=route, microbatches=2) for route in routes),
        slots=(8,) * 6,
    )


def test_two_data_nodes_share_stages() -> None:
    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 8 and not outcome.notes and not lab.errors

    in_stages(main, two_data_nodes())


def test_a_peer_that_one_data_node_lost_counts_for_the_other_one() -> None:
    """Peer 2 cannot be told by the first data node that its work counts, as if it were dead; the second sees nothing wrong."""

    async def main(lab: StageLab) -> None:
        lab.drivers[0].lost(2, "somebody says so")
        outcome = await lab.run()
        assert outcome.lost == {2} and len(outcome.losses) == 8
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):  # the first one says nothing to it
                await lab.servers[2].settled(b"w" * 32)
        lab.servers[2].lost(lab.step.keys[0])  # until it is seen to have gone on
        found = [await server.settled(b"w" * 32) for server in lab.servers]
        assert [one.visits[1] for one in found] == [0, 6, 2, 0, 0, 0]

    in_stages(main, two_data_nodes())


def test_busy_peers_are_passed_by() -> None:
    plan = dynamic(names(7), [[0], [1, 2], [3, 4], [5, 6]], [8, 1, 1, 1, 1, 1, 1], [(0, 1)] * 8)

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 8 and not lab.errors
        for hop in (1, 2, 3):
            assert len({route[hop].peer for route in outcome.routes.values()}) == 2

    in_stages(main, plan, service={"most_waiting": 1})


CODECS = {"tokenint8(width=16)": 0.05, "rotint4(width=16,block=16)": 0.9}
"""How far gradients may be from those without a codec, over their length. A token of 16 elements has a step of 2 / 254 of its largest one in 8 bits, so errors
of 0.5 % of its length at each of four boundaries, there and back: 1.3 % if they add up like noise, and norms and products make two to three times of
that. In 4 bits a step is 18 times as large."""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("plan", [two_columns(), two_columns(loss_at_home=False)], ids=["home", "end"])
def test_gradients_through_a_codec(codec: str, plan: Plan) -> None:
    """To rounding those of one process whose boundaries have the same codec (`whole`), and by what the codec costs those of one without."""

    async def main(lab: StageLab) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        outcome = await whole(lab)
        assert not outcome.notes and not lab.errors
        ways = {m: range(4) for m in outcome.losses}
        everything = [(m, part) for m in ways for part in (*range(4), HEAD)]
        exact = expected(lab.model, LAYERS, lab.data, ways, everything)
        return exact, mean_gradients(await lab.contributions(outcome))

    exact, coded = in_stages(main, plan, codec=codec)
    length = sum(float(one.square().sum()) for one in exact.values()) ** 0.5
    apart = sum(float((coded[name] - one).square().sum()) for name, one in exact.items()) ** 0.5
    assert 1e-4 < apart / length < CODECS[codec]


def test_gradients_through_a_codec_when_a_peer_dies() -> None:
    """What its replacement computes anew crosses the same boundaries to the same bits."""

    def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
        if (op, now) == (Op(Kind.B, 0, 2), "started"):
            lab.kill(3)

    outcome = in_stages(whole, two_columns(), codec="tokenint8(width=16)", happens=happens)
    assert outcome.lost == {3} and len(outcome.losses) == 4 and not outcome.cut


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


@pytest.mark.parametrize("death", ["process", "machine", "machine, unnoticed"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stage_peer_dies(moment: str, death: str) -> None:
    """At no moment does it cost half a step: when its connections break, when its heartbeats end, or when nothing but its stage server stands still, and the
    deadlines of flights show it. A control message that is lost may cost another deadline."""
    when, what = MOMENTS[moment]
    normal = usual()
    runs = {"process": [0.0, 0.0, 0.0, 0.02], "machine": [0.0, 0.0, 0.0], "machine, unnoticed": [0.0, 0.0, 0.02]}
    for seed, drop in enumerate(runs[death]):

        def happens(lab: StageLab, _: int, op: Op | None, now: str) -> None:
            if (op, now) == (when, what):
                lab.kill(3, reset=death == "process")
                if death == "machine":
                    asyncio.get_running_loop().call_later(HEARTBEATS_S, lab.drivers[0].lost, 3, "no heartbeat")

        outcome = in_stages(
            whole, by_turns(), seed=seed, happens=happens, patience=planned(), jitter_s=0.3, drop=drop, duplicate=0.02
        )
        assert sorted(outcome.losses) == list(range(8)) and not outcome.cut
        assert outcome.lost == {3}
        assert outcome.losses == pytest.approx(normal.losses, rel=1e-6)
        for microbatch in (1, 3, 5, 7):  # the other column
            assert outcome.routes[microbatch] == normal.routes[microbatch]
        if not drop:
            assert outcome.seconds <= 1.5 * normal.seconds, seed


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
        await asyncio.sleep(2 * 600.0)
        assert sum(desk.num_visits for desk in desks) == 0
        assert all(not server._open[b"w" * 32].inputs for server in lab.servers[1:])

    in_stages(main, two_columns(), happens=happens)


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


@pytest.mark.parametrize("death", HOME_DIES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_of_two_data_nodes_dies(moment: str, death: str) -> None:
    """Before it has told anybody that its step is over, having given up a peer that lives: none of its work counts, all of the other one's does, also at
    the peer that the dead one gave up."""
    op, what = MOMENTS[moment]
    last = op._replace(microbatch=9)
    for seed, drop in enumerate([0.0, 0.0, 0.02]):

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
@pytest.mark.parametrize("heard", range(1, 7))
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


def parcel(lab: StageLab, **changes: Any) -> ParcelHeader:
    """Microbatch 0 from peer 1 to peer 3."""
    header = ParcelHeader(
        window=b"w" * 32,
        microbatch=0,
        hop=2,
        backward=False,
        until=5,
        version=0,
        route=lab.step.routes[0],
        batch=2,
        length=8,
        loss=math.nan,
        asks=False,
        nbytes=Boundary.parse("fp32", 16).max_nbytes(16),
    )
    return msgspec.structs.replace(header, **changes)


WRONG: dict[str, dict[str, Any]] = {
    "of another step": {"window": b"x" * 32},
    "the plan has": {"microbatch": 4},
    "not that of the plan": {"route": (Leg(0, 0), Leg(1, 1), Leg(2, 3), Leg(2, 3))},
    "another data node": {"route": (Leg(0, 1), Leg(1, 1), Leg(2, 3), Leg(3, 5))},
    "does not hold": {"route": (Leg(0, 0), Leg(1, 1), Leg(2, 5), Leg(3, 5))},
    "must not be left out": {"route": (Leg(0, 0), Leg(1, 1), Leg(2, 3), Leg(3, DROPPED))},
    "does not go here": {"route": (Leg(0, 0), Leg(1, 1), Leg(2, 4), Leg(3, 5))},
    "does not come from there": {"route": (Leg(0, 0), Leg(1, 2), Leg(2, 3), Leg(3, 5))},
    "tokens are agreed": {"batch": 3},
    "bytes, limit": {"nbytes": 1 << 30},
    "of the other direction": {"backward": True},
    "not the payload": {},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: str) -> None:
    said = {
        "of another step": "not open here",
        "another data node": "not that of the plan",
        "not the payload": "hop 2:",
    }

    async def main(lab: StageLab) -> None:
        for server in lab.servers:
            await server.open(lab.step)
        stream = await lab.networks[1].open_stream(lab.step.keys[3], "activation")
        header = parcel(lab, **WRONG[wrong])
        await framing.write_header(stream, header)
        await stream.write(bytes(min(header.nbytes, 1 << 12)))
        with pytest.raises(NetworkError):
            await framing.read_exactly(stream, 1)
        assert [said.get(wrong, wrong) in str(error) for error in lab.errors] == [True]
        assert lab.errors[0].peer == lab.step.keys[1]
        assert lab.servers[3]._open[b"w" * 32].desk.num_visits == 0

    in_stages(main, two_columns())


def test_orders_of_others_are_refused() -> None:
    async def main(lab: StageLab) -> None:
        for server in lab.servers:
            await server.open(lab.step)
        again = Again(b"w" * 32, 0, 1, False, 5, 0, lab.step.routes[0])
        with pytest.raises(Refused, match="another data node"):
            lab.servers[1].handle(lab.step.keys[2], again)
        for wrong, match in (
            ({"hop": 5}, "does not go here"),
            ({"hop": 2}, "does not go here"),
            ({"microbatch": 9}, "another data node"),
            ({"route": lab.step.routes[0][:3]}, "not that of the plan"),
            ({"route": with_peer(lab.step.routes[0], 2, DROPPED)}, "must not be left out"),
        ):
            order = msgspec.structs.replace(again, **wrong)
            with pytest.raises(Refused, match=match):
                lab.servers[1].handle(lab.step.keys[0], order)
        assert lab.servers[1]._open[b"w" * 32].desk.num_visits == 0
        passage = Passage(b"w" * 32, 0, 1, False, Said.PASSED, 0, lab.step.routes[0], 0.0)
        with pytest.raises(Refused, match="not its data node"):
            lab.servers[1].handle(lab.step.keys[2], passage)
        lab.servers[1].handle(lab.step.keys[2], msgspec.structs.replace(again, window=b"x" * 32))  # means nothing

    in_stages(main, two_columns())


def test_a_repeated_parcel_counts_once() -> None:
    """The whole step, with everything that peer 1 sends to peer 3 sent three times."""

    async def main(lab: StageLab) -> None:
        send = lab.servers[1]._send

        def thrice(open_: Any, one: Any, output: Any) -> None:
            for _ in range(3):
                send(open_, one, output)

        lab.servers[1]._send = thrice  # type: ignore[method-assign]
        outcome = await whole(lab)
        assert len(outcome.losses) == 4 and not lab.errors

    in_stages(main, two_columns())


def test_plans_that_no_server_can_carry_out() -> None:
    with pytest.raises(BadPlan, match="split_backward"):
        Step(window=b"w" * 32, plan=zero_bubble_h1(names(3), 4), most_tokens=16)
