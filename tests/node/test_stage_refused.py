"""What a stage server refuses of what a peer sends it: parcels and orders that nobody who keeps to the plan could send."""

import asyncio
import math
from typing import Any

import msgspec
import pytest
import torch
from tests.node.stage_lab import StageLab, in_stages, signer, two_columns, whole

from farflung.node import framing
from farflung.protocol.errors import NetworkError, Refused
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Again, Passage, Said
from farflung.protocol.route import DROPPED, OPEN, Leg, with_peer
from farflung.sims.network import MemoryNetwork
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import Kind, Op


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
    "must be bound": {"route": (Leg(0, 0), Leg(1, 1), Leg(2, 3), Leg(3, OPEN))},
    "not in its plan": {"route": (Leg(0, 0), Leg(1, OPEN), Leg(2, 3), Leg(3, 5))},
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
        await lab.open()
        outsider = MemoryNetwork(lab.hub, signer(20).peer_id)
        sender = outsider if wrong == "not in its plan" else lab.networks[1]
        stream = await sender.open_stream(lab.step.keys[3], "activation")
        header = parcel(lab, **WRONG[wrong])
        await framing.write_header(stream, header)
        await stream.write(bytes(min(header.nbytes, 1 << 12)))
        with pytest.raises(NetworkError):
            await framing.read_exactly(stream, 1)
        assert [said.get(wrong, wrong) in str(error) for error in lab.errors] == [True]
        assert lab.errors[0].peer == sender.peer_id
        assert lab.servers[3]._open[b"w" * 32].desk.num_visits == 0

    in_stages(main, two_columns())


def test_orders_of_others_are_refused() -> None:
    async def main(lab: StageLab) -> None:
        await lab.open()
        again = Again(b"w" * 32, 0, 1, False, 5, 0, lab.step.routes[0])
        with pytest.raises(Refused, match="another data node"):
            lab.servers[1].handle(lab.step.keys[2], again)
        for wrong, match in (
            ({"hop": 5}, "does not go here"),
            ({"hop": 2}, "does not go here"),
            ({"microbatch": 9}, "another data node"),
            ({"route": lab.step.routes[0][:3]}, "not that of the plan"),
            ({"route": with_peer(lab.step.routes[0], 2, DROPPED)}, "must not be left out"),
            ({"route": with_peer(lab.step.routes[0], 2, OPEN)}, "must be bound"),
        ):
            order = msgspec.structs.replace(again, **wrong)
            with pytest.raises(Refused, match=match):
                lab.servers[1].handle(lab.step.keys[0], order)
        assert lab.servers[1]._open[b"w" * 32].desk.num_visits == 0
        passage = Passage(b"w" * 32, 0, 1, False, Said.PASSED, 0, lab.step.routes[0], 0.0)
        with pytest.raises(Refused, match="not its data node"):
            lab.servers[1].handle(lab.step.keys[2], passage)
        for message in (again, passage):
            with pytest.raises(Refused, match="not in its plan"):
                lab.servers[1].handle(signer(20).peer_id, message)
        lab.servers[1].handle(lab.step.keys[2], msgspec.structs.replace(again, window=b"x" * 32))  # means nothing

    in_stages(main, two_columns())


@pytest.mark.parametrize("hop", [1, 2])
def test_a_gradient_of_a_peer_that_is_not_in_the_plan_is_not_counted(hop: int) -> None:
    """It says that the leg that it stands in for is open: nobody's, as it is nobody of the plan. The step goes on as if it had said nothing."""
    answers: list[bool] = []

    async def inject(lab: StageLab) -> None:
        payload = lab.boundary.encode(torch.full((2, 8, 16), 1000.0))
        route = with_peer(lab.step.routes[0], hop + 1, OPEN)
        header = parcel(lab, hop=hop, backward=True, until=0, route=route, loss=0.001, nbytes=len(payload))
        network = MemoryNetwork(lab.hub, signer(20).peer_id)
        stream = await network.open_stream(lab.step.keys[route[hop].peer], "gradient")
        await framing.write_header(stream, header)
        await stream.write(payload)
        try:
            await framing.read_exactly(stream, 1)
            answers.append(True)
        except NetworkError:
            answers.append(False)

    async def main(lab: StageLab) -> None:
        async with asyncio.TaskGroup() as group:

            def happens(_: StageLab, number: int, op: Op | None, now: str) -> None:
                if op == Op(Kind.F, 0, hop) and now == "finished":
                    group.create_task(inject(lab))

            lab.happens = happens
            outcome = await whole(lab)
        assert answers == [False] and "not in its plan" in str(lab.errors[0])
        assert len(outcome.losses) == 4 and min(outcome.losses.values()) > 1.0

    in_stages(main, two_columns())
