"""Means that are looked for: one transfer of each at a time, whoever asks for it and however often."""

import asyncio
from typing import Any

from tests.node.lab import NUMEL, PLAN_ID, Lab, Node, accept, in_lab, payload_of

from farflung.compression.digest import digest_of
from farflung.node import framing
from farflung.protocol.chain import PartResult, RoundResult
from farflung.protocol.headers import MeanRequest
from farflung.protocol.settings import RESEND_S

MEAN = payload_of(NUMEL, 3)
DIGEST = digest_of(MEAN)


def fetch(lab: Lab, node: Node, *holders: Node) -> None:
    """As the proposer says it."""
    due = node.exchange.fetch_due(PLAN_ID, 0, DIGEST, [holder.id for holder in holders])
    node.exchange.start(PLAN_ID, due, lab.group)


def hang(node: Node) -> list[bytes]:
    """From now on it takes requests and answers none; by whom they are."""
    asked: list[bytes] = []

    async def never(stream: Any) -> None:
        await framing.read_header(stream, MeanRequest)
        asked.append(stream.peer)
        await asyncio.Event().wait()

    node.network.serve("fetch", never)
    return asked


async def is_fetching(lab: Lab) -> RoundResult:
    """The second node has begun to fetch a mean from the first one for a round that comes to this."""
    holder, asker = lab.nodes
    plan = accept(lab, lab.plan(owners=[0]))
    await holder.means.put(PLAN_ID, 0, MEAN)
    fetch(lab, asker, holder)
    await asyncio.sleep(RESEND_S)
    parts = tuple(PartResult(part.owner, part.start, part.stop, DIGEST) for part in plan.parts)
    return RoundResult(plan=PLAN_ID, contributors=(), seconds_ms=0, parts=parts)


def test_what_is_under_way_is_not_begun_again_when_the_proposer_repeats_itself() -> None:
    """On a link that needs nine seconds for it; each repetition that opened another transfer made all of them slower."""

    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        accept(lab, lab.plan(owners=[0]))
        await a.means.put(PLAN_ID, 0, MEAN)
        for _ in range(8):
            fetch(lab, b, a)
            await asyncio.sleep(RESEND_S)
        assert b.held == {(PLAN_ID, 0): DIGEST}
        assert a.network.sent_bytes() < 1.1 * len(MEAN)

    in_lab(2, main, up_bytes_per_s=80.0, window_bytes=64)


def test_a_commit_waits_for_the_mean_that_its_round_is_fetching() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        result = await is_fetching(lab)
        assert await b.exchange.collect(result, [a.id], last=False) == {0: MEAN}
        assert a.network.sent_bytes() < 1.1 * len(MEAN)

    in_lab(2, main, up_bytes_per_s=80.0, window_bytes=64)


def test_a_commit_does_not_count_on_a_round_that_ends() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        result = await is_fetching(lab)
        collecting = lab.group.create_task(b.exchange.collect(result, [a.id], last=False))
        await asyncio.sleep(RESEND_S)
        b.exchange.forget(PLAN_ID)
        assert await collecting == {0: MEAN} and not b.exchange.fetcher._searches

    in_lab(2, main, up_bytes_per_s=80.0, window_bytes=64)


def test_where_whoever_is_asked_has_died_others_are_asked_at_once() -> None:
    """A dead link shows only after half a minute; that the proposer does not count it as a holder any more shows sooner."""

    async def main(lab: Lab) -> None:
        a, b, c = lab.nodes
        accept(lab, lab.plan(owners=[0]))
        await c.means.put(PLAN_ID, 0, MEAN)
        asked = hang(b)
        for holders in ((b, c), (b, c), (c,)):
            assert not a.held
            fetch(lab, a, *holders)
            await asyncio.sleep(RESEND_S)
        assert a.held == {(PLAN_ID, 0): DIGEST} and asked == [a.id]
        await asyncio.sleep(60.0)
        assert a.lost == [b.id] and not a.exchange.fetcher._searches
        assert c.network.sent_bytes() < 1.1 * len(MEAN), "and the search that asked the dead one asks nobody else"

    in_lab(3, main)
