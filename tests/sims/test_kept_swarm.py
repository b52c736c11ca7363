"""What a codec leaves out stays in the local parameters: real nodes under virtual time, with rounds that fail."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.thorough import further
from torch import Tensor

from farflung.compression.registry import parse_codec
from farflung.node.exchange import Exchange
from farflung.node.residuals import Residuals
from farflung.protocol.chain import RoundResult
from farflung.protocol.headers import ContributionHeader
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.swarm import START_UNIX_S, Swarm
from farflung.sims.toy import ToyLearner
from farflung.training.inner import StepReport

NUMEL = 640
PEERS = 3
DURATION_S = 60.0


@pytest.mark.parametrize(
    ("seed", "spec"), [(6, "sign(block=32)"), *further((7, "topk(chunk=64,k=2)"))], ids=["standing", "training on"]
)
def test_all_progress_was_told_or_is_in_the_local_parameters(
    seed: int, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, Tensor] = {}
    told_by: dict[bytes, Tensor] = {}
    rounds = failed = 0
    send, train, told = Exchange._send, ToyLearner.train, Residuals.told

    async def send_or_not(self: Exchange, round_: Any, peer: bytes, header: Any, payload: Any) -> None:
        nonlocal failed
        doomed = isinstance(header, ContributionHeader) and hashlib.sha256(b"failing" + header.plan).digest()[0] < 77
        failed += doomed
        if not doomed:
            await send(self, round_, peer, header, payload)

    def trained(self: ToyLearner, numbers: Sequence[int], global_step: int) -> StepReport:
        before = self.parameters[0].double()
        report = train(self, numbers, global_step)
        made[id(self)] = made.get(id(self), torch.zeros(NUMEL).double()) + before - self.parameters[0].double()
        return report

    def telling(self: Residuals, result: RoundResult) -> dict[int, Tensor] | None:
        nonlocal rounds
        parts = told(self, result)
        assert parts, "the contribution is remembered until a commit counts it"
        total = told_by.setdefault(self._me, torch.zeros(NUMEL).double())
        for start, part in parts.items():
            total[start : start + len(part)] += part.double()
        rounds += 1
        return parts

    monkeypatch.setattr(Exchange, "_send", send_or_not)
    monkeypatch.setattr(ToyLearner, "train", trained)
    monkeypatch.setattr(Residuals, "told", telling)
    looked: list[int] = []

    async def look(swarm: Swarm) -> None:
        await asyncio.sleep(START_UNIX_S + DURATION_S + 30.0 - swarm.hub.loop.time())
        while any(peer.trainer.busy.locked() or not peer.applier.idle for peer in swarm.peers.values()):
            await asyncio.sleep(0.001)
        for i, learner in swarm.learners.items():
            behind = (learner.outer.params - learner.parameters[0]).double()
            expected = made[id(learner)] - told_by[swarm.ids[i]]
            assert torch.allclose(behind, expected, rtol=1e-4, atol=1e-4)
            assert behind.norm() > 0.1 * learner.outer.momentum.norm(), "such codecs leave much out"
            looked.append(i)

    wire = Wire(
        codec=parse_codec(spec),
        feedback=FeedbackSpec(uplink="kept"),
        numel=NUMEL,
        checkpoint_s=20.0,
        min_contributors=2,
        step_s=(0.8, 1.1, 1.6),
    )
    starts = tuple(Start(at=0.5 * peer, peer=peer) for peer in range(PEERS))
    report = run_schedule(seed, Schedule(num_peers=PEERS, duration_s=DURATION_S, faults=starts), look, wire)
    assert report.violations == [] and looked == list(range(PEERS))
    assert rounds > 20 and failed > 5
