"""Outer optimisers and mixing that a manifest may name, by whole nodes under virtual time: all with the same bits, as the judge sees it."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest
import torch
from tests.thorough import mostly

from farflung.compression.codec import Codec
from farflung.compression.int8 import Int8
from farflung.compression.registry import parse_codec
from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Fault, Kill, Schedule, Start
from farflung.sims.outer_audit import taken_step
from farflung.sims.swarm import START_UNIX_S, Swarm
from farflung.training.outer import OuterState
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd, Sign

NUMEL = 640
PEERS = 4
DURATION_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """To train: what a manifest says of it."""

    rule: OuterRule
    codec: Codec = field(default_factory=lambda: Int8(block=32))
    feedback: FeedbackSpec = field(default_factory=FeedbackSpec)
    mix: float | None = None
    delay: int = 0
    """tau, of laps of four steps."""


WAYS = {
    "averaging": Way(rule=Sgd(lr=1.0)),
    "sparseloco": Way(
        rule=Sgd(lr=1.0), codec=parse_codec("topk(chunk=64,k=4)"), feedback=FeedbackSpec(uplink="residual", decay=0.95)
    ),
    "co2": Way(rule=HeavyBall(lr=1.0, momentum=0.5, clip=0.03), delay=3),
    "streaming": Way(rule=Nesterov(lr=0.4, momentum=0.9), mix=0.5, delay=1),
    "given up": Way(rule=Sgd(lr=1.0), mix=0.0, delay=3),
}


@pytest.mark.parametrize("name", mostly({"streaming", "sparseloco"}, WAYS))
def test_a_swarm_keeps_the_same_bits(name: str) -> None:
    """One comes late, and rolls forward the chunks that it downloads; one is killed, and replays the rounds since its checkpoint."""
    way = WAYS[name]
    wire = Wire(
        codec=way.codec,
        feedback=way.feedback,
        outer=way.rule,
        mix=way.mix,
        numel=NUMEL,
        fragments=2,
        pace=Pace(laps=Laps.fixed(4, way.delay), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40),
        step_s=(0.8, 1.1, 1.6, 1.3),
        checkpoint_s=20.0,
    )
    faults: list[Fault] = [Start(at=0.5 * peer, peer=peer) for peer in range(PEERS - 1)]
    faults += [Start(at=30.0, peer=PEERS - 1), Kill(at=43.0, peer=1), Start(at=58.0, peer=1)]
    digests: list[set[bytes]] = []
    momenta: list[bool] = []

    async def look(swarm: Swarm) -> None:
        await asyncio.sleep(START_UNIX_S + DURATION_S + 30.0 - swarm.hub.loop.time())
        while len({peer.applier.version for peer in swarm.peers.values()}) > 1 or not all(
            peer.applier.idle for peer in swarm.peers.values()
        ):
            await asyncio.sleep(0.01)
        digests.append({swarm.learners[i].coupled.outer.digest() for i in swarm.peers})
        momenta.append(any(bool(learner.coupled.outer.momentum.any()) for learner in swarm.learners.values()))

    schedule = Schedule(num_peers=PEERS, duration_s=DURATION_S, faults=tuple(faults))
    report = run_schedule(8, schedule, look, wire)
    assert report.violations == []
    assert len(digests) == 1 and len(digests[0]) == 1
    assert momenta == [not isinstance(way.rule, Sgd)], "SGD has no momentum, and what travels of it is zeros"
    commits = [json.loads(line[line.index("{") :]) for line in report.events if " round.commit " in line]
    assert report.rounds > 15 and max(len(event["contributors"]) for event in commits) == PEERS


@pytest.mark.parametrize(
    "rule", [Nesterov(lr=0.7, momentum=0.9), HeavyBall(lr=0.8, momentum=0.5, clip=0.2), Sgd(lr=0.9)], ids=repr
)
def test_the_judge_finds_what_a_step_was(rule: OuterRule) -> None:
    def random(seed: int) -> torch.Tensor:
        return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))

    state = OuterState(random(1), None if isinstance(rule, Sgd) else random(2), rule=rule)
    before = state.params.clone(), state.momentum.clone()
    state.advance_(0, NUMEL, random(3))
    mean, step = taken_step(rule, before, (state.params, state.momentum))
    assert torch.allclose(mean, random(3), atol=1e-5)
    assert torch.allclose(before[0] - step, state.params, atol=1e-5)
    state.momentum[7] += 1.0  # nobody's step
    mean, step = taken_step(rule, before, (state.params, state.momentum))
    assert not (
        torch.allclose(before[0] - step, state.params, atol=0.01) and torch.allclose(mean, random(3), atol=0.01)
    )


def test_no_swarm_has_a_rule_that_the_judge_does_not_know() -> None:
    state = torch.zeros(3), torch.zeros(3)
    with pytest.raises(TypeError, match="no outer optimiser Sign"):
        taken_step(Sign(lr=0.1), state, state)
