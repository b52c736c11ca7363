"""Stage servers under virtual time: gradients of a single process, whatever is skipped; and what they refuse."""

import asyncio
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.node.stage_lab import (
    LAYERS,
    NOTHING,
    PATIENCE,
    StageLab,
    expected,
    in_stages,
    names,
    step_of,
    two_columns,
    whole,
)

from farflung.node import stage_server, stage_step
from farflung.node.courier import ACTIVATION, GRADIENT, Courier, Parcel
from farflung.node.device_room import LOOK_S, ROOM_S
from farflung.node.pipeline_step import Step
from farflung.node.stage_server import StageServer
from farflung.node.stage_step import OpenStep
from farflung.protocol.desk import Answer
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.keys import PeerId
from farflung.training.errors import NoRoom
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import BadPlan, Hop, Kind, Lane, Op, Plan
from farflung.training.pipeline_schedules import dynamic, gpipe, interleaved, one_f_one_b, zero_bubble_h1
from farflung.training.pipeline_worker import HEAD, Worker, mean_gradients


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


def full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("owner", "what", "said"),
    [
        (Worker, "forward", "a forward of 2 sequences through stage"),
        (Worker, "loss", "the loss of 2 sequences"),
        (Worker, "backward", "a backward of 2 sequences through stage"),
        (Boundary, "decode", "the activations of 2 sequences"),
    ],
)
def test_a_full_device_is_said_as_what_it_is_and_the_step_ends_without_what_needs_it(
    owner: Any, what: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(lab: StageLab) -> None:
        outcome = await lab.run()
        assert not outcome.losses and set(outcome.cut) == set(range(5)) and not lab.errors
        for _, error in lab.lacks:
            assert said in str(error) and "checkpoint,offload` (tried to allocate 2.00 GiB)" in str(error)
        assert lab.lacks

    monkeypatch.setattr(owner, what, full)
    in_stages(main, gpipe(names(4), 5))


def test_activations_that_there_is_no_room_for_wait_until_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = Boundary.decode, [0]
    came: list[tuple[int, int, bool]] = []
    take = StageServer._take

    async def taken(self: StageServer, open_: Any, header: ParcelHeader, *rest: Any) -> Answer:
        came.append((header.microbatch, header.hop, header.backward))
        return await take(self, open_, header, *rest)

    def full_at_first(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        return full() if times[0] <= 4 else real(*args, **kwargs)

    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        assert len(outcome.losses) == 5 and not lab.errors and len(lab.lacks) == 4
        assert len(came) == len(set(came)), "sent again"

    monkeypatch.setattr(Boundary, "decode", full_at_first)
    monkeypatch.setattr(StageServer, "_take", taken)
    in_stages(main, gpipe(names(4), 5))


@pytest.mark.parametrize("backward", [False, True])
def test_another_peer_of_the_stage_does_what_came_to_one_without_room(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes come once, it waits for room a while, and nobody is lost for that: not who has sent it either."""
    tries: list[tuple[int, int]] = []

    async def main(lab: StageLab) -> None:
        service = lab.servers[2]._service = dataclasses.replace(lab.servers[2]._service)

        def opened(its: Any, header: ParcelHeader, *rest: Any) -> Any:
            if its is service and header.backward == backward:
                tries.append((header.microbatch, header.version))
                raise NoRoom("full")
            return stage_step.opened(its, header, *rest)

        monkeypatch.setattr(stage_server, "opened", opened)
        outcome = await whole(lab)
        assert not outcome.cut and not outcome.lost and not lab.errors
        assert all(2 not in [hop.peer for hop in route] for route in outcome.routes.values())
        assert {version for _, version in tries} == {0} and len({microbatch for microbatch, _ in tries}) == 4
        assert len(lab.lacks) == len(tries) <= 4 * (1 + ROOM_S / LOOK_S)
        assert asyncio.get_running_loop().time() < 60.0

    in_stages(main, two_data_nodes())


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_another_peer_of_the_stage_does_what_one_has_no_room_for(what: str) -> None:
    async def main(lab: StageLab) -> None:
        lab.servers[2]._worker = copy.copy(lab.servers[2]._worker)
        setattr(lab.servers[2]._worker, what, full)
        outcome = await whole(lab)
        assert not outcome.cut and {number for number, _ in lab.lacks} == {2}
        assert all(2 not in [hop.peer for hop in route] for route in outcome.routes.values())
        assert asyncio.get_running_loop().time() < 60.0, "at once, and not by deadlines"

    in_stages(main, two_data_nodes())


@pytest.mark.parametrize("what", ["forward", "loss", "backward"])
def test_what_a_data_node_has_no_room_for_itself_is_cut_at_once(what: str) -> None:
    async def main(lab: StageLab) -> None:
        lab.servers[0]._worker = copy.copy(lab.servers[0]._worker)
        setattr(lab.servers[0]._worker, what, full)
        outcome = await whole(lab)
        assert len(outcome.losses) == len(outcome.cut) == 4 and not outcome.lost and not lab.errors
        assert all("its data node has no room for hop" in why for why in outcome.cut.values())
        assert asyncio.get_running_loop().time() < 60.0

    in_stages(main, two_data_nodes())


def test_there_may_be_no_room_to_put_the_gradients_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(lab: StageLab) -> None:
        outcome = await whole(lab)
        await lab.contributions(outcome)

    monkeypatch.setattr(stage_step, "together", full)
    with pytest.raises(ExceptionGroup) as raised:
        in_stages(main, gpipe(names(4), 5))
    assert raised.group_contains(NoRoom, match="the gradients of 1 data nodes together")


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


def test_whom_a_peer_may_have_to_send_to_when_another_is_lost() -> None:
    """In columns 0, 1, 3, 5 and 0, 2, 4, 6: the mate of whoever is next, or whoever comes after that; and for a mate, its own neighbours. None of them is
    planned; and nobody stands in for the data node."""
    step = step_of(two_columns(), NOTHING)
    forward, backward = False, True
    assert step.spares(0) == {(peer, way) for peer in (3, 4) for way in (forward, backward)}
    assert step.spares(1) == {(4, forward), (5, forward)}
    assert step.spares(3) == {(6, forward), (0, forward), (0, backward), (2, backward)}
    assert step.spares(5) == {(4, backward), (1, backward)}


def test_streams_for_the_case_that_a_peer_is_lost_are_open_before() -> None:
    async def main(lab: StageLab) -> None:
        await lab.open()
        await asyncio.sleep(1.0)
        spares = {(lab.step.keys[peer], GRADIENT if way else ACTIVATION) for peer, way in lab.step.spares(3)}
        assert lab.servers[3]._couriers.keys() == spares
        assert lab.servers[6]._streams[lab.step.keys[3], ACTIVATION] == 1

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
        Step(number=7, window=b"w" * 32, plan=zero_bubble_h1(names(3), 4), most_tokens=16, patience=PATIENCE)


class Sends:
    """A courier that sends something else."""

    def __init__(self, courier: Courier, change: Callable[[Parcel], Parcel]) -> None:
        self._courier = courier
        self._change = change

    def carry(self, parcel: Parcel) -> None:
        self._courier.carry(self._change(parcel))


def sends(lab: StageLab, peer: int, change: Callable[[Parcel], Parcel], *, backward: bool) -> None:
    """A peer's parcels of one direction are others from now on."""
    server = lab.servers[peer]
    usual = server._courier

    def courier(to: PeerId, *, backward: bool) -> Any:
        found = usual(to, backward=backward)
        return Sends(found, change) if backward == wanted else found

    wanted = backward
    server._courier = courier  # type: ignore[method-assign]


@pytest.mark.parametrize(("peer", "backward"), [(5, True), (5, False), (1, False)])
def test_sequences_of_another_shape_end_nobody(peer: int, backward: bool) -> None:
    """A gradient meets its input there, or an activation its targets, at whatever peer: neither is computed, and the other microbatches land."""

    async def main(lab: StageLab) -> None:
        def shorter(parcel: Parcel) -> Parcel:
            if parcel.header.microbatch != 0:
                return parcel
            payload = lab.boundary.encode(torch.zeros(1, 8, 16))
            header = msgspec.structs.replace(parcel.header, batch=1, length=8, nbytes=len(payload))
            return dataclasses.replace(parcel, header=header, payload=payload)

        sends(lab, peer, shorter, backward=backward)
        outcome = await lab.run()
        assert {1, 2, 3} <= outcome.losses.keys()

    in_stages(main, two_columns())


def test_who_is_busy_with_what_it_has_already_sent_back_ends_nobody() -> None:
    async def main(lab: StageLab) -> None:
        server, before = lab.servers[3], lab.servers[1]
        usual = server._take

        async def until_back(open_: OpenStep, header: ParcelHeader, *more: Any) -> Answer:
            answer = await usual(open_, header, *more)
            if header.backward or header.microbatch != 0:
                return answer
            above = before._open[open_.step.window].desk
            while (header.microbatch, header.hop - 1) not in above.counted.get(
                0, ()
            ):  # its gradient has gone all the way
                await asyncio.sleep(0.05)
            return Answer.BUSY

        server._take = until_back  # type: ignore[method-assign]
        outcome = await lab.run()
        assert {1, 2, 3} <= outcome.losses.keys()

    in_stages(main, two_columns())


def test_what_cannot_be_sent_on_is_not_in_the_sums() -> None:
    """It is done again, here or elsewhere, and would be in them as often."""

    async def main(lab: StageLab) -> None:
        def huge(parcel: Parcel) -> Parcel:
            if parcel.header.microbatch != 0:
                return parcel
            x = torch.full((2, 8, 16), 1.2e36)
            x[..., ::2] *= -1
            payload = lab.boundary.encode(x)
            return dataclasses.replace(
                parcel, payload=payload, header=msgspec.structs.replace(parcel.header, nbytes=len(payload))
            )

        sends(lab, 5, huge, backward=True)
        await lab.run()
        for server in lab.servers:
            for open_ in server._open.values():
                for home, found in open_.accumulated.items():
                    assert found.visits.total() == len(open_.desk.counted.get(home, ()))

    in_stages(main, two_columns(), codec="tokenint8(width=16)")
