"""Transfers of the butterfly that are refused: by what error, in whose name, and that nothing is stored of them."""

import asyncio
from typing import Any

import pytest
import torch
from tests.node.lab import (
    CODEC,
    NUMEL,
    PLAN_ID,
    Lab,
    accept,
    in_lab,
    numel,
    payload_of,
    peer,
    round_of,
    say,
    stored,
)

from farflung.compression import wire
from farflung.compression.codec import Codec
from farflung.compression.int8 import Int8
from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.node import framing
from farflung.node.delivery import ACK, KIND
from farflung.protocol.errors import LimitExceeded, Malformed, Refused, RemoteError
from farflung.protocol.headers import ContributionHeader, MeanHeader, MeanRequest
from farflung.protocol.manifest_sections import FeedbackSpec

GOOD = payload_of(192, 1)
CORRUPT = bytes([GOOD[0] ^ 0xFF]) + GOOD[1:]
"""Of three nodes, parts 0 and 1 have 192 elements."""

BAD: dict[str, tuple[int, str, Any, bytes, type[RemoteError]]] = {
    "an unknown plan": (0, KIND, ContributionHeader(b"?" * 32, 1, len(GOOD)), GOOD, Refused),
    "an unknown plan's mean": (0, KIND, MeanHeader(b"?" * 32, 0, len(GOOD)), GOOD, Refused),
    "another owner's part": (0, KIND, ContributionHeader(PLAN_ID, 0, len(GOOD)), GOOD, Refused),
    "no such part": (0, KIND, ContributionHeader(PLAN_ID, 7, len(GOOD)), GOOD, Refused),
    "no such part's mean": (0, KIND, MeanHeader(PLAN_ID, 7, len(GOOD)), GOOD, Refused),
    "not a contributor": (2, KIND, ContributionHeader(PLAN_ID, 1, len(GOOD)), GOOD, Refused),
    "not the owner": (0, KIND, MeanHeader(PLAN_ID, 2, len(GOOD)), GOOD, Refused),
    "a mean of the receiver's own part": (0, KIND, MeanHeader(PLAN_ID, 1, len(GOOD)), GOOD, Refused),
    "too large": (0, KIND, ContributionHeader(PLAN_ID, 1, CODEC.max_nbytes(192) + 1), GOOD + b"x", Refused),
    "enormous": (0, KIND, ContributionHeader(PLAN_ID, 1, 1 << 60), b"", Refused),
    "an enormous mean": (0, KIND, MeanHeader(PLAN_ID, 0, 1 << 60), b"", Refused),
    "corrupt": (0, KIND, ContributionHeader(PLAN_ID, 1, len(GOOD)), CORRUPT, Malformed),
    "short": (0, KIND, ContributionHeader(PLAN_ID, 1, len(GOOD) - 1), GOOD[:-1], Malformed),
    "empty": (0, KIND, ContributionHeader(PLAN_ID, 1, 0), b"", Malformed),
    "of another size": (0, KIND, ContributionHeader(PLAN_ID, 1, len(payload_of(96, 1))), payload_of(96, 1), Malformed),
    "a corrupt mean": (0, KIND, MeanHeader(PLAN_ID, 0, len(GOOD)), CORRUPT, Malformed),
    "another header": (0, KIND, MeanRequest(PLAN_ID, 1, b"d" * 32), GOOD, Refused),
    "no header": (0, KIND, b"\xc1\xc1", b"", Malformed),
    "a long header": (0, KIND, bytes(2000), b"", LimitExceeded),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_transfers_are_refused_by_name_and_leave_nothing(name: str) -> None:
    """Node 1 is the receiver; 0 and 1 contribute; each owns the part of its number."""
    who, kind, header, payload, error = BAD[name]

    async def main(lab: Lab) -> None:
        receiver = lab.nodes[1]
        accept(lab, lab.plan(contributors=[0, 1]))
        before = stored(lab, 1)
        assert await say(lab.nodes[who].network, receiver.id, kind, header, payload) is None, "no answer"
        assert stored(lab, 1) == before
        assert [type(e) for e in receiver.errors] == [error]
        assert receiver.errors[0].peer == peer(who)
        assert not receiver.exchange._rounds._awaited, "and nobody waits for it any more"
        good = ContributionHeader(PLAN_ID, 1, len(GOOD))
        assert await say(lab.nodes[0].network, receiver.id, KIND, good, GOOD) == ACK, "others go on"

    in_lab(3, main)


def beyond(codec: Codec, numel: int) -> bytes:
    """A payload that passes the check of its codec, and is too large for int8."""
    if isinstance(codec, Int8):  # its codes are symmetric; -128 is none that it writes
        payload = bytearray(codec.encode(torch.full((numel,), -(2.0**127))))
        payload[-1] = 0x80
        wire.seal(memoryview(payload), codec, numel)
        return bytes(payload)
    return bytes(codec.encode(torch.full((numel,), 3e38)))


@pytest.mark.parametrize("spec", ["int8(block=16)", "fp32"])
@pytest.mark.parametrize("early", [False, True])
def test_who_contributed_what_no_mean_can_hold_is_named(spec: str, early: bool) -> None:
    """The part has no mean then, and the owner goes on; but for means that are what was sent, which hold anything."""
    up = parse_codec(spec)

    async def main(lab: Lab) -> None:
        a, b, c, d = lab.nodes
        plan = accept(lab)
        size = numel(plan, 1)
        for node in lab.nodes:
            node.encode_with(uniform(up, NUMEL), uniform(CODEC, NUMEL), FeedbackSpec())
        good = bytes(up.encode(torch.ones(size)))
        for node, payload in ((a, beyond(up, size)), (c, good), (d, good)):
            assert await say(node.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload) == ACK
        await b.exchange.reduce(PLAN_ID, 1, ((a.id, 0.9994), (c.id, 0.0005), (d.id, 0.0001)), early=early)
        assert [(type(e), e.peer) for e in b.errors] == [(Refused, a.id)] and "part 1" in b.errors[0].reason
        assert not b.held and not b.disk.means
        await b.exchange.reduce(PLAN_ID, 1, ((c.id, 3e38), (d.id, 3e38)))
        assert [(type(e), e.peer) for e in b.errors[1:]] == [(Malformed, None)], (
            "with such a weight it is nobody's fault"
        )
        b.exchange.start(PLAN_ID, b.exchange.reduce(PLAN_ID, 1, ((c.id, 1.0),)), lab.group)
        await b.until(lambda: bool(b.held))

    in_lab(4, main)


def test_a_torn_transfer_leaves_nothing() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = accept(lab)
        payload = payload_of(numel(plan, 1), 1)
        before = stored(lab, 1)
        header = ContributionHeader(PLAN_ID, 1, len(payload))
        stream = await a.network.open_stream(b.id, KIND)
        await framing.write_header(stream, header)
        await stream.write(payload[: len(payload) // 2])
        await stream.close()
        await asyncio.sleep(5.0)
        assert stored(lab, 1) == before and b.errors == []

    in_lab(2, main)


def test_a_plan_that_is_over_takes_nothing_more() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = accept(lab)
        b.exchange.forget(PLAN_ID)
        payload = payload_of(numel(plan, 1), 1)
        assert await say(a.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload) is None
        assert [type(e) for e in b.errors] == [Refused] and not b.arrived

    in_lab(2, main)


@pytest.mark.parametrize("what", ["a contribution", "one that is here", "a mean"])
def test_what_was_on_its_way_while_its_plan_was_dropped_and_taken_up_again_is_sent_again(what: str) -> None:
    """What was kept of the plan went with it: who is told that it has arrived does not send it again, and the part has no mean."""

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = accept(lab)
        part = 0 if what == "a mean" else 1
        payload = payload_of(numel(plan, part), 1)
        header: ContributionHeader | MeanHeader = ContributionHeader(PLAN_ID, part, len(payload))
        if what == "a mean":
            header = MeanHeader(PLAN_ID, part, len(payload))
        if what == "one that is here":
            assert await say(a.network, b.id, KIND, header, payload) == ACK
        sending = lab.group.create_task(say(a.network, b.id, KIND, header, payload))
        await asyncio.sleep(2.0)
        assert not sending.done()
        b.exchange.forget(PLAN_ID)
        b.exchange.expect(PLAN_ID, plan)
        assert await sending is None and [type(e) for e in b.errors] == [Refused] and b.errors[0].peer == a.id
        assert not round_of(b).contributions and not b.held
        assert await say(a.network, b.id, KIND, header, payload) == ACK
        assert round_of(b).contributions == ({} if what == "a mean" else {1: {a.id: payload}})
        assert b.held.keys() == ({(PLAN_ID, 0)} if what == "a mean" else set())

    in_lab(2, main, up_bytes_per_s=60.0, window_bytes=64)
