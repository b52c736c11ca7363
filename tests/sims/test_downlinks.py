"""Narrow downlinks, by whole nodes under virtual time: parts of rounds follow what they were seen to take, and newcomers behind them come in."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from farflung.compression.int4 import Int4
from farflung.node.means import KEPT_ROUNDS
from farflung.sims import streams
from farflung.sims.chaos import OUTER, Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.links import LinkModel
from farflung.sims.simulation import simulate
from farflung.sims.swarm import Swarm
from farflung.sims.toy import ToyLearner

PEERS = 4
NUMEL = 240_000
"""A contribution has 250 kB: some seconds of such an uplink."""

SETTLE_S = 60.0

HOME = LinkModel(up_bytes_per_s=96e3, down_bytes_per_s=480e3)
NARROW = LinkModel(up_bytes_per_s=96e3, down_bytes_per_s=24e3)
STRONG = LinkModel(up_bytes_per_s=480e3, down_bytes_per_s=480e3)


def last_shares(last: LinkModel) -> list[float]:
    """All peers but the last one have the same link: each one's share of the newest round, some rounds after all have joined."""
    shares: list[float] = []

    async def watch(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or len(swarm.peers[0].member.head.commit.view) < PEERS:
            await asyncio.sleep(1.0)
        for index, peer in enumerate(swarm.ids):
            swarm.hub.set_link(peer, last if index == PEERS - 1 else HOME)
            swarm.peers[index].exchange.sending.bytes_per_s = 0.0  # it was another link's
        await asyncio.sleep(SETTLE_S)
        result = [c.commit.round for c in swarm.peers[0].member.history if c.commit.round is not None][-1]
        assert len(result.contributors) == PEERS
        owned = Counter[bytes]()
        for part in result.parts:
            owned[part.owner] += part.stop - part.start
        shares.extend(owned[peer] / NUMEL for peer in swarm.ids)

    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    schedule = Schedule(num_peers=PEERS, duration_s=SETTLE_S + 30.0, faults=starts)
    plan = toy_plan(2, schedule, Wire(numel=NUMEL, fragments=1, step_s=(2.0,) * PEERS), calm_s=0.0)
    outfit = replace(plan.outfit, learner=lambda index: ToyLearner(NUMEL, OUTER, chunk_bytes=1 << 16))
    report = simulate(replace(plan, outfit=outfit), meddler=watch)
    assert report.violations == []
    return shares


@pytest.fixture(autouse=True)
def fine_grained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that share such a link take turns of a fraction of a second."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 4096)


def test_a_peer_with_a_narrow_downlink_gets_a_smaller_part() -> None:
    *others, narrow = last_shares(NARROW)
    assert narrow < 0.1 and min(others) > 0.3, (others, narrow)


def test_a_peer_that_sends_much_and_is_sent_little_gets_a_larger_part() -> None:
    """What it receives in the first rounds is a fifth of its link: nobody sends faster."""
    *others, strong = last_shares(STRONG)
    assert strong > 0.5 and max(others) < 0.2, (others, strong)


@pytest.mark.thorough
def test_a_newcomer_whose_link_is_little_faster_than_the_rounds_joins() -> None:
    """Its download takes far longer than means are kept, no byte of the state comes twice, and it does not keep the means of all rounds meanwhile. Of its link means
    take a fifth, and control messages more than that in a swarm of so few parameters."""
    numel, joins_at, narrow = 12_000, 40.0, LinkModel(down_bytes_per_s=2500.0)
    starts = (*(Start(at=0.5 * peer, peer=peer) for peer in range(3)), Start(at=joins_at, peer=3))
    schedule = Schedule(num_peers=4, duration_s=400.0, faults=starts)
    plan = toy_plan(7, schedule, Wire(step_s=(1.0,) * 4, numel=numel, codec=Int4(), fragments=3), calm_s=0.0)
    plan = replace(plan, links=lambda peer: narrow if peer == 3 else LinkModel())
    in_memory, on_disk = list[int](), list[int]()
    """Bytes of means, and plans that have some, each second of the download."""

    async def watch(swarm: Swarm) -> None:
        while True:
            await asyncio.sleep(1.0)
            newcomer = swarm.peers.get(3)
            if newcomer is not None and newcomer.applier.downloading:
                in_memory.append(sum(len(mean) for of in newcomer._means._undecided.values() for mean in of.values()))
                on_disk.append(len(swarm.disks[3].plans_with_means()))

    report = simulate(plan, keep=True, meddler=watch)
    assert report.violations == [] and report.members == 4
    assert max(in_memory) < 0.2 * 8 * numel and KEPT_ROUNDS <= max(on_disk) <= KEPT_ROUNDS + 2

    def told(what: str, peer: int) -> list[tuple[float, dict[str, Any]]]:
        lines = [line.split(maxsplit=3) for line in report.events]
        return [(float(at), json.loads(said)) for at, who, event, said in lines if (who, event) == (str(peer), what)]

    done_at, done = told("state.sync", 3)[-1]
    assert (done["chunks_done"], done["bytes"]) == (done["chunks"], 8 * numel)
    meanwhile = [at for at, _ in told("round.commit", 0) if joins_at < at < done_at]
    assert len(meanwhile) > 4 * KEPT_ROUNDS, "or this tests nothing"
    assert any(one["contributed"] for _, one in told("round.commit", 3))
