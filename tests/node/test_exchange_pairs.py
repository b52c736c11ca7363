"""Rounds of two members: means are what the two have sent, and each hears the other's. With more members it depends on who lacks what."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.node.lab import CODEC, NUMEL, PLAN_ID, Lab, Node, accept, in_lab, numel, payload_of, round_of, say

from farflung.compression import unreduced
from farflung.compression.digest import digest_of
from farflung.compression.policy import uniform
from farflung.node.delivery import ACK, KIND
from farflung.protocol.errors import Malformed
from farflung.protocol.headers import MeanHeader
from farflung.protocol.manifest_sections import FeedbackSpec


async def contribute(lab: Lab, contributors: list[int]) -> None:
    """Those two have sent all their parts."""
    plan = accept(lab, lab.plan(contributors=contributors))
    for number in contributors:
        node = lab.nodes[number]
        node.learner.train([number + 1], 0)
        node.learner.offer()
        node.exchange.start(PLAN_ID, node.exchange.contribute(PLAN_ID), lab.group)
    for node in lab.nodes:
        await node.until(lambda n=node: len(n.arrived) == len(contributors))
    assert len(plan.parts) == len(lab.nodes)


SHARES = {1: (1.0,), 2: (0.25, 0.75), 3: (0.25, 0.25, 0.5)}
"""Weights, by the number of contributors."""


async def reduce(lab: Lab, contributors: Sequence[int]) -> None:
    """All parts, by `SHARES`; everybody holds all means."""
    shares = SHARES[len(contributors)]
    weights = tuple(zip((lab.nodes[number].id for number in contributors), shares, strict=True))
    for node in lab.nodes:
        node.exchange.start(PLAN_ID, node.exchange.reduce(PLAN_ID, node.number, weights), lab.group)
    for node in lab.nodes:
        await node.until(lambda n=node: len(n.held) == len(lab.nodes))


def exact(lab: Lab, contributors: Sequence[int] = (0, 1)) -> torch.Tensor:
    """The mean of what these have sent, as it is decoded."""
    flat = uniform(CODEC, NUMEL)
    plan = lab.plan()
    mean = torch.zeros(NUMEL)
    for number, weight in zip(contributors, SHARES[len(contributors)], strict=True):
        node = lab.nodes[number]
        delta = node.learner.outer.params - node.learner.parameters[0]
        for part in plan.parts:
            codec = flat.part(part.start, part.stop)
            codec.decode_add_(codec.encode(delta[part.start : part.stop]), mean[part.start : part.stop], weight)
    return mean


def decoded(node: Node, lab: Lab) -> torch.Tensor:
    policy, plan = node.exchange._means_of(lab.plan()), lab.plan()
    parts = [
        policy.part(p.start, p.stop).decode(node.disk.means[PLAN_ID, k], p.stop - p.start)
        for k, p in enumerate(plan.parts)
    ]
    return torch.cat(parts)


def test_each_of_two_hears_what_the_other_has_sent_and_nothing_is_lost() -> None:
    async def main(lab: Lab) -> None:
        await contribute(lab, [0, 1])
        await reduce(lab, [0, 1])
        a, b = lab.nodes
        assert (
            a.held == b.held and torch.equal(decoded(a, lab), exact(lab)) and torch.equal(decoded(b, lab), exact(lab))
        )
        await asyncio.sleep(1.0)
        sent = [len(CODEC.encode(torch.ones(numel(lab.plan(), k)))) for k in range(2)]
        for node in lab.nodes:
            own, other = sent[node.number], sent[1 - node.number]
            moved = node.exchange.forget(PLAN_ID)
            frame = 32 + 2 * 16  # of an unreduced mean
            assert moved.received_bytes == own + other + frame, "a contribution to our part, and one to the other's"
            assert moved.sent_bytes == own + other + frame
        assert not a.errors and not b.errors

    in_lab(2, main)


@pytest.mark.parametrize("contributors", [[0], [0, 1]])
def test_nobody_hears_two_contributions(contributors: list[int]) -> None:
    """Of three members: one that has sent nothing would hear both, but for the mean of its own part."""

    async def main(lab: Lab) -> None:
        await contribute(lab, contributors)
        await reduce(lab, contributors)
        assert all(node.held == lab.nodes[0].held for node in lab.nodes)
        stays = [unreduced.is_unreduced(lab.nodes[2].disk.means[PLAN_ID, k]) for k in range(3)]
        assert stays == [len(contributors) == 1] * 2 + [True]
        torch.testing.assert_close(decoded(lab.nodes[2], lab), exact(lab, contributors), atol=2e-3, rtol=0.05)
        assert not any(node.errors for node in lab.nodes)

    in_lab(3, main)


def test_what_is_held_is_not_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its owner sends it: the little that it sends would have us copy much."""

    async def main(lab: Lab) -> None:
        await contribute(lab, [0, 1])
        a, b = lab.nodes
        mean = unreduced.pack(numel(lab.plan(), 0), [(round_of(b).own[0], 1.0)])
        rest, put_back, times = bytes(unreduced.without(mean, 0)), unreduced.put_back, 0

        def count(*args: Any) -> memoryview:
            nonlocal times
            times += 1
            return put_back(*args)

        monkeypatch.setattr(unreduced, "put_back", count)
        for _ in range(5):
            assert await say(a.network, b.id, KIND, MeanHeader(PLAN_ID, 0, len(rest), False, 0), rest) == ACK
        assert times == 1 and b.held == {(PLAN_ID, 0): digest_of(mean)} and not b.errors

    in_lab(2, main)


def test_who_has_its_own_no_more_fetches_the_mean() -> None:
    """It was started again meanwhile."""

    async def main(lab: Lab) -> None:
        await contribute(lab, [0, 1])
        a, b = lab.nodes
        round_of(b).own.clear()
        weights = ((a.id, 0.25), (b.id, 0.75))
        for node in lab.nodes:
            node.exchange.start(PLAN_ID, node.exchange.reduce(PLAN_ID, node.number, weights), lab.group)
        await a.until(lambda: len(a.held) == 2)
        await asyncio.sleep(5.0)
        assert list(b.held) == [(PLAN_ID, 1)] and not a.errors and not b.errors and not a.lost
        b.exchange.start(PLAN_ID, b.exchange.fetch_due(PLAN_ID, 0, a.held[PLAN_ID, 0], [a.id]), lab.group)
        await b.until(lambda: len(b.held) == 2)
        assert a.held == b.held and torch.equal(decoded(b, lab), exact(lab))

    in_lab(2, main)


@pytest.mark.parametrize("damage", ["no such contribution", "not that long", "reduced", "too long a contribution"])
def test_what_our_contribution_does_not_fit_into_is_refused(damage: str) -> None:
    async def main(lab: Lab) -> None:
        await contribute(lab, [0, 1])
        a, b = lab.nodes
        size = numel(lab.plan(), 0)
        own = round_of(b).own[0]
        mean = unreduced.pack(size, [(own, 0.5), (payload_of(size, 3), 0.5)])
        rest, lacks = bytes(unreduced.without(mean, 0)), 0
        match damage:
            case "no such contribution":
                lacks = 2
            case "not that long":
                rest = rest[:-1]
            case "reduced":
                rest = payload_of(size, 3)
            case _:
                longer = bytearray(rest)
                longer[40] ^= 1  # its length, in the first entry
                rest = bytes(longer)
        header = MeanHeader(PLAN_ID, 0, len(rest), False, lacks)
        assert await say(a.network, b.id, KIND, header, rest) != ACK
        assert not b.held and isinstance(b.errors[-1], Malformed) and b.errors[-1].peer == a.id
        header = MeanHeader(PLAN_ID, 0, len(bytes(unreduced.without(mean, 0))), False, 0)
        assert await say(a.network, b.id, KIND, header, bytes(unreduced.without(mean, 0))) == ACK
        assert b.held == {(PLAN_ID, 0): digest_of(mean)}

    in_lab(2, main)


@pytest.mark.parametrize("contributors", [2, 3])
def test_what_owners_owe_waits_while_means_are_left_unreduced(contributors: int) -> None:
    """Of two contributors nothing is coded once more, whatever there is residual for: the residual stays for the next mean that is."""

    async def main(lab: Lab) -> None:
        flat = uniform(CODEC, NUMEL)
        for node in lab.nodes:
            node.encode_with(flat, flat, FeedbackSpec(uplink="none", downlink="residual"))
        await contribute(lab, range(contributors))
        await reduce(lab, range(contributors))
        waits = contributors == 2
        assert {unreduced.is_unreduced(mean) for mean in lab.nodes[0].disk.means.values()} == {waits}
        assert bool(lab.nodes[0].residuals.state()["down.round"].numel()) is not waits

    in_lab(contributors, main)
