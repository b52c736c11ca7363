"""Groups meet: an owner mixes in how another group stands, and who cannot be met costs nothing."""

import asyncio

import pytest
import torch
from tests.node.lab import NUMEL, OUTER, PLAN_ID, TOKEN, Lab, in_lab, peer

from farflung.node import framing, meetings
from farflung.node.meetings import SHARE
from farflung.protocol.errors import Malformed, Refused
from farflung.protocol.headers import OuterRequest
from farflung.training.rules import HeavyBall, Nesterov, Sgd, halfway


def vector(seed: int) -> torch.Tensor:
    return torch.sin(torch.arange(1, NUMEL + 1) * (0.01 * (seed + 1)))


@pytest.mark.parametrize(
    "rule", [Sgd(lr=0.5), Nesterov(lr=0.7, momentum=0.9), HeavyBall(lr=0.3, momentum=0.8, clip=9.0)]
)
def test_one_difference_brings_a_rule_half_of_the_way(rule: Sgd | Nesterov | HeavyBall) -> None:
    """Momentum takes its time."""
    params, buffers = torch.ones(3), tuple(torch.zeros(3) for _ in range(rule.num_buffers))
    update = halfway(rule) * (params - 5.0)
    for _ in range(200):
        params, buffers = rule.step(params, buffers, update)
        update = torch.zeros(3)
    assert params.tolist() == pytest.approx([3.0] * 3, abs=1e-4)


def test_an_owner_mixes_in_how_another_group_stands() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        a.learner.outer.params.copy_(vector(1))
        c.learner.outer.params.copy_(vector(2))
        a.neighbours.note(c.id, b"other")
        plan = lab.plan(owners=[0, 1])
        assert a.meetings.is_due and not b.meetings.is_due
        a.turn = 9
        assert not a.meetings.is_due
        term = await a.meetings.term(PLAN_ID, plan, 0)
        assert term is not None
        part = slice(plan.parts[0].start, plan.parts[0].stop)
        wanted = halfway(OUTER) * (vector(1)[part] - vector(2)[part].bfloat16().float())
        assert torch.equal(term, wanted)
        ((plan_id, where, whom, shown),) = a.met
        assert (plan_id, where, whom) == (PLAN_ID, plan.parts[0], c.id) and torch.equal(shown, term)
        assert await b.meetings.term(PLAN_ID, plan, 1) is None, "it knows nobody"

    in_lab(3, main)


def test_whoever_is_gone_is_forgotten_and_costs_only_the_meeting() -> None:
    async def main(lab: Lab) -> None:
        a = lab.nodes[0]
        a.neighbours.note(peer(9), b"other")
        plan = lab.plan(owners=[0, 1])
        assert await a.meetings.term(PLAN_ID, plan, 0) is None
        assert not a.neighbours.groups and not a.errors and not a.met
        ((part, whom, reason),) = a.unmet
        assert (part, whom) == (plan.parts[0], peer(9)) and reason

    in_lab(2, main)


@pytest.mark.parametrize("slow", ["they", "we"])
def test_a_meeting_lasts_no_longer_than_its_share_of_the_round_and_is_told_when_it_fails(slow: str) -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        (b if slow == "they" else a).steady.clear()
        a.neighbours.note(b.id, b"other")
        plan = lab.plan(owners=[0, 1])
        async with asyncio.timeout(SHARE * plan.scatter_s + 0.1):
            assert await a.meetings.term(PLAN_ID, plan, 0) is None
        ((_, whom, reason),) = a.unmet
        assert (
            whom == b.id
            and reason == f"{'no answer' if slow == 'they' else 'our own state was not ready'} within 5.0 s"
        )
        assert set(a.neighbours.groups) == (set() if slow == "they" else {b.id}), "we are not its fault"
        assert not a.met and not a.errors

    in_lab(2, main)


def test_who_has_no_outer_state_says_so_and_is_met_another_time() -> None:
    """It is not its fault, and nothing is broken."""

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        b.version = -1
        a.neighbours.note(b.id, b"other")
        assert await a.meetings.term(PLAN_ID, lab.plan(owners=[0, 1]), 0) is None
        assert not a.neighbours.groups and not a.met and not a.errors and not b.errors
        assert [reason for _, _, reason in a.unmet] == ["it tells nothing of its outer state at the moment"]

    in_lab(2, main)


@pytest.mark.parametrize(
    ("start", "stop", "token", "error"),
    [
        (0, 600, b"x" * 64, "without an invitation"),
        (0, 601, TOKEN, "elements 0 to 601"),
        (5, 5, TOKEN, "elements 5 to 5"),
    ],
)
def test_who_may_not_ask_or_asks_for_what_is_not_there_is_refused(
    start: int, stop: int, token: bytes, error: str
) -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        stream = await a.network.open_stream(b.id, meetings.KIND)
        await framing.write_header(stream, OuterRequest(start, stop, token))
        await b.until(lambda: bool(b.errors))
        (refusal,) = b.errors
        assert isinstance(refusal, Refused) and refusal.peer == a.id and error in refusal.reason

    in_lab(2, main)


def test_a_long_part_is_asked_for_in_pieces_and_no_more_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        a.learner.outer.params.fill_(1.0)
        b.learner.outer.params.copy_(vector(2))
        plan = lab.plan(owners=[0, 0, 0])
        monkeypatch.setattr(meetings, "MAX_OUTER_ELEMENTS", 77)
        a.neighbours.note(b.id, b"other")
        terms = await asyncio.gather(*(a.meetings.term(PLAN_ID, plan, k) for k in range(3)))
        assert all(term is not None for term in terms), "parts that meet the same peer wait for each other"
        wanted = halfway(OUTER) * (1.0 - vector(2).bfloat16().float())
        assert torch.equal(torch.cat([term for term in terms if term is not None]), wanted)
        stream = await a.network.open_stream(b.id, meetings.KIND)
        await framing.write_header(stream, OuterRequest(0, 78, TOKEN))
        await b.until(lambda: bool(b.errors))
        assert "more than 77 elements" in str(b.errors[0])

    in_lab(2, main)


def test_a_peer_has_one_answer_at_a_time_however_many_streams_it_opens() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        b.steady.clear()
        streams = [await c.network.open_stream(b.id, meetings.KIND) for _ in range(12)]
        for stream in streams:
            await framing.write_header(stream, OuterRequest(0, NUMEL, TOKEN))
        await asyncio.sleep(1.0)
        assert b.meetings._served == {c.id} and not b.errors, "they may be given up, and it does not know yet"
        b.steady.set()
        for number, stream in enumerate(streams):
            await framing.read_exactly(stream, meetings.VERSION_BYTES)
            assert (await framing.read_long_blob(stream, 2 * NUMEL) is None) == (number > 0)
        a.neighbours.note(b.id, b"other")
        assert await a.meetings.term(PLAN_ID, lab.plan(owners=[0]), 0) is not None, "others are told all the same"
        assert not b.meetings._served

    in_lab(3, main)


@pytest.mark.parametrize(
    ("ours", "theirs", "meets"), [(0.1, 0.39, True), (0.1, 0.41, False), (1.0, 3e38, False), (0.0, 0.039, True)]
)
def test_what_is_far_longer_than_ours_is_refused(ours: float, theirs: float, meets: bool) -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        a.learner.outer.params.fill_(ours)
        b.learner.outer.params.fill_(theirs)
        a.neighbours.note(b.id, b"other")
        term = await a.meetings.term(PLAN_ID, lab.plan(owners=[0, 1]), 0)
        assert (term is not None) == meets and bool(a.neighbours.groups) == meets
        reasons = ["outer parameters more than 4 times as long as ours"] * (not meets)
        assert [error.reason for error in a.errors] == reasons and len(a.unmet) == len(reasons)

    in_lab(2, main)


def test_what_is_no_number_is_refused() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        b.learner.outer.params[7] = float("nan")
        a.neighbours.note(b.id, b"other")
        plan = lab.plan(owners=[0, 1])
        assert await a.meetings.term(PLAN_ID, plan, 0) is None
        (refusal,) = a.errors
        assert [reason for _, _, reason in a.unmet] == [str(refusal)]
        assert isinstance(refusal, Malformed) and refusal.peer == b.id and not a.neighbours.groups
        await asyncio.sleep(0)

    in_lab(2, main)


def test_a_group_that_comes_no_further_is_met_once() -> None:
    """Else it would pull ours back to where it stands, again and again."""

    async def main(lab: Lab) -> None:
        a, c = lab.nodes[0], lab.nodes[2]
        a.neighbours.note(c.id, b"other")
        plan = lab.plan(owners=[0, 0])
        for k in (0, 1):  # both parts of one turn, and of fragments in it
            assert await a.meetings.term(PLAN_ID, plan, k) is not None
        a.turn += 1
        assert await a.meetings.term(PLAN_ID, plan, 0) is None
        assert [reason for _, _, reason in a.unmet] == [
            "its group has come no further than version 7 since we last met it"
        ]
        c.version = 8
        assert await a.meetings.term(PLAN_ID, plan, 0) is not None
        a.turn += 1
        assert await a.meetings.term(PLAN_ID, plan, 0) is None and a.neighbours.groups

    in_lab(3, main)
