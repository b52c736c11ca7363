"""The butterfly over an in-memory network: what arrives, what is refused, and that nothing is stored of what is refused."""

import asyncio
from collections import Counter
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
)

from farflung.compression.digest import digest_of
from farflung.compression.policy import parse_policy, uniform
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.unreduced import MeanCodec, MeanPolicy, is_unreduced
from farflung.node import framing
from farflung.node.delivery import ACK, KIND, SEND_ATTEMPTS
from farflung.node.exchange import MOST_STREAMS
from farflung.node.fetching import slow_ones_last
from farflung.node.rounds import PLAN_WAIT_S, Traffic
from farflung.node.uplink import Uplink
from farflung.protocol.chain import PartResult, RoundResult
from farflung.protocol.errors import Malformed, Refused
from farflung.protocol.headers import ContributionHeader, MeanRequest
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.messages import Part

# ---- a whole round --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["none", "residual"])
def test_who_has_nothing_to_contribute_any_more_sends_nothing(kept: str) -> None:
    """Its state was repaired between its offer and the plan."""

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        accept(lab)
        for node in lab.nodes:
            node.encode_with(uniform(CODEC, NUMEL), uniform(CODEC, NUMEL), FeedbackSpec(uplink=kept, downlink="none"))
        b.learner.train([2], 0)
        b.learner.offer()
        for node in lab.nodes:
            node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
        await a.until(lambda: len(a.arrived) == 1)
        await asyncio.sleep(30.0)
        assert len(a.arrived) == len(b.arrived) == 1 and a.exchange.in_flight == b"" != b.exchange.in_flight
        assert not a.errors and not b.errors
        a.exchange.forget(PLAN_ID)

    in_lab(2, main)


@pytest.mark.parametrize("policy", ["int8(block=16)", "norm:fp32,int8(block=16)"])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("feedback", ["none", "residual"])
def test_a_round_gives_everybody_the_weighted_mean(num: int, policy: str, feedback: str) -> None:
    flat = parse_policy(policy).resolve([("matrix", (20, 20)), ("norm", (50,)), ("matrix", (15, 10))])

    async def main(lab: Lab) -> None:
        plan = accept(lab)
        for node in lab.nodes:
            node.encode_with(flat, flat, FeedbackSpec(uplink=feedback, downlink=feedback))
            node.learner.train([node.number + 1], 0)
            node.learner.offer()
            node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.arrived) == num)
            assert {p for *_, p in node.arrived} == {n.id for n in lab.nodes}
        weights = tuple((node.id, (node.number + 1) / sum(range(1, num + 1))) for node in lab.nodes)
        for node in lab.nodes:
            node.exchange.start(PLAN_ID, node.exchange.reduce(PLAN_ID, node.number, weights), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.held) == num)
        assert all(node.held == lab.nodes[0].held for node in lab.nodes), "the same bytes everywhere"
        assert {span for node in lab.nodes for span in node.spent} == {
            (what, plan.height) for what in ("scatter", "encode", "reduce", "spread")
        }
        assert all(node.disk.means.keys() == node.held.keys() for node in lab.nodes), "and on disk before held"

        first = lab.nodes[0]
        result = RoundResult(
            plan=PLAN_ID, contributors=(), seconds_ms=0,
            parts=tuple(PartResult(p.owner, p.start, p.stop, first.held[PLAN_ID, k]) for k, p in enumerate(plan.parts)),
        )  # fmt: skip
        means = {k: bytes(first.disk.means[PLAN_ID, k]) for k in range(num)}
        mean = torch.cat([m for *_, m in first.exchange.decode(result, means, last=False)])
        deltas = [n.learner.outer.params - n.learner.parameters[0] for n in lab.nodes]
        expected = sum(d * w for d, (_, w) in zip(deltas, weights, strict=True))
        torch.testing.assert_close(mean, expected, atol=2e-3, rtol=0.05)
        await asyncio.sleep(1.0)
        moved = [node.exchange.forget(PLAN_ID) for node in lab.nodes]
        if num > 1:
            assert all(m.sent_bytes > 0 and m.received_bytes > 0 for m in moved)
            assert sum(m.sent_bytes for m in moved) == sum(m.received_bytes for m in moved)
        whole = 8 * sum(first.exchange._uplink.part(p.start, p.stop).max_nbytes(p.stop - p.start) for p in plan.parts)
        assert all(m.up_bits == whole / plan.parts[-1].stop for m in moved), "our own part counts as well"
        assert all(0.0 < m.owed < 0.01 if feedback == "residual" else m.owed is None for m in moved), (
            "int8 leaves little out"
        )
        assert not any(node.errors for node in lab.nodes)

    in_lab(num, main)


@pytest.mark.parametrize("feedback", ["none", "residual"])
@pytest.mark.parametrize(
    ("up", "down"), [("int4(block=16)", "fp32"), ("fp32", "deadzone(bits=4.0)"), ("fp32", "trellis(bits=4.0)")]
)
def test_each_way_has_its_codec(up: str, down: str, feedback: str) -> None:
    """A mean of two has none, where it would be no shorter."""
    ways = uniform(parse_codec(up), NUMEL), uniform(parse_codec(down), NUMEL)

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = accept(lab)
        for node in lab.nodes:
            node.encode_with(*ways, FeedbackSpec(uplink=feedback, downlink=feedback))
            node.learner.train([node.number + 1], 0)
            node.learner.offer()
            node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.arrived) == 2)
        sent = [payload for n in lab.nodes for payload in round_of(n).contributions[n.number].values()]
        assert [codec_of(payload).spec for payload in sent] == [up] * 4
        for node in lab.nodes:
            weights = ((a.id, 0.5), (b.id, 0.5))
            node.exchange.start(PLAN_ID, node.exchange.reduce(PLAN_ID, node.number, weights), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.held) == 2)
        means = {k: bytes(a.disk.means[PLAN_ID, k]) for k in range(2)}
        coded = ["" if is_unreduced(mean) else codec_of(mean).spec for mean in means.values()]
        assert coded == ["" if down == "fp32" else down] * 2
        result = RoundResult(
            plan=PLAN_ID, contributors=(), seconds_ms=0,
            parts=tuple(PartResult(p.owner, p.start, p.stop, a.held[PLAN_ID, k]) for k, p in enumerate(plan.parts)),
        )  # fmt: skip
        mean = torch.cat([m for *_, m in a.exchange.decode(result, means, last=False)])
        exact = sum(n.learner.outer.params - n.learner.parameters[0] for n in lab.nodes) / 2
        assert float((mean - exact).norm() / exact.norm()) < 0.15
        assert not a.errors and not b.errors

    in_lab(2, main)


@pytest.mark.parametrize("feedback", ["none", "residual"])
def test_a_mean_made_after_the_cut_takes_the_place_of_an_early_one_everywhere(feedback: str) -> None:
    async def main(lab: Lab) -> None:
        plan = accept(lab)
        for node in lab.nodes:
            flat = uniform(CODEC, NUMEL)
            node.encode_with(flat, flat, FeedbackSpec(uplink=feedback, downlink=feedback))
            node.learner.train([node.number + 1], 0)
            node.learner.offer()
            node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.arrived) == 3)
        whole = tuple((n.id, 1 / 3) for n in lab.nodes)
        early: dict[int, bytes] = {}
        for weights, is_early in ((whole, True), (tuple((n.id, 0.5) for n in lab.nodes[:2]), False)):
            for node in lab.nodes:
                work = node.exchange.reduce(PLAN_ID, node.number, weights, early=is_early)
                node.exchange.start(PLAN_ID, work, lab.group)
            for node in lab.nodes:
                await node.until(
                    lambda n=node, e=early: len(n.held) == 3 and all(n.held[PLAN_ID, k] != e.get(k) for k in range(3))
                )
            early = {k: lab.nodes[0].held[PLAN_ID, k] for k in range(3)}
        assert all(node.held == lab.nodes[0].held for node in lab.nodes)
        assert all(digest_of(n.disk.means[key]) == digest for n in lab.nodes for key, digest in n.held.items())
        pair = (lab.nodes[0], lab.nodes[1])
        deltas = sum(n.learner.outer.params - n.learner.parameters[0] for n in pair) / 2
        codec = MeanCodec(CODEC, CODEC)
        mean = torch.cat([codec.decode(lab.nodes[2].disk.means[PLAN_ID, k], numel(plan, k)) for k in range(3)])
        torch.testing.assert_close(mean, deltas, atol=2e-3, rtol=0.05)
        assert not any(node.errors for node in lab.nodes)

    in_lab(3, main)


def test_contributions_are_let_go_when_the_cut_leaves_nobody_out() -> None:
    async def main(lab: Lab) -> None:
        accept(lab)
        for node in lab.nodes:
            node.learner.offer()
            node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.arrived) == 2)
            weights = tuple((n.id, 0.5) for n in lab.nodes)
            node.exchange.start(PLAN_ID, node.exchange.reduce(PLAN_ID, node.number, weights, early=True), lab.group)
            node.exchange.start(PLAN_ID, node.exchange.confirm(PLAN_ID), lab.group)
        for node in lab.nodes:
            await node.until(lambda n=node: len(n.held) == 2)
            assert not round_of(node).contributions

    in_lab(2, main)


def test_streams_for_plans_that_are_over_do_not_stand_in_the_way_of_the_next() -> None:
    async def main(lab: Lab) -> None:
        late = payload_of(192, 1)
        a, b = lab.nodes
        for number in range(2 * MOST_STREAMS):
            over = bytes([number]) * 32
            b.exchange.expect(over, lab.plan())
            b.exchange.forget(over)
            assert await say(a.network, b.id, KIND, ContributionHeader(over, 1, len(late)), late) is None
        assert "is over" in b.errors[0].reason
        plan = accept(lab)
        payload = payload_of(numel(plan, 1), 1)
        assert await say(a.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload) == ACK

    in_lab(2, main)


def test_a_peer_has_so_many_streams_at_a_time() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        accept(lab)
        streams = [await a.network.open_stream(b.id, KIND) for _ in range(MOST_STREAMS + 1)]
        await asyncio.sleep(1.0)
        assert [type(error) for error in b.errors] == [Refused] and f"more than {MOST_STREAMS}" in b.errors[0].reason
        for stream in streams:
            await stream.close()
        await asyncio.sleep(1.0)
        payload = payload_of(numel(lab.plan(), 1), 1)
        assert await say(a.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload) == ACK

    in_lab(2, main)


def test_a_transfer_may_overtake_its_plan() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = lab.plan()
        payload = payload_of(numel(plan, 1), 1)

        async def late() -> None:
            await asyncio.sleep(PLAN_WAIT_S - 1.0)
            b.exchange.expect(PLAN_ID, plan)

        lab.group.create_task(late())
        assert await say(a.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload) == ACK
        assert b.arrived == [(PLAN_ID, 1, a.id)]

    in_lab(2, main)


def test_a_contribution_counts_once() -> None:
    """Sent again, because an answer was lost or in the hope to count twice: what came first stays."""

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        plan = accept(lab)
        for seed in (1, 2):
            payload = payload_of(numel(plan, 1), seed)
            await say(a.network, b.id, KIND, ContributionHeader(PLAN_ID, 1, len(payload)), payload)
        assert b.arrived == [(PLAN_ID, 1, a.id)]
        assert bytes(round_of(b).contributions[1][a.id]) == payload_of(numel(plan, 1), 1)
        assert all(type(e) is Refused and e.peer == a.id for e in b.errors)

    in_lab(2, main)


# ---- sending --------------------------------------------------------------------------------------------------


def test_a_dead_owner_is_tried_a_few_times_and_reported() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        accept(lab)
        lab.hub.kill(b.id)
        a.learner.offer()
        a.exchange.start(PLAN_ID, a.exchange.contribute(PLAN_ID), lab.group)
        await asyncio.sleep(120.0)
        assert a.lost == [b.id] * SEND_ATTEMPTS
        assert a.arrived == [(PLAN_ID, 0, a.id)]

    in_lab(2, main)


def test_forgetting_a_plan_ends_its_transfers() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        accept(lab)
        lab.hub.pause(b.id)
        a.learner.offer()
        a.exchange.start(PLAN_ID, a.exchange.contribute(PLAN_ID), lab.group)
        await a.until(lambda: bool(a.arrived))
        tasks = set(round_of(a).tasks)
        assert tasks
        a.exchange.forget(PLAN_ID)
        await asyncio.sleep(0.1)
        assert all(task.done() for task in tasks) and a.exchange.forget(PLAN_ID) == Traffic()
        lab.hub.resume(b.id)

    in_lab(2, main)


@pytest.mark.parametrize(("owners", "measured"), [([0, 1, 2], True), ([0, 1], False)])
def test_a_contribution_that_several_owners_lack_when_the_round_is_over_says_how_slow_we_are(
    owners: list[int], measured: bool
) -> None:
    async def main(lab: Lab) -> None:
        accept(lab, lab.plan(owners=owners))
        a = lab.nodes[0]
        a.exchange.sending = Uplink(a.network.delivered_bytes, fast_bytes_per_s=6250.0)
        for _ in range(2):  # one round more, in which nothing is sent, changes nothing
            a.learner.offer()
            a.exchange.start(PLAN_ID, a.exchange.contribute(PLAN_ID), lab.group)
            await asyncio.sleep(8.0)
            a.exchange.forget(PLAN_ID)
            await asyncio.sleep(0.1)
        assert a.exchange.sending.bytes_per_s == (pytest.approx(20.0, rel=0.5) if measured else 0.0)

    in_lab(3, main, up_bytes_per_s=20.0, window_bytes=64)


def test_work_for_a_forgotten_plan_is_not_begun() -> None:
    async def main(lab: Lab) -> None:
        (a,) = lab.nodes
        a.learner.offer()
        a.exchange.start(PLAN_ID, a.exchange.contribute(PLAN_ID), lab.group)
        await a.exchange.contribute(PLAN_ID)
        await a.exchange.reduce(PLAN_ID, 0, ())
        assert not a.arrived and not a.held and a.exchange.in_flight == b""

    in_lab(1, main)


# ---- fetching -------------------------------------------------------------------------------------------------

WHOLE = Part(peer(0), 0, NUMEL)
FLAT = MeanPolicy(uniform(CODEC, NUMEL), uniform(CODEC, NUMEL))


def test_whoever_is_known_to_send_slowly_is_asked_last() -> None:
    async def main(lab: Lab) -> None:
        a, *others = lab.nodes
        mean = payload_of(NUMEL, 3)
        for node in others:
            await node.means.put(PLAN_ID, 0, mean)
            a.uplinks[node.id] = 1e6
        a.uplinks[others[0].id] = 1e4  # who would be the first
        lab.hub.kill(others[1].id)
        assert await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), [n.id for n in others], WHOLE, FLAT)
        assert a.lost == [others[1].id], "and then it came from the next"

    in_lab(4, main)
    assert slow_ones_last([b"a", b"b", b"c", b"d"], [0.0, 1e6, 1e4, 1e6]) == [b"a", b"b", b"d", b"c"]
    assert slow_ones_last([], []) == []


def test_whom_only_others_hear_is_asked_last() -> None:
    """Each stream to it takes many seconds to fail; a newcomer that began with it for every mean never caught up."""

    async def main(lab: Lab) -> None:
        a, first, slow, gone = lab.nodes
        mean = payload_of(NUMEL, 3)
        for node in (first, slow, gone):
            await node.means.put(PLAN_ID, 0, mean)
            a.uplinks[node.id] = 1e6
        a.unheard = {first.id, gone.id}
        a.uplinks[slow.id] = 1e4
        lab.hub.kill(first.id)
        lab.hub.kill(gone.id)
        holders = [first.id, slow.id, gone.id]
        assert await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), holders, WHOLE, FLAT)
        assert a.lost == []

    in_lab(4, main)


def test_a_mean_is_fetched_from_whoever_has_it() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        mean = payload_of(NUMEL, 3)
        await c.means.put(PLAN_ID, 0, mean)
        found = await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), [b.id, c.id], WHOLE, FLAT)
        assert found is not None and bytes(found) == mean
        assert a.held == {(PLAN_ID, 0): digest_of(mean)} and digest_of(a.disk.means[PLAN_ID, 0]) == digest_of(mean)
        lab.hub.kill(c.id)
        assert await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), [c.id], WHOLE, FLAT) is not None, (
            "it is here by now"
        )

    in_lab(3, main)


@pytest.mark.parametrize("one_is_away", [False, True])
def test_means_that_all_holders_lack_are_not_looked_for_again(one_is_away: bool) -> None:
    """Else who comes back after long absence asks every member for every part, several times."""

    async def main(lab: Lab) -> None:
        a, *others = lab.nodes
        if one_is_away:
            lab.hub.kill(others[0].id)
        asked: Counter[tuple[bytes, int]] = Counter()
        ask = a.exchange.fetcher._fetch_from

        async def count(peer: bytes, request: MeanRequest, bounds: Any, codec: Any) -> Any:
            asked[peer, request.part] += 1
            return await ask(peer, request, bounds, codec)

        a.exchange.fetcher._fetch_from = count  # type: ignore[method-assign]
        parts = tuple(PartResult(n.id, 64 * k, 64 * (k + 1), b"d" * 32) for k, n in enumerate(lab.nodes))
        result = RoundResult(plan=PLAN_ID, contributors=(), seconds_ms=0, parts=parts)
        assert await a.exchange.collect(result, [n.id for n in others], last=False, attempts=3) is None
        if one_is_away:
            assert set(asked.values()) == {3}, "it may have them, and may come back"
        else:
            assert set(asked.values()) == {1}, "once, for the parts that are looked for at a time"

    in_lab(3, main)


def test_nobody_has_it() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        lab.hub.kill(c.id)
        assert await a.exchange.fetcher.fetch(PLAN_ID, 0, b"d" * 32, [b.id, c.id], WHOLE, FLAT) is None
        assert a.lost == [c.id] and not a.held and not a.disk.means

    in_lab(3, main)


def test_a_holder_that_serves_other_bytes_is_named_and_another_asked() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        mean = payload_of(NUMEL, 3)
        await c.means.put(PLAN_ID, 0, mean)

        async def lie(stream: Any) -> None:
            await framing.read_header(stream, MeanRequest)
            await framing.write_blob(stream, b"other bytes")

        b.network.serve("fetch", lie)
        found = await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), [b.id, c.id], WHOLE, FLAT)
        assert found is not None and bytes(found) == mean
        assert [(type(e), e.peer) for e in a.errors] == [(Refused, b.id)]

    in_lab(3, main)


def test_a_holder_that_does_not_answer_is_left_for_another() -> None:
    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        mean = payload_of(NUMEL, 3)
        await c.means.put(PLAN_ID, 0, mean)

        async def stall(stream: Any) -> None:
            await framing.read_header(stream, MeanRequest)
            await asyncio.Event().wait()

        b.network.serve("fetch", stall)
        async with asyncio.timeout(60.0):
            found = await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(mean), [b.id, c.id], WHOLE, FLAT)
        assert found is not None and bytes(found) == mean and a.lost == [b.id]

    in_lab(3, main)


def test_a_mean_that_does_not_decode_is_refused_though_its_digest_fits() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        await b.means.put(PLAN_ID, 0, b"nonsense")
        assert await a.exchange.fetcher.fetch(PLAN_ID, 0, digest_of(b"nonsense"), [b.id], WHOLE, FLAT) is None
        assert [(type(e), e.peer) for e in a.errors] == [(Malformed, b.id)] and not a.disk.means

    in_lab(2, main)
